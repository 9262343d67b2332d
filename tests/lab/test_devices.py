"""What a device lacks on this machine is one sentence with a way out, before anything is started."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emulator.core.calibration import Calibration, ReadRate, Spread
from emulator.core.device_spec import DeviceName, DevicePlan, DeviceSpec
from emulator.core.errors import ConfigError
from emulator.lab.calibration_files import write_calibration
from emulator.lab.devices import check_device, gpu_name, load_calibration, sharing_remarks
from emulator.live import numpy_device
from tests.builders import load_plan, node_spec, run_spec
from tests.lab.test_calibrate import measured

CUDA = DeviceSpec(kind="cuda")


class Driver:
    """A driver's library with `gpus` H200, or one that does not come up, with this code."""

    def __init__(self, gpus: int, code: int = 0) -> None:
        self.gpus, self.code = gpus, code

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.gpus
        return 0

    def cuDeviceGet(self, device: Any, gpu: int) -> int:
        device._obj.value = gpu
        return 0 if gpu < self.gpus else 101

    def cuDeviceGetName(self, name: Any, nbytes: int, device: Any) -> int:
        name.value = b"NVIDIA H200"
        return 0


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy is installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def _with(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)


def _problem(device: DeviceSpec = CUDA, launcher: str = "local") -> str:
    with pytest.raises(ConfigError) as refused:
        check_device(device, launcher)
    text = str(refused.value)
    assert text.startswith("device cuda: ")
    assert text.endswith(", or use --device virtual")
    return text


