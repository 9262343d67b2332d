"""The KV link: exact bytes, refusals that retain nothing, shared rates, and peers that die or misbehave."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
import zmq

from emulator.core.errors import ConfigError
from emulator.live import kv_receiver, kv_sender
from emulator.live.allocator import NODE_ALLOCATOR_ENV
from emulator.live.kv_frames import FrameHeader, pack_header
from emulator.live.kv_link import Arrival, KvReceiver, KvReceiverStats, KvSender
from emulator.live.timers import pause_until

pytestmark = pytest.mark.live

MIB = 1 << 20
TICKET = 0xFEDC_BA98_7654_3210
DEADLINE_S = 30.0


class Lab:
    """Links that are closed, and found without errors, when the test ends."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._changed = threading.Condition()
        self.arrivals: list[Arrival] = []
        self.errors: list[Exception] = []

    def receiver(
        self,
        *,
        rate: float | None = None,
        memory: int = 256 * MIB,
        verify: bool = False,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
    ) -> KvReceiver:
        return self._stack.enter_context(
            closing(
                KvReceiver(
                    "tcp://127.0.0.1:*",
                    ingress_bytes_per_s=rate,
                    delay_s=delay_s,
                    jitter_s=jitter_s,
                    host_memory_bytes=memory,
                    verify=verify,
                    on_complete=self._arrived,
                    on_error=self.errors.append,
                )
            )
        )

    def sender(self, *, rate: float | None = None, frame_bytes: int | None = None, verify: bool = False) -> KvSender:
        return self._stack.enter_context(
            closing(
                KvSender(
                    egress_bytes_per_s=rate,
                    frame_bytes=frame_bytes,
                    verify=verify,
                    on_error=self.errors.append,
                )
            )
        )

    def raw(self, endpoint: str) -> zmq.Socket[bytes]:
        context = self._stack.enter_context(zmq.Context[zmq.Socket[bytes]]())
        push = self._stack.enter_context(context.socket(zmq.PUSH))
        push.linger = 1000
        push.connect(endpoint)
        return push

    def _arrived(self, arrival: Arrival) -> None:
        with self._changed:
            self.arrivals.append(arrival)
            self._changed.notify_all()

    def wait_for(self, count: int = 1) -> list[Arrival]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.arrivals) >= count, DEADLINE_S)
            return list(self.arrivals)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def lab() -> Iterator[Lab]:
    made = Lab()
    yield made
    made.close()
    assert made.errors == []
    assert [t.name for t in threading.enumerate() if t.name.startswith("kv-")] == []


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that other threads bring about."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about in time"
        time.sleep(0.005)


def header(
    *, ticket: int = TICKET, offset: int = 0, part: int = 0, nbytes: int = 100, start_s: float = 1.0, crc: int = 0
) -> bytes:
    return pack_header(*FrameHeader(ticket, offset, part, start_s, 2.0, nbytes, crc))


def drops(stats: KvReceiverStats) -> tuple[int, int, int, int, int]:
    return (
        stats.no_ticket,
        stats.beyond_reserved,
        stats.out_of_sequence,
        stats.malformed,
        stats.bad_checksum,
    )


