"""Whole clusters whose nodes may prefill and decode: mixed ones, ones that help out, prompts that stay where they are.

Memory is scarce, so that nodes which wait for each other's would be found waiting for ever.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.bounds import Demand, limits, servable_share
from emulator.core.deployments import Conditional, RoleSwitching
from emulator.core.physics import violations
from emulator.core.records import Record
from emulator.core.roles import Role, sends_kv, takes_in_kv
from emulator.core.run_spec import NodeSpec, RunSpec
from emulator.simulate import Simulation, simulate
from tests import test_simulate_fast as fast
from tests import test_simulate_properties as properties
from tests.builders import ALL_OUTPUT, KV_BYTES_PER_TOKEN, load_plan, node_spec, request, run_spec, step_times
from tests.disturbed import ABORTS, DELAYS_S, LOSSES, SlowControl, assert_nothing_is_held, lost, run_disturbed
from tests.drawn import FIRST_TOKENS, admissions, overlaps, ways_of
from tests.examples import drawn_slowly
from tests.test_simulate_properties import DRAIN_S, loads

ROLES: list[tuple[Role, ...]] = [
    ("mixed",), ("prefill", "mixed"), ("mixed", "decode"), ("prefill", "mixed", "decode"), ("prefill", "decode"),
]  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeSpec]:
    """One to three nodes of each role, all mixed ones being two or three; memory for a few prompts, or for none."""
    cost = step_times(prefill_ms_per_token=0.5, prefill_base_ms=1.0, decode_ms=10.0, decode_ms_per_sequence=0.5)
    block_size, roles = draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from(ROLES))
    overlap = draw(overlaps())
    bound = draw(st.one_of(st.none(), st.integers(1, 40)))
    nodes = []
    for role in roles:
        shape = node_spec(
            role=role,
            cost=cost,
            max_num_batched_tokens=draw(st.integers(1, 200)),
            max_num_seqs=draw(st.integers(1, 6)),
            kv_blocks=draw(st.integers(100, 300)) // block_size,
            block_size=block_size,
            num_reserved_decode_tokens=draw(st.sampled_from([0, 4, ALL_OUTPUT])),
            **overlap,
        )
        count = draw(st.integers(2 if roles == ("mixed",) else 1, 3))
        held = None if role == "decode" else bound
        nodes += [msgspec.structs.replace(shape, name=f"{role}-{n}", max_held_blocks=held) for n in range(count)]
    return nodes


SWITCHINGS = st.builds(
    RoleSwitching,
    max_queued_prompt_tokens=st.sampled_from([1, 50, 200]),
    max_kv_usage=st.sampled_from([0.01, 0.3, 0.9]),
)
CONDITIONALS = st.one_of(
    st.builds(Conditional, eff_isl_threshold=st.integers(1, 100)),
    st.builds(Conditional, max_prefill_queue_size=st.integers(0, 3)),
    st.builds(Conditional, eff_isl_threshold=st.integers(1, 100), max_prefill_queue_size=st.integers(0, 3)),
)


@st.composite
def runs(draw: st.DrawFn, drain_s: float = DRAIN_S) -> RunSpec:
    """A cluster under a load, with or without the rules that let a node do what is not its own."""
    requests, users = draw(loads())
    cluster = draw(clusters())
    run = run_spec(
        cluster,
        load_plan(requests, users=users, duration_s=0.5, drain_s=drain_s),
        payload_bytes_per_s=draw(st.sampled_from([1e5, 1e6, 1e10])),
        delay_s=draw(st.sampled_from([0.0, 0.003])),
        routing=draw(st.sampled_from(["least_loaded", "least_loaded", "round_robin"])),
        first_token=draw(FIRST_TOKENS),
        admission=draw(admissions(cluster)),
        conditional=draw(st.none() | CONDITIONALS),
        role_switching=draw(st.none() | SWITCHINGS) if {n.role for n in cluster} != {"mixed"} else None,
    )
    return draw(ways_of(run))


# --- what is checked --------------------------------------------------------------------------------------------


def _must(run: RunSpec, prompt_tokens: int, max_tokens: int) -> set[str]:
    """The outcomes that a request with these lengths may have if nobody disturbs it."""
    total_tokens = prompt_tokens + max_tokens
    if min(prompt_tokens, max_tokens) < 1:
        return {"failed"}
    switching = run.router.role_switching is not None
    rooms = [(node.role, node.kv_blocks * node.block_size) for node in run.nodes]
    computed = max(room for role, room in rooms if sends_kv(role, switching=switching))
    decoded = max(room for role, room in rooms if takes_in_kv(role, switching=switching))
    if run.first_token == "prefill" and max_tokens == 1:
        return {"completed" if computed >= total_tokens else "failed"}
    if decoded < total_tokens:
        return {"failed"}
    if computed >= (prompt_tokens if run.router.preemption == "recompute" else total_tokens):
        return {"completed"}
    return {"failed", "completed"}  # where it is computed depends on what else there is to do


def _check_record(run: RunSpec, record: Record, *, disturbed: bool = False) -> None:
    properties.assert_ended_once(record)
    assert disturbed or record.outcome in _must(run, record.prompt_tokens, record.max_tokens), record.reason
    if record.outcome == "completed":
        moved = record.prefill_node != record.decode_node
        assert record.kv_bytes == (record.prompt_tokens * KV_BYTES_PER_TOKEN if moved else 0)
        if moved:
            assert (record.prefill_node, record.decode_node) in run.kv_pairs
        elif run.router.conditional is None and run.router.role_switching is None:
            alone = run.first_token == "prefill" and record.max_tokens == 1
            assert alone or (record.decode_node or "").startswith("mixed")


# --- properties -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@drawn_slowly(300)
@given(runs())
def test_every_request_ends_exactly_once_and_no_two_nodes_wait_for_each_other(run: RunSpec) -> None:
    simulation = Simulation(run, after_event=Simulation.check_integrity)
    simulated = simulation.run()
    assert_nothing_is_held(simulation)
    properties.assert_budgets_kept(run, simulated)
    assert simulation.recorder.strays == 0
    assert violations(run, simulated.records, simulated.steps, simulated=True) == []
    for record in simulated.records:
        _check_record(run, record)


@pytest.mark.slow
@drawn_slowly(150)
@given(runs(), ABORTS, LOSSES)
def test_aborts_and_lost_nodes_leave_nothing_behind(
    run: RunSpec, aborts: list[tuple[float, int]], losses: list[tuple[float, int, bool]]
) -> None:
    simulation = Simulation(run, after_event=Simulation.check_integrity)
    simulated = run_disturbed(simulation, aborts, losses)
    assert_nothing_is_held(simulation, lost=lost(simulation))
    assert simulation.recorder.strays == 0
    for record in simulated.records:
        _check_record(run, record, disturbed=bool(losses) or record.reason == "aborted")
        if record.outcome == "failed":
            known = ("was lost", "node is left", "aborted", "need KV for", "must be at least 1")
            assert any(words in record.reason for words in known), record.reason


@pytest.mark.slow
@drawn_slowly(200)
@given(runs(), DELAYS_S, ABORTS)
def test_nor_do_they_where_messages_cross_each_other_on_the_way(
    run: RunSpec, delays_s: list[float], aborts: list[tuple[float, int]]
) -> None:
    simulation = SlowControl(run, delays_s)
    simulated = run_disturbed(simulation, aborts)
    simulation.settle()
    assert_nothing_is_held(simulation)
    for record in simulated.records:
        _check_record(run, record, disturbed=record.reason == "aborted")


@drawn_slowly(100)
@given(runs(), st.integers(10, 90), st.sampled_from([0.05, 0.2, 0.6]))
def test_no_run_serves_more_than_its_bounds_allow(run: RunSpec, prompt_tokens: int, drain_s: float) -> None:
    """Requests that are all alike and far too many, so that it matters which nodes a bound counts."""
    requests = [request(f"r{n:02d}", prompt_tokens=prompt_tokens, max_tokens=3) for n in range(40)]
    slow = step_times(prefill_ms_per_token=3.0, decode_ms=20.0)
    nodes = [msgspec.structs.replace(n, cost=slow, max_num_batched_tokens=200, max_num_seqs=4) for n in run.nodes]
    load = load_plan(requests, duration_s=0.5, drain_s=drain_s)
    run = msgspec.structs.replace(run, nodes=tuple(nodes), load=load)
    served = sum(record.outcome == "completed" for record in simulate(run).records) / len(requests)
    demand = Demand.of(run.load)
    assert demand is not None
    for limit in limits(run):
        assert served <= servable_share(run, demand, limit), limit


@pytest.mark.slow
@drawn_slowly(200)
@given(runs(), st.sampled_from([0.0, 0.305, DRAIN_S]), ABORTS)
def test_merged_and_single_steps_agree(run: RunSpec, drain_s: float, aborts: list[tuple[float, int]]) -> None:
    run = msgspec.structs.replace(run, load=msgspec.structs.replace(run.load, drain_s=drain_s))
    merged = fast._simulate(run, aborts, exact_steps=False)
    single = fast._simulate(run, aborts, exact_steps=True)
    fast.assert_same_records(merged.records, single.records)
    fast.assert_same_steps(merged.steps, single.steps)
    assert merged.preemptions == single.preemptions
    assert merged.peak_retained_bytes == single.peak_retained_bytes
