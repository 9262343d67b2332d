"""Which device a node gets, and with what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emulator.core.calibrated_units import CalibratedUnits
from emulator.core.device_spec import DevicePlan
from emulator.core.errors import CapacityError, ConfigError, DeadlineError
from emulator.core.run_spec import RunSpec
from emulator.core.step_work import UnitTimes
from emulator.live import devices
from emulator.live.device import Device, VirtualDevice
from emulator.live.device_lock import LOCKS_ENV, Patience, device_lock
from emulator.live.devices import gpu_of, open_device, open_limit_s, unit_times
from emulator.live.numpy_device import NumpyBackend, NumpyKvStore, description
from emulator.live.processor import processor_id
from emulator.live.status import Assignment
from emulator.live.unit_times import measure_units
from tests.builders import load_plan, node_spec, pair, run_spec
from tests.live.fake_backend import UNITS, FakeBackend


def a_run(plan: DevicePlan, nodes: Any = None) -> RunSpec:
    return msgspec.structs.replace(run_spec(nodes or pair(), load_plan()), device=plan)


async def opened(run: RunSpec, waiting: Callable[[str], None] | None = None, **changes: Any) -> Device:
    task = Assignment(kind="node", name=run.nodes[0].name, run=run, secret="", **changes)
    ignore = lambda *_: None  # noqa: E731 - of any signature
    told = {"step_done": ignore, "step_progress": ignore, "failed": ignore} | {"waiting": waiting or ignore}
    return await open_device(task, run.nodes[0], **told)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that are measured, which takes half a second, and here no time."""
    found: list[str] = []

    def note(backend: NumpyBackend) -> UnitTimes:
        found.append(backend.device_id)
        return UNITS

    monkeypatch.setattr(devices, "measure_units", note)
    return found


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the stores that are made are made with."""
    made: list[dict[str, Any]] = []

    def note(backend: Any, **given: Any) -> NumpyKvStore:
        made.append(given)
        return NumpyKvStore(backend, **given)

    monkeypatch.setattr(devices, "NumpyKvStore", note)
    return made


def test_a_virtual_device_holds_no_kv_and_is_no_hardware() -> None:
    async def live() -> None:
        with closing(await opened(a_run(DevicePlan()))) as device:
            assert isinstance(device, VirtualDevice)
            assert device.store is None
            assert device.device_id == ""

    asyncio.run(live())


@pytest.mark.parametrize(("own", "limit"), [(None, 9_000_000), (5_000_000, 5_000_000), (20_000_000, 9_000_000)])
def test_a_numpy_node_holds_kv_within_its_share_and_its_device_s_memory(
    stores: list[dict[str, Any]], measured: list[str], own: int | None, limit: int
) -> None:
    async def live() -> None:
        run = a_run(DevicePlan(kind="numpy", memory_bytes=own))
        with closing(await opened(run, host_memory_bytes=9_000_000, expected_kv_bytes=1_000_000)) as device:
            assert device.store is not None
            assert device.store.block_bytes == 16_000
            assert device.device_id.startswith("cpu:")
            assert measured == [device.device_id]

    asyncio.run(live())
    (given,) = stores
    assert (given["limit_bytes"], given["expected_bytes"], given["node"]) == (limit, 1_000_000, "prefill-0")


@pytest.mark.parametrize(("count", "alone"), [(1, True), (2, False)])
def test_only_a_node_without_others_on_its_device_follows_drift(count: int, alone: bool) -> None:
    async def live() -> bool:
        nodes = [node_spec(f"colocated-{n}") for n in range(count)]
        run = a_run(DevicePlan(kind="numpy"), nodes)
        with closing(await opened(run, host_memory_bytes=9_000_000)) as device:
            return bool(device._alone)  # type: ignore[attr-defined]

    assert asyncio.run(live()) == alone


def test_a_store_that_cannot_be_made_leaves_no_backend_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def refuse(*_: Any, **__: Any) -> NumpyKvStore:
        raise CapacityError("prefill-0: too little")

    class Backend(NumpyBackend):
        def close(self) -> None:
            closed.append("backend")
            super().close()

    monkeypatch.setattr(devices, "NumpyKvStore", refuse)
    monkeypatch.setattr(devices, "NumpyBackend", Backend)
    with pytest.raises(CapacityError, match="prefill-0: too little"):
        asyncio.run(opened(a_run(DevicePlan(kind="numpy")), host_memory_bytes=9_000_000))
    assert closed == ["backend"]


def test_nodes_take_gpus_in_turn_and_begin_anew() -> None:
    run = a_run(DevicePlan(), [node_spec(f"colocated-{n}") for n in range(5)])
    assert [gpu_of(run, node.name, (3, 1)) for node in run.nodes] == [3, 1, 3, 1, 3]
    assert [gpu_of(run, node.name, tuple(range(8))) for node in run.nodes] == [0, 1, 2, 3, 4]


def test_a_device_without_calibration_is_warm_and_measured_while_nobody_else_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "measure_units", measure_units)
    held: list[bool] = []

    class Watched(FakeBackend):
        def warm_up(self, units: UnitTimes | None = None) -> None:
            assert units is None
            held.append(_is_locked(self.device_id))

        def time_s(self, enqueue: Callable[[], None], repeats: int = 1) -> list[float]:
            held.append(_is_locked(self.device_id))
            return super().time_s(enqueue, repeats)

    backend = Watched()
    units = unit_times(backend, None, "prefill-0", Patience(60.0))
    assert all(held)
    assert len(held) > 2
    assert not _is_locked(backend.device_id)
    assert units.read_bytes_per_s == pytest.approx(UNITS.read_bytes_per_s)


def test_a_node_says_what_it_waits_for_and_goes_on_when_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCKS_ENV, str(tmp_path))
    monkeypatch.setattr(devices, "TELL_AFTER_S", 0.0)
    told: list[str] = []

    async def live() -> None:
        said = asyncio.Event()

        def waiting(what: str) -> None:
            told.append(what)
            said.set()

        with device_lock(processor_id(), Patience(60.0)):
            opening = asyncio.create_task(opened(a_run(DevicePlan(kind="numpy")), waiting, host_memory_bytes=9_000_000))
            await asyncio.wait_for(said.wait(), 60.0)
            assert not opening.done()
        (await opening).close()

    asyncio.run(live())
    assert told == [f"prefill-0: waits for {description()}, which another process measures; for 60 s at most"]


def test_a_node_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCKS_ENV, str(tmp_path))
    monkeypatch.setattr(devices, "OPEN_S", 0.05)
    run = a_run(DevicePlan(kind="numpy"))
    expected = r"^prefill-0: .* is being measured by another process, for more than 0\.1 s; try again"
    with device_lock(processor_id(), Patience(60.0)), pytest.raises(DeadlineError, match=expected):
        asyncio.run(opened(run, host_memory_bytes=9_000_000))


@pytest.mark.parametrize(("plan", "times"), [("measures", 2), ("calibrated", 1), ("virtual", 0)])
def test_opening_may_take_as_long_as_nodes_that_measure_in_turn(plan: str, times: int) -> None:
    calibration = CALIBRATED if plan == "calibrated" else None
    device = DevicePlan() if plan == "virtual" else DevicePlan(kind="cuda", calibration=calibration)
    assert open_limit_s(a_run(device)) == times * devices.OPEN_S


def _is_locked(device_id: str) -> bool:
    try:
        with device_lock(device_id, Patience(0.0)):
            return False
    except DeadlineError:
        return True


CALIBRATED = CalibratedUnits(
    file="c.toml", kind="fake", device="fake device", measured_at="2026-11-30", mn=1, units=UNITS
)


def test_a_calibrated_device_is_planned_by_its_figures_and_never_measured() -> None:
    backend = FakeBackend()
    with device_lock(backend.device_id, Patience(60.0)):
        assert unit_times(backend, CALIBRATED, "prefill-0", Patience(0.0)) is UNITS
    assert backend.calls == [("warm_up", UNITS)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device": "fake device 2"}, "was measured on fake device 2, and prefill-0 has fake device;"),
        ({"kind": "cuda"}, "is of device cuda"),
        ({"mn": 2}, "GEMMs that prefill-0 does not know"),
    ],
)
def test_a_calibration_of_another_device_is_refused_before_any_work(changes: dict[str, Any], expected: str) -> None:
    backend = FakeBackend()
    with pytest.raises(ConfigError, match=expected):
        unit_times(backend, msgspec.structs.replace(CALIBRATED, **changes), "prefill-0", Patience(0.0))
    assert backend.calls == []
