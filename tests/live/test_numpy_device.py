"""The NumPy backend and its KV blocks: work in order on a thread of its own, bytes where they belong, limits kept."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from emulator.core.effects import KvWrite
from emulator.core.errors import CapacityError, RunError
from emulator.core.kv_content import PATTERN_BYTES, KvContent
from emulator.live.device_lock import Patience, device_lock
from emulator.live.numpy_device import GEMM_KS, NumpyBackend, NumpyKvStore
from emulator.live.processor import processor_id, processor_name
from emulator.live.unit_times import measure_units
from tests.live.lab import eventually

CONTENT = KvContent(3)
LIMIT_BYTES = 1 << 28


@pytest.fixture
def backend() -> Iterator[NumpyBackend]:
    with closing(NumpyBackend("test")) as made:
        yield made
    assert [thread.name for thread in threading.enumerate() if thread.name == "test-stream"] == []


def a_store(
    backend: NumpyBackend, block_bytes: int = 1_000, *, limit: int = LIMIT_BYTES, expected: int = 0
) -> NumpyKvStore:
    return NumpyKvStore(backend, block_bytes, expected, limit_bytes=limit, content=CONTENT, node="decode-0")


def computed(request_id: str, offset: int, nbytes: int) -> bytes:
    return b"".join(view.tobytes() for view in CONTENT.views(request_id, offset, nbytes))


def write(backend: NumpyBackend, store: NumpyKvStore, request_id: str, blocks: tuple[int, ...], nbytes: int) -> None:
    """All of a request's KV, in two parts as chunks are."""
    for start, stop in itertools.pairwise((0, nbytes // 3, nbytes)):
        store.write(KvWrite(request_id, start, stop - start, blocks), start, stop)
    backend.wait(backend.mark())


def test_work_is_done_in_order_and_marks_come_after_it(backend: NumpyBackend) -> None:
    done: list[int] = []
    go_on = threading.Event()
    backend.enqueue(go_on.wait)
    backend.enqueue(lambda: done.append(1))
    first = backend.mark()
    backend.enqueue(lambda: done.append(2))
    assert not first.is_set()
    go_on.set()
    backend.wait(first)
    assert done[0] == 1
    backend.wait(backend.mark())
    assert done == [1, 2]


@pytest.mark.alone
def test_every_kind_of_work_takes_time_on_the_stream_s_clock(backend: NumpyBackend) -> None:
    kinds: list[tuple[Callable[[int], None], int]] = [(partial(backend.gemm, k), 2) for k in GEMM_KS]
    for enqueue, units in [*kinds, (backend.fill, 1_000), (backend.read, 1 << 20)]:
        few, many = (min(backend.time_s(partial(enqueue, n), 5)) for n in (units, 20 * units))
        assert 0 < few < many


def test_reads_go_round_the_memory_at_hand_and_read_all_that_is_asked(backend: NumpyBackend) -> None:
    backend.read(backend.read_bytes_at_hand * 3 // 4)
    backend.read(backend.read_bytes_at_hand // 2)
    backend.read(5)
    backend.wait(backend.mark())
    assert backend._at * 8 == backend.read_bytes_at_hand // 4


def test_what_work_raises_is_raised_by_the_wait_and_nothing_is_done_afterwards(backend: NumpyBackend) -> None:
    done: list[int] = []

    def fail() -> None:
        raise MemoryError("too much")

    backend.enqueue(fail)
    backend.enqueue(lambda: done.append(1))
    with pytest.raises(RunError, match="NumPy: MemoryError: too much"):
        backend.wait(backend.mark())
    assert done == []


def test_a_close_forgets_what_is_enqueued_and_leaves_nobody_waiting() -> None:
    backend = NumpyBackend("test")
    started, go_on, done = threading.Event(), threading.Event(), []
    backend.enqueue(started.set)
    backend.enqueue(go_on.wait)
    backend.enqueue(lambda: done.append(1))
    mark = backend.mark()
    started.wait()
    closer = threading.Thread(target=backend.close)
    closer.start()
    assert eventually(lambda: backend._closed)
    go_on.set()
    closer.join()
    assert mark.is_set()
    assert done == []


@pytest.mark.alone
def test_units_are_measured_and_plausible(backend: NumpyBackend) -> None:
    with device_lock(backend.device_id, Patience(60.0)):
        units = measure_units(backend)
    assert [k for k, _ in units.gemm_s] == list(GEMM_KS)
    assert all(0 < seconds < 1.0 for _, seconds in units.gemm_s)
    assert 0 < units.fill_s < 1e-4
    assert 1e6 < units.read_bytes_per_s < 1e13
    assert units.fill_launch_s >= 0
    assert units.read_launch_s >= 0


def test_one_process_at_a_time_measures_on_a_device() -> None:
    order: list[str] = []
    entered = threading.Event()

    def second() -> None:
        entered.wait()
        with device_lock("test:device", Patience(60.0)):
            order.append("second")

    other = threading.Thread(target=second)
    other.start()
    with device_lock("test:device", Patience(60.0)), device_lock("test:another", Patience(60.0)):
        entered.set()
        other.join(0.05)
        order.append("first")
    other.join()
    assert order == ["first", "second"]


@pytest.mark.parametrize("block_bytes", [1, 977, 1_000, 70_000, 30_000_000])
def test_what_is_written_is_gathered_and_right(backend: NumpyBackend, block_bytes: int) -> None:
    store = a_store(backend, block_bytes)
    ids = [0, 1, 2, 9, 8, 4, 5, 30] if block_bytes < 1_000_000 else [1, 0, 3]
    nbytes = (len(ids) - 1) * block_bytes + -(-block_bytes // 2)
    write(backend, store, "r0", tuple(ids), nbytes)
    whole = computed("r0", 0, nbytes)
    assert bytes(store.gather(ids, 0, nbytes)) == whole
    draws = random.Random(0)
    for _ in range(10):
        start = draws.randrange(nbytes)
        length = draws.randrange(1, nbytes - start + 1)
        assert bytes(store.gather(ids, start, length)) == whole[start : start + length]
    assert store.is_right("r0", ids, nbytes)
    assert not store.is_right("r1", ids, nbytes)
    store.close()


def test_kv_that_wraps_round_the_pattern_is_right(backend: NumpyBackend) -> None:
    nbytes = PATTERN_BYTES + 12_345
    store = a_store(backend, 1 << 16)
    blocks = tuple(range(-(-nbytes // (1 << 16))))
    write(backend, store, "r0", blocks, nbytes)
    assert bytes(store.gather(blocks, 0, nbytes)) == computed("r0", 0, nbytes)
    assert store.is_right("r0", blocks, nbytes)


def test_frames_are_scattered_over_blocks_and_leave_their_neighbours_alone(backend: NumpyBackend) -> None:
    store = a_store(backend)
    write(backend, store, "other", (1, 6), 2_000)
    whole = computed("r0", 0, 3_500)
    blocks = (7, 2, 0, 5)
    for start, stop in ((0, 1_500), (1_500, 1_501), (1_501, 3_500)):
        cut = start + (stop - start) // 2
        store.scatter(blocks, start, [whole[start:cut], memoryview(whole)[cut:stop]])
    assert store.is_right("r0", blocks, 3_500)
    assert store.is_right("other", (1, 6), 2_000)


@pytest.mark.parametrize("at", [0, 1_234, 3_499])
def test_one_wrong_byte_is_noticed(backend: NumpyBackend, at: int) -> None:
    store = a_store(backend)
    blocks = (7, 2, 0, 5)
    write(backend, store, "r0", blocks, 3_500)
    right = bytes(store.gather(blocks, at, 1))
    store.scatter(blocks, at, [bytes([right[0] ^ 1])])
    assert not store.is_right("r0", blocks, 3_500)
    store.scatter(blocks, at, [right])
    assert store.is_right("r0", blocks, 3_500)


def test_memory_is_taken_as_far_as_blocks_are_used_and_no_farther_than_granted(backend: NumpyBackend) -> None:
    store = a_store(backend, 1 << 20, limit=1 << 26)
    store.scatter((0, 1, 2, 3), 0, [bytes(1 << 22)])
    held = sum(slab.nbytes for slab in store._slabs.values())
    assert held == 1 << 22
    with pytest.raises(CapacityError, match=r"decode-0: its KV needs more than the 67\.11MB .*scale\.bytes"):
        store.scatter(range(65), 0, [bytes(65 << 20)])
    assert sum(slab.nbytes for slab in store._slabs.values()) == 1 << 26


def test_expected_memory_is_there_from_the_start_within_the_limit(backend: NumpyBackend) -> None:
    for expected, there in ((1 << 24, 1 << 24), (1 << 30, 1 << 26)):
        store = a_store(backend, 1 << 20, limit=1 << 26, expected=expected)
        slabs = store._slabs.values()
        assert sum(slab.nbytes for slab in slabs) == there
        assert all(not np.any(slab) for slab in slabs)


def test_all_processes_of_a_host_name_the_same_device() -> None:
    with closing(NumpyBackend("test")) as one, closing(NumpyBackend("test")) as other:
        assert one.device_id == other.device_id == processor_id()
        assert one.description == other.description == f"{processor_name()} ({one.driver})"
