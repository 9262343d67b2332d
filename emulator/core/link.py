"""A KV network as a model: who gets which share of which NIC, and when each transfer is delivered.

The simulator needs transfer times that contention at both ends decides, and a live run is judged against the same
model. TCP flows through shaped NICs share them roughly max-min fairly, so here that is exact:

  source ──[FIFO per pair]──▶ egress NIC ══ max-min share ══▶ ingress NIC ── delay ± jitter ──▶ delivered
             message_s each      (rate or infinitely fast)

Transfers of one (source, destination) pair go one after the other, as on one connection; pairs that have something
to send share the NICs at both of their ends. Rates change only when a pair starts or stops sending; between such
instants everything is linear, so event times are exact up to rounding of floats.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Pair = tuple[str, str]
Rates = Mapping[str, float | None]
_Nic = tuple[str, str]  # (direction, node)


class Delivery(NamedTuple):
    """A transfer whose last byte has arrived; `start_s`: its first byte left the source. Model seconds."""

    transfer_id: Hashable
    start_s: float
    end_s: float
    nbytes: int


class Part(NamedTuple):
    """Bytes that a source had ready for a destination at `ready_s`."""

    source: str
    destination: str
    ready_s: float
    nbytes: int


@dataclass(slots=True, eq=False)
class _Transfer:
    transfer_id: Hashable
    pair: Pair
    nbytes: int
    start_s: float = math.nan


@dataclass(slots=True)
class _Sender:
    """A pair with something to send. Its head had `remaining` bytes at `since_s` and does next at `event_s`."""

    queue: deque[_Transfer] = field(default_factory=deque)
    flowing: bool = False
    rate: float = 0.0
    remaining: float = 0.0
    since_s: float = 0.0
    event_s: float = math.inf


class FairShareNetwork:
    """Transfers over NICs with given payload rates in bytes per second (None: infinitely fast).

    `delay_s` passes between sending and arrival of every byte; `message_s` passes at the head of the pair's FIFO
    before the first byte of each transfer, without using the NICs. With `jitter_s` the last byte's delay is up to so
    much shorter or longer, drawn uniformly by `seed`, but no transfer overtakes an earlier one of its pair. Calls must
    not go back in time.
    """

    def __init__(
        self,
        *,
        egress_bytes_per_s: Rates,
        ingress_bytes_per_s: Rates,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        message_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Raises ValueError for a rate that is not above 0, a negative delay or cost, and jitter above the delay."""
        rates = [*egress_bytes_per_s.values(), *ingress_bytes_per_s.values()]
        if any(rate is not None and not rate > 0 for rate in rates):
            raise ValueError(f"rates must be above 0 bytes per second, got {rates}")
        if not (0 <= delay_s < math.inf and 0 <= message_s < math.inf):
            raise ValueError(f"delay_s {delay_s} and message_s {message_s} must be 0 or more")
        if not 0 <= jitter_s <= delay_s:
            raise ValueError(f"jitter_s {jitter_s} must be from 0 to delay_s {delay_s}")
        self._egress = dict(egress_bytes_per_s)
        self._ingress = dict(ingress_bytes_per_s)
        self._delay_s = delay_s
        self._jitter_s = jitter_s
        self._message_s = message_s
        self._random = np.random.default_rng(seed)
        self._now_s = -math.inf
        self._senders: dict[Pair, _Sender] = {}
        self._transfers: dict[Hashable, _Transfer] = {}
        self._arrivals: list[tuple[float, int, Delivery]] = []  # a heap: when, in which order it was sent
        self._last_end_s: dict[Pair, float] = {}  # of the last arrival of a pair, where there is jitter
        self._order = 0
        self._share_is_stale = False
        self._next_s: float | None = math.inf  # of the next event; None when it has to be looked for

    def start(self, transfer_id: Hashable, source: str, destination: str, nbytes: int, now_s: float) -> None:
        """Queue `nbytes` behind what the pair already has; parts of one transfer are entries with their own ids.

        Raises ValueError for an id that is under way, an unknown node or a negative size.
        """
        if transfer_id in self._transfers:
            raise ValueError(f"transfer {transfer_id!r} is already under way")
        if source not in self._egress or destination not in self._ingress:
            raise ValueError(f"no link {source} -> {destination}")
        if nbytes < 0:
            raise ValueError(f"transfer {transfer_id!r} has {nbytes} bytes")
        self._run_until(now_s)
        pair = (source, destination)
        transfer = self._transfers[transfer_id] = _Transfer(transfer_id, pair, nbytes)
        self._next_s = None
        sender = self._senders.setdefault(pair, _Sender())
        sender.queue.append(transfer)
        if len(sender.queue) == 1:
            self._begin_head(sender)
            self._share()

    def cancel(self, transfer_id: Hashable, now_s: float) -> None:
        """Drop a transfer, sent in part, waiting or in flight; no effect on one that has arrived or is unknown."""
        self._run_until(now_s)
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return
        self._next_s = None
        sender = self._senders.get(transfer.pair)
        if sender is not None and transfer in sender.queue:
            del self._transfers[transfer_id]
            if transfer is sender.queue[0]:
                self._next_head(transfer.pair, sender)
                self._share()
            else:
                sender.queue.remove(transfer)
        elif any(d.transfer_id == transfer_id and end_s > now_s for end_s, _, d in self._arrivals):
            del self._transfers[transfer_id]
            self._arrivals = [entry for entry in self._arrivals if entry[2].transfer_id != transfer_id]
            heapq.heapify(self._arrivals)

    def next_event_s(self) -> float | None:
        """The next instant at which something is delivered or rates change; None when nothing is under way."""
        if self._next_s is None:
            self._next_s = min((sender.event_s for sender in self._senders.values()), default=math.inf)
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
        """The present rate of every pair whose head is flowing."""
        return {pair: sender.rate for pair, sender in self._senders.items() if sender.flowing}

    def check_integrity(self) -> None:
        """Assert that transfers are each in one place, no NIC is above its rate and shares are max-min fair."""
        queued = [t.transfer_id for sender in self._senders.values() for t in sender.queue]
        arriving = [delivery.transfer_id for _, _, delivery in self._arrivals]
        assert len(queued) + len(arriving) == len(self._transfers), "a transfer was lost or counted twice"
        assert set(queued).union(arriving) == self._transfers.keys(), "an unknown transfer is under way"
        for pair, sender in self._senders.items():
            assert sender.queue, f"{pair} has nothing to send"
            assert self._now_s <= sender.event_s < math.inf, f"{pair} has no next event"
            if sender.flowing:
                assert 0 <= sender.remaining <= sender.queue[0].nbytes, f"{pair} counts wrongly"
        _check_shares(self.rates_bytes_per_s(), self._egress, self._ingress)

    def _run_until(self, now_s: float) -> None:
        if now_s < self._now_s:
            raise ValueError(f"time went back from {self._now_s} to {now_s}")
        event_s = self.next_event_s()
        if event_s is None or now_s < event_s:
            self._now_s = now_s
            return
        self._next_s = None
        while self._senders and (instant := min(s.event_s for s in self._senders.values())) <= now_s:
            self._now_s = instant
            for pair in sorted(pair for pair, sender in self._senders.items() if sender.event_s <= instant):
                sender = self._senders[pair]
                if sender.flowing:
                    self._sent(pair, sender)
                else:
                    self._flow(sender)
            self._share()
        self._now_s = now_s

    def _begin_head(self, sender: _Sender) -> None:
        if self._message_s > 0:
            self._share_is_stale |= sender.flowing
            sender.flowing = False
            sender.event_s = self._now_s + self._message_s
        else:
            self._flow(sender)

    def _flow(self, sender: _Sender) -> None:
        """The head's bytes begin to flow, at the pair's present rate if it was flowing already."""
        head = sender.queue[0]
        head.start_s = sender.since_s = self._now_s
        sender.remaining = head.nbytes
        if sender.flowing:
            sender.event_s = self._now_s + sender.remaining / sender.rate
        else:
            sender.flowing = self._share_is_stale = True
            sender.rate = 0.0

    def _sent(self, pair: Pair, sender: _Sender) -> None:
        head = sender.queue[0]
        end_s = self._arrival_s(pair)
        self._order += 1
        delivery = Delivery(head.transfer_id, head.start_s, end_s, head.nbytes)
        heapq.heappush(self._arrivals, (end_s, self._order, delivery))
        self._next_head(pair, sender)

    def _arrival_s(self, pair: Pair) -> float:
        """When what a pair's head has now sent arrives."""
        if not self._jitter_s:
            return self._now_s + self._delay_s
        end_s = self._now_s + self._delay_s + float(self._random.uniform(-self._jitter_s, self._jitter_s))
        self._last_end_s[pair] = end_s = max(end_s, self._last_end_s.get(pair, end_s))
        return end_s

    def _next_head(self, pair: Pair, sender: _Sender) -> None:
        sender.queue.popleft()
        if sender.queue:
            self._begin_head(sender)
        else:
            self._share_is_stale |= sender.flowing
            del self._senders[pair]

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
            if self._now_s > sender.since_s:
                sent = sender.rate * (self._now_s - sender.since_s)
                sender.remaining = max(0.0, sender.remaining - sent)
            sender.rate, sender.since_s = rate, self._now_s
            sender.event_s = self._now_s + sender.remaining / rate


