"""Opening a computing device to be measured."""

from __future__ import annotations

import functools

from emulator.core.device_spec import DeviceName
from emulator.core.errors import ConfigError
from emulator.lab.calibrate import Target
from emulator.live.backend import MeasuredBackend
from emulator.live.cuda import open_cuda
from emulator.live.numpy_device import NumpyBackend


def measured_device(kind: DeviceName, gpu: int | None) -> Target:
    """The device of `--device` and `--gpu`, not yet open; raises ConfigError for one that computes nothing."""
    if kind == "virtual":
        raise ConfigError("--device virtual: it computes nothing that could be measured; choose cuda or numpy")
    if kind == "numpy" and gpu is not None:
        raise ConfigError(f"--gpu {gpu}: NumPy computes on this machine's cores; leave it out, or use --device cuda")
    return Target(kind, functools.partial(open_device, kind, gpu or 0))


def open_device(kind: DeviceName, gpu: int) -> MeasuredBackend:
    """Open it, with a stream of its own; raises ConfigError that says what is missing."""
    return NumpyBackend() if kind == "numpy" else open_cuda(gpu, None)
