"""KV on its modelled way between the nodes of a run: who expects what under which ticket, and what has come of it.

The network (`core.link`) carries messages and knows nothing of requests; a ticket's KV may come in several of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from emulator.core.effects import CancelTransmit, CloseTicket, OpenTicket, Transmit
from emulator.core.link import FairShareNetwork
from emulator.core.run_spec import MessageCost, RunSpec


class PartId(NamedTuple):
    """One message of a ticket's KV on the network, numbered from 0."""

    ticket: int
    part: int


@dataclass(slots=True)
class Ticket:
    """The KV that `node` expects under one ticket, in bytes, and since when what of it has come."""

    node: str
    nbytes: int
    received: int = 0
    first_byte_s: float = 0.0


class Arrival(NamedTuple):
    """All KV under a ticket is at its node, the first byte on the wire at `first_byte_s`."""

    node: str
    ticket: int
    nbytes: int
    first_byte_s: float


class ModelledKv:
    """Every transfer of a run, and the KV that nodes keep; `peak_retained_bytes` is the most that one kept at a time.

    A ticket stands in `tickets` from when it is opened until it is closed, and its KV is kept as long.
    """

    def __init__(self, run: RunSpec) -> None:
        self.network = modelled_network(run)
        self.tickets: dict[int, Ticket] = {}
        self.peak_retained_bytes = 0
        self._run = run
        self._message_costs: dict[tuple[str, str], MessageCost] = {}
        self._parts_of: dict[int, list[PartId]] = {}
        self._retained_bytes: Counter[str] = Counter()

    def transmit(self, source: str, effect: Transmit, now_s: float) -> None:
        """Send one more part of a ticket's KV."""
        parts = self._parts_of.setdefault(effect.ticket, [])
        parts.append(PartId(effect.ticket, len(parts)))
        pair = (source, effect.destination)
        cost = self._message_costs.get(pair)
        if cost is None:
            cost = self._message_costs[pair] = self._run.message_cost(*pair)
        self.network.start(
            parts[-1], *pair, effect.nbytes, now_s, request=effect.ticket, message_s=cost.seconds(effect.nbytes)
        )

    def cancel(self, effect: CancelTransmit, now_s: float) -> None:
        """What is on its way under a ticket is not wanted any more."""
        for part in self._parts_of.pop(effect.ticket, []):
            self.network.cancel(part, now_s)

    def open(self, node: str, effect: OpenTicket) -> None:
        """A node expects KV."""
        self.tickets[effect.ticket] = Ticket(node, effect.nbytes)

    def close(self, effect: CloseTicket) -> None:
        """What has come under a ticket can be dropped, and what still comes is nobody's."""
        ticket = self.tickets.pop(effect.ticket, None)
        if ticket is not None:
            self._retained_bytes[ticket.node] -= ticket.received

    def deliver(self, now_s: float) -> Iterator[Arrival]:
        """What is complete with the parts that have arrived by `now_s`; each may close tickets before the next."""
        for delivery in self.network.advance(now_s):
            part_id = delivery.transfer_id
            assert isinstance(part_id, PartId)
            ticket = self.tickets.get(part_id.ticket)
            if ticket is None:
                continue
            if part_id.part == 0:
                ticket.first_byte_s = delivery.start_s
            ticket.received += delivery.nbytes
            self._retained_bytes[ticket.node] += delivery.nbytes
            self.peak_retained_bytes = max(self.peak_retained_bytes, self._retained_bytes[ticket.node])
            if ticket.received == ticket.nbytes:
                yield Arrival(ticket.node, part_id.ticket, ticket.nbytes, ticket.first_byte_s)

    def check_integrity(self) -> None:
        """The network's invariants; no more has come under a ticket than was expected, and all that is kept has one."""
        self.network.check_integrity()
        kept = dict.fromkeys(self._retained_bytes, 0)
        for ticket in self.tickets.values():
            assert ticket.received <= ticket.nbytes, "more KV than was expected"
            if ticket.received:
                kept[ticket.node] = kept.get(ticket.node, 0) + ticket.received
        assert kept == dict(self._retained_bytes), "KV is kept without a ticket"


def modelled_network(run: RunSpec) -> FairShareNetwork:
    """The KV network of a run, in model terms."""
    if run.link is None:
        return FairShareNetwork(egress_bytes_per_s={}, ingress_bytes_per_s={})
    nics = {node.name: run.link.nic(node.name) for node in run.nodes}
    return FairShareNetwork(
        egress_bytes_per_s={name: nic.egress_bps / 8 for name, nic in nics.items()},
        ingress_bytes_per_s={name: nic.ingress_bps / 8 for name, nic in nics.items()},
        delay_s=run.link.delay_s,
        jitter_s=run.link.jitter_s,
        max_in_flight=run.link.max_in_flight,
        order=run.link.order,
        seed=run.seed,
    )