def fair_shares(pairs: Iterable[Pair], egress: Rates, ingress: Rates) -> dict[Pair, float]:
    """Max-min fair rates of (source, destination) pairs in bytes per second; inf where no NIC limits.

    Progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2): all rates rise together until a NIC is full,
    its pairs stay there, the others go on. Summed in the order of names, so that equal sets give equal floats.
    """
    ordered = sorted(set(pairs))
    if len({source for source, _ in ordered}) == len({destination for _, destination in ordered}) == len(ordered):
        return {pair: _alone(egress[pair[0]], ingress[pair[1]]) for pair in ordered}
    members: dict[_Nic, list[Pair]] = {}
    room: dict[_Nic, float] = {}
    for pair in ordered:
        for nic, rate in zip(_nics(pair), (egress[pair[0]], ingress[pair[1]]), strict=True):
            if rate is not None:
                members.setdefault(nic, []).append(pair)
                room[nic] = rate
    rising = {nic: len(at_nic) for nic, at_nic in members.items()}  # how many pairs of each NIC are not settled
    rates: dict[Pair, float] = {}
    level = 0.0
    while rising:
        fullest = min(rising, key=lambda nic: room[nic] / rising[nic])
        level = max(level, room[fullest] / rising[fullest])  # rounding must not take back what others were given
        for pair in members[fullest]:
            if pair in rates:
                continue
            rates[pair] = level
            for nic in _nics(pair):
                if nic in room:
                    room[nic] -= level
                    rising[nic] -= 1
        rising = {nic: n for nic, n in rising.items() if n > 0}
    return {pair: rates.get(pair, math.inf) for pair in ordered}


