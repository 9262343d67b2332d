"""KV between the blocks of two stores over real sockets: bit-identical, counted, and found where it is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from emulator.core.effects import KvWrite
from emulator.core.errors import RunError
from emulator.core.kv_content import KvContent
from emulator.live.kv_link import Arrival, KvReceiver, KvSender
from emulator.live.kv_places import StoredSink, StoredSource
from emulator.live.numpy_device import NumpyBackend, NumpyKvStore
from tests.live.lab import eventually

pytestmark = pytest.mark.live

BLOCK_BYTES = 99_991
NBYTES = 37 * BLOCK_BYTES + 17
SENT_FROM = (*range(30, 50), *range(5, 23))
PUT_INTO = (*range(37, 0, -1), 60)
DEADLINE_S = 30.0


class Lab:
    """A sending and a receiving node's store, and the link between them."""

    def __init__(self, stack: ExitStack, *, rate: float | None, delay_s: float) -> None:
        self.backends = [stack.enter_context(closing(NumpyBackend(name))) for name in ("prefill-0", "decode-0")]
        self.sending, self.receiving = (
            NumpyKvStore(b, BLOCK_BYTES, 0, limit_bytes=1 << 28, content=KvContent(1), node="test")
            for b in self.backends
        )
        self.arrivals: list[Arrival] = []
        self.errors: list[Exception] = []
        self.heard = threading.Event()
        self.receiver = stack.enter_context(
            closing(
                KvReceiver(
                    "tcp://127.0.0.1:*",
                    ingress_bytes_per_s=rate,
                    delay_s=delay_s,
                    host_memory_bytes=1 << 28,
                    verify=True,
                    on_complete=self._arrived,
                    on_error=self._failed,
                )
            )
        )
        self.sender = stack.enter_context(
            closing(KvSender(egress_bytes_per_s=rate, verify=True, on_error=self._failed))
        )

    def _arrived(self, arrival: Arrival) -> None:
        self.arrivals.append(arrival)
        self.heard.set()

    def _failed(self, error: Exception) -> None:
        self.errors.append(error)
        self.heard.set()

    def compute(self, request_id: str = "r0") -> None:
        self.sending.write(KvWrite(request_id, 0, NBYTES, SENT_FROM), 0, NBYTES)
        self.backends[0].wait(self.backends[0].mark())

    def open(self, ticket: int = 1, request_id: str = "r0") -> None:
        way = "from prefill-0 to decode-0"
        sink = StoredSink(self.receiving, request_id, PUT_INTO, NBYTES, way=way, verify=True)
        self.receiver.open(ticket, NBYTES, sink)

    def send(self, *cuts: int, ticket: int = 1) -> None:
        source = StoredSource(self.sending, SENT_FROM, self.sender.frame_bytes, verify=True)
        ends = [*cuts, NBYTES]
        for start, stop in zip([0, *cuts], ends, strict=True):
            self.sender.send(self.receiver.endpoint, ticket, stop - start, source=source)

    def wait(self) -> None:
        assert self.heard.wait(DEADLINE_S)


@pytest.fixture(params=[(None, 0.0), (200e6, 0.0), (200e6, 0.01)], ids=["full-speed", "paced", "held"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    rate, delay_s = request.param
    with ExitStack() as stack:
        yield Lab(stack, rate=rate, delay_s=delay_s)


@pytest.mark.parametrize("cuts", [(), (1, 65_537, 2_000_000)])
def test_kv_arrives_in_other_blocks_bit_for_bit(lab: Lab, cuts: tuple[int, ...]) -> None:
    lab.compute()
    lab.open()
    lab.send(*cuts)
    lab.wait()
    assert lab.errors == []
    (arrival,) = lab.arrivals
    assert (arrival.nbytes, len(arrival.parts)) == (NBYTES, len(cuts) + 1)
    sent, received = lab.sending.gather(SENT_FROM, 0, NBYTES), lab.receiving.gather(PUT_INTO, 0, NBYTES)
    assert bytes(received) == bytes(sent)
    stats = lab.receiver.stats()
    assert (stats.bytes, stats.retained_bytes, stats.peak_retained_bytes) == (NBYTES, NBYTES, NBYTES)
    assert stats.dropped == stats.unretained_bytes == 0
    lab.receiver.release(1)
    assert lab.receiver.stats().retained_bytes == 0


@pytest.mark.parametrize("at", [0, 1_000_003, NBYTES - 1])
def test_a_corrupted_byte_is_found_and_named(lab: Lab, at: int) -> None:
    lab.compute()
    byte = lab.sending.gather(SENT_FROM, at, 1)
    byte[0] ^= 0x10
    lab.open()
    lab.send()
    lab.wait()
    (error,) = lab.errors
    assert isinstance(error, RunError)
    assert str(error) == "the KV of r0 from prefill-0 to decode-0 arrived, but is not what was computed for it"
    assert lab.arrivals == []


def test_kv_of_another_request_is_found(lab: Lab) -> None:
    lab.compute("r1")
    lab.open(request_id="r0")
    lab.send()
    lab.wait()
    assert [type(error) for error in lab.errors] == [RunError]


def test_a_released_ticket_s_blocks_are_not_written_any_more(lab: Lab) -> None:
    lab.compute()
    lab.open(1)
    lab.receiver.release(1)
    lab.receiving.write(KvWrite("r2", 0, NBYTES, PUT_INTO), 0, NBYTES)
    lab.backends[1].wait(lab.backends[1].mark())
    lab.open(2, "r2")
    lab.send(ticket=1)
    lab.send(ticket=3)
    assert eventually(lambda: lab.sender.stats().bytes == 2 * NBYTES, DEADLINE_S)
    assert eventually(lambda: lab.receiver.stats().no_ticket == lab.sender.stats().frames, DEADLINE_S)
    assert lab.receiving.is_right("r2", PUT_INTO, NBYTES)
    assert lab.receiver.stats().retained_bytes == 0
