"""A stand-in for what the CUDA device uses of CuPy: one GPU made of this machine's memory, with the real kernels in it.

Everything enqueued is done at once, and moves the GPU's own clock. As in CuPy, the current device and stream belong to
a thread, and whoever forgets them fails here.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from emulator.live import cuda_gpu
from emulator.live.cuda_backend import CudaBackend

KERNELS = Path(cuda_gpu.__file__).parent
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
MULTIPROCESSORS, THREADS, CACHE_BYTES = 2, 1024, 1 << 20
GEMM_FLOPS = 600e12
READ_BYTES_PER_S = 4e11
TOTAL_BYTES = 160 << 20
ABOUT = cuda_gpu.About("gpu:1", "Host GPU", "driver 1.0", 90)

Launcher = Callable[[tuple[int, ...], tuple[int, ...], tuple[Any, ...]], None]


def host_kernels(folder: Path) -> dict[str, Launcher]:
    """The kernels, compiled for this machine into a folder, by their names: functions of grid, block and arguments."""
    assert COMPILER is not None
    library = folder / "kernels.so"
    source = Path(__file__).with_name("host_kernels.cc")
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", f"-I{KERNELS}"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True, timeout=100)
    loaded = ctypes.CDLL(str(library))

    def launcher(name: str) -> Launcher:
        function = getattr(loaded, f"launch_{name}")
        function.restype = None

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            values = [np.asarray(value) for value in arguments]
            assert all(value.size == 1 for value in values), "arrays of one element alone go by value"
            pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
            function((ctypes.c_uint * 2)(*(*grid, 1)[:2]), ctypes.c_uint(block[0]), pointers)

        return launch

    return {name: launcher(name) for name in cuda_gpu.KERNELS}


class CudaError(RuntimeError):
    """An error of the runtime, with its number."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class OutOfMemoryError(MemoryError):
    """What the pool raises beyond its limit, or the GPU's memory."""


