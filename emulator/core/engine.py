"""One node as a state machine: messages, finished steps and arrived KV in, effects out. Never waits, never sends.

The role of a node is only what the router asks of it: `Generate` computes and decodes here, `Prefill` computes here
and hands over, `Reserve` takes KV in and decodes. All three meet in one scheduler over one KV pool and one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from emulator.core.deploy import NodeSpec
from emulator.core.effects import CloseTicket, Effect, RecordStep, Reply, RunStep
from emulator.core.incoming import Incoming
from emulator.core.kv_pool import KvPool
from emulator.core.messages import (
    Abort,
    Generate,
    Heartbeat,
    KvReady,
    KvReceived,
    NodeFinish,
    Prefill,
    PrefillDone,
    Rejected,
    Release,
    Reserve,
    SendKv,
    StepTokens,
    TokenCount,
    ToNode,
)
from emulator.core.outgoing import Outgoing
from emulator.core.records import RequestTimes, StepRecord
from emulator.core.scheduler import Scheduler, SchedulerConfig, Sequence, Status, Step


@dataclass(slots=True)
class Life:
    """A sequence with the instants of its prefill on this node, model seconds; none where its KV was received."""

    sequence: Sequence
    queued_s: float | None = None
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None

    @property
    def prefills_here(self) -> bool:
        """Whether its prompt was queued here; recomputing a prompt whose KV was received is not its prefill."""
        return self.queued_s is not None

    def times(self) -> RequestTimes:
        """What this node can say of the request's life so far."""
        return RequestTimes(
            queued_s=self.queued_s, prefill_start_s=self.prefill_start_s, prefill_end_s=self.prefill_end_s
        )


@dataclass(slots=True)
class Running:
    """The step that the device runs."""

    step: Step
    start_s: float
    planned_s: float


