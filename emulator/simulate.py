"""The same machines in virtual time: one heap of events drives router, engines, load generator and a modelled KV link.

Nothing sleeps and nothing is random: two simulations of one run are identical. Control messages take no time here, so
a simulated run shows what the decisions and the link alone would give.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from emulator.core.deploy import RunSpec
from emulator.core.effects import CancelTransmit, CloseTicket, Effect, OpenTicket, RecordStep, Reply, RunStep, Transmit
from emulator.core.engine import Engine
from emulator.core.link import FairShareNetwork
from emulator.core.load import LoadGenerator
from emulator.core.messages import Abort, Finished, Hello, Submit, Tokens, ToRouter
from emulator.core.recorder import Recorder
from emulator.core.records import Record, StepRecord
from emulator.core.router import Router, Send

CLIENT = "client"
TICK_S = 1.0


class PartId(NamedTuple):
    """One part of a transfer on the modelled network."""

    ticket: int
    part: int


@dataclass(slots=True)
class SimulatedNode:
    """A node's engine and the KV that it expects and keeps, in bytes by ticket."""

    engine: Engine
    expected: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    first_byte_s: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Simulated:
    """What a simulated run leaves. `peak_retained_bytes`: the most KV that a decode node kept at one time."""

    records: list[Record]
    steps: list[StepRecord]
    peak_retained_bytes: int
    preemptions: int


