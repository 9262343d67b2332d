"""Continuous batching: both policies step by step, and invariants under random requests, aborts and tiny pools."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.deployments import Policy
from emulator.core.kv_pool import KvPool
from emulator.core.scheduler import Scheduler, SchedulerConfig
from emulator.core.sequence import Sequence, Status, Step
from tests.examples import examples

MANY_STEPS = 20_000


@dataclass
class Bench:
    """A scheduler with somebody who completes its steps, ends its sequences and watches what happens."""

    policy: Policy = "chunked"
    max_num_batched_tokens: int = 100
    max_num_seqs: int = 8
    blocks: int = 100
    block_size: int = 1
    sequences: list[Sequence] = field(default_factory=list)
    reserved: list[Sequence] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    admitted: list[str] = field(default_factory=list)
    recomputed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.pool = KvPool(self.blocks, self.block_size)
        limits = SchedulerConfig(self.policy, self.max_num_batched_tokens, self.max_num_seqs)
        self.scheduler = Scheduler(limits, self.pool)

    def add(self, prompt_tokens: int, max_tokens: int, name: str = "") -> Sequence:
        """A request to be computed from its first token."""
        sequence = Sequence(name or f"s{len(self.sequences)}", prompt_tokens, max_tokens)
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def reserve(self, prompt_tokens: int, max_tokens: int, name: str = "") -> Sequence | None:
        """Blocks for a prompt whose KV is on its way; None when they are not free."""
        sequence = Sequence(name or f"s{len(self.sequences)}", prompt_tokens, max_tokens, generated=1)
        if not self.pool.reserve(sequence.request_id, prompt_tokens):
            return None
        self.sequences.append(sequence)
        self.tokens[sequence.request_id] = 1
        self.reserved.append(sequence)
        return sequence

    def arrive(self) -> None:
        """The KV of the oldest reservation is here, and with it the first token."""
        sequence = self.reserved.pop(0)
        self.pool.claim(sequence.request_id)
        self.scheduler.add_with_kv(sequence)
        self._end_if_done(sequence)

    def plan(self) -> Step | None:
        """The next step, with everything checked that must hold of it."""
        running_before = list(self.scheduler.running)
        new_before = {s.request_id for s in self.scheduler.waiting if s.status is Status.WAITING}
        step = self.scheduler.next_step()
        self.check()
        for victim in self.scheduler.preempted:
            self.recomputed[victim.request_id] = 0
        if step is not None:
            self._check_step(step, running_before)
            first_chunks = [s.request_id for s, _ in step.chunks if s.request_id in new_before]
            self.admitted += [name for name in first_chunks if name not in self.admitted]
        return step

    def finish(self, step: Step) -> None:
        """Apply a step's outcome and let sequences end that have all their tokens."""
        for sequence, count in step.chunks:
            self.recomputed[sequence.request_id] += count
        result = self.scheduler.complete(step)
        for sequence in result.prefilled:
            known_before = sequence.prompt_tokens + sequence.generated - 1
            assert self.recomputed[sequence.request_id] == known_before, "not every known token was computed once"
        for sequence in result.tokens:
            self.tokens[sequence.request_id] += 1
            self._end_if_done(sequence)
        self.check()

    def abort(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        if not sequence.ended:
            if sequence in self.reserved:
                self.reserved.remove(sequence)
            self.scheduler.remove(sequence, Status.FINISHED_ABORTED)
        self.check()

    def drain(self) -> None:
        """Run until nothing is left; fails when the scheduler has nothing to do although something waits."""
        for _ in range(MANY_STEPS):
            step = self.plan()
            if step is not None:
                self.finish(step)
            elif self.reserved:
                self.arrive()
            else:
                break
        assert all(s.ended for s in self.sequences), "the scheduler is stuck"

    def check(self) -> None:
        """Every invariant, and that blocks belong to sequences that are here."""
        self.pool.check_integrity()
        self.scheduler.check_integrity()
        assert self.pool.owners() <= {s.request_id for s in self.sequences if not s.ended}
        for sequence in self.sequences:
            assert sequence.generated == self.tokens[sequence.request_id], "a token was lost or made twice"

    def _end_if_done(self, sequence: Sequence) -> None:
        if sequence.generated >= sequence.max_tokens:
            self.scheduler.remove(sequence, Status.FINISHED_LENGTH)

    def _check_step(self, step: Step, running_before: list[Sequence]) -> None:
        inside = [s for s, _ in step.chunks] + list(step.decodes)
        assert inside, "an empty step"
        assert len({id(s) for s in inside}) == len(inside), "a sequence computes twice in one step"
        assert all(s in self.scheduler.running for s in inside)
        newcomers = [s for s in inside if s not in running_before]
        if self.policy == "prefill_first":
            assert not (step.chunks and step.decodes), "prefill_first mixed a step"
            assert all(count == s.known for s, count in step.chunks), "prefill_first split a prompt"
            assert step.prefill_tokens <= self.max_num_batched_tokens or len(step.chunks) == 1
        else:
            assert step.prefill_tokens + len(step.decodes) <= self.max_num_batched_tokens
            if newcomers:
                left_out = [s for s in running_before if s in self.scheduler.running and s not in inside]
                assert not left_out, "a newcomer was served before a running sequence"
        if self.scheduler.preempted and any(s in running_before for s in inside):
            assert not newcomers, "a step that took blocks from one admitted another"


def _table(bench: Bench, steps: int) -> list[tuple[dict[str, int], list[str]]]:
    """The next steps as (prompt tokens by sequence, decoding sequences)."""
    rows = []
    for _ in range(steps):
        step = bench.plan()
        assert step is not None
        chunks = {s.request_id: count for s, count in step.chunks}
        rows.append((chunks, [s.request_id for s in step.decodes]))
        bench.finish(step)
    return rows


# --- the two policies, step by step -------------------------------------------------------------------------------


def test_chunked_serves_running_first_and_gives_the_rest_of_its_budget_to_the_next() -> None:
    bench = Bench(max_num_batched_tokens=100, blocks=400)
    bench.add(80, 4, "a")
    bench.add(150, 2, "b")
    assert _table(bench, 4) == [
        ({"a": 80, "b": 20}, []),
        ({"b": 99}, ["a"]),
        ({"b": 31}, ["a"]),
        ({}, ["a", "b"]),
    ]
    assert bench.plan() is None
    assert bench.tokens == {"a": 4, "b": 2}


def test_prefill_first_computes_whole_prompts_and_lets_decodes_wait() -> None:
    bench = Bench(policy="prefill_first", max_num_batched_tokens=100, blocks=1_000)
    bench.add(30, 4, "a")
    assert _table(bench, 2) == [({"a": 30}, []), ({}, ["a"])]
    for name, prompt_tokens in (("b", 60), ("c", 40), ("d", 50), ("giant", 250), ("e", 10)):
        bench.add(prompt_tokens, 3, name)
    assert _table(bench, 5) == [
        ({"b": 60, "c": 40}, []),
        ({"d": 50}, []),
        ({"giant": 250}, []),
        ({"e": 10}, []),
        ({}, ["a", "b", "c", "d", "giant", "e"]),
    ]


def test_decodes_beyond_the_budget_wait_their_turn_in_order_of_admission() -> None:
    bench = Bench(max_num_batched_tokens=2)
    for name in ("a", "b", "c"):
        bench.add(1, 3, name)
    assert _table(bench, 5) == [
        ({"a": 1, "b": 1}, []),
        ({}, ["a", "b"]),
        ({}, ["a", "b"]),
        ({"c": 1}, []),
        ({}, ["c"]),
    ]


def test_seats_limit_how_many_run_at_a_time() -> None:
    bench = Bench(max_num_seqs=2)
    for name in ("a", "b", "c"):
        bench.add(5, 2, name)
    assert _table(bench, 3) == [({"a": 5, "b": 5}, []), ({}, ["a", "b"]), ({"c": 5}, [])]


@pytest.mark.parametrize("policy", ["chunked", "prefill_first"])
def test_a_prompt_that_must_wait_holds_back_smaller_ones_behind_it(policy: Policy) -> None:
    bench = Bench(policy=policy, blocks=100)
    bench.add(60, 2, "a")
    bench.add(50, 2, "big")
    bench.add(5, 2, "small")
    assert _table(bench, 3) == [({"a": 60}, []), ({}, ["a"]), ({"big": 50, "small": 5}, [])]


def test_prefill_first_keeps_one_percent_free_for_those_that_run() -> None:
    bench = Bench(policy="prefill_first", blocks=200, max_num_batched_tokens=1_000)
    bench.add(100, 5, "a")
    assert _table(bench, 1) == [({"a": 100}, [])]
    bench.add(99, 5, "b")
    assert _table(bench, 1) == [({}, ["a"])], "99 blocks would leave 1 of 200 free, less than the watermark of 2"


def test_the_last_admitted_loses_its_blocks_and_recomputes_prompt_and_tokens() -> None:
    bench = Bench(blocks=25)
    bench.add(10, 9, "a")
    last = bench.add(10, 9, "b")
    assert _table(bench, 4) == [({"a": 10, "b": 10}, []), ({}, ["a", "b"]), ({}, ["a", "b"]), ({}, ["a"])]
    assert (last.status, last.preemptions, last.generated) == (Status.PREEMPTED, 1, 3)
    assert _table(bench, 5) == [({}, ["a"])] * 5, "13 known tokens do not fit beside the first"
    assert _table(bench, 1) == [({"b": 13}, [])], "the prompt and the three tokens it had made"
    bench.drain()
    assert bench.tokens == {"a": 9, "b": 9}


def test_preempted_sequences_keep_their_order_ahead_of_those_that_never_ran() -> None:
    bench = Bench(blocks=30)
    for name in ("a", "b", "c", "d"):
        bench.add(10, 20, name)
    _table(bench, 1)
    assert [s.request_id for s in bench.scheduler.waiting] == ["d"]
    _table(bench, 8)
    assert [s.request_id for s in bench.scheduler.waiting] == ["b", "c", "d"]
    bench.drain()
    assert bench.tokens == {"a": 20, "b": 20, "c": 20, "d": 20}


def test_nobody_is_admitted_in_a_step_that_took_blocks_from_another() -> None:
    bench = Bench(blocks=22)
    bench.add(10, 9, "a")
    bench.add(10, 9, "b")
    assert _table(bench, 1) == [({"a": 10, "b": 10}, [])]
    bench.reserve(2, 9, "received")
    bench.arrive()
    assert _table(bench, 2) == [({}, ["a"]), ({}, ["a", "received"])], "b gave its blocks for a, not for a newcomer"


# --- KV that was received -----------------------------------------------------------------------------------------


def test_received_kv_decodes_in_the_next_step_ahead_of_waiting_prompts() -> None:
    bench = Bench(max_num_seqs=2)
    bench.add(5, 3, "a")
    bench.add(5, 3, "b")
    assert _table(bench, 1) == [({"a": 5, "b": 5}, [])]
    bench.add(5, 3, "c")
    assert bench.reserve(7, 3, "received") is not None
    bench.arrive()
    assert _table(bench, 4) == [({}, ["a", "b"]), ({}, ["a", "b"]), ({"c": 5}, ["received"]), ({}, ["received", "c"])]


def test_when_the_only_running_sequence_gives_its_blocks_up_received_kv_uses_them_at_once() -> None:
    bench = Bench(blocks=10)
    assert bench.reserve(5, 5, "first") is not None
    bench.arrive()
    assert _table(bench, 1) == [({}, ["first"])]
    assert bench.reserve(4, 5, "second") is not None
    bench.arrive()
    assert _table(bench, 1) == [({}, ["second"])], "all 10 blocks are taken; with nobody running nothing would end"
    bench.drain()


def test_received_kv_that_fills_the_memory_loses_its_youngest_so_that_someone_can_run() -> None:
    bench = Bench(blocks=10)
    for name in ("a", "b"):
        assert bench.reserve(5, 4, name) is not None
    bench.arrive()
    bench.arrive()
    assert _table(bench, 1) == [({}, ["a"])]
    assert [s.request_id for s in bench.scheduler.waiting] == ["b"]
    bench.drain()
    assert bench.tokens == {"a": 4, "b": 4}


# --- aborts and endings -------------------------------------------------------------------------------------------


def test_a_sequence_aborted_while_its_step_runs_gets_no_token_and_holds_nothing() -> None:
    bench = Bench()
    kept, aborted = bench.add(5, 3, "kept"), bench.add(5, 3, "aborted")
    step = bench.plan()
    assert step is not None
    bench.abort(aborted)
    bench.finish(step)
    assert (kept.generated, aborted.generated) == (1, 0)
    assert bench.pool.owners() == {"kept"}


def test_a_detached_sequence_leaves_its_seat_but_keeps_its_blocks() -> None:
    bench = Bench(max_num_seqs=1)
    held = bench.add(5, 3, "held")
    held.hand_over = True
    step = bench.plan()
    assert step is not None
    bench.finish(step)
    bench.scheduler.detach(held)
    bench.add(5, 3, "next")
    assert _table(bench, 1) == [({"next": 5}, [])]
    assert bench.pool.owners() == {"held", "next"}


# --- invariants ---------------------------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 12))
EVENTS = st.one_of(
    st.tuples(st.just("add"), SIZES),
    st.tuples(st.just("reserve"), SIZES),
    st.tuples(st.sampled_from(["arrive", "step", "step", "step"]), st.just((0, 0))),
    st.tuples(st.sampled_from(["abort", "abort during step"]), st.tuples(st.integers(0, 30), st.just(0))),
)


@examples(400)
@given(
    events=st.lists(EVENTS, max_size=60),
    policy=st.sampled_from(["chunked", "prefill_first"]),
    max_num_batched_tokens=st.integers(1, 60),
    max_num_seqs=st.integers(1, 5),
    spare_blocks=st.integers(0, 12),
    block_size=st.sampled_from([1, 4]),
)
def test_budgets_order_and_tokens_are_kept_whatever_happens(
    *,
    events: list[tuple[str, tuple[int, int]]],
    policy: Policy,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    spare_blocks: int,
    block_size: int,
) -> None:
    needed = -(-(40 + 12) // block_size)
    bench = Bench(policy, max_num_batched_tokens, max_num_seqs, needed + spare_blocks, block_size)
    for event, (first, second) in events:
        if event == "add":
            bench.add(first, second)
        elif event == "reserve":
            bench.reserve(first, second)
        elif event == "arrive" and bench.reserved:
            bench.arrive()
        elif event == "abort" and bench.sequences:
            bench.abort(bench.sequences[first % len(bench.sequences)])
        elif event in ("step", "abort during step") and (step := bench.plan()) is not None:
            if event == "abort during step":
                bench.abort(bench.sequences[first % len(bench.sequences)])
            bench.finish(step)
    bench.drain()
    assert bench.pool.used_blocks == 0
    order = [s.request_id for s in bench.sequences]
    assert bench.admitted == sorted(bench.admitted, key=order.index), "not first come first served"
    for sequence in bench.sequences:
        if sequence.status is Status.FINISHED_LENGTH:
            assert sequence.generated == sequence.max_tokens


# --- repeats --------------------------------------------------------------------------------------------------------


def test_a_decode_step_repeats_until_somebody_has_all_tokens() -> None:
    bench = Bench(blocks=1_000)
    bench.add(10, 9, "a")
    bench.add(10, 30, "b")
    _table(bench, 1)
    step = bench.plan()
    assert step is not None
    assert bench.scheduler.repeats(step) == 8
    assert bench.scheduler.room(step, 8) == 8


@pytest.mark.parametrize(("blocks", "room"), [(6, 4), (7, 4), (8, 8), (9, 8), (20, 20)])
def test_a_decode_step_repeats_as_long_as_there_are_blocks_for_all(blocks: int, room: int) -> None:
    """Two sequences with 8 tokens computed and a third block of 4 each: every fourth step needs one more for either."""
    bench = Bench(blocks=blocks, block_size=4)
    bench.add(7, 40, "a")
    bench.add(7, 40, "b")
    _table(bench, 2)
    step = bench.plan()
    assert step is not None
    assert bench.scheduler.slack(step) == 4
    assert bench.scheduler.room(step, 20) == room


def test_after_a_preemption_a_step_is_not_known_to_repeat() -> None:
    bench = Bench(blocks=21)
    bench.add(10, 30, "a")
    bench.add(10, 30, "b")
    step = None
    while not bench.scheduler.preempted:
        step = bench.plan()
        assert step is not None
        if not bench.scheduler.preempted:
            bench.finish(step)
    assert step is not None
    assert bench.scheduler.repeats(step) == 1


def test_steps_that_are_repeated_in_one_go_end_as_if_one_by_one() -> None:
    one, other = Bench(blocks=100, block_size=4), Bench(blocks=100, block_size=4)
    for bench in (one, other):
        bench.add(5, 40, "a")
        bench.add(9, 40, "b")
        _table(bench, 1)
    step = one.plan()
    assert step is not None
    one.scheduler.repeat(step, 6)
    result = one.scheduler.complete(step, 3)
    _table(other, 9)
    assert [s.request_id for s in result.tokens] == ["a", "b"]
    assert [(s.computed, s.generated) for s in one.sequences] == [(s.computed, s.generated) for s in other.sequences]
    assert one.pool.used_blocks == other.pool.used_blocks
