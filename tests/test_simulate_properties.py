"""Whole clusters under random loads: nothing is lost, shared, leaked or stuck, whatever is aborted, late or dies."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.deployments import Admission, FirstToken, Preemption, TransferMode
from emulator.core.effects import OpenTicket
from emulator.core.lengths import LengthPair
from emulator.core.records import Record, write_rows
from emulator.core.run_spec import NodeSpec, RunSpec
from emulator.core.specs import Scale
from emulator.core.traffic import UniformLength
from emulator.core.workload import PlannedRequest, UserPlan
from emulator.simulate import Simulated, SimulatedNode, Simulation, simulate
from tests.builders import ALL_OUTPUT, KV_BYTES_PER_TOKEN, load_plan, node_spec, run_spec, step_times
from tests.disturbed import ABORTS, DELAYS_S, LOSSES, SlowControl, assert_nothing_is_held, lost, run_disturbed
from tests.drawn import (
    EVERY_ADMISSION,
    EVERY_FIRST_TOKEN,
    EVERY_PREEMPTION,
    EVERY_TRANSFER_MODE,
    FIRST_TOKENS,
    admissions,
    overlaps,
    ways_of,
)
from tests.examples import drawn_slowly
from tests.handed_over import handed_over

DRAIN_S = 2_000.0


# --- what runs --------------------------------------------------------------------------------------------------


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    """Prompt and output tokens; rarely none at all, or more than anything holds."""
    prompt = draw(st.one_of(st.integers(1, 120), st.sampled_from([0, 1, 16, 500])))
    return prompt, draw(st.integers(0, 20) if prompt % 7 == 0 else st.integers(1, 20))


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[PlannedRequest], list[UserPlan]]:
    """Bursts of requests on a grid of instants, so that many coincide, and users who wait for their last one."""
    instants = draw(st.lists(st.integers(0, 40), min_size=0, max_size=14))
    requests = []
    for n, instant in enumerate(sorted(instants)):
        prompt, output = draw(sizes())
        requests.append(PlannedRequest(f"chat-{n:05d}", "chat", instant * 0.01, prompt, output))
    lengths = LengthPair(UniformLength(low=1, high=90), UniformLength(low=1, high=12))
    users = [
        UserPlan("users", user, 0.01 * user, draw(st.sampled_from([0.0, 0.05])), lengths, seed=user)
        for user in range(draw(st.integers(0 if requests else 1, 3)))
    ]
    return requests, users


@st.composite
def colocated_nodes(draw: st.DrawFn) -> list[NodeSpec]:
    """One to three colocated nodes of one make."""
    cost = step_times(prefill_ms_per_token=0.5, prefill_base_ms=1.0, decode_ms=10.0, decode_ms_per_sequence=0.5)
    shape = node_spec(
        cost=cost,
        policy=draw(st.sampled_from(["chunked", "prefill_first"])),
        max_num_batched_tokens=draw(st.integers(1, 200)),
        max_num_seqs=draw(st.integers(1, 6)),
        kv_blocks=draw(st.integers(8, 40)),
        block_size=draw(st.sampled_from([1, 4, 16])),
    )
    return [msgspec.structs.replace(shape, name=f"colocated-{n}") for n in range(draw(st.integers(1, 3)))]


@st.composite
def disaggregated_nodes(draw: st.DrawFn) -> list[NodeSpec]:
    """One to three prefill and one to three decode nodes; pools from far too small to roomy."""
    cost = step_times(prefill_ms_per_token=0.5, prefill_base_ms=1.0, decode_ms=10.0, decode_ms_per_sequence=0.5)
    block_size = draw(st.sampled_from([1, 4, 16]))
    shapes = {}
    for role in ("prefill", "decode"):
        shapes[role] = node_spec(
            role="prefill" if role == "prefill" else "decode",
            cost=cost,
            max_num_batched_tokens=draw(st.integers(1, 200)),
            max_num_seqs=draw(st.integers(1, 6)),
            kv_blocks=draw(st.integers(8, 40)),
            block_size=block_size,
            num_reserved_decode_tokens=draw(st.sampled_from([0, 4, ALL_OUTPUT])),
            **draw(overlaps()),
        )
    bound = draw(st.one_of(st.none(), st.integers(1, 20)))
    shapes["prefill"] = msgspec.structs.replace(shapes["prefill"], max_held_blocks=bound)
    return [
        msgspec.structs.replace(shape, name=f"{role}-{n}")
        for role, shape in shapes.items()
        for n in range(draw(st.integers(1, 3)))
    ]


ANY_NODES = st.one_of(colocated_nodes(), disaggregated_nodes())


@st.composite
def runs(draw: st.DrawFn, nodes: st.SearchStrategy[list[NodeSpec]] = ANY_NODES) -> RunSpec:
    """A cluster under a load, with a drain long enough to serve everything one by one."""
    requests, users = draw(loads())
    cluster = draw(nodes)
    run = run_spec(
        cluster,
        load_plan(requests, users=users, duration_s=0.5, drain_s=DRAIN_S),
        payload_bytes_per_s=draw(st.sampled_from([1e5, 1e7, 1e10])),
        delay_s=draw(st.sampled_from([0.0, 0.003])),
        routing=draw(st.sampled_from(["least_loaded", "round_robin"])),
        scale=Scale(time=draw(st.sampled_from([1.0, 3.0])), bytes=draw(st.sampled_from([1.0, 7.0]))),
        first_token=draw(FIRST_TOKENS),
        admission=draw(admissions(cluster)),
    )
    return draw(ways_of(run))


# --- what is checked --------------------------------------------------------------------------------------------


def assert_ended_once(record: Record) -> None:
    """Completed with exactly its tokens, in order; or failed with a reason."""
    times = record.times()
    assert len(times) == record.output_tokens
    assert all(times[1:] >= times[:-1])
    if record.outcome == "completed":
        assert record.output_tokens == record.max_tokens, f"{record.request_id} lost or gained a token"
        assert record.finish_s is not None
        assert record.finish_s >= times[-1]
    else:
        assert record.outcome == "failed"
        assert record.reason


def assert_budgets_kept(run: RunSpec, simulated: Simulated) -> None:
    nodes = {node.name: node for node in run.nodes}
    longest = max((r.prompt_tokens + r.max_tokens for r in simulated.records), default=0)
    for step in simulated.steps:
        node = nodes[step.node]
        assert 1 <= step.requests <= node.max_num_seqs
        if node.policy == "prefill_first":
            assert step.kind != "mixed"
            assert step.prefill_tokens <= max(node.max_num_batched_tokens, longest)
        else:
            assert step.prefill_tokens + step.decode_batch <= node.max_num_batched_tokens


def _refusal(run: RunSpec, prompt_tokens: int, max_tokens: int) -> bool:
    """Whether some node of the way can never serve these lengths."""
    if min(prompt_tokens, max_tokens) < 1:
        return True
    alone = _ends_with_its_prefill(run, max_tokens)
    for node in run.nodes:
        prompt_alone = node.role == "prefill" and not alone and run.router.preemption == "recompute"
        here = prompt_tokens + (0 if prompt_alone else max_tokens)
        if -(-here // node.block_size) > node.kv_blocks and not (alone and node.role == "decode"):
            return True
    return False


def _ends_with_its_prefill(run: RunSpec, max_tokens: int) -> bool:
    """Whether the prefill node streams all that is wanted, so that no KV moves."""
    return run.first_token == "prefill" and max_tokens == 1


# --- properties -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@drawn_slowly(250)
@given(runs())
def test_every_request_ends_exactly_once_and_leaves_nothing_behind(run: RunSpec) -> None:
    simulation = Simulation(run, after_event=Simulation.check_integrity)
    simulated = simulation.run()
    assert_nothing_is_held(simulation)
    assert_budgets_kept(run, simulated)
    assert simulation.recorder.strays == 0
    ids = [record.request_id for record in simulated.records]
    assert len(set(ids)) == len(ids) >= len(run.load.open)
    for record in simulated.records:
        assert_ended_once(record)
        refused = _refusal(run, record.prompt_tokens, record.max_tokens)
        assert (record.outcome == "failed") is refused, record.reason
        moves = run.router.disaggregated and not (refused or _ends_with_its_prefill(run, record.max_tokens))
        assert record.kv_bytes == (record.prompt_tokens * KV_BYTES_PER_TOKEN if moves else 0)


@drawn_slowly(40)
@given(runs())
def test_the_same_run_is_the_same_to_the_last_bit_whatever_its_scale(run: RunSpec) -> None:
    first, second = simulate(run), simulate(msgspec.structs.replace(run, scale=Scale()))
    assert write_rows(first.records) == write_rows(second.records)
    assert write_rows(first.steps) == write_rows(second.steps)
    assert first.preemptions == second.preemptions


@drawn_slowly(60)
@given(runs(disaggregated_nodes()))
def test_a_prefill_node_never_computes_a_prompt_token_twice(run: RunSpec) -> None:
    """So KV that has left already is never computed again, whatever is held there; but for each that is moved anew."""
    simulation = CountedTickets(run)
    simulated = simulation.run()
    prefills = [node.engine for node in simulation.nodes.values() if node.engine.node.role == "prefill"]
    assert sum(engine.scheduler.num_preemptions for engine in prefills) == 0
    by_decode = {node.name for node in run.nodes if node.role == "decode"}
    computed = sum(step.prefill_tokens for step in simulated.steps if step.node not in by_decode)
    refused = sum(r.prompt_tokens for r in simulated.records if r.outcome == "failed")
    completed = sum(r.prompt_tokens for r in simulated.records if r.outcome == "completed")
    again = sum(r.kv_bytes_again for r in simulated.records) // KV_BYTES_PER_TOKEN
    if run.router.preemption == "prefill":
        again += sum(_prefilled_for_the_last_token(simulation, r) for r in simulated.records)
    assert completed + again <= computed <= completed + again + refused


def _prefilled_for_the_last_token(simulation: CountedTickets, record: Record) -> int:
    """The prompt of an attempt that is over with the prefill node's token: no KV is moved, so no ticket issued."""
    moves = simulation.tickets[record.request_id] == 1 + record.preemptions
    return 0 if moves or not record.preemptions else record.prompt_tokens + record.max_tokens - 1


