"""KV blocks in a GPU's memory: computed by steps, gathered for the sender, scattered by the receiver.

    write    pattern ──kernel──▶ blocks                          compute stream, device thread
    gather   blocks ──kernel──▶ staging ──copy engine──▶ pinned  a stream of its own, sender's thread
    scatter  pinned ──copy engine──▶ staging ──kernel──▶ blocks  a stream of its own, receiver's thread

Where the runs of bytes are long, copy engines take them from and to the blocks themselves, and leave the
multiprocessors to the steps. A gather or scatter is over when its call returns, and the core hands on only blocks that
a step has told to be computed, or that have arrived. So no stream needs to wait for another one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from emulator.core.byte_runs import Run, Span, in_blocks, in_ring, runs_between
from emulator.core.effects import KvWrite
from emulator.core.errors import CapacityError
from emulator.core.pacing import MAX_FRAME_BYTES
from emulator.core.quantities import Bytes
from emulator.live.kv_frames import FRAMES_PER_MESSAGE

if TYPE_CHECKING:
    from emulator.live.cuda_backend import CudaBackend
    from emulator.live.cuda_gpu import Gpu

ALIGNED_BYTES = 256
"""Blocks begin at multiples of this."""
SLAB_BYTES = 256 << 20
"""Memory is taken in so much at a time beyond what was expected, or in a 16th of what there is if that is less."""
ENGINE_RUN_BYTES = 128 << 10
"""Runs that are as long on average go by copy engine: some 5 µs each, about what enqueuing one takes."""
STAGED_BYTES = FRAMES_PER_MESSAGE * MAX_FRAME_BYTES
"""The longest message of the KV link, for which there is room from the start."""


class Content(Protocol):
    """What KV requests have: byte i of one is `pattern[(start(request_id) + i) % len(pattern)]`."""

    @property
    def pattern(self) -> npt.NDArray[np.uint8]:
        """Contiguous bytes."""

    def start(self, request_id: str) -> int:
        """Where in the pattern a request's KV begins."""