@pytest.mark.parametrize("rate", [None, 400e6])
@pytest.mark.parametrize("nbytes", [1, 65_535, 65_536, 65_537, 9 * MIB + 12_345])
def test_every_size_arrives_to_the_byte(lab: Lab, rate: float | None, nbytes: int) -> None:
    receiver = lab.receiver(rate=rate, verify=True)
    sender = lab.sender(rate=rate, frame_bytes=65_536, verify=True)
    receiver.open(TICKET, nbytes)
    sender.send(receiver.endpoint, TICKET, nbytes)
    (arrival,) = lab.wait_for()
    assert (arrival.ticket, arrival.nbytes) == (TICKET, nbytes)
    assert arrival.start_s <= arrival.end_s
    stats = receiver.stats()
    assert (stats.bytes, stats.retained_bytes, stats.dropped) == (nbytes, nbytes, 0)
    assert stats.frames == sender.stats().frames == -(-nbytes // 65_536)


def test_parts_form_one_sequence_and_report_their_times(lab: Lab) -> None:
    receiver, sender = lab.receiver(rate=50e6), lab.sender(rate=50e6)
    receiver.open(TICKET, 1_000_001)
    for nbytes in (500_000, 1, 500_000):
        sender.send(receiver.endpoint, TICKET, nbytes)
    (arrival,) = lab.wait_for()
    assert [part.nbytes for part in arrival.parts] == [500_000, 1, 500_000]
    assert arrival.start_s == arrival.parts[0].start_s
    assert arrival.end_s == arrival.parts[-1].end_s
    for before, after in zip(arrival.parts, arrival.parts[1:], strict=False):
        assert before.start_s < before.end_s
        assert before.start_s < after.start_s
        assert before.end_s <= after.end_s
    assert arrival.end_s - arrival.start_s >= 1_000_001 / 50e6 * 0.999


def test_release_frees_what_is_stored(lab: Lab) -> None:
    receiver, sender = lab.receiver(), lab.sender()
    receiver.open(TICKET, 5 * MIB)
    sender.send(receiver.endpoint, TICKET, 5 * MIB)
    lab.wait_for()
    for _ in range(2):
        receiver.release(TICKET)
        assert receiver.stats().retained_bytes == 0
    assert receiver.stats().peak_retained_bytes == 5 * MIB
    assert receiver.stats().broken_off == 0, "it was complete"


def test_storage_is_bounded_and_the_transfer_completes(lab: Lab) -> None:
    receiver, sender = lab.receiver(rate=2e9, memory=3 * MIB), lab.sender(rate=2e9, frame_bytes=MIB)
    receiver.open(TICKET, 8 * MIB)
    sender.send(receiver.endpoint, TICKET, 8 * MIB)
    lab.wait_for()
    stats = receiver.stats()
    assert (stats.bytes, stats.peak_retained_bytes, stats.unretained_bytes) == (8 * MIB, 3 * MIB, 5 * MIB)


def test_frames_without_a_ticket_are_dropped(lab: Lab) -> None:
    receiver, sender = lab.receiver(), lab.sender()
    receiver.open(1, 1000)
    receiver.release(1)
    sender.send(receiver.endpoint, 1, 1000)
    until(lambda: receiver.stats().no_ticket == 1)
    assert receiver.stats().retained_bytes == receiver.stats().bytes == receiver.stats().broken_off == 0
    receiver.open(2, 1000)
    sender.send(receiver.endpoint, 2, 1000)
    assert lab.wait_for()[0].ticket == 2


def test_bytes_beyond_the_reserved_size_are_dropped(lab: Lab) -> None:
    receiver, sender = lab.receiver(), lab.sender()
    receiver.open(TICKET, 1000)
    sender.send(receiver.endpoint, TICKET, 1000)
    sender.send(receiver.endpoint, TICKET, 1)
    until(lambda: receiver.stats().beyond_reserved == 1)
    assert len(lab.wait_for()) == 1
    assert receiver.stats().retained_bytes == 1000


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ([b""], (0, 0, 0, 1, 0)),
        ([b"single"], (0, 0, 0, 1, 0)),
        ([header(), b""], (0, 0, 0, 1, 0)),
        ([b"x" * 47, b"x" * 100], (0, 0, 0, 1, 0)),
        ([header(), b"x" * 99], (0, 0, 0, 1, 0)),
        ([header(), b"x" * 60, b"x" * 60], (0, 0, 0, 1, 0)),
        ([header(nbytes=0), b""], (0, 0, 0, 1, 0)),
        ([header(start_s=float("nan")), b"x" * 100], (0, 0, 0, 1, 0)),
        ([header(start_s=3.0), b"x" * 100], (0, 0, 0, 1, 0)),
        ([header(ticket=1), b"x" * 100], (1, 0, 0, 0, 0)),
        ([header(offset=950), b"x" * 100], (0, 1, 0, 0, 0)),
        ([header(offset=2**64 - 1), b"x" * 100], (0, 1, 0, 0, 0)),
        ([header(offset=100), b"x" * 100], (0, 0, 1, 0, 0)),
        ([header(part=2), b"x" * 100], (0, 0, 1, 0, 0)),
        ([header(), b"x" * 100], (0, 0, 0, 0, 1)),
    ],
)
def test_what_a_peer_makes_up_is_counted_and_retains_nothing(
    lab: Lab, message: list[bytes], expected: tuple[int, int, int, int, int]
) -> None:
    receiver = lab.receiver(verify=True)
    receiver.open(TICKET, 1000)
    push = lab.raw(receiver.endpoint)
    push.send_multipart(message)
    until(lambda: receiver.stats().dropped == 1)
    stats = receiver.stats()
    assert drops(stats) == expected
    assert stats.retained_bytes == stats.bytes == 0
    body = os.urandom(1000)
    push.send_multipart([header(nbytes=1000, crc=zlib.crc32(body)), body])
    assert lab.wait_for()[0].nbytes == 1000


