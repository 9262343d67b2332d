"""The same machines in virtual time: one heap of events drives router, engines, load generator and a modelled KV link.

Nothing sleeps and nothing is random: two simulations of one run are identical. Control messages take no time here, so
a simulated run shows what the decisions and the link alone would give.

Decode steps that are alike are one event (`exact_steps=False`; see `core.running`): the run is planned ahead, an input
that comes before its end settles the steps that are over by then. With `exact_steps` every step is an event and every
token a message. Both give the same records and steps to the last bit of every decision, because they add up the same
step times in the same order, and because what falls on one instant has an order of its own (`_Event`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from emulator.core.deploy import MessageCost, RunSpec
from emulator.core.effects import (
    CancelTransmit,
    CloseTicket,
    Effect,
    OpenTicket,
    RecordMemory,
    RecordStep,
    Reply,
    RunStep,
    Send,
    TokenRun,
    Transmit,
)
from emulator.core.engine import Engine
from emulator.core.link import FairShareNetwork
from emulator.core.load import LoadGenerator
from emulator.core.messages import Abort, Finished, Hello, Submit, Tokens, ToRouter
from emulator.core.recorder import Recorder
from emulator.core.records import MemoryRecord, Record, StepRecord
from emulator.core.router import Router

CLIENT = "client"
TICK_S = 1.0


class PartId(NamedTuple):
    """One part of a transfer on the modelled network."""

    ticket: int
    part: int


_Event = tuple[float, int, int, Callable[[], None]]
"""When, which turn, in what order it was asked for, and what happens. On one instant first comes what has turn 0, then
steps progress and end, one node after the other."""


@dataclass(slots=True)
class SimulatedNode:
    """A node's engine and the KV that it expects and keeps, in bytes by ticket; its device's `turn`, from 1 on.

    The device's next event is at `due_s`; any other that still stands in the heap has been overtaken.
    """

    name: str
    engine: Engine
    turn: int
    due_s: float | None = None
    expected: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    received_bytes: int = 0
    first_byte_s: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Simulated:
    """What a simulated run leaves. `peak_retained_bytes`: the most KV that a decode node kept at one time."""

    records: list[Record]
    steps: list[StepRecord]
    memory: list[MemoryRecord]
    peak_retained_bytes: int
    preemptions: int


class Simulation:
    """One run in virtual time; `after_event` is called after every event (tests check invariants there).

    Losing nodes needs `exact_steps`: the router does not hear of the tokens of merged steps, and would miscount them.
    """

    def __init__(
        self,
        run: RunSpec,
        *,
        exact_steps: bool = True,
        after_event: Callable[[Simulation], None] | None = None,
    ) -> None:
        self.run_spec = run
        self.now_s = 0.0
        self.router = Router(run.router)
        self.generator = LoadGenerator(run.load)
        self.recorder = Recorder()
        self.steps: list[StepRecord] = []
        self.memory: list[MemoryRecord] = []
        self._after_event = after_event
        self._heap: list[_Event] = []
        self._sends: deque[Send] = deque()
        self._order = itertools.count()
        self._turn: float = 0
        self._due_s = math.inf
        self._over = False
        tickets = itertools.count(1)
        self.nodes = {
            node.name: SimulatedNode(
                node.name,
                Engine(node, new_ticket=partial(next, tickets), kv_endpoint=node.name, merge_steps=not exact_steps),
                turn,
            )
            for turn, node in enumerate(run.nodes, start=1)
        }
        self.network = _network(run)
        self._message_costs: dict[tuple[str, str], MessageCost] = {}
        self._parts_of: dict[int, list[PartId]] = {}
        self._receivers: dict[int, SimulatedNode] = {}
        self._peak_retained = 0
        self._carry_out: dict[type[Effect], Callable[[SimulatedNode, Any], None]] = {
            Reply: self._reply,
            RecordStep: self._record_step,
            RecordMemory: self._record_memory,
            TokenRun: self._record_tokens,
            RunStep: self._run_step,
            Transmit: self._transmit,
            CancelTransmit: self._cancel,
            OpenTicket: self._open,
            CloseTicket: self._close,
        }
        for node in run.nodes:
            self.router.join(Hello(node.name, node.role, "", node.kv_blocks), node.block_size, 0.0)
        self.router.join(Hello(CLIENT, "client", ""), 1, 0.0)

    def run(self) -> Simulated:
        """Run to the end of the load, or to the drain deadline."""
        deadline_s = self.run_spec.load.duration_s + self.run_spec.load.drain_s
        self._at(TICK_S, self._tick)
        self._schedule_due()
        self._over = self.generator.over()
        while not self._over and (instant := self._next_s()) is not None and instant <= deadline_s:
            self._advance_to(instant)
        if self.generator.outstanding:
            self.now_s = max(self.now_s, deadline_s)
        self._tell_merged_steps()
        if self.generator.outstanding:
            self._cut()
        return Simulated(
            records=self.recorder.records(),
            steps=self.steps,
            memory=sorted(self.memory, key=attrgetter("at_s")),
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

    def _at(self, at_s: float, happen: Callable[[], None], *, turn: int = 0) -> None:
        heapq.heappush(self._heap, (at_s, turn, next(self._order), happen))

    def _next_s(self) -> float | None:
        network_s = self.network.next_event_s()
        if not self._heap:
            return network_s
        heap_s = self._heap[0][0]
        return heap_s if network_s is None or heap_s < network_s else network_s

    def _advance_to(self, instant: float) -> None:
        if instant > self.now_s:
            self.now_s, self._turn = instant, 0
        network_s = self.network.next_event_s()
        if network_s is not None and network_s <= self.now_s:
            for delivery in self.network.advance(self.now_s):
                assert isinstance(delivery.transfer_id, PartId)
                self._delivered(delivery.transfer_id, delivery.start_s, delivery.nbytes)
        self._deliver_sends()
        heap = self._heap
        while heap and heap[0][0] <= self.now_s:
            _, turn, _, happen = heapq.heappop(heap)
            self._turn = max(self._turn, turn)
            happen()
            if self._sends:
                self._deliver_sends()
        self._turn = math.inf
        if self._after_event is not None:
            self._after_event(self)

    def _tell_merged_steps(self) -> None:
        """What merged steps have brought by the end of the run."""
        self._turn = math.inf
        for node in self.nodes.values():
            self._settle(node)
            self._apply(node, node.engine.cut())

    def _cut(self) -> None:
        self.recorder.cut(self.now_s)
        for request_id in list(self.generator.outstanding):
            self._to_router(CLIENT, Abort(request_id))
        self._advance_to(self.now_s)

    def _tick(self) -> None:
        for node in self.nodes.values():
            self._settle(node)
            self._apply(node, node.engine.tick(self.now_s))
        self._route(self.router.tick(self.now_s))
        self._at(self.now_s + TICK_S, self._tick)

    def _schedule_due(self) -> None:
        due_s = self.generator.next_due_s()
        if due_s is not None and due_s < self._due_s:
            self._due_s = due_s
            self._at(due_s, self._due)

    def _due(self) -> None:
        self._due_s = math.inf
        for request in self.generator.due(self.now_s):
            self.recorder.sent(request, self.now_s)
            self._to_router(CLIENT, Submit(request.request_id, request.prompt_tokens, request.max_tokens))
        self._schedule_due()

    # --- messages ---------------------------------------------------------------------------------------------

    def _to_router(self, peer: str, message: ToRouter) -> None:
        self._route(self.router.handle(peer, message, self.now_s))

    def _route(self, sends: Iterable[Send]) -> None:
        self._sends.extend(sends)

    def _deliver_sends(self) -> None:
        while self._sends:
            self._deliver(self._sends.popleft())

    def _deliver(self, send: Send) -> None:
        node = self.nodes.get(send.peer)
        if node is not None:
            self._settle(node)
            self._apply(node, node.engine.handle(send.message, self.now_s))  # type: ignore[arg-type]
            return
        if isinstance(send.message, Tokens):
            self.recorder.tokens(send.message, self.now_s)
        elif isinstance(send.message, Finished):
            self.recorder.finished(send.message, self.now_s)
            self.generator.finished(send.message.request_id, self.now_s)
            self._over = self.generator.over()
            self._schedule_due()

    # --- nodes ------------------------------------------------------------------------------------------------

    def _settle(self, node: SimulatedNode) -> None:
        """Bring a node to the present before an input: steps that end now count if their turn is over."""
        node.engine.settle(self.now_s, inclusive=node.turn <= self._turn)

    def _step_done(self, node: SimulatedNode, due_s: float) -> None:
        if node.due_s == due_s:
            node.due_s = None
            self._apply(node, node.engine.step_done(due_s))

    def _step_progress(self, node: SimulatedNode, due_s: float, groups: int) -> None:
        if node.due_s == due_s:
            self._apply(node, node.engine.step_progress(groups))

    def _apply(self, node: SimulatedNode, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._carry_out[type(effect)](node, effect)
        self._await_step(node)

    def _await_step(self, node: SimulatedNode) -> None:
        due_s = node.engine.busy_until_s
        if due_s is not None and due_s != node.due_s:
            node.due_s = due_s
            self._at(due_s, partial(self._step_done, node, due_s), turn=node.turn)

    def _reply(self, node: SimulatedNode, effect: Reply) -> None:
        self._to_router(node.name, effect.message)  # type: ignore[arg-type]

    def _record_step(self, _: SimulatedNode, effect: RecordStep) -> None:
        self.steps.append(effect.record)

    def _record_memory(self, _: SimulatedNode, effect: RecordMemory) -> None:
        self.memory.extend(effect.rows)

    def _record_tokens(self, _: SimulatedNode, effect: TokenRun) -> None:
        self.recorder.token_run(effect)

    def _run_step(self, node: SimulatedNode, effect: RunStep) -> None:
        """What the device reports within the step; `_await_step` knows until when it is busy."""
        if effect.progress:
            for groups, at_s in enumerate(effect.progress_s(), start=1):
                self._at(at_s, partial(self._step_progress, node, effect.end_s, groups), turn=node.turn)

    # --- KV ---------------------------------------------------------------------------------------------------

    def _transmit(self, node: SimulatedNode, effect: Transmit) -> None:
        parts = self._parts_of.setdefault(effect.ticket, [])
        parts.append(PartId(effect.ticket, len(parts)))
        pair = (node.name, effect.destination)
        cost = self._message_costs.get(pair)
        if cost is None:
            cost = self._message_costs[pair] = self.run_spec.message_cost(*pair)
        self.network.start(
            parts[-1], *pair, effect.nbytes, self.now_s, request=effect.ticket, message_s=cost.seconds(effect.nbytes)
        )

    def _cancel(self, _: SimulatedNode, effect: CancelTransmit) -> None:
        for part in self._parts_of.pop(effect.ticket, []):
            self.network.cancel(part, self.now_s)

    def _open(self, node: SimulatedNode, effect: OpenTicket) -> None:
        node.expected[effect.ticket] = effect.nbytes
        self._receivers[effect.ticket] = node

    def _close(self, node: SimulatedNode, effect: CloseTicket) -> None:
        ticket = effect.ticket
        self._receivers.pop(ticket, None)
        node.expected.pop(ticket, None)
        node.received_bytes -= node.received.pop(ticket, 0)
        node.first_byte_s.pop(ticket, None)

    def _delivered(self, part_id: PartId, start_s: float, nbytes: int) -> None:
        ticket, part = part_id
        node = self._receivers.get(ticket)
        if node is None or node.name not in self.nodes:
            return
        if part == 0:
            node.first_byte_s[ticket] = start_s
        node.received[ticket] = node.received.get(ticket, 0) + nbytes
        node.received_bytes += nbytes
        self._peak_retained = max(self._peak_retained, node.received_bytes)
        if node.received[ticket] == node.expected[ticket]:
            first_byte_s = node.first_byte_s.pop(ticket)
            self._settle(node)
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
        max_in_flight=run.link.max_in_flight,
        order=run.link.order,
        seed=run.seed,
    )


def simulate(run: RunSpec, *, exact_steps: bool = False) -> Simulated:
    """Run in virtual time what `run` describes; `exact_steps`: one row for every step, instead of runs of them."""
    return Simulation(run, exact_steps=exact_steps).run()