@drawn_slowly(80)
@given(runs(), ABORTS.filter(bool))
def test_aborts_at_any_instant_leave_nothing_behind(run: RunSpec, aborts: list[tuple[float, int]]) -> None:
    simulation = Simulation(run, after_event=Simulation.check_integrity)
    simulated = run_disturbed(simulation, aborts)
    assert_nothing_is_held(simulation)
    assert simulation.recorder.strays == 0
    for record in simulated.records:
        assert_ended_once(record)
        if record.outcome == "failed" and record.reason != "aborted":
            assert _refusal(run, record.prompt_tokens, record.max_tokens)


class CountedTickets(Simulation):
    """How many tickets were issued for each request, and all invariants after every event."""

    def __init__(self, run: RunSpec) -> None:
        self.tickets: Counter[str] = Counter()
        super().__init__(run, after_event=Simulation.check_integrity)

    def _open(self, node: SimulatedNode, effect: OpenTicket) -> None:
        self.tickets[effect.request_id.partition("~")[0]] += 1
        super()._open(node, effect)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", list(itertools.product(EVERY_FIRST_TOKEN, EVERY_ADMISSION, EVERY_TRANSFER_MODE, EVERY_PREEMPTION)), ids=str
)
@drawn_slowly(25)
@given(runs(disaggregated_nodes()), ABORTS)
def test_however_requests_are_handed_over_none_is_stuck_and_none_asks_for_its_kv_twice(
    way: tuple[FirstToken, Admission, TransferMode, Preemption], run: RunSpec, aborts: list[tuple[float, int]]
) -> None:
    """Once for each attempt, to be exact, where what loses its memory is prefilled anew."""
    first_token, admission, transfer_mode, preemption = way
    run = handed_over(
        run, first_token=first_token, admission=admission, transfer_mode=transfer_mode, preemption=preemption
    )
    simulation = CountedTickets(run)
    simulated = run_disturbed(simulation, aborts)
    assert_nothing_is_held(simulation)
    for record in simulated.records:
        assert_ended_once(record)
        assert record.outcome == "completed" or record.reason == "aborted" or _refused(simulation, record)
        tickets, attempts = simulation.tickets[record.request_id], 1
        if preemption == "prefill":
            attempts += record.preemptions
            assert record.preemptions <= record.output_tokens, "no attempt without a token"
        assert tickets <= attempts
        if record.kv_bytes and record.outcome == "completed":
            streamed_by_prefill = first_token == "prefill" and attempts > 1
            assert tickets in ((attempts - 1, attempts) if streamed_by_prefill else (attempts,))
    assert sum(record.preemptions for record in simulated.records) == simulated.preemptions
    if all(node.num_reserved_decode_tokens == ALL_OUTPUT for node in run.nodes if node.role == "decode"):
        assert simulated.preemptions == 0, "the whole output was reserved"