def test_times_from_the_future_do_not_stall_the_card(lab: Lab) -> None:
    receiver = lab.receiver(rate=1e6)
    receiver.open(TICKET, 100)
    ahead_s = time.monotonic() + 1e6
    push = lab.raw(receiver.endpoint)
    push.send_multipart([pack_header(TICKET, 0, 0, ahead_s, ahead_s, 100, 0), b"x" * 100])
    assert lab.wait_for()[0].end_s < ahead_s


def test_an_oversized_message_costs_only_its_connection(lab: Lab) -> None:
    receiver, sender = lab.receiver(), lab.sender()
    receiver.open(TICKET, 100)
    lab.raw(receiver.endpoint).send(b"x" * (4 * MIB))
    sender.send(receiver.endpoint, TICKET, 100)
    lab.wait_for()
    assert receiver.stats().retained_bytes == 100


def test_two_senders_share_the_receivers_rate(lab: Lab) -> None:
    rate, nbytes = 50e6, 5_000_000
    receiver = lab.receiver(rate=rate)
    senders = [lab.sender(rate=rate), lab.sender(rate=rate)]
    for ticket, sender in enumerate(senders):
        receiver.open(ticket, nbytes)
        sender.send(receiver.endpoint, ticket, nbytes)
    arrivals = lab.wait_for(2)
    elapsed_s = max(arrival.end_s for arrival in arrivals) - min(arrival.start_s for arrival in arrivals)
    assert elapsed_s >= 2 * nbytes / rate * 0.999


def test_one_sender_shares_its_rate_between_destinations(lab: Lab) -> None:
    rate, nbytes = 50e6, 5_000_000
    sender = lab.sender(rate=rate)
    receivers = [lab.receiver(rate=rate), lab.receiver(rate=rate)]
    for ticket, receiver in enumerate(receivers):
        receiver.open(ticket, nbytes)
        sender.send(receiver.endpoint, ticket, nbytes)
    arrivals = lab.wait_for(2)
    elapsed_s = max(arrival.end_s for arrival in arrivals) - min(arrival.start_s for arrival in arrivals)
    assert elapsed_s >= 2 * nbytes / rate * 0.999


def test_a_slow_destination_does_not_hold_up_another(lab: Lab) -> None:
    sender = lab.sender(rate=100e6)
    slow, fast = lab.receiver(rate=1e6), lab.receiver(rate=100e6)
    slow.open(1, 100_000_000)
    fast.open(2, 10_000_000)
    sender.send(slow.endpoint, 1, 100_000_000)
    until(lambda: slow.stats().bytes > 0)
    sender.send(fast.endpoint, 2, 10_000_000)
    assert lab.wait_for()[0].ticket == 2
    assert slow.stats().bytes < 50_000_000


def test_delay_holds_a_frame_back(lab: Lab) -> None:
    receiver, sender = lab.receiver(rate=50e6, delay_s=0.2), lab.sender(rate=50e6)
    receiver.open(TICKET, 1_000_000)
    sender.send(receiver.endpoint, TICKET, 1_000_000)
    (arrival,) = lab.wait_for()
    assert arrival.end_s - arrival.start_s >= 1_000_000 / 50e6 * 0.999 + 0.2