def _alone(egress: float | None, ingress: float | None) -> float:
    """The rate of a pair that shares neither NIC."""
    return min(math.inf if egress is None else egress, math.inf if ingress is None else ingress)


def expected_ends(
    parts: Sequence[Part],
    *,
    egress_bytes_per_s: Rates,
    ingress_bytes_per_s: Rates,
    delay_s: float = 0.0,
    message_s: float = 0.0,
) -> list[float]:
    """When each part would have been delivered, in the order given: a run's transfers replayed through the model.

    Parts may be in any order; those of one pair with one `ready_s` go in the order given.
    """
    network = FairShareNetwork(
        egress_bytes_per_s=egress_bytes_per_s,
        ingress_bytes_per_s=ingress_bytes_per_s,
        delay_s=delay_s,
        message_s=message_s,
    )
    for n in sorted(range(len(parts)), key=lambda n: parts[n].ready_s):
        part = parts[n]
        network.start(n, part.source, part.destination, part.nbytes, part.ready_s)
    ends = [math.nan] * len(parts)
    now_s = max((part.ready_s for part in parts), default=0.0)
    while (instant := network.next_event_s()) is not None:
        now_s = max(now_s, instant)
        for delivery in network.advance(now_s):
            assert isinstance(delivery.transfer_id, int)
            ends[delivery.transfer_id] = delivery.end_s
    return ends


def _nics(pair: Pair) -> tuple[_Nic, _Nic]:
    return ("egress", pair[0]), ("ingress", pair[1])


def _check_shares(rates: Mapping[Pair, float], egress: Rates, ingress: Rates) -> None:
    """Each pair is held back by a NIC that is full and at which nobody is faster, or by none at all."""
    for pair, rate in rates.items():
        at_source = [r for (source, _), r in rates.items() if source == pair[0]]
        at_destination = [r for (_, destination), r in rates.items() if destination == pair[1]]
        ends = ((egress[pair[0]], at_source), (ingress[pair[1]], at_destination))
        assert all(cap is None or math.fsum(users) <= cap * (1 + 1e-9) for cap, users in ends), f"{pair}: too fast"
        held_back = any(_holds_back(rate, cap, users) for cap, users in ends)
        assert held_back or rate == math.inf, f"{pair}: could be faster"


def _holds_back(rate: float, cap: float | None, users: Collection[float]) -> bool:
    return cap is not None and math.fsum(users) >= cap * (1 - 1e-9) and rate >= max(users) * (1 - 1e-9)
