"""A KV network as a model: who gets which share of which NIC, and when each transfer is delivered.

The simulator needs transfer times that contention at both ends decides, and a live run is judged against the same
model. TCP flows through shaped NICs share them roughly max-min fairly, so here that is exact:

  source ──[lane per pair]──▶ egress NIC ══ max-min share ══▶ ingress NIC ── delay ± jitter ──▶ delivered
           message_s each       (rate or infinitely fast)

Transfers of one (source, destination) pair take turns as its lane says (`core.kv_lanes`), as on one connection: one
after the other, or several side by side at equal parts of the pair's rate. Pairs that have something to send share the
NICs at both of their ends, whatever they have. Rates change only when a pair starts or stops sending, or when the
number of its transfers that flow changes; between such instants everything is linear, so event times are exact up to
rounding of floats.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from emulator.core.deployments import TransferOrder
from emulator.core.fair_share import Pair, Rates, check_shares, fair_shares
from emulator.core.kv_lanes import Lane, Message


class Delivery(NamedTuple):
    """A transfer whose last byte has arrived; `start_s`: its first byte left the source. Model seconds."""

    transfer_id: Hashable
    start_s: float
    end_s: float
    nbytes: int


class Part(NamedTuple):
    """Bytes that a source had ready for a destination at `ready_s`; those of one `request` go in sequence."""

    source: str
    destination: str
    ready_s: float
    nbytes: int
    request: Hashable = None


@dataclass(slots=True, eq=False)
class _Transfer(Message):
    """`remaining` bytes are not sent, as of its sender's `since_s`."""

    transfer_id: Hashable
    pair: Pair
    nbytes: int
    remaining: float = 0.0
    start_s: float = math.nan


@dataclass(slots=True)
class _Sender:
    """A pair with something to send, at `rate` since `since_s` if it is `flowing`. It does the next thing at `event_s`.

    By `sent_s` the first of the transfers that flow is through; infinite where none does.
    """

    lane: Lane[_Transfer]
    flowing: bool = False
    rate: float = 0.0
    since_s: float = 0.0
    sent_s: float = math.inf
    event_s: float = math.inf