class Simulation:
    """One run in virtual time; `after_event` is called after every event (tests check invariants there)."""

    def __init__(self, run: RunSpec, *, after_event: Callable[[Simulation], None] | None = None) -> None:
        self.run_spec = run
        self.now_s = 0.0
        self.router = Router(run.router)
        self.generator = LoadGenerator(run.load)
        self.recorder = Recorder()
        self.steps: list[StepRecord] = []
        self._after_event = after_event
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        tickets = itertools.count(1)
        self.nodes = {
            node.name: SimulatedNode(Engine(node, new_ticket=partial(next, tickets), kv_endpoint=node.name))
            for node in run.nodes
        }
        self.network = _network(run)
        self._parts_of: dict[int, list[PartId]] = {}
        self._peak_retained = 0
        for node in run.nodes:
            self.router.join(Hello(node.name, node.role, "", node.kv_blocks), node.block_size, 0.0)
        self.router.join(Hello(CLIENT, "client", ""), 1, 0.0)

    def run(self) -> Simulated:
        """Run to the end of the load, or to the drain deadline."""
        deadline_s = self.run_spec.load.duration_s + self.run_spec.load.drain_s
        self._at(TICK_S, self._tick)
        self._schedule_due()
        while not self._over() and (instant := self._next_s()) is not None and instant <= deadline_s:
            self._advance_to(instant)
        if self.generator.outstanding:
            self._cut(deadline_s)
        return Simulated(
            records=self.recorder.records(),
            steps=self.steps,
            peak_retained_bytes=self._peak_retained,
            preemptions=sum(n.engine.scheduler.num_preemptions for n in self.nodes.values()),
        )

    def check_integrity(self) -> None:
        """The invariants of every part."""
        self.router.check_integrity()
        self.network.check_integrity()
        self.generator.check_integrity()
        for node in self.nodes.values():
            node.engine.check_integrity()

    # --- events -----------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        return self.generator.exhausted() and not self.generator.outstanding

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at_s, next(self._order), event))

    def _next_s(self) -> float | None:
        instants = [self._heap[0][0]] if self._heap else []
        if (network_s := self.network.next_event_s()) is not None:
            instants.append(network_s)
        return min(instants, default=None)

    def _advance_to(self, instant: float) -> None:
        self.now_s = max(self.now_s, instant)
        for delivery in self.network.advance(self.now_s):
            assert isinstance(delivery.transfer_id, PartId)
            self._delivered(delivery.transfer_id, delivery.start_s, delivery.nbytes)
        while self._heap and self._heap[0][0] <= self.now_s:
            heapq.heappop(self._heap)[2]()
        if self._after_event is not None:
            self._after_event(self)

    def _cut(self, deadline_s: float) -> None:
        self.now_s = max(self.now_s, deadline_s)
        self.recorder.cut(self.now_s)
        for request_id in list(self.generator.outstanding):
            self._to_router(CLIENT, Abort(request_id))
        self._advance_to(self.now_s)

    def _tick(self) -> None:
        for node in self.nodes.values():
            self._apply(node, node.engine.tick(self.now_s))
        self._route(self.router.tick(self.now_s))
        self._at(self.now_s + TICK_S, self._tick)

    def _schedule_due(self) -> None:
        due_s = self.generator.next_due_s()
        if due_s is not None:
            self._at(due_s, self._due)

    def _due(self) -> None:
        for request in self.generator.due(self.now_s):
            self.recorder.sent(request, self.now_s)
            self._to_router(CLIENT, Submit(request.request_id, request.prompt_tokens, request.max_tokens))
        self._schedule_due()

    # --- messages ---------------------------------------------------------------------------------------------

    def _to_router(self, peer: str, message: ToRouter) -> None:
        self._route(self.router.handle(peer, message, self.now_s))

    def _route(self, sends: Iterable[Send]) -> None:
        for send in sends:
            self._at(self.now_s, partial(self._deliver, send))

    def _deliver(self, send: Send) -> None:
        node = self.nodes.get(send.peer)
        if node is not None:
            self._apply(node, node.engine.handle(send.message, self.now_s))  # type: ignore[arg-type]
            return
        if isinstance(send.message, Tokens):
            self.recorder.tokens(send.message, self.now_s)
        elif isinstance(send.message, Finished):
            self.recorder.finished(send.message, self.now_s)
            self.generator.finished(send.message.request_id, self.now_s)
            self._schedule_due()

    # --- effects ----------------------------------------------------------------------------------------------

    def _apply(self, node: SimulatedNode, effects: Iterable[Effect]) -> None:
        name = node.engine.node.name
        for effect in effects:
            match effect:
                case Reply(message=message):
                    self._to_router(name, message)  # type: ignore[arg-type]
                case RunStep(start_s=start_s, planned_s=planned_s):
                    self._at(start_s + planned_s, partial(self._step_done, node))
                case RecordStep(record=record):
                    self.steps.append(record)
                case Transmit(ticket=ticket, endpoint=endpoint, nbytes=nbytes):
                    parts = self._parts_of.setdefault(ticket, [])
                    parts.append(PartId(ticket, len(parts)))
                    self.network.start(parts[-1], name, endpoint, nbytes, self.now_s)
                case CancelTransmit(ticket=ticket):
                    for part in self._parts_of.pop(ticket, []):
                        self.network.cancel(part, self.now_s)
                case OpenTicket(ticket=ticket, nbytes=nbytes):
                    node.expected[ticket] = nbytes
                case CloseTicket(ticket=ticket):
                    node.expected.pop(ticket, None)
                    node.received.pop(ticket, None)
                    node.first_byte_s.pop(ticket, None)

    def _step_done(self, node: SimulatedNode) -> None:
        self._apply(node, node.engine.step_done(self.now_s))

    def _delivered(self, part_id: PartId, start_s: float, nbytes: int) -> None:
        ticket, part = part_id
        node = next((n for n in self.nodes.values() if ticket in n.expected), None)
        if node is None:
            return
        if part == 0:
            node.first_byte_s[ticket] = start_s
        node.received[ticket] = node.received.get(ticket, 0) + nbytes
        self._peak_retained = max(self._peak_retained, sum(node.received.values()))
        if node.received[ticket] == node.expected[ticket]:
            first_byte_s = node.first_byte_s.pop(ticket)
            effects = node.engine.kv_arrived(ticket, node.received[ticket], first_byte_s, self.now_s, self.now_s)
            self._apply(node, effects)


def _network(run: RunSpec) -> FairShareNetwork:
    """The modelled KV network of a run, in model terms."""
    if run.link is None:
        return FairShareNetwork(egress_bytes_per_s={}, ingress_bytes_per_s={})
    nics = {node.name: run.link.nic(node.name) for node in run.nodes}
    return FairShareNetwork(
        egress_bytes_per_s={name: nic.egress_bps / 8 for name, nic in nics.items()},
        ingress_bytes_per_s={name: nic.ingress_bps / 8 for name, nic in nics.items()},
        delay_s=run.link.delay_s,
        jitter_s=run.link.jitter_s,
        seed=run.seed,
    )


def simulate(run: RunSpec) -> Simulated:
    """Run in virtual time what `run` describes."""
    return Simulation(run).run()
