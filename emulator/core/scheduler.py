"""Continuous batching on one node: which requests compute how many tokens in the next step.

Two policies. `chunked` (as vLLM V1): one token budget a step; running requests first in order of admission, one
token for each that decodes and a chunk for each whose prompt is not finished; then waiting ones while budget, seats
and memory last. `prefill_first` (as early vLLM): a step with prefills computes whole prompts and runs no decodes,
which is the interference of the textbook. When memory runs out the request admitted last loses its blocks and goes
back to the head of the queue, to be recomputed, or is given up; in such a step nobody is admitted. A prompt whose KV
leaves in parts has memory for all of it from its first step on, and keeps it: what is on its way is not taken.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from emulator.core.deployments import Policy
from emulator.core.held_kv import HeldKv
from emulator.core.kv_pool import KvPool
from emulator.core.sequence import Sequence, Status, Step, StepResult

# Early vLLM kept this share of the blocks free when it admitted a prompt (its `watermark`), so that the requests
# already running do not have to be preempted in the very next step.
PREFILL_FIRST_WATERMARK = 0.01


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a batch: tokens a step and sequences at a time; and of memory for prompts that are handed over."""

    policy: Policy
    max_num_batched_tokens: int
    max_num_seqs: int
    max_held_blocks: int | None = None


