"""Opening a GPU: the only module that imports CuPy, and not before it is asked for a GPU. What is missing, it tells."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emulator.core.errors import ConfigError
from emulator.live.cuda_backend import CudaBackend
from emulator.live.cuda_gpu import About, line_of
from emulator.live.cuda_kv import CudaKvStore

__all__ = ["CudaBackend", "CudaKvStore", "count_by_bus", "open_cuda", "visible_gpus"]

_NO_DRIVER = 35
"""cudaErrorInsufficientDriver, which no driver at all gives too."""
_LEAST_CAPABILITY = 70
_EXTRA = "pip install 'pd-emulator[cuda12]' (or cuda13)"
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")


def open_cuda(gpu: int, memory_bytes: int | None, sharers: int = 1) -> CudaBackend:
    """A GPU with all its buffers and kernels, not yet warm.

    It may take `memory_bytes` of its memory (None: an equal part of what is free for each of `sharers`).
    Raises ConfigError where CuPy, a driver, that GPU or a library is missing, and CapacityError for want of memory.
    """
    cupy = _cupy()
    _check(cupy, gpu)
    return CudaBackend(cupy, gpu, _about(cupy, gpu), memory_bytes, sharers)


def visible_gpus() -> int:
    """How many GPUs this process sees, at least one. Raises ConfigError without CuPy, a driver, or any GPU."""
    count = _visible(_cupy())
    if not count:
        raise _missing("the NVIDIA driver finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES")
    return count


def gpu_id(uuid: bytes, pci_bus_id: str) -> str:
    """The same for every process on this GPU. CuPy gives the 16 bytes of its UUID up to a 0 among them, or more."""
    return f"gpu:{uuid[:16].hex()}:{pci_bus_id.lower()}"


def count_by_bus() -> None:
    """Have CUDA number GPUs as nvidia-smi and container engines do, unless told otherwise; before it is first used."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def _has_home() -> bool:
    try:
        return os.access(Path.home(), os.W_OK)
    except RuntimeError:  # there is neither HOME nor an entry in the list of users
        return False


def _cupy() -> Any:
    """CuPy, which wants a folder of the user's for what it compiles: where there is no home, a passing one."""
    count_by_bus()
    if "CUPY_CACHE_DIR" not in os.environ and not _has_home():
        os.environ["CUPY_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="pdemu-cupy-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        import cupy  # noqa: PLC0415 - nobody else needs it, and it is slow to load
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            raise _missing(f"CuPy is not installed; {_EXTRA}") from error
        raise _missing(f"CuPy cannot be imported: {line_of(error)}; install it anew") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise _missing(f"CuPy cannot be imported: {line_of(error)}; install it anew") from error
    return cupy


def _visible(cupy: Any) -> int:
    """How many GPUs there are. Raises ConfigError without a driver that CuPy can use."""
    runtime = cupy.cuda.runtime
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        if error.status != _NO_DRIVER:
            raise _missing(
                f"the NVIDIA driver finds no GPU that can be used: {line_of(error)}; see nvidia-smi"
            ) from error
        there = runtime.driverGetVersion()
        if there:
            needed = _version(runtime.runtimeGetVersion())
            raise _missing(
                f"the NVIDIA driver is for CUDA {_version(there)}, and CuPy is for CUDA {needed}; update the driver"
            ) from error
        raise _missing("there is no NVIDIA driver here; install it") from error


def _check(cupy: Any, gpu: int) -> None:
    """Raise ConfigError unless there are a driver, that GPU, and CUDA's libraries."""
    count = _visible(cupy)
    if gpu >= count:
        seen = "none is" if not count else "GPU 0 alone is" if count == 1 else f"GPUs 0 to {count - 1} are"
        raise _missing(f"there is no GPU {gpu}: {seen} visible here; name another in gpus")
    libraries: tuple[Callable[[], Any], ...] = (cupy.cuda.nvrtc.getVersion, lambda: cupy.cuda.cublas)
    try:
        for load in libraries:
            load()
    except (ImportError, OSError, RuntimeError) as error:
        raise _missing(f"a library of CUDA cannot be loaded: {line_of(error)}; {_EXTRA}") from error
    capability = int(cupy.cuda.Device(gpu).compute_capability)
    least = max(_LEAST_CAPABILITY, min(cupy.cuda.nvrtc.getSupportedArchs()))
    if capability < least:
        raise _missing(
            f"GPU {gpu} has compute capability {capability / 10}, and {least / 10} is needed; name another in gpus"
        )


def _about(cupy: Any, gpu: int) -> About:
    runtime, device = cupy.cuda.runtime, cupy.cuda.Device(gpu)
    properties = runtime.getDeviceProperties(gpu)
    driver = f"CUDA {_version(runtime.driverGetVersion())}"
    with contextlib.suppress(OSError):
        if found := re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER_VERSION.read_text(encoding="utf-8", errors="replace")):
            driver = f"driver {found[0]}, {driver}"
    return About(
        device_id=gpu_id(properties["uuid"], device.pci_bus_id),
        name=properties["name"].decode(errors="replace"),
        driver=f"{driver}, CuPy {cupy.__version__} for CUDA {_version(runtime.runtimeGetVersion())}",
        capability=int(device.compute_capability),
    )


def _version(number: int) -> str:
    """12090 as 12.9."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _missing(what: str) -> ConfigError:
    return ConfigError(f"device cuda: {what}, or use --device virtual")