class CudaKvStore:
    """KV blocks of `node` on a GPU, see `live.backend.KvStore`; steps compute `content`.

    Memory for `expected_bytes`, the most that is foreseen, is taken at once, and more as blocks are used. Raises
    CapacityError where it is not to be had, with a scale.bytes above this `scale_bytes` that would do.
    """

    def __init__(
        self,
        backend: CudaBackend,
        block_bytes: int,
        expected_bytes: int,
        *,
        content: Content,
        node: str,
        scale_bytes: float = 1.0,
    ) -> None:
        self.block_bytes = block_bytes
        self._gpu = backend.gpu
        self._content = content
        self._node = node
        self._stride = -(-block_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self._lock = threading.Lock()
        self._closed = False
        self._pattern = self._gpu.upload(content.pattern, "what KV consists of")
        self._different = self._gpu.memory(ALIGNED_BYTES, "KV blocks")
        self._sending, self._receiving = _Lane(self._gpu), _Lane(self._gpu)
        nothing = [Run(self._pattern.ptr, self._different.ptr, 0)]  # kernels may be loaded with their first launch
        self._gpu.copy_runs(nothing, self._gpu.compute)
        self._gpu.compare_runs(nothing, self._different, self._gpu.compute)
        self._gpu.finish(self._gpu.compute)
        left_bytes = self._gpu.left_bytes()
        self._slab_blocks = max(1, min(SLAB_BYTES, left_bytes // 16) // self._stride)
        self._first_blocks = max(1, -(-expected_bytes // block_bytes))
        if self._first_blocks * self._stride > left_bytes:
            raise CapacityError(self._too_little(left_bytes, scale_bytes))
        self._slabs = {0: self._memory(self._first_blocks)}

    def write(self, write: KvWrite, start: int, stop: int) -> None:
        """Enqueue bytes `start` … `stop` of a request's KV into its blocks, on the stream of steps."""
        runs = self._right_runs(write.request_id, write.blocks, start, stop - start)
        self._gpu.copy_runs(runs, self._gpu.compute)

    def gather(self, blocks: Sequence[int], offset: int, nbytes: int) -> memoryview:
        """Bytes of a request's KV in pinned memory, good until the next call."""
        lane, stored = self._sending, self._spans(blocks, offset, nbytes)
        host, staging = lane.stage(nbytes)
        runs = runs_between(stored, [Span(host.ctypes.data, nbytes)])
        if by_engine(runs):
            self._gpu.transfer(runs, lane.stream)
        else:
            self._gpu.copy_runs(runs_between(stored, [Span(staging.ptr, nbytes)]), lane.stream)
            self._gpu.transfer([Run(staging.ptr, host.ctypes.data, nbytes)], lane.stream)
        self._gpu.finish(lane.stream)
        return host.data

    def scatter(self, blocks: Sequence[int], offset: int, frames: Sequence[Any]) -> None:
        """Put what was received into a request's blocks from `offset` on."""
        parts = [np.frombuffer(frame, np.uint8) for frame in frames if len(frame)]
        nbytes = sum(part.nbytes for part in parts)
        if not nbytes:
            return
        lane, stored = self._receiving, self._spans(blocks, offset, nbytes)
        host, staging = lane.stage(nbytes)
        np.concatenate(parts, out=host)
        runs = runs_between([Span(host.ctypes.data, nbytes)], stored)
        if by_engine(runs):
            self._gpu.transfer(runs, lane.stream)
        else:
            self._gpu.transfer([Run(host.ctypes.data, staging.ptr, nbytes)], lane.stream)
            self._gpu.copy_runs(runs_between([Span(staging.ptr, nbytes)], stored), lane.stream)
        self._gpu.finish(lane.stream)

    def is_right(self, request_id: str, blocks: Sequence[int], nbytes: int) -> bool:
        """Whether the first `nbytes` in these blocks are those that steps compute for a request."""
        lane = self._receiving
        count, _ = lane.stage(8)
        self._gpu.clear(self._different, 8, lane.stream)
        self._gpu.compare_runs(self._right_runs(request_id, blocks, 0, nbytes), self._different, lane.stream)
        self._gpu.transfer([Run(self._different.ptr, count.ctypes.data, 8)], lane.stream)
        self._gpu.finish(lane.stream)
        return not count.any()

    def close(self) -> None:
        """Free everything; no call is under way. Idempotent."""
        with self._lock:
            self._closed = True
            self._slabs.clear()
            self._pattern = self._different = None
            self._sending.free()
            self._receiving.free()

    def _right_runs(self, request_id: str, blocks: Sequence[int], offset: int, nbytes: int) -> list[Run]:
        """From the pattern to where a request's KV is stored."""
        start = self._content.start(request_id) + offset
        right = in_ring(self._pattern.ptr, len(self._content.pattern), start, nbytes)
        return runs_between(right, self._spans(blocks, offset, nbytes))

    def _spans(self, blocks: Sequence[int], offset: int, nbytes: int) -> list[Span]:
        """Where bytes `offset` … `offset + nbytes` of a request's KV are stored."""
        first, last = offset // self.block_bytes, -(-(offset + nbytes) // self.block_bytes)
        addresses = [self._address(block) for block in blocks[first:last]]
        return in_blocks(addresses, self.block_bytes, offset - first * self.block_bytes, nbytes)

    def _address(self, block: int) -> int:
        if block < self._first_blocks:
            slab, within = 0, block
        else:
            slab, within = divmod(block - self._first_blocks, self._slab_blocks)
            slab += 1
        with self._lock:
            if self._closed:
                raise RuntimeError("the KV store is closed")
            if slab not in self._slabs:
                self._slabs[slab] = self._memory(self._slab_blocks)
            return int(self._slabs[slab].ptr) + within * self._stride

    def _too_little(self, left_bytes: int, scale_bytes: float) -> str:
        """What is wrong and what would help: at `scale_bytes` a block of the model has `block_bytes` at most."""
        block_bytes = left_bytes // self._first_blocks // ALIGNED_BYTES * ALIGNED_BYTES
        scale = f"set scale.bytes = {int(scale_bytes * self.block_bytes / block_bytes) + 1}, " if block_bytes else ""
        expected_bytes = Bytes(self._first_blocks * self._stride)
        return (
            f"{self._node}: {expected_bytes} of KV are expected, but only {Bytes(left_bytes)} of "
            f"{self._gpu.description} are left for it; {scale}raise the memory of [device], or send fewer requests "
            "at a time"
        )

    def _memory(self, blocks: int) -> Any:
        try:
            return self._gpu.memory(blocks * self._stride, "KV blocks")
        except CapacityError as error:
            raise CapacityError(f"{self._node}: {error}") from error


class _Lane:
    """A stream for copies in one direction, and the memory that they are staged in; for one thread."""

    def __init__(self, gpu: Gpu) -> None:
        self.stream = gpu.copy_stream()
        self._gpu = gpu
        self._host: npt.NDArray[np.uint8]
        self._device: Any
        self._take(STAGED_BYTES)

    def stage(self, nbytes: int) -> tuple[npt.NDArray[np.uint8], Any]:
        """Pinned memory of `nbytes`, and device memory of at least as much; those of the last call."""
        if nbytes > len(self._host):
            self._take(1 << (nbytes - 1).bit_length())
        return self._host[:nbytes], self._device

    def _take(self, nbytes: int) -> None:
        self.free()
        self._host = self._gpu.pinned(nbytes, "staging of KV")
        self._device = self._gpu.memory(nbytes, "staging of KV")

    def free(self) -> None:
        """Let go of the memory."""
        self._host, self._device = np.empty(0, np.uint8), None


def by_engine(runs: Sequence[Run]) -> bool:
    """Whether copy engines take these runs one by one, rather than a kernel all together."""
    return sum(run.nbytes for run in runs) >= len(runs) * ENGINE_RUN_BYTES