def test_jitter_varies_the_delay_and_keeps_every_transfer_whole(lab: Lab) -> None:
    receiver, sender = lab.receiver(delay_s=0.1, jitter_s=0.1), lab.sender(frame_bytes=65536)
    for ticket in range(40):
        receiver.open(ticket, 200_000)
        sender.send(receiver.endpoint, ticket, 200_000)
    arrivals = lab.wait_for(40)
    took = [arrival.end_s - arrival.start_s for arrival in arrivals]
    assert {arrival.nbytes for arrival in arrivals} == {200_000}
    assert max(took) - min(took) > 0.05, "drawn from 0 to 0.2 s"
    assert receiver.stats().dropped == 0


def test_a_release_while_frames_are_delayed(lab: Lab) -> None:
    receiver, sender = lab.receiver(delay_s=0.2), lab.sender()
    receiver.open(1, 1000)
    sender.send(receiver.endpoint, 1, 1000)
    until(lambda: receiver.stats().bytes == 1000)
    receiver.release(1)
    assert receiver.stats().broken_off == 1
    receiver.open(1, 500)
    receiver.open(2, 10)
    sender.send(receiver.endpoint, 2, 10)
    assert [arrival.ticket for arrival in lab.wait_for()] == [2]
    assert receiver.stats().retained_bytes == 10


def test_cancel_keeps_back_what_has_not_left(lab: Lab) -> None:
    receiver, sender = lab.receiver(rate=1e6), lab.sender(rate=1e6)
    receiver.open(1, 50_000_000)
    receiver.open(2, 1000)
    sender.send(receiver.endpoint, 1, 50_000_000)
    until(lambda: receiver.stats().bytes > 0)
    sender.send(receiver.endpoint, 2, 1000)
    for _ in range(2):
        sender.cancel(1)
    assert sender.stats().waiting_bytes <= 1000
    assert lab.wait_for()[0].ticket == 2
    assert receiver.stats().bytes < 10_000_000


def test_the_sender_outlives_a_receiver(lab: Lab) -> None:
    sender, dying, other = lab.sender(rate=100e6), lab.receiver(rate=1e6), lab.receiver(rate=100e6)
    dying.open(1, 100_000_000)
    other.open(2, 1_000_000)
    sender.send(dying.endpoint, 1, 100_000_000)
    until(lambda: dying.stats().bytes > 0)
    dying.close()
    sender.send(other.endpoint, 2, 1_000_000)
    assert lab.wait_for()[0].ticket == 2
    sender.cancel(1)
    assert sender.stats().waiting_bytes == 0


def test_each_transfer_says_how_long_it_has_waited_to_be_sent(lab: Lab) -> None:
    waited_s: dict[int, float] = {}
    receiver = lab.receiver(rate=1e6)
    with closing(KvSender(egress_bytes_per_s=1e6, on_begin=waited_s.__setitem__, on_error=lab.errors.append)) as sender:
        queued = {}
        for ticket in (1, 2):
            receiver.open(ticket, 200_000)
            before_s = time.monotonic()
            sender.send(receiver.endpoint, ticket, 100_000)
            queued[ticket] = before_s, time.monotonic()
            sender.send(receiver.endpoint, ticket, 100_000)  # a further part of the same
        for arrival in lab.wait_for(2):
            before_s, after_s = queued[arrival.ticket]
            assert before_s <= arrival.start_s - waited_s[arrival.ticket] <= after_s
        assert sender.stats().waiting_transfers == 0


def test_what_has_not_begun_to_leave_is_counted(lab: Lab) -> None:
    sender, closed = lab.sender(), lab.receiver()
    closed.close()
    for ticket in (1, 1, 2):
        sender.send(closed.endpoint, ticket, 1000)
    assert sender.stats().waiting_transfers == 2
    sender.cancel(1)
    assert sender.stats().waiting_transfers == 1


def test_a_receiver_that_starts_late_is_served(lab: Lab) -> None:
    sender, first = lab.sender(), lab.receiver()
    endpoint = first.endpoint
    first.close()
    sender.send(endpoint, TICKET, 1000)
    done = threading.Event()
    late = KvReceiver(endpoint, ingress_bytes_per_s=None, host_memory_bytes=MIB, on_complete=lambda _: done.set())
    with closing(late):
        late.open(TICKET, 1000)
        until(lambda: done.is_set() or late.stats().no_ticket == 1)  # it may come before its ticket, and has come then