@dataclass(slots=True)
class Scheduler:
    """The queues of one node over its KV pool. `next_step` plans, `complete` applies the same step's outcome.

    Prompts that `held` does not let start stand in `held_back`, out of the way of what is not handed over.
    """

    config: SchedulerConfig
    pool: KvPool
    held: HeldKv = field(init=False)
    waiting: deque[Sequence] = field(default_factory=deque)
    held_back: deque[Sequence] = field(default_factory=deque)
    arrived: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.held = HeldKv(self.config.max_held_blocks)

    def add(self, sequence: Sequence) -> None:
        """A request to be computed from its first token."""
        self.waiting.append(sequence)

    def add_with_kv(self, sequence: Sequence) -> None:
        """A request whose prompt's KV has arrived; it decodes from the last token on that is known of it."""
        sequence.computed = sequence.known - 1
        sequence.prefilled = True
        sequence.status = Status.WAITING
        self.arrived.append(sequence)

    def remove(self, sequence: Sequence, status: Status, *, in_step: bool = False) -> None:
        """Take a sequence out, wherever it is, and free its blocks; a step in flight will not count it.

        Where it is `in_step`, in the one that runs, its blocks are only retired: the step still works on them.
        """
        if not (sequence.hand_over and self.held.end(sequence.request_id)):
            self._take_out(sequence)
        sequence.status, sequence.ended = status, True
        sequence.held_tokens = 0
        if in_step:
            self.pool.retire(sequence.request_id)
        else:
            self.pool.free(sequence.request_id)

    def detach(self, sequence: Sequence) -> None:
        """Take a computed prompt out of all queues but leave it its blocks: its KV is held until it is fetched."""
        self._take_out(sequence)
        self.held.hold(sequence.request_id, self.pool.held_blocks(sequence.request_id))

    def _take_out(self, sequence: Sequence) -> None:
        for queue in (self.running, self.arrived, self.waiting, self.held_back):
            if sequence in queue:
                queue.remove(sequence)
                return

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be computed, the preempted ones included."""
        return len(self.waiting) + len(self.held_back)

    @property
    def preempted_waiting(self) -> bool:
        """Whether a preempted sequence waits for memory; it goes before any new reservation."""
        return bool(self.waiting) and self.waiting[0].status is Status.PREEMPTED

    def next_step(self) -> Step | None:
        """The next step, or None when there is nothing to do (or nothing that fits).

        Afterwards `preempted` lists the sequences that lost their blocks for it.
        """
        self.preempted.clear()
        if not (self.running or self.waiting or self.arrived or self.held_back):
            return None
        while True:
            preempted = len(self.preempted)
            step = self._plan()
            # Where the last running sequence has just given its blocks up, others may be able to use them.
            if step is not None or len(self.preempted) == preempted:
                return step

    def complete(self, step: Step, times: int = 1) -> StepResult:
        """Apply a finished step, or `times` repeats of a decode step; sequences that were removed are left out."""
        tokens: list[Sequence] = []
        full: list[Sequence] = []
        prefilled: list[Sequence] = []
        for sequence, count in step.chunks:
            if sequence.ended:
                continue
            sequence.computed += count
            if sequence.computed == sequence.known:
                sequence.prefilled = True
                sequence.generated += 1
                prefilled.append(sequence)
                tokens.append(sequence)
                if sequence.generated >= sequence.max_tokens:
                    full.append(sequence)
        for sequence in step.decodes:
            if sequence.ended:
                continue
            sequence.computed += times
            sequence.generated += times
            if sequence.computed > sequence.held_tokens:
                held = self._hold(sequence, sequence.computed)
                assert held, "a step was repeated without memory"
            tokens.append(sequence)
            if sequence.generated >= sequence.max_tokens:
                full.append(sequence)
        return StepResult(tokens, full, prefilled)

    # --- repeats ----------------------------------------------------------------------------------------------

    def repeats(self, step: Step) -> int:
        """How many times in a row a decode step, just planned, is the next if nobody comes or leaves; at least 1.

        Its sequences go on alike until one of them has its last token, as long as there is `room`. Who was not
        admitted beside them stays out: seats and budget remain as they are, and free memory only shrinks.
        """
        return 1 if self.preempted else min([s.max_tokens - s.generated for s in step.decodes])

    def slack(self, step: Step) -> int:
        """How many repeats of a decode step, the present one included, fit into the blocks that are held."""
        return min([s.held_tokens - s.computed for s in step.decodes])

    def room(self, step: Step, most: int) -> int:
        """How many of `most` repeats of a decode step, the present one included, have memory; at least 1."""
        if self._has_room(step, most):
            return most
        enough, too_many = 1, most
        while too_many - enough > 1:
            middle = (enough + too_many) // 2
            if self._has_room(step, middle):
                enough = middle
            else:
                too_many = middle
        return enough

    def _has_room(self, step: Step, repeats: int) -> bool:
        return self.pool.room_for([(s.request_id, s.computed + repeats) for s in step.decodes])

    def repeat(self, step: Step, times: int) -> None:
        """`times` repeats of a decode step are over, and it runs once more."""
        for sequence in step.decodes:
            sequence.computed += times
            sequence.generated += times
            held = self._hold(sequence, sequence.computed + 1)
            assert held, "a step was repeated without memory"

    # --- planning ---------------------------------------------------------------------------------------------

    def _plan(self) -> Step | None:
        if self.config.policy == "prefill_first":
            return self._prefill_step() or self._running_step(admit=False)
        return self._running_step(admit=True)

    def _prefill_step(self) -> Step | None:
        """Whole prompts up to the budget (one prompt larger than the budget goes alone); None when none fits."""
        chunks: list[tuple[Sequence, int]] = []
        budget = self.config.max_num_batched_tokens
        keep = int(self.pool.num_blocks * PREFILL_FIRST_WATERMARK)
        bounded = self.held.max_blocks is not None
        while len(self.running) < self.config.max_num_seqs:
            queue = self._next_queue() if bounded else self.waiting
            if not queue:
                break
            sequence = queue[0]
            if chunks and sequence.known > budget:
                break
            spare = keep if self.running else 0
            if self.pool.missing(sequence.request_id, sequence.known) > self.pool.free_blocks - spare:
                break
            self.pool.grow(sequence.request_id, sequence.known)
            self._admit(queue.popleft())
            chunks.append((sequence, sequence.known))
            budget -= sequence.known
        return Step(tuple(chunks), ()) if chunks else None

    def _running_step(self, *, admit: bool) -> Step | None:
        chunks: list[tuple[Sequence, int]] = []
        budget = self.config.max_num_batched_tokens
        decodes = [s for s in self.running[:budget] if s.prefilled and s.computed < s.held_tokens]
        preempted = False
        if len(decodes) < len(self.running) and len(decodes) < budget:
            decodes.clear()
            preempted = self._plan_running(chunks, decodes)
        budget -= sum([count for _, count in chunks]) + len(decodes)
        if not preempted:
            budget = self._admit_arrived(decodes, budget)
            if admit and (self.waiting or self.held_back):
                self._admit_waiting(chunks, budget)
        if not chunks and not decodes:
            return None
        return Step(tuple(chunks), tuple(decodes))

    def _plan_running(self, chunks: list[tuple[Sequence, int]], decodes: list[Sequence]) -> bool:
        """Plan for the running sequences, in order of admission; whether any had to be preempted."""
        budget = self.config.max_num_batched_tokens
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            count = 1 if sequence.prefilled else min(sequence.known - sequence.computed, budget)
            if not self._hold(sequence, sequence.computed + count):
                preempted = True
                self._preempt_last()
                continue
            budget -= count
            index += 1
            if sequence.prefilled:
                decodes.append(sequence)
            else:
                chunks.append((sequence, count))
        return preempted

    def _hold(self, sequence: Sequence, tokens: int) -> bool:
        """Let a sequence's blocks hold `tokens`; False when too few are free."""
        if tokens <= sequence.held_tokens:
            return True
        if not self.pool.grow(sequence.request_id, tokens):
            return False
        sequence.held_tokens = self.pool.held_tokens(sequence.request_id)
        return True

    def _admit_arrived(self, decodes: list[Sequence], budget: int) -> int:
        """Returns what is left of the budget."""
        while self.arrived and budget > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = self.arrived[0]
            if not self._hold(sequence, sequence.computed + 1):
                if self.running or len(self.arrived) == 1:
                    return budget
                # Arrived KV fills the memory and nobody runs: without room for a token nobody ever would.
                self._preempt(self.arrived.pop())
                continue
            self._admit(self.arrived.popleft())
            decodes.append(sequence)
            budget -= 1
        return budget

    def _admit_waiting(self, chunks: list[tuple[Sequence, int]], budget: int) -> None:
        bounded = self.held.max_blocks is not None
        while budget > 0 and len(self.running) < self.config.max_num_seqs:
            queue = self._next_queue() if bounded else self.waiting
            if not queue:
                return
            sequence = queue[0]
            count = min(sequence.known - sequence.computed, budget)
            if self.pool.missing(sequence.request_id, sequence.known) > self.pool.free_blocks:
                return
            self.pool.grow(
                sequence.request_id, sequence.known if sequence.leaves_in_parts else sequence.computed + count
            )
            self._admit(queue.popleft())
            chunks.append((sequence, count))
            budget -= count

    def _next_queue(self) -> deque[Sequence]:
        """The queue whose head is to be started next; empty when nobody is.

        Prompts for hand-over keep their order among each other. One that was preempted has been started before.
        """
        if self.held_back and not self.preempted_waiting and self._may_start(self.held_back[0]):
            return self.held_back
        while self.waiting and self.waiting[0].hand_over and not self.preempted_waiting:
            if not self.held_back and self._may_start(self.waiting[0]):
                break
            self.held_back.append(self.waiting.popleft())
        return self.waiting

    def _may_start(self, prompt: Sequence) -> bool:
        return self.held.may_start(self.pool.blocks_for(prompt.prompt_tokens))

    def _admit(self, sequence: Sequence) -> None:
        if sequence.hand_over and sequence.status is Status.WAITING:
            self.held.start(sequence.request_id, self.pool.blocks_for(sequence.prompt_tokens))
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def _preempt_last(self) -> Sequence:
        """There is one: who asks for memory, failing others, since prompts that keep theirs never ask."""
        last = next(n for n in reversed(range(len(self.running))) if not self.running[n].leaves_in_parts)
        victim = self.running.pop(last)
        self._preempt(victim)
        return victim

    def _preempt(self, victim: Sequence) -> None:
        self.pool.free(victim.request_id)
        victim.held_tokens = 0
        victim.status = Status.PREEMPTED
        victim.computed = 0
        victim.prefilled = False
        victim.preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(victim)
        if victim.gives_up:
            victim.ended = True
        else:
            self.waiting.appendleft(victim)

    def check_integrity(self) -> None:
        """No sequence stands in two places, running ones hold the blocks of what they computed, limits are kept."""
        everyone = [*self.running, *self.waiting, *self.arrived, *self.held_back]
        assert len({id(s) for s in everyone}) == len(everyone), "a sequence stands in two queues"
        assert len(self.running) <= self.config.max_num_seqs, "more sequences than seats"
        for sequence in [*self.running, *self.arrived]:
            assert self.pool.missing(sequence.request_id, sequence.computed) == 0, "computed tokens without blocks"
        assert all(sequence.status is Status.RUNNING for sequence in self.running), "running, but not said so"
        owners = self.pool.owners()
        for sequence in [*self.waiting, *self.held_back]:
            assert sequence.computed == 0
            assert sequence.request_id not in owners, "a waiting sequence holds blocks"
        self.held.check_integrity()
        for request_id, blocks in self.held.held().items():
            assert self.pool.held_blocks(request_id) == blocks, "held KV without its blocks"
