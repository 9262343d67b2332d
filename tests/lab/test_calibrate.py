"""Calibrations: of a device of known speeds on a clock of its own, and of NumPy with real threads and processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from emulator.core.calibration import ACTIVITIES, Calibration, Spread, fit_norm, gemm_flops, parse, to_toml
from emulator.core.device_use import device_digest
from emulator.core.errors import ConfigError, DeadlineError, RunError
from emulator.core.step_work import UnitTimes, plan_work
from emulator.lab.calibrate import calibrate, measure
from emulator.lab.calibration_files import read_calibration, write_calibration
from emulator.lab.measured_device import measured_device
from emulator.lab.measuring import Bench, Plan, Work, quick_plan
from emulator.lab.rivals import Rival, rival
from emulator.live.device_lock import LOCKS_ENV, Patience, device_lock
from emulator.live.numpy_device import description
from emulator.live.processor import processor_id
from tests.fake_device import FakeBackend, FakeClock, Speeds, fake_rivals

PLAN = Plan(300.0, most=10)


def measured(plan: Plan = PLAN, speeds: Speeds | None = None) -> tuple[Calibration, FakeClock]:
    clock = FakeClock()
    backend = FakeBackend(clock, speeds)
    bench = Bench(backend, plan, clock.clock(), lambda _: None)
    return measure(bench, "fake", fake_rivals(backend, thread=1.5, process=2.0), lambda _: None), clock


def test_a_device_of_known_speeds_is_measured_to_have_them() -> None:
    found, _ = measured()
    speeds = Speeds()
    assert found.left_out == ()
    assert found.gemm_tflops("low-toggle") == pytest.approx(500, rel=1e-3)
    assert found.gemm_tflops("random") == pytest.approx(400, rel=1e-3)
    assert found.copy_gb_per_s("out") == found.copy_gb_per_s("in") == pytest.approx(25, rel=1e-3)
    assert found.copy_gb_per_s("within") == pytest.approx(2800, rel=1e-3)  # read and written
    units = found.unit_times()
    assert units.read_bytes_per_s == pytest.approx(speeds.read_bytes_per_s, rel=1e-3)
    assert (units.fill_s, units.fill_launch_s) == pytest.approx((2e-6, 3e-6), rel=1e-2)
    assert units.read_launch_s == pytest.approx(3e-6, rel=1e-2)
    assert [k for k, _ in units.gemm_s] == [512, 1024, 4096]
    assert found.launch is not None
    assert found.launch.device_us.median == pytest.approx(5, rel=1e-3)


def test_steps_planned_by_what_was_measured_keep_their_length() -> None:
    found, _ = measured()
    assert {(step.activity, step.loop) for step in found.steps} == {
        (activity, loop) for activity in ("prefill", "decode") for loop in ("open", "closed")
    }
    assert sorted({step.target_ms for step in found.steps}) == [0.2, 1.0, 5.0, 20.0, 50.0, 200.0, 1000.0]
    for step in found.steps:
        assert abs(step.error.median) < 1e-6
        assert abs(step.work_error.median) < 0.02, step
    at_1s = {step.activity: step.rate for step in found.steps if step.target_ms == 1000.0 and step.loop == "open"}
    assert at_1s["prefill"] is not None
    assert at_1s["prefill"].median == pytest.approx(500, rel=0.01)
    assert at_1s["decode"] is not None
    assert at_1s["decode"].median == pytest.approx(3000, rel=0.01)


def test_interference_has_every_ordered_pair_under_every_sharing() -> None:
    found, _ = measured()
    cells = {(cell.sharing, cell.activity, cell.beside): cell.slowdown.median for cell in found.interference}
    assert len(cells) == len(found.interference) == 27
    for activity in ACTIVITIES:
        for beside in ACTIVITIES:
            assert cells["one stream", activity, beside] == pytest.approx(2.0, rel=0.2)
            assert cells["two streams", activity, beside] == pytest.approx(1.5, rel=1e-3)
            assert cells["two processes", activity, beside] == pytest.approx(2.0, rel=1e-3)


def test_what_opening_took_is_within_the_limit() -> None:
    clock = FakeClock()
    backend = FakeBackend(clock)
    bench = Bench(backend, Plan(60.0, most=1000), clock.clock(), lambda _: None)
    began_s = bench.clock.now_s() - 20.0
    found = measure(bench, "fake", fake_rivals(backend, thread=1.5, process=2.0), lambda _: None, began_s)
    assert found.took_s == pytest.approx(bench.clock.now_s() - began_s, abs=1e-3)
    assert 20.0 < found.took_s <= 60.0


def test_the_fastest_gemm_is_one_that_steps_use() -> None:
    """The longest is the fastest, but keeps others waiting for longer than 200 µs."""
    found, _ = measured()

    def rates(longest: float) -> Calibration:
        gemms = tuple(
            msgspec.structs.replace(gemm, tflops=Spread.of([longest if gemm.k == 4096 else 600.0]))
            for gemm in found.gemms
        )
        return msgspec.structs.replace(found, gemms=gemms)

    flops = gemm_flops(found.mn, found.mn, 4096)
    slow, fast = rates(flops / 201e-6 / 1e12), rates(flops / 199e-6 / 1e12)
    assert slow.gemm_tflops("low-toggle") == slow.gemm_tflops("random") == 600.0
    assert fast.gemm_tflops("low-toggle") == pytest.approx(flops / 199e-6 / 1e12, rel=1e-5)
    assert 4096 in dict(plan_work(1.0, 0.0, fast.unit_times()).gemms)
    assert 4096 not in dict(plan_work(1.0, 0.0, slow.unit_times()).gemms)


def test_parts_that_do_not_slow_each_other_are_joined_by_the_largest_norm() -> None:
    found, _ = measured()
    assert found.mixed is not None
    assert [point.tokens for point in found.mixed.points] == [128, 256, 512, 1024, 2048]
    assert found.mixed.norm == 32.0


@pytest.mark.parametrize("norm", [1.0, 2.0, 3.5, 8.0])
def test_the_norm_of_points_that_have_one_is_found(norm: float) -> None:
    parts = [(0.25, 1.0), (0.5, 1.0), (1.0, 1.0), (2.0, 1.0), (4.0, 1.0)]
    points = [(gemm, read, (gemm**norm + read**norm) ** (1 / norm)) for gemm, read in parts]
    assert fit_norm(points) == pytest.approx(norm, abs=0.011)


@pytest.mark.parametrize("limit_s", [5.0, 20.0, 60.0, 300.0])
@pytest.mark.parametrize("slowness", [1.0, 1000.0])
def test_the_limit_is_kept_whatever_the_device_and_what_did_not_fit_is_said(limit_s: float, slowness: float) -> None:
    speeds = Speeds(500e12 / slowness, 0.8, 3e12 / slowness, 25e9 / slowness, 1.4e12 / slowness)
    found, clock = measured(Plan(limit_s), speeds)
    assert clock() <= limit_s
    assert found.took_s == pytest.approx(clock(), abs=1e-3)
    missing = 27 - len(found.interference)
    assert sum(" beside " in line for line in found.left_out) == missing
    steps = 28 - len(found.steps)
    assert sum(line.startswith("steps of ") for line in found.left_out) == steps or not found.steps


def test_nothing_is_measured_without_time_and_all_of_it_is_said() -> None:
    found, _ = measured(Plan(1e-9))
    assert not found.gemms
    assert not found.steps
    assert not found.interference
    assert len([line for line in found.left_out if line.startswith("GEMM")]) == 6
    with pytest.raises(ConfigError, match="has no gemms and read and fill"):
        found.unit_times()


def test_a_rival_that_cannot_open_the_device_is_said_and_the_rest_goes_on() -> None:
    clock = FakeClock()
    backend = FakeBackend(clock)

    @contextlib.contextmanager
    def refused(kind: Literal["thread", "process"], within_s: float) -> Iterator[Rival]:
        raise RunError(f"no memory for a {kind}")
        yield

    found = measure(Bench(backend, PLAN, clock.clock(), lambda _: None), "fake", refused, lambda _: None)
    assert [line for line in found.left_out if "no memory" in line] == [
        "interference on two streams: no memory for a thread",
        "interference on two processes: no memory for a process",
        "mixed steps: no memory for a thread",
    ]
    assert len(found.interference) == 9
    assert found.mixed is None


def test_a_calibration_is_read_back_as_it_was(tmp_path: Path) -> None:
    found, _ = measured()
    path = tmp_path / "calibration.toml"
    write_calibration(path, found)
    assert read_calibration(path) == found
    assert [file.name for file in tmp_path.iterdir()] == ["calibration.toml"]
    assert isinstance(found.unit_times(), UnitTimes)
    units = found.units_in(path.name)
    assert (units.file, units.kind, units.device) == ("calibration.toml", "fake", "Fake H100")
    assert (units.mn, units.units, units.measured_at) == (4096, found.unit_times(), found.measured_at)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("mn = 4096", "mn = 0", "mn = 0"),
        ("format = 1", "format = 2", "has format 2, and not 1, which this version reads; calibrate anew"),
        ("format = 1\n", "", "is no calibration of format 1"),
        ("mn = 4096", "mm = 4096", "unknown key 'mm'; allowed: "),
        ('kind = "fake"\n', "", "key 'kind' is missing"),
        ('operands = "random"', 'operands = "zeros"', "allowed: random, low-toggle"),
        ("[read]", "[read", "not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(old: str, new: str, expected: str) -> None:
    text = to_toml(measured()[0])
    assert old in text
    with pytest.raises(ConfigError) as refused:
        parse(text.replace(old, new, 1), "mine.toml")
    assert str(refused.value).startswith("mine.toml: ")
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value).strip()


# --- with real threads and processes ------------------------------------------------------------------------------


@pytest.mark.live
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_rival_works_when_told_to_and_ends_with_its_owner(kind: Literal["thread", "process"]) -> None:
    open_backend = measured_device("numpy", None).open
    with rival(kind, 60.0, open_backend) as other:
        other.begin(Work("decode", 1))
        other.stop()
        other.once(Work("copy", 1))
        assert other.ended_s() > 0
        other.begin(Work("prefill", 1))  # and is left working
    assert not [thread for thread in threading.enumerate() if thread.name == "rival"]
    assert not multiprocessing.active_children()


@pytest.mark.live
def test_a_rival_that_fails_to_open_the_device_says_why() -> None:
    with pytest.raises(RunError, match="failed: there is no such device"), rival("thread", 60.0, _no_device):
        raise AssertionError("never open")


def _no_device() -> FakeBackend:
    raise ConfigError("there is no such device")


class Silent:
    """Hears how a calibration goes."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.waited: list[str] = []

    def waiting(self, device: str) -> None:
        self.waited.append(device)

    def part(self, name: str) -> None:
        self.parts.append(name)

    def figure(self, what: str) -> None:
        assert what


