"""Whether this machine has what a device needs, told before anything is started. CuPy itself is not imported here."""

from __future__ import annotations

import ctypes
import importlib.util
import sys

from emulator.core.device_spec import DevicePlan, DeviceSpec
from emulator.core.errors import ConfigError

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE of the driver's API."""


def check_device(device: DeviceSpec | DevicePlan, launcher: str) -> None:
    """Raise ConfigError where a launcher's nodes could not compute on this machine, saying what is missing.

    Containers bring their own CuPy, so that they need the driver alone. A simulation computes nothing.
    """
    if device.kind != "cuda" or launcher == "simulate":
        return
    if launcher != "compose" and importlib.util.find_spec("cupy") is None:
        raise _missing("CuPy is not installed; install the extra cuda12 (or cuda13) of this package")
    visible = visible_gpus()
    if launcher == "compose":  # the engine counts its GPUs itself, whatever this process sees of them
        return
    if beyond := [gpu for gpu in device.gpus if gpu >= visible]:
        known = "GPU 0 alone is" if visible == 1 else f"GPUs 0 to {visible - 1} are"
        raise _missing(f"gpus names GPU {beyond[0]}, but {known} visible here; name others")


def visible_gpus() -> int:
    """How many GPUs the driver lets this process see. Raises ConfigError without a driver, or any GPU."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        raise _missing(f"there is no NVIDIA driver here ({_DRIVER} cannot be loaded); install it") from None
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code not in (0, _NO_DEVICE):
        raise _missing(f"the NVIDIA driver cannot be used (CUDA error {code}); see what nvidia-smi says")
    if count.value == 0:
        raise _missing("the NVIDIA driver finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES")
    return count.value


def _missing(what: str) -> ConfigError:
    return ConfigError(f"device cuda: {what}, or use --device virtual")
