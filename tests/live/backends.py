"""Computing devices for tests: each kind opened with a KV store, as a node would have them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from emulator.core.kv_content import KvContent
from emulator.lab.measured_device import measured_device
from emulator.live.backend import KvStore, MeasuredBackend
from emulator.live.cuda import CudaBackend, CudaKvStore
from emulator.live.numpy_device import NumpyBackend, NumpyKvStore

KINDS = ("numpy", pytest.param("cuda", marks=pytest.mark.gpu))

BLOCK_BYTES = 4096 + 112
"""Not a power of two, and no multiple of 128, as KV blocks may be."""
EXPECTED_BYTES = 16 * BLOCK_BYTES
SEED = 7


class Opened(NamedTuple):
    """A device with a store."""

    backend: MeasuredBackend
    store: KvStore
    content: KvContent

    def done(self) -> None:
        """Wait for everything enqueued so far."""
        self.backend.wait(self.backend.mark())

    def right(self, request_id: str, offset: int, nbytes: int) -> bytes:
        """What a request's KV is to be."""
        return b"".join(view.tobytes() for view in self.content.views(request_id, offset, nbytes))


@contextlib.contextmanager
def opened(kind: str) -> Iterator[MeasuredBackend]:
    """A device of this kind, warm, and closed at the end."""
    backend = measured_device("cuda" if kind == "cuda" else "numpy", None).open()
    try:
        backend.warm_up()
        yield backend
    finally:
        backend.close()
        backend.close()  # nothing happens


@contextlib.contextmanager
def with_store(backend: MeasuredBackend) -> Iterator[Opened]:
    """The device with a store, which is closed at the end."""
    content = KvContent(SEED)
    store: KvStore
    if isinstance(backend, NumpyBackend):
        store = NumpyKvStore(backend, BLOCK_BYTES, EXPECTED_BYTES, limit_bytes=64 << 20, content=content, node="test-0")
    else:
        assert isinstance(backend, CudaBackend)
        store = CudaKvStore(backend, BLOCK_BYTES, EXPECTED_BYTES, content=content, node="test-0")
    try:
        yield Opened(backend, store, content)
    finally:
        store.close()
        store.close()  # nothing happens