@pytest.mark.live
@pytest.mark.alone
@pytest.mark.slow
def test_numpy_is_calibrated_and_every_pair_is_there_or_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCKS_ENV, str(tmp_path))  # others on this machine may measure too, but are not waited for
    watcher = Silent()
    found = calibrate(measured_device("numpy", None), quick_plan(20.0), watcher)
    assert watcher.parts == ["rates", "steps", "interference", "mixed steps"]
    assert len(found.interference) + sum(" beside " in line for line in found.left_out) == 27
    assert all(cell.slowdown.min > 0 for cell in found.interference)
    assert found.device_id == device_digest(processor_id())
    assert found.driver.startswith("NumPy ")
    assert found.device == description()
    assert not multiprocessing.active_children()
    write_calibration(tmp_path / "numpy.toml", found)
    assert read_calibration(tmp_path / "numpy.toml") == found


def test_whoever_holds_the_device_is_waited_for_in_one_line_and_not_for_ever() -> None:
    told: list[str] = []
    with device_lock("test:held", Patience(1.0)):
        expected = "test:held is being measured by another process, for more than"
        with (
            pytest.raises(DeadlineError, match=expected),
            device_lock("test:held", Patience(0.2, lambda: told.append("waits"))),
        ):
            raise AssertionError("two have the device")
        assert told == ["waits"]
        with device_lock("test:other", Patience(0.0)):
            pass
    with device_lock("test:held", Patience(0.0, lambda: told.append("waits"))):
        assert told == ["waits"]


def test_a_folder_that_cannot_hold_the_lock_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCKS_ENV, str(tmp_path / "none"))
    expected = r"cannot be locked in .*none \(No such file or directory\); name a folder by PDEMU_LOCKS"
    with pytest.raises(ConfigError, match=expected), device_lock("test:held", Patience(0.0)):
        raise AssertionError("locked nowhere")
    monkeypatch.setenv(LOCKS_ENV, str(tmp_path))
    with device_lock("test:held", Patience(0.0)):
        assert len(list(tmp_path.iterdir())) == 1
