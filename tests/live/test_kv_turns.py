"""Whose frames a KV sender sends when, seen by a bare socket that reads their headers: turns, places, costs."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import zmq

from emulator.core.deployments import TransferOrder
from emulator.live.kv_frames import FrameHeader, parse_header
from emulator.live.kv_link import Arrival, KvReceiver, KvSender

pytestmark = pytest.mark.live

FRAME = 65_536
NEVER_S = 1e6
DEADLINE_MS = 30_000


class Wire:
    """A sender, and the sockets at its destinations: nothing leaves for one before it is opened."""

    def __init__(self, stack: ExitStack, sender: KvSender) -> None:
        self._stack = stack
        self._context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        self.sender = sender

    def endpoint(self) -> str:
        """An address that is taken, and at which nobody listens yet."""
        held = self._stack.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{held.getsockname()[1]}"

    def open(self, endpoint: str) -> zmq.Socket[bytes]:
        pull = self._stack.enter_context(self._context.socket(zmq.PULL))
        pull.rcvtimeo = DEADLINE_MS
        pull.bind(endpoint)
        return pull


def _read(pull: zmq.Socket[bytes], nbytes: int) -> list[FrameHeader]:
    """The headers of frames until so many bytes have come."""
    headers = []
    while nbytes > 0:
        first, *bodies = pull.recv_multipart(copy=False)
        header = parse_header(first)
        assert header is not None
        assert header.nbytes == sum(len(body) for body in bodies)
        nbytes -= header.nbytes
        headers.append(header)
    return headers


@contextmanager
def _wire(*, rate: float | None = 200e6, cap: int = 1, order: TransferOrder = "fifo") -> Iterator[Wire]:
    errors: list[Exception] = []
    with ExitStack() as stack:
        sender = KvSender(
            egress_bytes_per_s=rate, frame_bytes=FRAME, max_in_flight=cap, order=order, on_error=errors.append
        )
        yield Wire(stack, stack.enter_context(closing(sender)))
    assert errors == []


def _tickets(headers: list[FrameHeader]) -> list[int]:
    """Whose frames came, each run of one ticket's once."""
    return [ticket for ticket, _ in itertools.groupby(header.ticket for header in headers)]


def _most_at_a_time(headers: list[FrameHeader], sizes: dict[int, int]) -> int:
    """How many messages had begun and were not through."""
    most = 0
    left: dict[int, int] = {}
    for header in headers:
        left[header.ticket] = left.get(header.ticket, sizes[header.ticket]) - header.nbytes
        most = max(most, len(left))
        if left[header.ticket] == 0:
            del left[header.ticket]
    return most


@pytest.mark.parametrize("cap", [1, 3])
def test_fifo_sends_transfers_whole_in_the_order_of_their_calls(cap: int) -> None:
    with _wire(cap=cap) as wire:
        endpoint = wire.endpoint()
        for ticket in (1, 2, 1, 3):
            wire.sender.send(endpoint, ticket, 3 * FRAME)
        assert _tickets(_read(wire.open(endpoint), 12 * FRAME)) == [1, 2, 1, 3]


def test_fair_sends_frame_by_frame_in_turn_of_as_many_as_may_be_on_the_way() -> None:
    sizes = {1: 4 * FRAME, 2: 6 * FRAME, 3: 4 * FRAME}
    with _wire(cap=2, order="fair") as wire:
        endpoint = wire.endpoint()
        for ticket, nbytes in sizes.items():
            wire.sender.send(endpoint, ticket, nbytes)
        headers = _read(wire.open(endpoint), sum(sizes.values()))
    assert [header.ticket for header in headers] == [1, 2, 1, 2, 1, 2, 1, 2, 3, 2, 3, 2, 3, 3]
    assert _most_at_a_time(headers, sizes) == 2


@pytest.mark.parametrize("cap", [1, 3, 5])
@pytest.mark.parametrize("rate", [None, 200e6])
def test_never_are_more_on_the_way_than_may_be(rate: float | None, cap: int) -> None:
    sizes = {ticket: (1 + 7 * ticket % 11) * FRAME + ticket for ticket in range(1, 25)}
    with _wire(rate=rate, cap=cap, order="fair") as wire:
        endpoint = wire.endpoint()
        for ticket, nbytes in sizes.items():
            wire.sender.send(endpoint, ticket, nbytes)
        headers = _read(wire.open(endpoint), sum(sizes.values()))
    assert _most_at_a_time(headers, sizes) <= cap
    for ticket, nbytes in sizes.items():
        own = [header for header in headers if header.ticket == ticket]
        assert [header.offset for header in own] == [FRAME * n for n in range(len(own))]
        assert sum(header.nbytes for header in own) == nbytes


def test_fair_takes_the_messages_of_requests_in_turn() -> None:
    with _wire(order="fair") as wire:
        endpoint = wire.endpoint()
        for ticket in (1, 1, 1, 2, 2):
            wire.sender.send(endpoint, ticket, 2 * FRAME)
        headers = _read(wire.open(endpoint), 10 * FRAME)
    assert _tickets(headers) == [1, 2, 1, 2, 1]
    assert [header.part for header in headers] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("rate", [None, 100e6])
