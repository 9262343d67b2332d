"""Whether this machine has what a device needs, told before anything is started. CuPy itself is not imported here."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from emulator.core.calibrated_units import CalibratedUnits
from emulator.core.device_spec import DevicePlan, DeviceSpec
from emulator.core.device_use import foreseen_sharing
from emulator.core.errors import ConfigError
from emulator.core.run_spec import RunSpec
from emulator.lab.calibration_files import read_calibration
from emulator.live import numpy_device
from emulator.live.cuda import count_by_bus

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE of the driver's API."""
_NAME_BYTES = 256


def load_calibration(device: DeviceSpec) -> CalibratedUnits | None:
    """What the device's calibration file says of its units; raises ConfigError for one that it cannot be planned by."""
    if device.calibration is None:
        return None
    path = Path(device.calibration)
    calibration = read_calibration(path).units_in(path.name)
    calibration.check_kind(device.kind)
    return calibration


def check_device(device: DeviceSpec | DevicePlan, launcher: str) -> None:
    """Raise ConfigError where a launcher's nodes could not compute on this machine, saying what is missing.

    Containers bring their own CuPy, so that they need the driver alone. A simulation computes nothing. A calibration
    must be of the hardware here; under compose the nodes themselves see what they have.
    """
    if launcher == "simulate":
        return
    if device.kind == "cuda":
        _check_gpus(device.gpus or (), launcher)
    calibration = device.calibration if isinstance(device, DevicePlan) else load_calibration(device)
    if calibration is None or launcher == "compose":
        return
    if device.kind == "cuda":
        for gpu in device.gpus or (0,):  # without `gpus` nodes take all in turn, from the first on
            calibration.check_hardware(f"GPU {gpu} here", gpu_name(gpu))
    else:
        calibration.check_device("this machine", numpy_device.description())


def sharing_remarks(runs: Iterable[RunSpec], launcher: str) -> list[str]:
    """What nodes of these runs will share without being allowed to, a line for each deployment and device."""
    found: dict[str, None] = {}
    for run in runs:
        plan, names = run.device, [node.name for node in run.nodes]
        everywhere = plan.kind != "cuda" or plan.gpus or launcher == "compose"
        gpus = None if everywhere else visible_gpus()
        found |= dict.fromkeys(f"{run.deployment}: {what}" for what in foreseen_sharing(plan, names, gpus))
    return list(found)


def _check_gpus(gpus: tuple[int, ...], launcher: str) -> None:
    if launcher != "compose" and importlib.util.find_spec("cupy") is None:
        raise _missing("CuPy is not installed; install the extra cuda12 (or cuda13) of this package")
    visible = visible_gpus()
    if launcher == "compose":  # the engine counts its GPUs itself, whatever this process sees of them
        return
    if beyond := [gpu for gpu in gpus if gpu >= visible]:
        known = "GPU 0 alone is" if visible == 1 else f"GPUs 0 to {visible - 1} are"
        raise _missing(f"gpus names GPU {beyond[0]}, but {known} visible here; name others")


def visible_gpus() -> int:
    """How many GPUs the driver lets this process see. Raises ConfigError without a driver, or any GPU."""
    driver = _driver()
    count = ctypes.c_int(0)
    _succeeded(driver.cuDeviceGetCount(ctypes.byref(count)))
    _succeeded(0 if count.value else _NO_DEVICE)
    return count.value


def gpu_name(gpu: int) -> str:
    """The driver's name of a GPU that is visible, as `NVIDIA H200`; raises ConfigError without a driver."""
    driver, name = _driver(), ctypes.create_string_buffer(_NAME_BYTES)
    device = ctypes.c_int(0)
    _succeeded(driver.cuDeviceGet(ctypes.byref(device), gpu))
    _succeeded(driver.cuDeviceGetName(name, _NAME_BYTES, device))
    return name.value.decode(errors="replace")


def _driver() -> Any:
    """The driver's library, set up."""
    count_by_bus()
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        raise _missing(f"there is no NVIDIA driver here ({_DRIVER} cannot be loaded); install it") from None
    _succeeded(driver.cuInit(0))
    return driver


def _succeeded(code: int) -> None:
    if code == _NO_DEVICE:
        raise _missing("the NVIDIA driver finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES")
    if code != 0:
        raise _missing(f"the NVIDIA driver cannot be used (CUDA error {code}); see what nvidia-smi says")


def _missing(what: str) -> ConfigError:
    return ConfigError(f"device cuda: {what}, or use --device virtual")
