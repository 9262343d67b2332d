"""Where the KV link takes bytes from, and where it puts them: buffers of the host, or KV blocks of a device."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from emulator.core.effects import KvWrite
from emulator.core.errors import RunError
from emulator.live.backend import KvStore


class KvSource(Protocol):
    """What a transfer's bytes are taken from, by the sender's thread."""

    def draw(self, offset: int, nbytes: int, /) -> tuple[list[Any], int]:
        """The transfer's bytes from `offset` on as buffers of a frame each, and their checksum (0 without verify).

        They are sent, or copied, before the next call.
        """


class KvSink(Protocol):
    """What becomes of a transfer's bytes: `put` and `drop` are called one at a time, `check` by the link's thread."""

    def put(self, offset: int, frames: Sequence[Any], /) -> None:
        """Keep what was received from `offset` on."""

    def drop(self) -> None:
        """Forget what was kept."""

    def check(self) -> None:
        """All bytes are here: raises RunError where they are not the ones that were computed."""


class KeptFrames:
    """The received buffers are the storage: nothing is copied."""

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        self._frames: list[Any] = []

    def put(self, _offset: int, frames: Sequence[Any]) -> None:
        """Keep the frames themselves."""
        self._frames += frames

    def drop(self) -> None:
        """Let the frames go."""
        self._frames.clear()

    def check(self) -> None:
        """Nobody knows what they should be."""


class WatchedStore:
    """A KV store that knows of the copies between the device and the host: `copies` have begun or ended so far."""

    def __init__(self, store: KvStore) -> None:
        self.block_bytes = store.block_bytes
        self.copies = 0
        self._store = store
        self._under_way = 0
        self._lock = threading.Lock()

    def still_since(self, copies: int) -> bool:
        """Whether nothing has been copied since there were so many `copies`, and was not then."""
        with self._lock:
            return self._under_way == 0 and self.copies == copies

    @contextmanager
    def _copying(self) -> Iterator[None]:
        with self._lock:
            self.copies += 1
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self.copies += 1
                self._under_way -= 1

    def write(self, write: KvWrite, start: int, stop: int) -> None:
        """Part of a step: no copy."""
        self._store.write(write, start, stop)

    def gather(self, blocks: Sequence[int], offset: int, nbytes: int) -> memoryview:
        """A copy to the host."""
        with self._copying():
            return self._store.gather(blocks, offset, nbytes)

    def scatter(self, blocks: Sequence[int], offset: int, frames: Sequence[Any]) -> None:
        """A copy to the device."""
        with self._copying():
            self._store.scatter(blocks, offset, frames)

    def is_right(self, request_id: str, blocks: Sequence[int], nbytes: int) -> bool:
        """Work beside that of the steps."""
        with self._copying():
            return self._store.is_right(request_id, blocks, nbytes)

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._store.close()


class StoredSource:
    """A request's KV in the blocks of a store, cut into frames of `frame_bytes`."""

    __slots__ = ("_blocks", "_frame_bytes", "_store", "_verify")

    def __init__(self, store: KvStore, blocks: Sequence[int], frame_bytes: int, *, verify: bool) -> None:
        self._store = store
        self._blocks = blocks
        self._frame_bytes = frame_bytes
        self._verify = verify

    def draw(self, offset: int, nbytes: int) -> tuple[list[Any], int]:
        """Gather the bytes."""
        data = self._store.gather(self._blocks, offset, nbytes)
        size = self._frame_bytes
        return [data[at : at + size] for at in range(0, nbytes, size)], zlib.crc32(data) if self._verify else 0


class StoredSink:
    """The blocks of a store that a request's `nbytes` of KV belong into; `way` says whose KV goes where."""

    __slots__ = ("_blocks", "_nbytes", "_request_id", "_store", "_verify", "_way")

    def __init__(
        self, store: KvStore, request_id: str, blocks: Sequence[int], nbytes: int, *, way: str, verify: bool
    ) -> None:
        self._store = store
        self._request_id = request_id
        self._blocks = blocks
        self._nbytes = nbytes
        self._way = way
        self._verify = verify

    def put(self, offset: int, frames: Sequence[Any]) -> None:
        """Copy the frames into their blocks."""
        self._store.scatter(self._blocks, offset, frames)

    def drop(self) -> None:
        """The blocks are the node's again, which keeps count of them."""

    def check(self) -> None:
        """With `verify` every byte is compared with what was to be computed."""
        if self._verify and not self._store.is_right(self._request_id, self._blocks, self._nbytes):
            raise RunError(f"the KV of {self._request_id} {self._way} arrived, but is not what was computed for it")
