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
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

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
from emulator.core.load import LoadGenerator
from emulator.core.messages import Abort, Finished, Hello, Submit, Tokens, ToRouter
from emulator.core.modelled_kv import Arrival, ModelledKv
from emulator.core.recorder import Recorder
from emulator.core.records import MemoryRecord, Record, StepRecord
from emulator.core.router import Router
from emulator.core.run_spec import RunSpec

CLIENT = "client"
TICK_S = 1.0


_Event = tuple[float, int, int, Callable[[], None]]
"""When, which turn, in what order it was asked for, and what happens. On one instant first comes what has turn 0, then
steps progress and end, one node after the other."""


@dataclass(slots=True)
class SimulatedNode:
    """A node's engine, and its device's `turn`, from 1 on.

    The device's next event is at `due_s`; any other that still stands in the heap has been overtaken.
    """

    name: str
    engine: Engine
    turn: int
    due_s: float | None = None


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
        self.kv = ModelledKv(run)
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
            peak_retained_bytes=self.kv.peak_retained_bytes,
            preemptions=sum(n.engine.scheduler.num_preemptions for n in self.nodes.values()),
        )

    def check_integrity(self) -> None:
        """The invariants of every part."""
        self.router.check_integrity()
        self.kv.check_integrity()
        self.generator.check_integrity()
        for node in self.nodes.values():
            node.engine.check_integrity()

    # --- events -----------------------------------------------------------------------------------------------

    def _at(self, at_s: float, happen: Callable[[], None], *, turn: int = 0) -> None:
        heapq.heappush(self._heap, (at_s, turn, next(self._order), happen))

    def _next_s(self) -> float | None:
        network_s = self.kv.network.next_event_s()
        if not self._heap:
            return network_s
        heap_s = self._heap[0][0]
        return heap_s if network_s is None or heap_s < network_s else network_s

    def _advance_to(self, instant: float) -> None:
        if instant > self.now_s:
            self.now_s, self._turn = instant, 0
        network_s = self.kv.network.next_event_s()
        if network_s is not None and network_s <= self.now_s:
            for arrival in self.kv.deliver(self.now_s):
                self._kv_arrived(arrival)
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
        node.engine.device.settle(self.now_s, inclusive=node.turn <= self._turn)

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
        self.kv.transmit(node.name, effect, self.now_s)

    def _cancel(self, _: SimulatedNode, effect: CancelTransmit) -> None:
        self.kv.cancel(effect, self.now_s)

    def _open(self, node: SimulatedNode, effect: OpenTicket) -> None:
        self.kv.open(node.name, effect)

    def _close(self, _: SimulatedNode, effect: CloseTicket) -> None:
        self.kv.close(effect)

    def _kv_arrived(self, arrival: Arrival) -> None:
        node = self.nodes.get(arrival.node)
        if node is None:
            return
        self._settle(node)
        effects = node.engine.kv_arrived(arrival.ticket, arrival.nbytes, arrival.first_byte_s, self.now_s, self.now_s)
        self._apply(node, effects)


def simulate(run: RunSpec, *, exact_steps: bool = False) -> Simulated:
    """Run in virtual time what `run` describes; `exact_steps`: one row for every step, instead of runs of them."""
    return Simulation(run, exact_steps=exact_steps).run()