class Engine:
    """The engine of one node. All instants are model seconds; `new_ticket` and `kv_endpoint` serve a KV receiver."""

    def __init__(self, node: NodeSpec, *, new_ticket: Callable[[], int], kv_endpoint: str = "") -> None:
        self.node = node
        self.pool = KvPool(node.kv_blocks, node.block_size)
        limits = SchedulerConfig(node.policy, node.max_num_batched_tokens, node.max_num_seqs)
        self.scheduler = Scheduler(limits, self.pool)
        self.outgoing = Outgoing(node.overlap, node.kv_bytes_per_token)
        self.incoming = Incoming(
            self.pool,
            endpoint=kv_endpoint,
            bytes_per_token=node.kv_bytes_per_token,
            num_reserved_decode_tokens=node.num_reserved_decode_tokens,
            new_ticket=new_ticket,
        )
        self._lives: dict[str, Life] = {}
        self._running: Running | None = None
        self._heard_s = 0.0

    @property
    def idle(self) -> bool:
        """Nothing held, queued, reserved or running."""
        return not self._lives and self._running is None and not len(self.outgoing) and self.pool.used_blocks == 0

    # --- inputs -----------------------------------------------------------------------------------------------

    def handle(self, message: ToNode, now_s: float) -> list[Effect]:
        """A message from the router."""
        self._heard_s = now_s
        effects: list[Effect] = []
        match message:
            case Generate() | Prefill():
                effects += self._enqueue(message, now_s)
            case Reserve():
                effects += self._reserve(message)
            case SendKv():
                effects += self._send_kv(message, now_s)
            case Release(request_id=request_id) | Abort(request_id=request_id):
                effects += self._drop(request_id)
        return effects + self._advance(now_s)

    def step_done(self, end_s: float) -> list[Effect]:
        """The device has finished its step at `end_s`. The next starts where it was to end: lateness never adds up."""
        running = self._running
        assert running is not None, "a step ended that was never started"
        self._running = None
        planned_end_s = running.start_s + running.planned_s
        effects: list[Effect] = [RecordStep(self._step_record(running, end_s))]
        result = self.scheduler.complete(running.step)
        for sequence, _ in running.step.chunks:
            if sequence.hand_over and not sequence.ended:
                effects += self.outgoing.computed(sequence.request_id, sequence.computed, planned_end_s)
        for sequence in result.prefilled:
            effects += self._prefilled(sequence, planned_end_s)
        effects += self._emit(s for s in result.tokens if not s.hand_over)
        return effects + self._advance(planned_end_s)

    def kv_arrived(self, ticket: int, nbytes: int, start_s: float, end_s: float, now_s: float) -> list[Effect]:
        """All KV under a ticket is here: first byte on the wire at `start_s`, last byte counted at `end_s`."""
        request = self.incoming.arrived(ticket)
        if request is None:
            return [CloseTicket(ticket)]
        sequence = Sequence(request.request_id, request.prompt_tokens, request.max_tokens, generated=1)
        self._lives[request.request_id] = Life(sequence)
        self.scheduler.add_with_kv(sequence)
        times = RequestTimes(kv_start_s=start_s, kv_end_s=end_s, kv_bytes=nbytes)
        effects = self._emit([sequence], times)
        effects.append(Reply(KvReceived(request.request_id, times)))
        return effects + self._advance(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Once a second: tell the load; give everything up when the router has been silent for a lease.

        The router answers every heartbeat of a node that it knows, so only a lost one falls silent.
        """
        effects: list[Effect] = []
        if now_s - self._heard_s > self.node.kv_lease_s:
            reason = f"{self.node.name} gave it up: the router was silent for {self.node.kv_lease_s:g} s"
            for request_id in [*self._lives, *self.incoming.request_ids()]:
                effects += self._drop(request_id)
                effects.append(Reply(Rejected(request_id, reason)))
        waiting = len(self.scheduler.waiting) + self.incoming.waiting
        return [*effects, Reply(Heartbeat(self.pool.free_blocks, len(self.scheduler.running), waiting))]

    # --- decisions --------------------------------------------------------------------------------------------

    def _enqueue(self, message: Generate | Prefill, now_s: float) -> list[Effect]:
        hand_over = isinstance(message, Prefill)
        here = message.prompt_tokens + (0 if hand_over else message.max_tokens)
        if refusal := self._refusal(message, here):
            return refusal
        sequence = Sequence(message.request_id, message.prompt_tokens, message.max_tokens, hand_over=hand_over)
        self._lives[message.request_id] = Life(sequence, queued_s=now_s)
        if hand_over:
            self.outgoing.expect(message.request_id, message.prompt_tokens)
        self.scheduler.add(sequence)
        return []

    def _reserve(self, message: Reserve) -> list[Effect]:
        if refusal := self._refusal(message, message.prompt_tokens + message.max_tokens):
            return refusal
        self.incoming.request(message)
        return []

    def _refusal(self, message: Generate | Prefill | Reserve, tokens_here: int) -> list[Effect]:
        """A Rejected for a request that can never be served here, or nothing."""
        total = message.prompt_tokens + message.max_tokens
        what = f"prompt of {message.prompt_tokens} and {message.max_tokens} output tokens"
        reason = ""
        if min(message.prompt_tokens, message.max_tokens) < 1:
            reason = f"{what}: both must be at least 1"
        elif total > self.node.max_model_len:
            reason = f"{what} exceed the context of {self.node.max_model_len} tokens"
        elif self.pool.blocks_for(tokens_here) > self.pool.num_blocks:
            room = self.pool.num_blocks * self.pool.block_size
            reason = f"{what} need KV for {tokens_here} tokens, {self.node.name} has room for {room}"
        return [Reply(Rejected(message.request_id, reason))] if reason else []

    def _send_kv(self, message: SendKv, now_s: float) -> list[Effect]:
        effects = self.outgoing.ticket(message.request_id, message.ticket, message.endpoint, now_s)
        ready_s = self.outgoing.ready_s(message.request_id)
        if ready_s is not None:
            effects.append(Reply(KvReady(message.request_id, RequestTimes(kv_ready_s=ready_s))))
        return effects

    def _prefilled(self, sequence: Sequence, now_s: float) -> list[Effect]:
        life = self._lives[sequence.request_id]
        if life.prefill_end_s is None and life.prefills_here:
            life.prefill_end_s = now_s
        if not sequence.hand_over:
            return []
        self.scheduler.detach(sequence)
        times = life.times().merged(RequestTimes(kv_ready_s=self.outgoing.ready_s(sequence.request_id)))
        return [Reply(PrefillDone(sequence.request_id, times))]

    def _emit(self, sequences: Iterable[Sequence], times: RequestTimes | None = None) -> list[Effect]:
        """One message for the new tokens of a step; sequences that reached their length end with it."""
        tokens: list[TokenCount] = []
        finished: list[NodeFinish] = []
        effects: list[Effect] = []
        for sequence in sequences:
            tokens.append(TokenCount(sequence.request_id, 1))
            if sequence.generated >= sequence.max_tokens:
                known = self._lives.pop(sequence.request_id).times()
                finished.append(NodeFinish(sequence.request_id, "length", known.merged(times or RequestTimes())))
                self.scheduler.remove(sequence, Status.FINISHED_LENGTH)
                effects += self.incoming.drop(sequence.request_id)
        if tokens:
            effects.insert(0, Reply(StepTokens(tuple(tokens), tuple(finished))))
        return effects

    def _drop(self, request_id: str) -> list[Effect]:
        life = self._lives.pop(request_id, None)
        effects = self.outgoing.drop(request_id) + self.incoming.drop(request_id)
        if life is not None:
            self.scheduler.remove(life.sequence, Status.FINISHED_ABORTED)
        return effects

    def _advance(self, now_s: float) -> list[Effect]:
        """Keep the device busy; memory that running and preempted sequences do not need goes to KV yet to come."""
        effects = self._start_step(now_s) if self._running is None else []
        if not self.scheduler.preempted_waiting:
            effects += self.incoming.grant()
        return effects

    def _start_step(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        step = self.scheduler.next_step()
        for victim in self.scheduler.preempted:
            effects += self.incoming.forget(victim.request_id)
        if step is None:
            return effects
        for sequence, _ in step.chunks:
            life = self._lives[sequence.request_id]
            if life.prefill_start_s is None and life.prefills_here:
                life.prefill_start_s = now_s
        shape = step.shape()
        planned_s = self.node.cost.step_s(shape)
        self._running = Running(step, now_s, planned_s)
        return [*effects, RunStep(now_s, planned_s, shape)]

    def _step_record(self, running: Running, end_s: float) -> StepRecord:
        step = running.step
        return StepRecord(
            node=self.node.name,
            kind=step.kind,
            start_s=running.start_s,
            end_s=end_s,
            planned_s=running.planned_s,
            prefill_tokens=step.prefill_tokens,
            decode_batch=len(step.decodes),
            requests=len(step.decodes) + len(step.chunks),
            kv_blocks_used=self.pool.used_blocks,
        )

    def check_integrity(self) -> None:
        """The invariants of all parts, and that blocks belong to requests that are here."""
        self.pool.check_integrity()
        self.scheduler.check_integrity()
        self.incoming.check_integrity()
        known = self._lives.keys() | set(self.incoming.request_ids())
        assert self.pool.owners() <= known, "blocks held for a request that has left"