class Memory:
    """Device memory, freed with its last reference."""

    def __init__(self, gpu: HostCupy, nbytes: int) -> None:
        rounded = -(-nbytes // 512) * 512
        if gpu.used_bytes + gpu.cached_bytes + rounded > min(gpu.limit_bytes or gpu.total_bytes, gpu.total_bytes):
            raise OutOfMemoryError
        self._bytes = np.empty(rounded + 512, np.uint8)
        self.ptr = -(-self._bytes.ctypes.data // 512) * 512
        gpu.used_bytes += rounded
        weakref.finalize(self, gpu.give_back, rounded)

    def copy_from_host(self, address: int, nbytes: int) -> None:
        ctypes.memmove(self.ptr, address, nbytes)


class HostCupy:
    """`cupy` with one GPU of `total_bytes`, on which `failing` makes the next wait fail."""

    __version__ = "14.0"

    def __init__(self, kernels: dict[str, Launcher], total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.limit_bytes = self.used_bytes = self.cached_bytes = 0
        self.clock_s = 0.0
        self.failing = ""
        self.launched: list[tuple[str, int]] = []
        self.gemms: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._kernels = kernels
        self._lock = threading.Lock()
        self._here = threading.local()
        self.runtime = SimpleNamespace(
            CUDARuntimeError=CudaError,
            cudaDevAttrMultiProcessorCount=1,
            cudaDevAttrMaxThreadsPerMultiProcessor=2,
            cudaDevAttrL2CacheSize=3,
            deviceGetAttribute=lambda attribute, gpu: (0, MULTIPROCESSORS, THREADS, CACHE_BYTES)[attribute],
            memGetInfo=lambda: (self.total_bytes - self.used_bytes - self.cached_bytes, self.total_bytes),
            hostAllocPortable=1,
            memcpyDefault=4,
            memcpyAsync=self._memcpy,
            memsetAsync=self._memset,
        )
        pool = SimpleNamespace(
            set_limit=lambda size: setattr(self, "limit_bytes", size),
            malloc=self._malloc,
            used_bytes=lambda: self.used_bytes,
            free_bytes=lambda: self.cached_bytes,
            free_all_blocks=lambda: setattr(self, "cached_bytes", 0),
        )
        self.cuda = SimpleNamespace(
            runtime=self.runtime,
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            MemoryPool=lambda: pool,
            Device=lambda gpu: SimpleNamespace(use=self._use_device, synchronize=lambda: None),
            Stream=self._stream,
            Event=self._event,
            Module=self._module,
            PinnedMemory=lambda nbytes, flags: np.zeros(nbytes, np.uint8),
            PinnedMemoryPointer=lambda memory, offset: memory,
            get_elapsed_time=lambda start, end: (end.at_s - start.at_s) * 1e3,
            nvrtc=SimpleNamespace(
                NVRTCError=CudaError,
                getSupportedArchs=lambda: (80, 90),
                createProgram=lambda source, name, headers, names: 1,
                compileProgram=lambda program, options: None,
                getCUBIN=lambda program: b"machine code",
                destroyProgram=lambda program: None,
            ),
        )

    def give_back(self, nbytes: int) -> None:
        """Memory that is freed stays the pool's, as in CuPy, until that frees its blocks."""
        with self._lock:
            self.used_bytes -= nbytes
            self.cached_bytes += nbytes

    def ndarray(self, shape: tuple[int, ...], dtype: Any, memory: Memory) -> Any:
        """An array that can be multiplied, at the GPU's speed, without a result."""

        def dot(right: Any, out: Any) -> None:
            self._check_here()
            assert out.shape == (shape[0], right.shape[1])
            assert shape[1] == right.shape[0]
            assert dtype == right.dtype == out.dtype == np.float16
            self.gemms.append((shape, right.shape))
            self.clock_s += 2 * shape[0] * shape[1] * right.shape[1] / GEMM_FLOPS

        return SimpleNamespace(shape=shape, dtype=dtype, memory=memory, dot=dot)

    def _use_device(self) -> None:
        self._here.device = True

    def _check_here(self) -> None:
        assert getattr(self._here, "device", False), "no current device in this thread"
        assert getattr(self._here, "stream", False), "no current stream in this thread"

    def _stream(self, *, non_blocking: bool, priority: int = 0) -> Any:
        assert non_blocking
        assert priority <= 0
        return SimpleNamespace(ptr=7, use=lambda: setattr(self._here, "stream", True))

    def _event(self, *, block: bool, disable_timing: bool) -> Any:
        assert block, "events that are not blocking make the waiting thread spin"
        event = SimpleNamespace(at_s=0.0)

        def record(stream: Any) -> None:
            assert stream.ptr
            event.at_s = self.clock_s

        def synchronize() -> None:
            if self.failing:
                raise CudaError(700, self.failing)

        event.record, event.synchronize = record, synchronize
        return event

    def _malloc(self, nbytes: int) -> Memory:
        self._check_here()
        with self._lock:
            return Memory(self, nbytes)

    def _memcpy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self._check_here()
        self.launched.append(("copy", nbytes))
        ctypes.memmove(target, source, nbytes)

    def _memset(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self._check_here()
        ctypes.memset(address, value, nbytes)

    def _module(self) -> Any:
        return SimpleNamespace(load=lambda code: None, get_function=self._function)

    def _function(self, name: str) -> Any:
        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...], *, stream: Any) -> None:
            self._check_here()
            assert stream.ptr
            values = tuple(np.uint64(each.ptr) if isinstance(each, Memory) else each for each in arguments)
            self.launched.append((name, grid[-1]))
            if name == "read_memory":
                self.launched[-1] = (name, int(values[1]) * cuda_gpu.PIECE_BYTES)
                self.clock_s += self.launched[-1][1] / READ_BYTES_PER_S
            self._kernels[name](grid, block, values)

        return launch


def open_host(host: HostCupy, memory_bytes: int | None = None) -> CudaBackend:
    """The stand-in's GPU, opened and warm; what that took is forgotten."""
    backend = CudaBackend(host, 0, ABOUT, memory_bytes)
    backend.warm_up()
    host.launched.clear()
    host.gemms.clear()
    return backend