def test_a_taken_address_is_a_config_error(lab: Lab) -> None:
    taken = lab.receiver().endpoint
    with pytest.raises(ConfigError, match=r"is taken.*choose another port"):
        KvReceiver(taken, ingress_bytes_per_s=None, host_memory_bytes=1, on_complete=print)


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1", "tcp://192.0.2.1:5555"])
def test_an_impossible_address_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match="cannot bind"):
        KvReceiver(address, ingress_bytes_per_s=None, host_memory_bytes=1, on_complete=print)


def test_an_impossible_destination_is_a_config_error(lab: Lab) -> None:
    sender = lab.sender()
    with pytest.raises(ConfigError, match="cannot send KV to 'nonsense'"):
        sender.send("nonsense", 1, 1)
    with pytest.raises(ValueError, match="at least one byte"):
        sender.send("tcp://127.0.0.1:1", 1, 0)


def test_a_ticket_opens_once_and_for_some_bytes(lab: Lab) -> None:
    receiver = lab.receiver()
    receiver.open(1, 1)
    with pytest.raises(ValueError, match="open already"):
        receiver.open(1, 1)
    with pytest.raises(ValueError, match="at least one byte"):
        receiver.open(2, 0)


def test_an_error_of_a_callback_is_reported_and_survived() -> None:
    errors: list[Exception] = []
    calls = 0
    done = threading.Event()

    def fail_once(_: Arrival) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("first")
        done.set()

    receiver = KvReceiver(
        "tcp://127.0.0.1:*",
        ingress_bytes_per_s=None,
        host_memory_bytes=MIB,
        on_complete=fail_once,
        on_error=errors.append,
    )
    with closing(receiver), closing(KvSender(egress_bytes_per_s=None)) as sender:
        for ticket in (1, 2):
            receiver.open(ticket, 10)
            sender.send(receiver.endpoint, ticket, 10)
        assert done.wait(DEADLINE_S)
    assert [str(error) for error in errors] == ["first"]


class Noticed(threading.Event):
    """An event of somebody's, with another one that is set as soon as it is waited for."""

    def __init__(self, event: threading.Event, awaited: threading.Event) -> None:
        super().__init__()
        self._event, self._awaited = event, awaited

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        self._awaited.set()
        return self._event.wait(timeout)


@pytest.fixture(params=[kv_sender, kv_receiver], ids=["sender", "receiver"])
def under_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the end of a slot is waited for at one end of a link: by the sender, or by the receiver."""
    awaited = threading.Event()

    def pause(deadline_s: float, stop: threading.Event) -> None:
        pause_until(deadline_s, Noticed(stop, awaited))

    monkeypatch.setattr(request.param, "pause_until", pause)
    return awaited


def test_close_ends_a_slot_that_is_under_way(lab: Lab, under_way: threading.Event) -> None:
    receiver, sender = lab.receiver(rate=10.0), lab.sender(rate=10.0)
    receiver.open(TICKET, MIB)
    sender.send(receiver.endpoint, TICKET, MIB)  # its first slot alone takes hours
    now_s = time.monotonic()
    frame = [pack_header(TICKET, 0, 0, now_s, now_s, 100_000, 0), b"x" * 100_000]
    lab.raw(receiver.endpoint).send_multipart(frame)  # and this one takes the receiver hours
    assert under_way.wait(DEADLINE_S)
    for _ in range(2):
        sender.close()
        receiver.close()
    assert lab.errors == [], "a thread that does not end in time is an error"
    assert [t.name for t in threading.enumerate() if t.name.startswith("kv-")] == []
    assert (sender.stats().bytes, receiver.stats().transfers) == (0, 0)
    with pytest.raises(RuntimeError, match="closed"):
        sender.send(receiver.endpoint, TICKET, 1)


def test_the_allocator_settings_are_taken_by_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "print('started')"],
        env={**os.environ, **NODE_ALLOCATOR_ENV},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip(), done.stderr) == ("started", "")
