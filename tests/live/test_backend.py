"""What every computing device must do, whatever it is made of: on NumPy anywhere, on CUDA where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np
import pytest

from emulator.core.calibration import Direction, Operands
from emulator.core.effects import KvWrite
from tests.live.backends import BLOCK_BYTES, KINDS, Opened, opened, with_store

SCATTERED = (5, 2, 3, 11, 0)
NBYTES = 4 * BLOCK_BYTES + 1000


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Opened]:
    if request.param == "cuda":
        with with_store(request.getfixturevalue("gpu")) as found:
            yield found
    else:
        with opened(request.param) as backend, with_store(backend) as found:
            yield found


def write(device: Opened, request_id: str, blocks: tuple[int, ...], start: int = 0, stop: int = NBYTES) -> None:
    device.store.write(KvWrite(request_id, start, stop - start, blocks), start, stop)


def drawn(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, NBYTES), (1, 1), (BLOCK_BYTES - 1, 2), (BLOCK_BYTES, BLOCK_BYTES), (3001, 3 * BLOCK_BYTES + 7)],
)
def test_what_is_scattered_is_gathered_again(device: Opened, offset: int, nbytes: int) -> None:
    device.store.scatter(SCATTERED, 0, [drawn(5 * BLOCK_BYTES)])
    data = drawn(nbytes)
    frames = [memoryview(data)[at : at + 1500] for at in range(0, nbytes, 1500)]
    device.store.scatter(SCATTERED, offset, frames)
    assert bytes(device.store.gather(SCATTERED, offset, nbytes)) == data
    around = bytes(device.store.gather(SCATTERED, 0, 5 * BLOCK_BYTES))
    expected = bytearray(drawn(5 * BLOCK_BYTES))
    expected[offset : offset + nbytes] = data
    assert around == bytes(expected)


def test_blocks_of_different_requests_do_not_touch_each_other(device: Opened) -> None:
    write(device, "one", (1, 4, 6, 7, 8))
    write(device, "other", SCATTERED)
    device.done()
    assert device.store.is_right("one", (1, 4, 6, 7, 8), NBYTES)
    assert device.store.is_right("other", SCATTERED, NBYTES)


def test_what_a_step_writes_is_what_the_request_is_to_have(device: Opened) -> None:
    for start, stop in ((0, 1), (1, BLOCK_BYTES + 500), (BLOCK_BYTES + 500, NBYTES)):
        write(device, "one", SCATTERED, start, stop)
    device.done()
    assert bytes(device.store.gather(SCATTERED, 0, NBYTES)) == device.right("one", 0, NBYTES)
    assert device.store.is_right("one", SCATTERED, NBYTES)


@pytest.mark.parametrize("at", [0, BLOCK_BYTES - 1, BLOCK_BYTES, NBYTES - 1])
def test_a_single_wrong_byte_is_not_right(device: Opened, at: int) -> None:
    write(device, "one", SCATTERED)
    device.done()
    wrong = device.right("one", at, 1)[0] ^ 0x10
    device.store.scatter(SCATTERED, at, [bytes([wrong])])
    assert not device.store.is_right("one", SCATTERED, NBYTES)
    assert device.store.is_right("one", SCATTERED, at)  # what is before it is right


@pytest.mark.parametrize("blocks", [(2, 5, 3, 11, 0), (5, 2, 3, 0, 11)])
def test_a_block_in_the_wrong_place_is_not_right(device: Opened, blocks: tuple[int, ...]) -> None:
    write(device, "one", SCATTERED)
    device.done()
    assert not device.store.is_right("one", blocks, NBYTES)
    assert not device.store.is_right("other", SCATTERED, NBYTES)


def test_work_is_done_in_order_and_before_its_mark(device: Opened) -> None:
    for turn in range(8):
        device.backend.gemm(max(device.backend.gemm_ks), 4)
        write(device, f"request {turn}", SCATTERED)
        device.backend.read(1 << 20)
    mark = device.backend.mark()
    write(device, "later", (20, 21, 22, 23, 24))
    device.backend.wait(mark)
    assert device.store.is_right("request 7", SCATTERED, NBYTES)
    device.done()
    assert device.store.is_right("later", (20, 21, 22, 23, 24), NBYTES)


def test_gathering_beside_work_of_another_request_gives_what_was_there(device: Opened) -> None:
    write(device, "one", SCATTERED)
    device.done()
    device.backend.gemm(max(device.backend.gemm_ks), 50)
    write(device, "two", (30, 31, 32, 33, 34))
    assert bytes(device.store.gather(SCATTERED, 0, NBYTES)) == device.right("one", 0, NBYTES)
    device.done()
    assert device.store.is_right("two", (30, 31, 32, 33, 34), NBYTES)


def test_every_kind_of_work_takes_time_and_as_many_times_are_told_as_asked_for(device: Opened) -> None:
    backend = device.backend
    kinds: list[Callable[[], None]] = [lambda k=k: backend.gemm(k, 2) for k in backend.gemm_ks]  # type: ignore[misc]
    kinds += [lambda: backend.fill(100), lambda: backend.read(backend.read_bytes_at_hand + (3 << 20))]
    kinds += [lambda d=d: backend.copy(70 << 20, d) for d in get_args(Direction)]  # type: ignore[misc]
    kinds += [
        lambda o=o, rows=rows: backend.product(backend.gemm_ks[0], 1, rows=rows, operands=o)  # type: ignore[misc]
        for o in get_args(Operands)
        for rows in (16, backend.mn)
    ]
    for enqueue in kinds:
        times_s = backend.time_s(enqueue, 3)
        assert len(times_s) == 3
        assert all(0 < took_s < 10 for took_s in times_s)


def test_a_device_is_the_same_for_all_who_open_it(device: Opened) -> None:
    with opened(device.backend.name) as again:
        assert again.device_id == device.backend.device_id
        assert again.description == device.backend.description
        assert device.backend.driver