@pytest.mark.parametrize(
    ("plan", "launcher", "expected"),
    [
        (DevicePlan(), "local", []),
        (DevicePlan(kind="numpy"), "compose", ["decode-0, decode-1 and decode-2 will compute on one CPU"]),
        (DevicePlan(kind="numpy", allow_shared_gpu=True), "local", []),
        (DevicePlan(kind="cuda"), "local", ["decode-0 and decode-2 will compute on one GPU 0"]),
        (DevicePlan(kind="cuda"), "compose", []),
        (DevicePlan(kind="cuda", gpus=(3, 3, 1)), "compose", ["decode-0 and decode-1 will compute on one GPU 3"]),
    ],
)
def test_what_nodes_will_share_is_known_before_the_run(
    plan: DevicePlan, launcher: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _with(monkeypatch, Driver(2))
    nodes = [node_spec(f"decode-{n}", role="decode") for n in range(3)]
    run = msgspec.structs.replace(run_spec(nodes, load_plan()), device=plan)
    told = sharing_remarks([run, run], launcher)
    assert [line.partition(":")[0] for line in told] == [run.deployment] * len(expected)
    assert [line.partition(": ")[2].partition(":")[0] for line in told] == expected
    assert all(line.endswith("no verdict is made of it without --allow-shared-gpu") for line in told)


@pytest.mark.parametrize("launcher", ["local", "netns", "compose", "members"])
def test_a_gpu_that_is_there_is_found_by_every_launcher(
    launcher: str, cupy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with(monkeypatch, Driver(2))
    check_device(CUDA, launcher)
    check_device(DeviceSpec(kind="cuda", gpus=(1, 0)), launcher)


def test_without_cupy_its_extra_is_named_except_to_containers_which_bring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _with(monkeypatch, Driver(1))
    assert "CuPy is not installed; install the extra cuda12" in _problem()
    check_device(CUDA, "compose")


@pytest.mark.parametrize("launcher", ["local", "netns", "compose", "members"])
def test_without_a_driver_that_is_said(launcher: str, cupy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert "no NVIDIA driver here" in _problem(launcher=launcher)


def test_a_driver_without_gpus_or_in_trouble_is_told_apart(cupy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, Driver(0, code=100))
    assert "finds no GPU" in _problem()
    _with(monkeypatch, Driver(0))
    assert "finds no GPU" in _problem()
    _with(monkeypatch, Driver(1, code=999))
    assert "CUDA error 999" in _problem()


def test_a_gpu_that_is_not_visible_is_named_unless_the_engine_counts_them(
    cupy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with(monkeypatch, Driver(2))
    device = DeviceSpec(kind="cuda", gpus=(0, 3))
    assert "gpus names GPU 3, but GPUs 0 to 1 are visible here" in _problem(device)
    check_device(device, "compose")
    _with(monkeypatch, Driver(1))
    assert "but GPU 0 alone is visible here" in _problem(device)


def test_other_devices_need_nothing_and_a_simulation_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for device in (DeviceSpec(), DeviceSpec(kind="numpy")):
        check_device(device, "local")
    check_device(CUDA, "simulate")


def test_the_command_line_never_imports_cupy() -> None:
    code = (
        "import sys, emulator.cli.main, emulator.lab.devices as d\n"
        "from emulator.core.device_spec import DeviceSpec\n"
        "from emulator.core.errors import ConfigError\n"
        "try:\n    d.check_device(DeviceSpec(kind='cuda'), 'local')\n"
        "except ConfigError:\n    pass\n"
        "sys.exit(any(name.split('.')[0] in ('cupy', 'cupyx', 'cupy_backends') for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# --- calibrations ---------------------------------------------------------------------------------------------------


STILL = ReadRate(gb_per_s=Spread.of([0.0]), launch_us=Spread.of([3.0]))


@pytest.fixture(scope="module")
def found() -> Calibration:
    return measured()[0]


def _calibrated(folder: Path, found: Calibration, kind: DeviceName, **changes: Any) -> DeviceSpec:
    """A device planned by what was found, with these changes."""
    path = folder / "mine.toml"
    write_calibration(path, msgspec.structs.replace(found, **{"kind": kind, **changes}))
    return DeviceSpec(kind=kind, calibration=str(path))


def test_a_calibration_is_read_as_figures(found: Calibration, tmp_path: Path) -> None:
    units = load_calibration(_calibrated(tmp_path, found, "cuda"))
    assert units is not None
    assert (units.file, units.units) == ("mine.toml", found.unit_times())
    assert load_calibration(DeviceSpec(kind="cuda")) is None


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("cuda", {}, "mine.toml: is of device cuda, and steps are to run on numpy"),
        ("numpy", {"read": STILL}, "cannot be planned by the calibration of Fake H100: reads must be"),
        ("numpy", {"gemms": (), "read": None}, "has no gemms and read: steps cannot be planned by it"),
    ],
)
def test_a_calibration_that_steps_cannot_be_planned_by_is_refused(
    kind: DeviceName, changes: dict[str, Any], expected: str, found: Calibration, tmp_path: Path
) -> None:
    device = msgspec.structs.replace(_calibrated(tmp_path, found, kind, **changes), kind="numpy")
    for refusing in (load_calibration, lambda spec: check_device(spec, "local")):
        with pytest.raises(ConfigError, match=expected):
            refusing(device)
    with pytest.raises(ConfigError, match=r"calibration .*none\.toml: cannot be read: No such file"):
        load_calibration(DeviceSpec(kind="numpy", calibration=str(tmp_path / "none.toml")))


def test_a_calibration_of_another_processor_is_refused_here_and_by_a_node_in_a_container(
    found: Calibration, tmp_path: Path
) -> None:
    check_device(_calibrated(tmp_path, found, "numpy", device=numpy_device.description()), "local")
    other = _calibrated(tmp_path, found, "numpy")
    for device in (other, other.plan(load_calibration(other))):
        with pytest.raises(ConfigError, match="was measured on Fake H100, and this machine has "):
            check_device(device, "members")
        check_device(device, "compose")


def test_a_calibration_of_another_gpu_is_refused_by_the_drivers_name_of_it(
    found: Calibration, tmp_path: Path, cupy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with(monkeypatch, Driver(2))
    assert gpu_name(1) == "NVIDIA H200"
    check_device(_calibrated(tmp_path, found, "cuda", device="NVIDIA H200 (CUDA 12.8)"), "local")
    other = msgspec.structs.replace(_calibrated(tmp_path, found, "cuda", device="NVIDIA L4 (CUDA 12.8)"), gpus=(1,))
    with pytest.raises(ConfigError, match=r"measured on NVIDIA L4 \(CUDA 12\.8\), and GPU 1 here has NVIDIA H200"):
        check_device(other, "local")
    check_device(other, "compose")
    check_device(other, "simulate")
