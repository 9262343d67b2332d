"""KV in a GPU's memory, on one made of this machine's memory."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import pytest

from emulator.core.effects import KvWrite
from emulator.core.errors import CapacityError
from emulator.core.pacing import MAX_FRAME_BYTES
from emulator.core.scaling import Scaling
from emulator.core.specs import Scale
from emulator.live import cuda_kv
from emulator.live.cuda import CudaBackend, CudaKvStore
from emulator.live.cuda_gpu import MAX_RUNS
from emulator.live.kv_frames import FRAMES_PER_MESSAGE
from tests.live.host_cupy import TOTAL_BYTES, HostCupy, Launcher, open_host

MIB = 1 << 20


class _Content:
    """A pattern of a prime length, so that no two requests lie alike in it."""

    def __init__(self) -> None:
        self.pattern = np.random.default_rng(3).integers(0, 256, 100_003).astype(np.uint8)

    def start(self, request_id: str) -> int:
        return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:4], "little") % len(self.pattern)

    def of(self, request_id: str, offset: int, nbytes: int) -> bytes:
        places = (self.start(request_id) + offset + np.arange(nbytes)) % len(self.pattern)
        return self.pattern[places].tobytes()


CONTENT = _Content()


def _store(backend: CudaBackend, block_bytes: int, expected_bytes: int | None = None) -> CudaKvStore:
    if expected_bytes is None:
        expected_bytes = min(MIB, 100 * block_bytes)
    return CudaKvStore(backend, block_bytes, expected_bytes, content=CONTENT, node="prefill-0")


BLOCKS = (5, 0, 3, 4, 9, 1)
SIZES = (1, 7, 16, 100, 4096, 5000, 200_000)
"""Bytes of a block: of whole pieces and not, and long enough for copy engines."""


@pytest.mark.parametrize("block_bytes", SIZES)
def test_kv_that_was_computed_is_gathered_byte_for_byte(host: HostCupy, block_bytes: int) -> None:
    backend = open_host(host)
    check_computed(_store(backend, block_bytes))


def check_computed(store: CudaKvStore) -> None:
    """Write a request's KV in parts, and gather many parts of it."""
    block_bytes = store.block_bytes
    total = block_bytes * len(BLOCKS) - block_bytes // 3
    write = KvWrite("r1", 0, total, BLOCKS)
    for start in range(0, total, max(1, total // 3)):
        store.write(write, start, min(total, start + max(1, total // 3)))
    assert store.is_right("r1", BLOCKS, total)
    draw = np.random.default_rng(block_bytes)
    for _ in range(20):
        offset = int(draw.integers(0, total))
        nbytes = int(draw.integers(1, total - offset + 1))
        gathered = store.gather(BLOCKS, offset, nbytes)
        assert gathered.nbytes == nbytes
        assert bytes(gathered) == CONTENT.of("r1", offset, nbytes)


@pytest.mark.parametrize("block_bytes", SIZES)
def test_kv_that_was_received_is_right_and_no_other(host: HostCupy, block_bytes: int) -> None:
    backend = open_host(host)
    check_received(_store(backend, block_bytes))


def check_received(store: CudaKvStore) -> None:
    """Scatter frames of many sizes; whatever byte is wrong then, is seen."""
    total = store.block_bytes * len(BLOCKS)
    content = CONTENT.of("r2", 0, total)
    offset = 0
    for length in _lengths(total):
        half = length // 2
        frames = [memoryview(content[offset : offset + half]), bytearray(content[offset + half : offset + length]), b""]
        store.scatter(BLOCKS, offset, frames)
        offset += length
    assert store.is_right("r2", BLOCKS, total)
    assert bytes(store.gather(BLOCKS, 0, total)) == content
    assert not store.is_right("r3", BLOCKS, total)
    for place in (0, total // 2, total - 1):
        store.scatter(BLOCKS, place, [bytes([content[place] ^ 1])])
        assert not store.is_right("r2", BLOCKS, total)
        assert place == 0 or store.is_right("r2", BLOCKS, place)
        store.scatter(BLOCKS, place, [content[place : place + 1]])


def _lengths(total: int) -> list[int]:
    """Frames of several sizes that make up a transfer."""
    draw, lengths = np.random.default_rng(total), []
    while total > 0:
        lengths.append(min(total, int(draw.integers(1, max(2, total // 2 + 2)))))
        total -= lengths[-1]
    return lengths


def test_requests_do_not_touch_each_other(host: HostCupy) -> None:
    backend = open_host(host)
    store = _store(backend, 1000)
    shares = {"a": (0, 2, 4), "b": (1, 3, 5), "c": (6,)}
    for request, blocks in shares.items():
        store.write(KvWrite(request, 0, 1000 * len(blocks), blocks), 0, 1000 * len(blocks))
    assert all(store.is_right(request, blocks, 1000 * len(blocks)) for request, blocks in shares.items())


def test_long_runs_go_by_copy_engine_and_short_ones_by_one_kernel(host: HostCupy) -> None:
    backend = open_host(host)
    long, short = _store(backend, 256 << 10), _store(backend, 1000)
    host.launched.clear()
    long.gather((3, 1, 2), 0, 700_000)
    assert host.launched == [("copy", 256 << 10), ("copy", 700_000 - (256 << 10))], "blocks 1 and 2 lie together"
    host.launched.clear()
    short.gather(tuple(range(299, -1, -1)), 0, 300_000)
    assert host.launched == [("copy_runs", MAX_RUNS)] * 2 + [("copy_runs", 300 - 2 * MAX_RUNS), ("copy", 300_000)]


def test_memory_is_taken_as_blocks_are_used(host: HostCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kv, "SLAB_BYTES", 2 * MIB)
    backend = open_host(host)
    store = _store(backend, MIB, expected_bytes=3 * MIB)
    before = host.used_bytes
    store.write(KvWrite("r", 0, 3 * MIB, (0, 1, 2)), 0, 3 * MIB)
    assert host.used_bytes == before
    store.write(KvWrite("s", 0, 2 * MIB, (3, 8)), 0, 2 * MIB)
    assert host.used_bytes == before + 2 * 2 * MIB
    assert store.is_right("s", (3, 8), 2 * MIB)
    assert store.is_right("r", (0, 1, 2), 3 * MIB)


def test_kv_beyond_the_memory_is_told_with_node_and_remedy(host: HostCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kv, "SLAB_BYTES", 2 * MIB)
    backend = open_host(host, 130 * MIB)
    store = _store(backend, MIB, expected_bytes=8 * MIB)
    told = r"^prefill-0: KV blocks: 1.049MB are wanted, but .* of the 136.3MB granted are taken, .*scale\.bytes"
    with pytest.raises(CapacityError, match=told):
        store.write(KvWrite("r", 0, 64 * MIB, tuple(range(64))), 0, 64 * MIB)


@pytest.mark.parametrize("scale_bytes", [1.0, 7.5])
def test_expected_kv_beyond_the_memory_is_refused_at_once_with_a_scale_that_suffices(
    kernels: dict[str, Launcher], scale_bytes: float
) -> None:
    model_block_bytes, blocks = 3_000_017, 400

    def store(scale: float) -> CudaKvStore:
        block_bytes = Scaling(Scale(bytes=scale)).wire_block_bytes(model_block_bytes)
        backend = open_host(HostCupy(kernels, TOTAL_BYTES))
        return CudaKvStore(
            backend, block_bytes, blocks * block_bytes, content=CONTENT, node="prefill-0", scale_bytes=scale
        )

    with pytest.raises(CapacityError, match=r"^prefill-0: .*B of KV are expected, but only .*B of Host GPU") as told:
        store(scale_bytes)
    suggested = int(str(told.value).partition("scale.bytes = ")[2].partition(",")[0])
    store(suggested).close()
    with pytest.raises(CapacityError):
        store(suggested * 0.95)


def test_where_no_scale_suffices_none_is_suggested(host: HostCupy) -> None:
    with pytest.raises(CapacityError, match=r"of Host GPU .* are left for it; raise the memory of \[device\]"):
        _store(open_host(host), 4096, expected_bytes=1 << 40)


def test_what_a_transfer_is_staged_in_is_there_before_it_comes(host: HostCupy) -> None:
    nbytes = FRAMES_PER_MESSAGE * MAX_FRAME_BYTES
    store = _store(open_host(host), 1000, expected_bytes=2 * nbytes)
    before = host.used_bytes
    blocks = tuple(range(-(-nbytes // 1000)))
    store.scatter(blocks, 0, [bytes(MAX_FRAME_BYTES)] * FRAMES_PER_MESSAGE)
    store.gather(blocks, 0, nbytes)
    assert host.used_bytes == before


def test_sender_and_receiver_are_threads_of_their_own(host: HostCupy) -> None:
    backend = open_host(host)
    store = _store(backend, 1000)
    store.write(KvWrite("r", 0, 5000, (0, 1, 2, 3, 4)), 0, 5000)
    wrong: list[str] = []

    def send() -> None:
        for _ in range(50):
            if bytes(store.gather((0, 1, 2, 3, 4), 100, 4000)) != CONTENT.of("r", 100, 4000):
                wrong.append("sent")

    def receive() -> None:
        for number in range(50):
            store.scatter((7, 6), 0, [CONTENT.of(f"s{number}", 0, 2000)])
            if not store.is_right(f"s{number}", (7, 6), 2000):
                wrong.append("received")

    threads = [threading.Thread(target=work) for work in (send, receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_closing_gives_all_memory_back(host: HostCupy) -> None:
    backend = open_host(host)
    store = _store(backend, 4096)
    backend.product(512, 1, rows=16, operands="random")
    assert host.used_bytes > backend.read_bytes_at_hand
    store.close()
    store.close()
    backend.close()
    assert host.used_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("block_bytes", SIZES)
def test_a_gpu_keeps_kv_byte_for_byte(gpu: CudaBackend, block_bytes: int) -> None:
    store = _store(gpu, block_bytes)
    try:
        check_computed(store)
        check_received(store)
    finally:
        store.close()
