"""What a device lacks on this machine is one sentence with a way out, before anything is started."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from emulator.core.device_spec import DeviceSpec
from emulator.core.errors import ConfigError
from emulator.lab.devices import check_device

CUDA = DeviceSpec(kind="cuda")


class Driver:
    """A driver's library with `gpus` GPUs, or one that does not come up, with this code."""

    def __init__(self, gpus: int, code: int = 0) -> None:
        self.gpus, self.code = gpus, code

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.gpus
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