def test_a_message_costs_its_time_after_the_one_before_is_through(rate: float | None) -> None:
    cost_s = 0.03
    with _wire(rate=rate) as wire:
        endpoint = wire.endpoint()
        called_s = time.monotonic()
        for ticket in range(4):
            wire.sender.send(endpoint, ticket, 3 * FRAME, message_s=cost_s)
        headers = _read(wire.open(endpoint), 12 * FRAME)
    through_s = called_s
    for first, last in zip(headers[::3], headers[2::3], strict=True):
        assert first.ticket == last.ticket
        assert first.start_s >= through_s + cost_s
        through_s = last.end_s


def test_of_two_on_the_way_the_one_that_costs_nothing_goes_first() -> None:
    with _wire(cap=2) as wire:
        endpoint = wire.endpoint()
        wire.sender.send(endpoint, 1, FRAME, message_s=NEVER_S)
        wire.sender.send(endpoint, 2, FRAME)
        wire.sender.send(endpoint, 3, FRAME)
        assert _tickets(_read(wire.open(endpoint), 2 * FRAME)) == [2, 3]


def test_while_a_message_pays_the_card_is_free_for_another_destination() -> None:
    with _wire() as wire:
        to_x, to_y = wire.endpoint(), wire.endpoint()
        x = wire.open(to_x)
        wire.sender.send(to_x, 1, FRAME, message_s=NEVER_S)
        wire.sender.send(to_y, 2, 4 * FRAME)
        assert _tickets(_read(wire.open(to_y), 4 * FRAME)) == [2]
        assert not x.poll(0)


def test_a_slower_link_beyond_the_card_postpones_the_next_cost_but_no_message_without_one() -> None:
    with _wire(rate=None) as wire:
        endpoint = wire.endpoint()
        called_s = time.monotonic()
        wire.sender.send(endpoint, 1, 4 * FRAME, pair_bytes_per_s=2e6)
        wire.sender.send(endpoint, 2, FRAME, message_s=0.05, pair_bytes_per_s=2e6)
        pull = wire.open(endpoint)
        headers = _read(pull, 5 * FRAME)
        assert headers[-1].start_s >= called_s + 4 * FRAME / 2e6 + 0.05
        wire.sender.send(endpoint, 3, 400 * FRAME, pair_bytes_per_s=1.0)
        wire.sender.send(endpoint, 4, FRAME, pair_bytes_per_s=1.0)
        assert _read(pull, 401 * FRAME)[-1].ticket == 4


def test_what_is_cancelled_while_it_pays_gives_its_place_to_the_next() -> None:
    with _wire() as wire:
        endpoint = wire.endpoint()
        wire.sender.send(endpoint, 1, FRAME, message_s=NEVER_S)
        wire.sender.send(endpoint, 1, FRAME, message_s=NEVER_S)
        wire.sender.send(endpoint, 2, FRAME, message_s=0.01)
        wire.sender.cancel(1)
        assert wire.sender.stats().waiting_bytes <= FRAME
        assert _tickets(_read(wire.open(endpoint), FRAME)) == [2]


def test_a_cost_that_cannot_be_is_refused() -> None:
    with _wire() as wire:
        endpoint = wire.endpoint()
        with pytest.raises(ValueError, match="a message costs 0 s or more"):
            wire.sender.send(endpoint, 1, 1, message_s=-1.0)


def test_a_receiver_takes_transfers_whose_frames_alternate() -> None:
    nbytes = 20 * FRAME + 17
    done = threading.Semaphore(0)
    arrivals: list[Arrival] = []

    def arrived(arrival: Arrival) -> None:
        arrivals.append(arrival)
        done.release()

    receiver = KvReceiver(
        "tcp://127.0.0.1:*", ingress_bytes_per_s=100e6, host_memory_bytes=1 << 30, verify=True, on_complete=arrived
    )
    sender = KvSender(egress_bytes_per_s=100e6, frame_bytes=FRAME, verify=True, max_in_flight=3, order="fair")
    with closing(receiver), closing(sender):
        for ticket in range(5):
            receiver.open(ticket, 2 * nbytes)
        for ticket in (*range(5), *range(5)):
            sender.send(receiver.endpoint, ticket, nbytes, message_s=0.001)
        for _ in range(5):
            assert done.acquire(timeout=DEADLINE_MS / 1e3)
        stats = receiver.stats()
    assert (stats.bytes, stats.transfers, stats.dropped) == (10 * nbytes, 5, 0)
    for arrival in arrivals:
        assert [part.nbytes for part in arrival.parts] == [nbytes, nbytes]
        assert arrival.parts[1].start_s >= arrival.parts[0].start_s
    in_turn = itertools.pairwise(sorted(arrivals, key=lambda arrival: arrival.start_s))
    assert any(after.start_s < before.parts[0].end_s for before, after in in_turn), "some were on the way together"
