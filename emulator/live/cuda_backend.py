"""What steps do on a GPU: fp16 GEMMs, a small arithmetic kernel, reads of memory; and measuring them.

Units of work take 200 µs at most. What is multiplied and read are zeros, of which no bits toggle: clocks stay where
they are, and a unit takes as long tomorrow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.core.byte_runs import Run, ring_pieces
from emulator.core.errors import CapacityError, RunError
from emulator.core.quantities import Bytes
from emulator.core.step_work import MOST_GEMM_S, UnitTimes, usable_gemms
from emulator.live.cuda_gpu import PIECE_BYTES, THREADS, About, Gpu

MN = 4096
GEMM_KS = (512, 1024, 4096)
UNIT_S = MOST_GEMM_S
"""What one unit of work may take, so that whoever else uses the GPU gets his turn."""
READ_BYTES = 4 << 30
"""A read runs over so much, many times what any cache holds; on small GPUs over a share of what there is."""
READ_SHARE = 4
CACHES_READ = 4
"""A read runs over at least so many times the second-level cache."""
COPY_BYTES = 64 << 20
_ARITHMETIC_BLOCKS = 2  # a multiprocessor: 1,024 threads fill its arithmetic units
_WARM_TIMES = 4


class CudaBackend:
    """Work on one GPU, see `live.backend`; `gpu` is its memory and streams, `driver` names what drives it.

    Raises CapacityError where `memory_bytes` (None: this one of `sharers`' part of what is free) are too few.
    """

    name = "cuda"
    mn = MN
    gemm_ks: tuple[int, ...] = GEMM_KS

    def __init__(self, cupy: Any, index: int, about: About, memory_bytes: int | None, sharers: int = 1) -> None:
        self.gpu = gpu = Gpu(cupy, index, about, memory_bytes, sharers)
        self.device_id, self.description, self.driver = about.device_id, gpu.description, about.driver
        self._buffers: dict[str, Any] = {}
        self._arrays: dict[tuple[int, int, str], tuple[Any, Any, Any]] = {}
        self._position = self._copied = 0
        self._closed = False
        self.read_bytes_at_hand = read_buffer_bytes(gpu.left_bytes(), gpu.cache_bytes)
        self._read_blocks = gpu.multiprocessors * max(1, gpu.multiprocessor_threads // THREADS)
        self._buffers["never"] = gpu.zeros(PIECE_BYTES, "results")
        for name in ("product", "low-toggle"):
            self._buffers[name] = gpu.zeros(2 * MN * MN, "operands of GEMMs")
        self._buffers["read"] = gpu.zeros(self.read_bytes_at_hand, "the memory that decode steps read")
        self._read_piece_bytes = self.read_bytes_at_hand

    def warm_up(self, units: UnitTimes | None = None) -> None:
        """Load cuBLAS and the kernels; find the largest reads of `UNIT_S` at most, and the GEMMs to use."""

        def quickest_s(enqueue: Callable[[], None]) -> float:
            return min(self.time_s(enqueue, _WARM_TIMES)[1:])

        self.fill(1)
        read_s = quickest_s(lambda: self.read(self.read_bytes_at_hand))
        rate = self.read_bytes_at_hand / read_s if units is None else units.read_bytes_per_s
        self._read_piece_bytes = int(min(self.read_bytes_at_hand, rate * UNIT_S)) // PIECE_BYTES * PIECE_BYTES
        took_s = {k: quickest_s(lambda k=k: self.gemm(k, 1)) for k in GEMM_KS}  # type: ignore[misc]
        if units is None:
            self.gemm_ks = tuple(sorted(k for k, _ in usable_gemms(took_s.items())))

    def gemm(self, k: int, times: int) -> None:
        """Enqueue `times` products of (mn × k) by (k × mn), of operands in which few bits toggle."""
        self.product(k, times, rows=MN, operands="low-toggle")

    def product(self, k: int, times: int, *, rows: int, operands: str) -> None:
        """Enqueue `times` products of (rows × k) by (k × mn), of `random` or `low-toggle` operands, in fp16."""
        left, right, out = self._operands(k, rows, operands)
        with self.gpu.telling("GEMM"):
            self.gpu.here()
            for _ in range(times):
                left.dot(right, out)  # of two dimensions: of three, CuPy computes fp16 in fp32

    def fill(self, iterations: int) -> None:
        """Enqueue the small arithmetic kernel; an iteration takes some 0.3 µs."""
        if iterations > 0:
            half = np.float32(0.5)
            arguments = (np.uint64(iterations), half, half, self._buffers["never"])
            grid = (_ARITHMETIC_BLOCKS * self.gpu.multiprocessors,)
            self.gpu.launch("arithmetic", grid, arguments, self.gpu.compute)

    def read(self, nbytes: int) -> None:
        """Enqueue a streaming read of `nbytes`, in launches of about `UNIT_S` at most, where the last one ended."""
        ring_bytes, piece_bytes = self.read_bytes_at_hand, max(PIECE_BYTES, self._read_piece_bytes)
        for offset, length in ring_pieces(self._position, nbytes, ring_bytes, piece_bytes, PIECE_BYTES):
            address, pieces = self._buffers["read"].ptr + offset, length // PIECE_BYTES
            arguments = (np.uint64(address), np.uint64(pieces), self._buffers["never"])
            self.gpu.launch(
                "read_memory", (min(self._read_blocks, -(-pieces // THREADS)),), arguments, self.gpu.compute
            )
            self._position = (offset + length) % ring_bytes

    def copy(self, nbytes: int, direction: str) -> None:
        """Enqueue copies of `nbytes` in all: `out` to pinned host memory, back `in`, or `within` device memory.

        Over `COPY_BYTES` of host memory; within the device from one half of the memory that is read to the other, which
        no cache holds.
        """
        half = self.read_bytes_at_hand // 2
        if direction != "within" and "host" not in self._buffers:
            self._buffers["host"] = self.gpu.pinned(COPY_BYTES, "copies to the host")
            self._buffers["host"].fill(0)  # what is copied `in` lands in the memory that is read
        while nbytes > 0:
            part = min(nbytes, COPY_BYTES, half - self._copied)
            device = self._buffers["read"].ptr + self._copied
            other = device + half if direction == "within" else self._buffers["host"].ctypes.data
            run = Run(other, device, part) if direction == "in" else Run(device, other, part)
            self.gpu.transfer([run], self.gpu.compute)
            self._copied = (self._copied + part) % half
            nbytes -= part

    def mark(self) -> Any:
        """A blocking event after everything enqueued so far."""
        mark = self.gpu.event()
        with self.gpu.telling("event"):
            mark.record(self.gpu.compute)
        return mark

    def wait(self, mark: Any) -> None:
        """Sleep until the event; raises RunError when the GPU failed."""
        with self.gpu.telling("work"):
            mark.synchronize()

    def time_s(self, enqueue: Callable[[], None], repeats: int = 1) -> list[float]:
        """Seconds on the GPU of each of `repeats` calls of `enqueue`, between two events."""
        pairs = [(self.gpu.event(timing=True), self.gpu.event(timing=True)) for _ in range(repeats)]
        with self.gpu.telling("work"):
            for start, end in pairs:
                start.record(self.gpu.compute)
                enqueue()
                end.record(self.gpu.compute)
            pairs[-1][1].synchronize()
            return [float(self.gpu.cupy.cuda.get_elapsed_time(start, end)) / 1e3 for start, end in pairs]

    def close(self) -> None:
        """Wait for what is under way and free everything. Idempotent."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(RunError):  # of a GPU that has failed already
                self.gpu.finish(self.gpu.compute)
            self._arrays.clear()
            self._buffers.clear()
            self.gpu.free()

    def _operands(self, k: int, rows: int, operands: str) -> tuple[Any, Any, Any]:
        """(rows × k), (k × mn) and (rows × mn) of fp16. Both operands lie in the same memory."""
        known = self._arrays.get((k, rows, operands))
        if known is None:
            if operands not in self._buffers:
                drawn = np.random.default_rng(0).standard_normal(MN * MN, np.float32).astype(np.float16)
                self._buffers[operands] = self.gpu.upload(drawn, "operands of GEMMs")
            places = ((rows, k), operands), ((k, MN), operands), ((rows, MN), "product")
            left, right, out = (self.gpu.cupy.ndarray(s, np.float16, self._buffers[name]) for s, name in places)
            known = self._arrays[k, rows, operands] = (left, right, out)
        return known


def read_buffer_bytes(limit_bytes: int, cache_bytes: int) -> int:
    """How much memory decode steps read, whole MiB. Raises CapacityError where a cache would hold much of it."""
    mib = 1 << 20
    nbytes = min(READ_BYTES, limit_bytes // READ_SHARE) // mib * mib
    least = max(2 * mib, CACHES_READ * cache_bytes)
    if nbytes < least:
        raise CapacityError(
            f"{Bytes(limit_bytes)} of GPU memory are too little: a cache of {Bytes(cache_bytes)} would hold much of "
            f"what is read; grant the node at least {Bytes(READ_SHARE * (least + mib))} as memory of [device]"
        )
    return nbytes
