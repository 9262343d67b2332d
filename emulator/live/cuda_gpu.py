"""A GPU's memory, streams, copies and kernels, in terms of CuPy, which `live.cuda` imports and hands over.

All device memory is one pool's, which holds the limit. The current device and stream belong to a thread in CuPy, so
every call sets them. The kernels are `kernels.cu`, compiled for the GPU at hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from emulator.core.byte_runs import Run
from emulator.core.errors import CapacityError, RunError
from emulator.core.quantities import Bytes

THREADS = 512
PIECE_BYTES = 16
MAX_RUNS = 128
RUNS = np.dtype([("run", np.dtype([("source", "<u8"), ("target", "<u8"), ("nbytes", "<u8")]), (MAX_RUNS,))])
"""`THREADS`, `PIECE`, `MAX_RUNS` and `Runs` of the kernels."""
KERNELS = ("arithmetic", "read_memory", "copy_runs", "compare_runs")
_RUN_BYTES_PER_BLOCK = 64 << 10
_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation."""


class About(NamedTuple):
    """What is known of a GPU: an id that is its alone, its name, what drives it, and its compute capability (90)."""

    device_id: str
    name: str
    driver: str
    capability: int


class Gpu:
    """One GPU, of whose memory it may take `memory_bytes` (None: an equal part of what is free for each of `sharers`).

    `compute` is the stream of steps.
    Methods may be called from any thread. All raise RunError when the GPU or a library of CUDA fails.
    """

    def __init__(self, cupy: Any, index: int, about: About, memory_bytes: int | None, sharers: int = 1) -> None:
        self.cupy = cupy
        self.description = f"{about.name} ({about.driver})"
        self._runtime = cupy.cuda.runtime
        self._device = cupy.cuda.Device(index)
        with self.telling("it cannot be set up"):
            self._device.use()
            self.multiprocessors, self.multiprocessor_threads, self.cache_bytes = (
                self._runtime.deviceGetAttribute(getattr(self._runtime, f"cudaDevAttr{attribute}"), index)
                for attribute in ("MultiProcessorCount", "MaxThreadsPerMultiProcessor", "L2CacheSize")
            )
            self.compute = cupy.cuda.Stream(non_blocking=True)
            free_bytes = self._runtime.memGetInfo()[0]
            self._limit_bytes = free_bytes // sharers if memory_bytes is None else memory_bytes
            self._pool = cupy.cuda.MemoryPool()
            self._pool.set_limit(size=self._limit_bytes)
            module = cupy.cuda.Module()
            module.load(compiled(cupy.cuda.nvrtc, about.capability))
            self._kernels = {name: module.get_function(name) for name in KERNELS}

    # --- memory -------------------------------------------------------------------------------------------------------

    def memory(self, nbytes: int, what: str) -> Any:
        """Device memory, with its address in `ptr`; freed with its last reference. Raises CapacityError."""
        out_of_memory = self.cupy.cuda.memory.OutOfMemoryError
        with self.telling(what):
            self.here()
            with contextlib.suppress(out_of_memory):
                return self._pool.malloc(nbytes)
            self._pool.free_all_blocks()  # which are nobody's, but count against the limit
            try:
                return self._pool.malloc(nbytes)
            except out_of_memory as error:
                taken, free = self._pool.used_bytes(), self._runtime.memGetInfo()[0]
                raise CapacityError(
                    f"{what}: {Bytes(nbytes)} are wanted, but {Bytes(taken)} of the {Bytes(self._limit_bytes)} granted "
                    f"are taken, and {Bytes(free)} of {self.description} are free; "
                    "set a higher scale.bytes, raise the memory of [device], or send fewer requests at a time"
                ) from error

    def left_bytes(self) -> int:
        """Device memory that can still be had."""
        with self.telling("memory"):
            self.here()
            free_bytes = self._runtime.memGetInfo()[0] + self._pool.free_bytes()
            return int(min(self._limit_bytes - self._pool.used_bytes(), free_bytes))

    def zeros(self, nbytes: int, what: str) -> Any:
        """Device memory that is 0 for all that is enqueued from now on, on the stream of steps."""
        memory = self.memory(nbytes, what)
        self.clear(memory, nbytes, self.compute)
        return memory

    def upload(self, content: npt.NDArray[Any], what: str) -> Any:
        """Device memory that holds a contiguous array's bytes."""
        memory = self.memory(content.nbytes, what)
        with self.telling(what):
            memory.copy_from_host(content.ctypes.data, content.nbytes)
            self._device.synchronize()
        return memory

    def pinned(self, nbytes: int, what: str) -> npt.NDArray[np.uint8]:
        """Page-locked host memory, of exactly this size, which CuPy's pool would round up. Raises CapacityError."""
        with self.telling(what):
            self.here()
            try:
                memory = self.cupy.cuda.PinnedMemory(nbytes, self._runtime.hostAllocPortable)
            except self._runtime.CUDARuntimeError as error:
                if error.status != _OUT_OF_MEMORY:
                    raise
                raise CapacityError(
                    f"{what}: {Bytes(nbytes)} of page-locked host memory are not to be had; free some on this host"
                ) from error
            pointer = self.cupy.cuda.PinnedMemoryPointer(memory, 0)
            return np.ndarray((nbytes,), np.uint8, buffer=pointer)

    # --- streams ------------------------------------------------------------------------------------------------------

    def copy_stream(self) -> Any:
        """A stream of its own, whose kernels go before those of steps."""
        with self.telling("stream"):
            self._device.use()
            return self.cupy.cuda.Stream(non_blocking=True, priority=-1)

    def clear(self, memory: Any, nbytes: int, stream: Any) -> None:
        """Enqueue zeros."""
        with self.telling("memory"):
            self.here()
            self._runtime.memsetAsync(memory.ptr, 0, nbytes, stream.ptr)

    def transfer(self, runs: Sequence[Run], stream: Any) -> None:
        """Enqueue copies by the copy engines, one by one, between any two memories; of host memory only pinned."""
        with self.telling("copy"):
            self.here()
            for run in runs:
                self._runtime.memcpyAsync(run.target, run.source, run.nbytes, self._runtime.memcpyDefault, stream.ptr)

    def copy_runs(self, runs: Sequence[Run], stream: Any) -> None:
        """Enqueue copies within device memory by a kernel, `MAX_RUNS` at a time."""
        for grid, table in self._tables(runs):
            self.launch("copy_runs", grid, (table,), stream)

    def compare_runs(self, runs: Sequence[Run], different: Any, stream: Any) -> None:
        """Enqueue comparisons within device memory, which add what differs to the 8-byte count `different`."""
        for grid, table in self._tables(runs):
            self.launch("compare_runs", grid, (table, different), stream)

    def launch(self, kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...], stream: Any) -> None:
        """Enqueue a kernel; arguments are device memory, and NumPy's scalars and arrays of one element by value."""
        with self.telling("kernel"):
            self.here()
            self._kernels[kernel](grid, (THREADS,), arguments, stream=stream)

    def event(self, *, timing: bool = False) -> Any:
        """An event on which one sleeps, instead of asking over and over."""
        with self.telling("event"):
            self.here()
            return self.cupy.cuda.Event(block=True, disable_timing=not timing)

    def finish(self, stream: Any) -> None:
        """Sleep until everything enqueued on a stream is done."""
        event = self.event()
        with self.telling("work"):
            event.record(stream)
            event.synchronize()

    def free(self) -> None:
        """Give memory without references back to the driver."""
        with contextlib.suppress(RuntimeError):  # of a GPU that has failed already
            self._device.use()
            self._pool.free_all_blocks()

    def here(self) -> None:
        """Make this GPU and the stream of steps, by which cuBLAS goes, the calling thread's."""
        self._device.use()
        self.compute.use()

    @contextlib.contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Errors of CUDA, its libraries and CuPy, all RuntimeErrors, as one line of ours."""
        try:
            yield
        except RuntimeError as error:
            raise RunError(f"{self.description}: {what}: {line_of(error)}") from error

    def _tables(self, runs: Sequence[Run]) -> Iterator[tuple[tuple[int, int], npt.NDArray[Any]]]:
        """Runs as the kernels take them, by value, and the grid of thread blocks for them."""
        for first in range(0, len(runs), MAX_RUNS):
            part = runs[first : first + MAX_RUNS]
            table = np.zeros((), RUNS)
            table["run"][: len(part)] = part
            yield (run_blocks(part, self.multiprocessors), len(part)), table


def compiled(nvrtc: Any, capability: int) -> bytes:
    """The kernels in the machine code of a compute capability, or in PTX for one that is newer than NVRTC.

    Raises RunError with what the compiler says.
    """
    known = nvrtc.getSupportedArchs()
    target = f"sm_{capability}" if capability in known else f"compute_{max(c for c in known if c < capability)}"
    return compiled_for(nvrtc, target, Path(__file__).with_name("kernels.cu").read_text(encoding="utf-8"))


def compiled_for(nvrtc: Any, target: str, source: str) -> bytes:
    """CUDA C++ as machine code for `sm_NN`, or as PTX for `compute_NN`."""
    program = nvrtc.createProgram(source, "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={target}", "-std=c++17"))
        return bytes(nvrtc.getCUBIN(program) if target.startswith("sm_") else nvrtc.getPTX(program))
    except nvrtc.NVRTCError as error:
        raise RunError(f"the CUDA kernels do not compile for {target}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def run_blocks(runs: Sequence[Run], multiprocessors: int) -> int:
    """Thread blocks for each of some runs: enough for the longest, and no more in all than the GPU has use for."""
    longest = max(run.nbytes for run in runs)
    return max(1, min(-(-longest // _RUN_BYTES_PER_BLOCK), 4 * multiprocessors // len(runs)))


def line_of(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip(" =")), type(error).__name__)
