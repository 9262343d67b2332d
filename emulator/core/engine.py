"""One node as a state machine: messages, finished steps and arrived KV in, effects out. Never waits, never sends.

The role of a node is only what the router asks of it: `Generate` computes and decodes here, `Prefill` computes here
and hands over, `Reserve` takes KV in and decodes. All three meet in one scheduler over one KV pool and one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from emulator.core.device_steps import DeviceSteps
from emulator.core.effects import CloseTicket, Effect, RecordStep, Reply, RunStep
from emulator.core.incoming import Incoming
from emulator.core.kv_pool import KvPool, NamedKvPool
from emulator.core.life import Life
from emulator.core.memory_watch import MemoryWatch
from emulator.core.messages import (
    Abort,
    Admit,
    Forget,
    Generate,
    Heartbeat,
    KvComputed,
    KvReady,
    KvReceived,
    NodeFinish,
    Preempted,
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
from emulator.core.records import RequestTimes
from emulator.core.refusal import refusal
from emulator.core.run_spec import NodeSpec
from emulator.core.scheduler import Scheduler, SchedulerConfig
from emulator.core.sequence import Sequence, Status, Step
from emulator.core.token_runs import TokenRuns


class Engine:
    """The engine of one node. All instants are model seconds; `new_ticket` and `kv_endpoint` serve a KV receiver.

    With `merge_steps` (for simulations) decode steps that are alike run as one: `busy_until_s` is when the last of them
    ends, `step_done` is called once for all, `device.settle` before any other input, and their tokens are a `TokenRun`.
    With `name_blocks` (for devices that hold KV) effects say in which blocks KV lies. None is another request's before
    the effect that ends its present use, nor before the end of the step that computes with it.
    """

    def __init__(
        self,
        node: NodeSpec,
        *,
        new_ticket: Callable[[], int],
        kv_endpoint: str = "",
        merge_steps: bool = False,
        name_blocks: bool = False,
    ) -> None:
        self.node = node
        self.pool = (NamedKvPool if name_blocks else KvPool)(node.kv_blocks, node.block_size)
        limits = SchedulerConfig(
            node.policy, node.max_num_batched_tokens, node.max_num_seqs, max_held_blocks=node.max_held_blocks
        )
        self.scheduler = Scheduler(limits, self.pool)
        self.outgoing = Outgoing(
            node.overlap,
            node.kv_bytes_per_token,
            node.layers,
            node.layer_groups,
            node.layer_min_tokens,
            blocks_of=self.pool.blocks,
        )
        self.incoming = Incoming(
            self.pool,
            endpoint=kv_endpoint,
            bytes_per_token=node.kv_bytes_per_token,
            num_reserved_decode_tokens=node.num_reserved_decode_tokens,
            new_ticket=new_ticket,
            max_reads=node.max_transfers_in_flight,
        )
        self._memory = MemoryWatch(node.name, self.scheduler, self.incoming)
        self._lives: dict[str, Life] = {}
        self._first_due: set[Sequence] = set()  # received, and without a token so far
        self._merge_steps = merge_steps
        self._name_blocks = name_blocks
        self._token_runs = TokenRuns()
        self.device = DeviceSteps(self.scheduler, node.cost, self._token_runs, merge=merge_steps)
        self._heard_s = 0.0

    @property
    def idle(self) -> bool:
        """Nothing held, queued, reserved or running."""
        return not self._lives and self.device.running is None and not len(self.outgoing) and self.pool.used_blocks == 0

    @property
    def load(self) -> Heartbeat:
        """What the node has to do; other threads may ask for it too."""
        waiting = self.scheduler.num_waiting + self.incoming.waiting
        return Heartbeat(self.pool.free_blocks, len(self.scheduler.running), waiting)

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
            case KvComputed():
                self.incoming.reads.computed(message.request_id)
            case Admit():
                self._admit(message.request_id, now_s)
            case SendKv():
                effects += self._send_kv(message, now_s)
            case Release(request_id=request_id) | Abort(request_id=request_id):
                effects += self._drop(request_id)
            case Forget():
                for request_id in self._held():
                    effects += self._drop(request_id)
        return effects + self._advance(now_s)

    @property
    def busy_until_s(self) -> float | None:
        """When the step (or the steps alike) that the device runs is to end; None when it has nothing to do."""
        running = self.device.running
        return running.bounds_s[-1] if running is not None else None

    def step_done(self, end_s: float, slipped_s: float = 0.0) -> list[Effect]:
        """The device has finished its step, and was heard of at `end_s`.

        The next one starts where it was to end, so that lateness never adds up, or later by as much as the work itself
        `slipped_s`.
        """
        running, result = self.device.finish()
        due_s = running.end_s + slipped_s
        effects: list[Effect] = [RecordStep(running.record(self.node.name, self.pool.used_blocks, end_s))]
        self._free_retired()
        for sequence, _ in running.step.chunks:
            if sequence.hand_over and not sequence.ended:
                effects += self.outgoing.computed(sequence.request_id, sequence.computed, due_s)
        for sequence in result.prefilled:
            effects += self._prefilled(sequence, due_s)
        news = result.prefilled if self._merge_steps else result.tokens
        effects += self._emit([s for s in news if not s.hand_over], [s for s in result.full if not s.hand_over])
        return effects + self._advance(due_s)

    def step_progress(self, groups: int) -> list[Effect]:
        """The running step has got to the end of its first `groups` groups of layers (`RunStep.progress`)."""
        running = self.device.running
        assert running is not None, "progress of a step that was never started"
        now_s = running.start_s + self.outgoing.progress[groups - 1] * running.planned_s[0]
        effects: list[Effect] = []
        for sequence, chunk in running.step.chunks:
            if sequence.hand_over and not sequence.ended:
                request_id, before = sequence.request_id, sequence.computed
                effects += self.outgoing.computed_groups(request_id, before, chunk, groups, now_s)
        return effects

    def cut(self) -> list[Effect]:
        """The run is over: what the merged steps that are settled have brought, and what memory has been."""
        effects: list[Effect] = []
        running = self.device.cut()
        if running is not None:
            effects.append(RecordStep(running.record(self.node.name, self.pool.used_blocks, running.end_s)))
            self._free_retired()
        return [*effects, *self._token_runs.tell_all(), *self._memory.tell()]

    def kv_arrived(self, ticket: int, nbytes: int, start_s: float, end_s: float, now_s: float) -> list[Effect]:
        """All KV under a ticket is here: first byte on the wire at `start_s`, last byte counted at `end_s`."""
        request = self.incoming.arrived(ticket)
        if request is None:
            return [CloseTicket(ticket)]
        self._memory.due = True
        gives_up = self.node.preemption == "prefill"
        sequence = Sequence(request.request_id, request.prompt_tokens, request.max_tokens, gives_up=gives_up)
        if request.first_token == "recompute":
            self._first_due.add(sequence)
        else:
            sequence.generated = 1
        self._lives[request.request_id] = Life(sequence)
        self.device.close_ranks()
        self.scheduler.add_with_kv(sequence)
        times = RequestTimes(kv_start_s=start_s, kv_end_s=end_s, kv_bytes=nbytes)
        streamed = [sequence] if request.first_token == "handoff" else []
        effects = self._emit(streamed, [sequence] if sequence.generated >= sequence.max_tokens else [], times)
        effects.append(Reply(KvReceived(request.request_id, times)))
        return effects + self._advance(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Once a second: tell the load; give everything up when the router has been silent for a lease.

        The router answers every heartbeat of a node that it knows, so only a lost one falls silent.
        """
        effects: list[Effect] = []
        if now_s - self._heard_s > self.node.kv_lease_s:
            reason = f"{self.node.name} gave it up: the router was silent for {self.node.kv_lease_s:g} s"
            for request_id in self._held():
                effects += self._drop(request_id)
                effects.append(Reply(Rejected(request_id, reason, "unavailable")))
        effects += self._memory.tick(now_s)
        return [*effects, Reply(self.load)]

    # --- decisions --------------------------------------------------------------------------------------------

    def _enqueue(self, message: Generate | Prefill, now_s: float) -> list[Effect]:
        if problem := refusal(self.node, message):
            return [Reply(Rejected(message.request_id, problem))]
        hand_over = isinstance(message, Prefill)
        sequence = Sequence(message.request_id, message.prompt_tokens, message.max_tokens, hand_over=hand_over)
        waits = isinstance(message, Prefill) and message.await_ticket
        self._lives[message.request_id] = Life(sequence, queued_s=now_s, awaits_ticket=waits)
        if hand_over:
            sequence.leaves_in_parts = self.outgoing.expect(message.request_id, message.prompt_tokens)
        if not waits:
            self.device.close_ranks()
            self.scheduler.add(sequence)
        return []

    def _reserve(self, message: Reserve) -> list[Effect]:
        if problem := refusal(self.node, message):
            return [Reply(Rejected(message.request_id, problem))]
        self.incoming.request(message)
        self._memory.due = True
        return []

    def _admit(self, request_id: str, now_s: float) -> None:
        """The decode node has memory: a prefill that waited for that may start."""
        life = self._lives.get(request_id)
        if life is not None and life.awaits_ticket:
            life.awaits_ticket, life.admitted_s = False, now_s
            self.device.close_ranks()
            self.scheduler.add(life.sequence)

    def _send_kv(self, message: SendKv, now_s: float) -> list[Effect]:
        self._admit(message.request_id, now_s)
        since_s = now_s if message.readable_s is None else message.readable_s
        effects = self.outgoing.ticket(
            message.request_id, message.ticket, message.endpoint, message.destination, since_s
        )
        ready_s = self.outgoing.ready_s(message.request_id)
        if ready_s is not None:
            effects.append(Reply(KvReady(message.request_id, RequestTimes(kv_ready_s=ready_s))))
        return effects

    def _prefilled(self, sequence: Sequence, now_s: float) -> list[Effect]:
        life = self._lives[sequence.request_id]
        if life.prefill_end_s is None and life.prefills_here:
            life.prefill_end_s = now_s
        self._note_first([sequence], now_s)
        if not sequence.hand_over:
            return []
        self.scheduler.detach(sequence)
        self._memory.due = True
        times = life.times().merged(RequestTimes(kv_ready_s=self.outgoing.ready_s(sequence.request_id)))
        return [Reply(PrefillDone(sequence.request_id, times))]

    def _emit(
        self, sequences: Iterable[Sequence], full: Iterable[Sequence], times: RequestTimes | None = None
    ) -> list[Effect]:
        """One message for a token of each sequence and for those that are `full`: they end with it."""
        tokens = tuple([TokenCount(sequence.request_id, 1) for sequence in sequences])
        told: list[Effect] = []
        finished: list[NodeFinish] = []
        effects: list[Effect] = []
        for sequence in full:
            known = self._lives.pop(sequence.request_id).times()
            finished.append(NodeFinish(sequence.request_id, "length", known.merged(times) if times else known))
            told += self._token_runs.tell(sequence)
            self.scheduler.remove(sequence, Status.FINISHED_LENGTH)
            effects += self.incoming.drop(sequence.request_id)
        if tokens or finished:
            return [*told, Reply(StepTokens(tokens, tuple(finished))), *effects]
        return []

    def _drop(self, request_id: str) -> list[Effect]:
        self.device.close_ranks()
        self._memory.due = True
        effects = self.outgoing.drop(request_id) + self.incoming.drop(request_id)
        life = self._lives.pop(request_id, None)
        if life is not None:
            self.device.note_settled()
            effects += self._token_runs.tell(life.sequence)
            in_step = self.device.computes(life.sequence)
            self.scheduler.remove(life.sequence, Status.FINISHED_ABORTED, in_step=in_step)
            self._first_due.discard(life.sequence)
        return effects

    def _held(self) -> list[str]:
        """All requests that are here, or are expected."""
        return [*self._lives, *self.incoming.request_ids()]

    def _free_retired(self) -> None:
        """The step is over in which requests were dropped: from now on nobody works on their blocks."""
        if self.pool.retired_blocks:
            self.pool.free_retired()
            self._memory.due = True

    def _advance(self, now_s: float) -> list[Effect]:
        """Keep the device busy; memory that running and preempted sequences do not need goes to KV yet to come."""
        effects: list[Effect] = []
        step = self._plan_step(now_s, effects) if self.device.running is None else None
        if self.incoming.waiting and not self.scheduler.preempted_waiting:
            granted = self.incoming.grant()
            self._memory.due |= bool(granted)
            if granted and step is None:
                self.device.keep_within_memory()
            effects += granted
        if self.incoming.reads.due:
            effects += self.incoming.read(now_s)
        if step is not None:
            if self._merge_steps and step.decodes:
                effects += self._token_runs.follow(step.decodes)
            effects.append(self._start(step, now_s))
        if self._memory.due:
            self._memory.note(now_s)
        return effects

    def _plan_step(self, now_s: float, effects: list[Effect]) -> Step | None:
        step = self.scheduler.next_step()
        for victim in self.scheduler.preempted:
            effects += self._token_runs.tell(victim)
            effects += self.incoming.forget(victim.request_id)
            effects.append(self._preempted(victim))
        if step is None:
            return None
        for sequence, _ in step.chunks:
            life = self._lives[sequence.request_id]
            if life.prefill_start_s is None and life.prefills_here:
                life.prefill_start_s = now_s
        return step

    def _preempted(self, victim: Sequence) -> Reply:
        self._memory.due = True
        if not victim.gives_up:
            return Reply(Preempted(victim.request_id, victim.generated, recomputes=True))
        self._first_due.discard(victim)
        return Reply(Preempted(victim.request_id, victim.generated, self._lives.pop(victim.request_id).times()))

    def _start(self, step: Step, now_s: float) -> RunStep:
        shape = step.shape()
        planned_s = self.device.start(step, shape, now_s)
        self._note_first(step.decodes, now_s + planned_s)
        progress = self.outgoing.progress
        if progress and not any(sequence.hand_over for sequence, _ in step.chunks):
            progress = ()
        writes = step.writes(self.node.kv_bytes_per_token, self.pool.blocks) if self._name_blocks else ()
        return RunStep(now_s, planned_s, shape, progress, writes)

    def _note_first(self, sequences: Iterable[Sequence], end_s: float) -> None:
        """The step that ends at `end_s` brings the first token of those of these that have none."""
        if self._first_due:
            for sequence in self._first_due.intersection(sequences):
                self._lives[sequence.request_id].streamed_s = end_s
                self._first_due.remove(sequence)

    def check_integrity(self) -> None:
        """The invariants of all parts, and that blocks belong to requests that are here."""
        self.pool.check_integrity()
        self.scheduler.check_integrity()
        self.incoming.check_integrity()
        known = self._lives.keys() | set(self.incoming.request_ids())
        assert self.pool.owners() <= known, "blocks held for a request that has left"
        here = {life.sequence for life in self._lives.values()}
        assert self._first_due <= here, "a first token is due of a request that has left"
        idle = self.device.running is None
        assert not (idle and self.pool.retired_blocks), "blocks are kept for a step that does not run"