class FairShareNetwork:
    """Transfers over NICs with given payload rates in bytes per second (None: infinitely fast).

    `delay_s` passes between sending and arrival of every byte. With `jitter_s` the last byte's delay is up to so much
    shorter or longer, drawn uniformly by `seed`, but no transfer overtakes one of its pair that was sent before.
    `max_in_flight` and `order` are those of every pair's lane. Calls must not go back in time.
    """

    def __init__(
        self,
        *,
        egress_bytes_per_s: Rates,
        ingress_bytes_per_s: Rates,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        max_in_flight: int = 1,
        order: TransferOrder = "fifo",
        seed: int = 0,
    ) -> None:
        """Raises ValueError for a rate that is not above 0, a negative delay, and jitter above the delay."""
        rates = [*egress_bytes_per_s.values(), *ingress_bytes_per_s.values()]
        if any(rate is not None and not rate > 0 for rate in rates):
            raise ValueError(f"rates must be above 0 bytes per second, got {rates}")
        if not 0 <= delay_s < math.inf:
            raise ValueError(f"delay_s {delay_s} must be 0 or more")
        if not 0 <= jitter_s <= delay_s:
            raise ValueError(f"jitter_s {jitter_s} must be from 0 to delay_s {delay_s}")
        self._egress = dict(egress_bytes_per_s)
        self._ingress = dict(ingress_bytes_per_s)
        self._delay_s = delay_s
        self._jitter_s = jitter_s
        self._max_in_flight = max_in_flight
        self._turns: TransferOrder = order
        self._random = np.random.default_rng(seed)
        self._now_s = -math.inf
        self._lanes: dict[Pair, Lane[_Transfer]] = {}
        self._senders: dict[Pair, _Sender] = {}
        self._transfers: dict[Hashable, _Transfer] = {}
        self._arrivals: list[tuple[float, int, Delivery]] = []  # a heap: when, in which order it was sent
        self._last_end_s: dict[Pair, float] = {}  # of the last arrival of a pair, where there is jitter
        self._order = 0
        self._share_is_stale = False
        self._next_s: float | None = math.inf  # of the next event; None when it has to be looked for

    def start(
        self,
        transfer_id: Hashable,
        source: str,
        destination: str,
        nbytes: int,
        now_s: float,
        *,
        request: Hashable = None,
        message_s: float = 0.0,
    ) -> None:
        """Queue `nbytes` in the pair's lane: a message that costs `message_s` before its first byte, without the NICs.

        Parts of one `request` are entries with their own ids; without a request it is one by itself.
        Raises ValueError for an id that is under way, an unknown node, and a negative size or cost.
        """
        if transfer_id in self._transfers:
            raise ValueError(f"transfer {transfer_id!r} is already under way")
        if source not in self._egress or destination not in self._ingress:
            raise ValueError(f"no link {source} -> {destination}")
        if nbytes < 0:
            raise ValueError(f"transfer {transfer_id!r} has {nbytes} bytes")
        if not 0 <= message_s < math.inf:
            raise ValueError(f"transfer {transfer_id!r}: message_s {message_s} must be 0 or more")
        self._run_until(now_s)
        pair = (source, destination)
        transfer = _Transfer(transfer_id if request is None else request, message_s, transfer_id, pair, nbytes)
        self._transfers[transfer_id] = transfer
        self._next_s = None
        sender = self._senders.get(pair)
        if sender is None:
            lane = self._lanes.get(pair)
            if lane is None:
                lane = self._lanes[pair] = Lane(self._max_in_flight, self._turns)
            sender = self._senders[pair] = _Sender(lane)
        if sender.lane.add(transfer, now_s):
            self._flow(sender)
            self._share()

    def cancel(self, transfer_id: Hashable, now_s: float) -> None:
        """Drop a transfer, sent in part, waiting or in flight; no effect on one that has arrived or is unknown."""
        self._run_until(now_s)
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return
        self._next_s = None
        sender = self._senders.get(transfer.pair)
        if sender is not None and transfer in sender.lane.of(transfer.request):
            del self._transfers[transfer_id]
            if transfer in sender.lane.flowing:
                self._settle(sender, sender.lane.flowing)
            self._remove(sender, [transfer])
            self._share()
        elif any(d.transfer_id == transfer_id and end_s > now_s for end_s, _, d in self._arrivals):
            del self._transfers[transfer_id]
            self._arrivals = [entry for entry in self._arrivals if entry[2].transfer_id != transfer_id]
            heapq.heapify(self._arrivals)

    def next_event_s(self) -> float | None:
        """The next instant at which something is delivered or rates change; None when nothing is under way."""
        if self._next_s is None:
            self._next_s = min([sender.event_s for sender in self._senders.values()], default=math.inf)
            if self._arrivals:
                self._next_s = min(self._next_s, self._arrivals[0][0])
        return self._next_s if self._next_s < math.inf else None

    def advance(self, now_s: float) -> list[Delivery]:
        """Everything that has arrived by `now_s` and was not returned before, in order of arrival."""
        self._run_until(now_s)
        deliveries: list[Delivery] = []
        while self._arrivals and self._arrivals[0][0] <= now_s:
            delivery = heapq.heappop(self._arrivals)[2]
            del self._transfers[delivery.transfer_id]
            deliveries.append(delivery)
            self._next_s = None
        return deliveries

    def rates_bytes_per_s(self) -> dict[Pair, float]:
        """The present rate of every pair that sends."""
        return {pair: sender.rate for pair, sender in self._senders.items() if sender.flowing}

    def check_integrity(self) -> None:
        """Assert that transfers are each in one place, no NIC is above its rate and shares are max-min fair."""
        queued = [t.transfer_id for sender in self._senders.values() for t in sender.lane]
        arriving = [delivery.transfer_id for _, _, delivery in self._arrivals]
        assert len(queued) + len(arriving) == len(self._transfers), "a transfer was lost or counted twice"
        assert set(queued).union(arriving) == self._transfers.keys(), "an unknown transfer is under way"
        for pair, sender in self._senders.items():
            sender.lane.check_integrity()
            assert not sender.lane.idle, f"{pair} has nothing to send"
            assert self._now_s <= sender.event_s < math.inf, f"{pair} has no next event"
            assert sender.flowing == bool(sender.lane.flowing), f"{pair} counts as what it is not"
            assert all(0 <= t.remaining <= t.nbytes for t in sender.lane.flowing), f"{pair} counts wrongly"
        check_shares(self.rates_bytes_per_s(), self._egress, self._ingress)

    def _run_until(self, now_s: float) -> None:
        if now_s < self._now_s:
            raise ValueError(f"time went back from {self._now_s} to {now_s}")
        event_s = self.next_event_s()
        if event_s is None or now_s < event_s:
            self._now_s = now_s
            return
        self._next_s = None
        while self._senders and (instant := min([s.event_s for s in self._senders.values()])) <= now_s:
            self._now_s = instant
            for pair in sorted([pair for pair, sender in self._senders.items() if sender.event_s <= instant]):
                sender = self._senders[pair]
                if sender.sent_s <= instant:
                    self._sent(sender)
                else:
                    self._flow(sender)
            self._share()
        self._now_s = now_s

    def _sent(self, sender: _Sender) -> None:
        """Whoever has least left of what flows has sent it all."""
        least = _least_remaining(sender.lane.flowing)
        for transfer in sender.lane.flowing:
            transfer.remaining -= least
        sender.since_s = self._now_s
        through = [transfer for transfer in sender.lane.flowing if transfer.remaining <= 0]
        for transfer in through:
            end_s = self._arrival_s(transfer.pair)
            self._order += 1
            delivery = Delivery(transfer.transfer_id, transfer.start_s, end_s, transfer.nbytes)
            heapq.heappush(self._arrivals, (end_s, self._order, delivery))
        self._remove(sender, through)

    def _arrival_s(self, pair: Pair) -> float:
        """When what a pair has now sent arrives."""
        if not self._jitter_s:
            return self._now_s + self._delay_s
        end_s = self._now_s + self._delay_s + float(self._random.uniform(-self._jitter_s, self._jitter_s))
        self._last_end_s[pair] = end_s = max(end_s, self._last_end_s.get(pair, end_s))
        return end_s

    def _remove(self, sender: _Sender, transfers: Sequence[_Transfer]) -> None:
        """Take out what is through or dropped; `since_s` is now if it flowed."""
        for transfer in transfers:
            sender.lane.remove(transfer, self._now_s)
        if sender.lane.idle:
            self._share_is_stale |= sender.flowing
            del self._senders[transfers[0].pair]
        else:
            self._flow(sender)

    def _flow(self, sender: _Sender) -> None:
        """Let flow what now may, at the pair's present rate if it was sending already, and find its next event."""
        lane = sender.lane
        begun = lane.flow(self._now_s)
        flowing = lane.flowing
        if begun:
            if sender.flowing and len(begun) < len(flowing):
                self._settle(sender, flowing[: -len(begun)])
            sender.since_s = self._now_s
            for transfer in begun:
                transfer.start_s, transfer.remaining = self._now_s, transfer.nbytes
        if sender.flowing != bool(flowing):
            sender.flowing = not sender.flowing
            sender.rate, sender.sent_s = 0.0, math.inf  # its share follows
            self._share_is_stale = True
        elif flowing:
            sender.sent_s = _sent_s(sender)
        sender.event_s = min(sender.sent_s, lane.next_due_s())

    def _settle(self, sender: _Sender, flowed: Sequence[_Transfer]) -> None:
        """Count what has been sent since `since_s` of the transfers that flowed all the while."""
        if self._now_s > sender.since_s:
            sent = sender.rate * (self._now_s - sender.since_s) / len(flowed)
            for transfer in flowed:
                transfer.remaining = max(0.0, transfer.remaining - sent)
        sender.since_s = self._now_s

    def _share(self) -> None:
        """Give every flowing pair its share where the set of flowing pairs has changed."""
        if not self._share_is_stale:
            return
        self._share_is_stale = False
        flowing = [pair for pair, sender in self._senders.items() if sender.flowing]
        if not flowing:
            return
        for pair, rate in fair_shares(flowing, self._egress, self._ingress).items():
            sender = self._senders[pair]
            if rate == sender.rate:
                continue
            self._settle(sender, sender.lane.flowing)
            sender.rate = rate
            sender.sent_s = _sent_s(sender)
            sender.event_s = min(sender.sent_s, sender.lane.next_due_s())


