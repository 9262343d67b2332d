"""A device on this machine's cores: one thread that multiplies, adds and reads, as a GPU's stream does.

For tests and demonstrations without a GPU. Each operation is a few calls of NumPy that run without the interpreter's
lock, so that the node's other threads are not held up; all processes of a host share its cores and memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from emulator.core.calibration import Direction, Operands
from emulator.core.effects import KvWrite
from emulator.core.errors import CapacityError, PdemuError, RunError
from emulator.core.kv_content import Bytes8, KvContent
from emulator.core.quantities import Bytes
from emulator.core.step_work import UnitTimes
from emulator.live.processor import processor_id, processor_name

MN = 128
GEMM_KS = (32, 128, 256)
"""Products of 128 × K by K × 128: some 20, 55 and 110 µs on one core of a present server."""
READ_BYTES = 128 << 20
"""Read over and over; beyond the caches of most machines."""
_FILL_WIDTH = 1024
_FILL_ITERATIONS = 20_000  # of one call: some 1.5 ms
_READ_STRIDE_BYTES = 4 << 20  # of one call: some 0.3 ms
_SLAB_BYTES = 16 << 20
_COPY_BYTES = 64 << 20
_COPY_STRIDE_BYTES = 4 << 20
_JOIN_S = 5.0

DRIVER = f"NumPy {np.__version__}"

Work = Callable[[], object]
Matrix = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class NumpyBackend:
    """The stream of one device thread: work is enqueued, and done in order by a thread of its own.

    float32 products, sums over a tile that stays in the first cache, and reads of `READ_BYTES`.
    """

    name = "numpy"
    mn = MN
    gemm_ks: tuple[int, ...] = GEMM_KS
    read_bytes_at_hand = READ_BYTES

    def __init__(self, name: str = "numpy") -> None:
        self.device_id, self.description, self.driver = processor_id(), description(), DRIVER
        self._operands = {k: (np.ones((MN, k), np.float32), np.ones((k, MN), np.float32)) for k in GEMM_KS}
        self._random: dict[int, tuple[Matrix, Matrix]] = {}
        self._copied: tuple[Matrix, Matrix] | None = None
        self._product = np.empty((MN, MN), np.float32)
        self._tile = np.full(_FILL_WIDTH, 1e-6, np.float32)
        self._sums = np.empty(_FILL_WIDTH, np.float32)
        self._memory = np.ones(READ_BYTES // 8, np.uint64)
        self._at = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._queue: queue.SimpleQueue[Work | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{name}-stream", daemon=True)
        self._thread.start()

    # --- the device's thread ---

    def warm_up(self, units: UnitTimes | None = None) -> None:
        """Nothing is loaded late."""

    def gemm(self, k: int, times: int) -> None:
        """Enqueue `times` products of (128 × k) by (k × 128)."""
        left, right = self._operands[k]

        def multiply() -> None:
            for _ in range(times):
                np.matmul(left, right, out=self._product)

        self.enqueue(multiply)

    def product(self, k: int, times: int, *, rows: int, operands: Operands) -> None:
        """Enqueue `times` products of (rows × k) by (k × 128), of ones or of random numbers."""
        if operands == "random" and k not in self._random:
            draw = np.random.default_rng(k)
            left, right = (draw.standard_normal(shape, np.float32) for shape in ((MN, k), (k, MN)))
            self._random[k] = (left, right)
        left, right = (self._random if operands == "random" else self._operands)[k]
        some, out = left[:rows], self._product[:rows]

        def multiply() -> None:
            for _ in range(times):
                np.matmul(some, right, out=out)

        self.enqueue(multiply)

    def copy(self, nbytes: int, direction: Direction) -> None:
        """Enqueue copies between two arrays, all of which are this machine's memory."""
        if self._copied is None:
            self._copied = (np.ones(_COPY_BYTES // 4, np.float32), np.ones(_COPY_BYTES // 4, np.float32))
        source, target = self._copied if direction != "in" else self._copied[::-1]
        for done in range(0, nbytes, _COPY_STRIDE_BYTES):
            at, words = done % _COPY_BYTES // 4, min(_COPY_STRIDE_BYTES, nbytes - done) // 4
            self.enqueue(partial(np.copyto, target[at : at + words], source[at : at + words]))

    def fill(self, iterations: int) -> None:
        """Enqueue sums: an iteration adds one tile."""
        for done in range(0, iterations, _FILL_ITERATIONS):
            tiles = np.broadcast_to(self._tile, (min(_FILL_ITERATIONS, iterations - done), _FILL_WIDTH))
            self.enqueue(partial(np.add.reduce, tiles, axis=0, out=self._sums))

    def read(self, nbytes: int) -> None:
        """Enqueue a streaming read, where the last one ended."""
        words = nbytes // 8
        while words > 0:
            part = self._memory[self._at : self._at + min(words, _READ_STRIDE_BYTES // 8)]
            self.enqueue(partial(np.bitwise_or.reduce, part))
            self._at = (self._at + len(part)) % len(self._memory)
            words -= len(part)

    def enqueue(self, work: Work) -> None:
        """Enqueue anything; what it raises is raised by the next `wait`."""
        self._queue.put(work)

    def mark(self) -> threading.Event:
        """An event after everything enqueued so far."""
        event = threading.Event()
        self._queue.put(event)
        return event

    def wait(self, mark: threading.Event) -> None:
        """Sleep until the event; raises RunError when work failed, and what the user can mend as it is."""
        mark.wait()
        if isinstance(self._failure, PdemuError):
            raise self._failure
        if self._failure is not None:
            raise RunError(f"NumPy: {type(self._failure).__name__}: {self._failure}") from self._failure

    def time_s(self, enqueue: Callable[[], None], repeats: int = 1) -> list[float]:
        """Seconds of each of `repeats` calls of `enqueue`, by the clock of the thread that does the work."""
        instants: list[float] = []
        for _ in range(repeats):
            self.enqueue(lambda: instants.append(time.perf_counter()))
            enqueue()
            self.enqueue(lambda: instants.append(time.perf_counter()))
        self.wait(self.mark())
        return [end_s - start_s for start_s, end_s in zip(instants[::2], instants[1::2], strict=True)]

    def close(self) -> None:
        """Forget what is enqueued and end the thread. Idempotent."""
        self._closed = True
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    # --- the stream's thread ---

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if isinstance(work, threading.Event):
                work.set()
            elif not self._closed and self._failure is None:
                try:
                    work()
                except Exception as error:
                    self._failure = error


class NumpyKvStore:
    """KV blocks in this machine's memory, in slabs that are taken as far as blocks are used.

    `expected_bytes` of it are touched at once, which first use would do slowly; it never takes more than `limit_bytes`,
    and raises CapacityError beyond. `node` is whose it is, `content` what its steps compute.
    """

    def __init__(
        self,
        backend: NumpyBackend,
        block_bytes: int,
        expected_bytes: int,
        *,
        limit_bytes: int,
        content: KvContent,
        node: str,
    ) -> None:
        self.block_bytes = block_bytes
        self._backend = backend
        self._limit_bytes = limit_bytes
        self._content = content
        self._node = node
        self._slab_blocks = max(1, min(_SLAB_BYTES, limit_bytes // 16) // block_bytes)
        self._slab_bytes = self._slab_blocks * block_bytes
        self._slabs: dict[int, Bytes8] = {}
        self._lock = threading.Lock()
        self._gathered = np.empty(0, np.uint8)
        for number in range(min(expected_bytes, limit_bytes) // self._slab_bytes):
            self._slab(number).fill(0)

    def write(self, write: KvWrite, start: int, stop: int) -> None:
        """Enqueue bytes `start` … `stop` of a request's KV into its blocks."""
        pairs = list(self._pairs(write.request_id, write.blocks, start, stop - start))

        def copy() -> None:
            for stored, right in pairs:
                np.copyto(stored, right)

        self._backend.enqueue(copy)

    def gather(self, blocks: Sequence[int], offset: int, nbytes: int) -> memoryview:
        """The bytes where they lie, if they lie together, else copied into a buffer."""
        spans = list(self._spans(blocks, offset, nbytes))
        if len(spans) == 1:
            return spans[0].data
        if len(self._gathered) < nbytes:
            self._gathered = np.empty(nbytes, np.uint8)
        gathered = self._gathered[:nbytes]
        np.concatenate(spans, out=gathered)
        return gathered.data

    def scatter(self, blocks: Sequence[int], offset: int, frames: Sequence[Any]) -> None:
        """Copy what was received into its blocks."""
        for frame in frames:
            source = np.frombuffer(frame, np.uint8)
            done = 0
            for span in self._spans(blocks, offset, len(source)):
                np.copyto(span, source[done : done + len(span)])
                done += len(span)
            offset += len(source)

    def is_right(self, request_id: str, blocks: Sequence[int], nbytes: int) -> bool:
        """Whether the first `nbytes` in these blocks are those that steps compute for a request."""
        return all(np.array_equal(stored, right) for stored, right in self._pairs(request_id, blocks, 0, nbytes))

    def close(self) -> None:
        """Free everything. Idempotent."""
        with self._lock:
            self._slabs.clear()

    def _pairs(
        self, request_id: str, blocks: Sequence[int], offset: int, nbytes: int
    ) -> Iterator[tuple[Bytes8, Bytes8]]:
        """Bytes of a request's KV piece by piece: where they are stored, and what they are to be."""
        for span in self._spans(blocks, offset, nbytes):
            done = 0
            for right in self._content.views(request_id, offset, len(span)):
                yield span[done : done + len(right)], right
                done += len(right)
            offset += len(span)

    def _spans(self, blocks: Sequence[int], offset: int, nbytes: int) -> Iterator[Bytes8]:
        """Bytes `offset` … `offset + nbytes` of the sequence over `blocks`, in as few pieces as they lie in."""
        size, per_slab = self.block_bytes, self._slab_blocks
        end = offset + nbytes
        while offset < end:
            place, within = divmod(offset, size)
            block = blocks[place]
            slab, first = divmod(block, per_slab)
            start = first * size + within
            length = min(size - within, end - offset)
            while offset + length < end and first + 1 < per_slab and blocks[place + 1] == block + 1:
                place, block, first = place + 1, block + 1, first + 1
                length += min(size, end - offset - length)
            yield self._slab(slab)[start : start + length]
            offset += length

    def _slab(self, number: int) -> Bytes8:
        slab = self._slabs.get(number)
        if slab is None:
            with self._lock:
                if number not in self._slabs:
                    self._slabs[number] = self._new_slab()
                slab = self._slabs[number]
        return slab

    def _new_slab(self) -> Bytes8:
        if (len(self._slabs) + 1) * self._slab_bytes > self._limit_bytes:
            raise CapacityError(
                f"{self._node}: its KV needs more than the {Bytes(self._limit_bytes)} of memory granted to it; "
                "set a higher scale.bytes, raise host_memory or memory of [device], or send fewer requests at a time"
            )
        return np.empty(self._slab_bytes, np.uint8)


def description() -> str:
    """What computes here, and by what."""
    return f"{processor_name()} ({DRIVER})"