def _refused(simulation: Simulation, record: Record) -> bool:
    return _refusal(simulation.run_spec, record.prompt_tokens, record.max_tokens)


@pytest.mark.slow
@drawn_slowly(200)
@given(
    runs(),
    LOSSES.filter(bool),
    ABORTS,
)
def test_lost_nodes_cost_a_retry_or_a_failure_with_its_reason_and_survivors_nothing(
    run: RunSpec, losses: list[tuple[float, int, bool]], aborts: list[tuple[float, int]]
) -> None:
    simulation = Simulation(run, after_event=Simulation.check_integrity)
    simulated = run_disturbed(simulation, aborts, losses)
    assert_nothing_is_held(simulation, lost=lost(simulation))
    assert simulation.recorder.strays == 0
    for record in simulated.records:
        assert_ended_once(record)
        if record.outcome == "failed":
            known = ("was lost", "node is left", "aborted", "need KV for", "must be at least 1")
            assert any(words in record.reason for words in known), record.reason


@pytest.mark.slow
@drawn_slowly(250)
@given(
    runs(),
    DELAYS_S,
    ABORTS,
    LOSSES,
)
def test_messages_that_cross_each_other_on_the_way_lose_and_leak_nothing(
    run: RunSpec, delays_s: list[float], aborts: list[tuple[float, int]], losses: list[tuple[float, int, bool]]
) -> None:
    simulation = SlowControl(run, delays_s)
    simulated = run_disturbed(simulation, aborts, losses)
    simulation.settle()
    assert_nothing_is_held(simulation, lost=lost(simulation))
    assert simulation.recorder.strays == 0
    for record in simulated.records:
        assert_ended_once(record)
        if not (losses or record.reason == "aborted"):
            refused = _refusal(run, record.prompt_tokens, record.max_tokens)
            assert (record.outcome == "failed") is refused, record.reason