def _sent_s(sender: _Sender) -> float:
    """When the first of the transfers that flow is through, if nothing changes before."""
    flowing = sender.lane.flowing
    return sender.since_s + _least_remaining(flowing) * len(flowing) / sender.rate


def _least_remaining(flowing: Sequence[_Transfer]) -> float:
    return flowing[0].remaining if len(flowing) == 1 else min([transfer.remaining for transfer in flowing])


def expected_ends(
    parts: Sequence[Part],
    *,
    egress_bytes_per_s: Rates,
    ingress_bytes_per_s: Rates,
    delay_s: float = 0.0,
    max_in_flight: int = 1,
    order: TransferOrder = "fifo",
) -> list[float]:
    """When each part would have been delivered, in the order given: a run's transfers replayed through the model.

    Parts may be in any order; those of one pair with one `ready_s` go in the order given. They are ready when their
    first byte was on the wire, so what the message cost before is over.
    """
    network = FairShareNetwork(
        egress_bytes_per_s=egress_bytes_per_s,
        ingress_bytes_per_s=ingress_bytes_per_s,
        delay_s=delay_s,
        max_in_flight=max_in_flight,
        order=order,
    )
    for n in sorted(range(len(parts)), key=lambda n: parts[n].ready_s):
        part = parts[n]
        network.start(n, part.source, part.destination, part.nbytes, part.ready_s, request=part.request)
    ends = [math.nan] * len(parts)
    now_s = max((part.ready_s for part in parts), default=0.0)
    while (instant := network.next_event_s()) is not None:
        now_s = max(now_s, instant)
        for delivery in network.advance(now_s):
            assert isinstance(delivery.transfer_id, int)
            ends[delivery.transfer_id] = delivery.end_s
    return ends
