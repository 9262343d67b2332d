"""Merged steps against single ones: the same decisions, records and steps, in far fewer events and rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from emulator.core.catalog import find_gpu, find_model
from emulator.core.cost import CostModel, FittedCost, RooflineCost, StepShape, cost_model
from emulator.core.errors import ConfigError
from emulator.core.hardware import DecodeFit, FittedProfile
from emulator.core.lengths import LengthPair
from emulator.core.records import Record, StepRecord, TimeRun, expand_steps, read_records, read_steps, write_rows
from emulator.core.roles import Role
from emulator.core.run_spec import NodeSpec, RunSpec
from emulator.core.traffic import UniformLength
from emulator.core.workload import PlannedRequest, UserPlan
from emulator.lab.catalog_files import load_catalog
from emulator.lab.simulated import simulated_result
from emulator.simulate import Simulated, Simulation, simulate
from tests.builders import ALL_OUTPUT, by_id, load_plan, node_spec, pair, request, run_spec, step_times
from tests.disturbed import run_disturbed
from tests.drawn import FIRST_TOKENS, admissions, overlaps, ways_of
from tests.examples import drawn_slowly

MICROSECOND = 1e-6
CATALOG = load_catalog()
LLAMA = find_model(CATALOG, "Llama-3.1-8B")
H100 = find_gpu(CATALOG, "h100")

ALL_ALIKE = step_times(prefill_ms_per_token=0.0, prefill_base_ms=10.0, decode_ms=10.0)
"""Every step takes 10 ms, so steps of all nodes and arrivals fall on the same instants."""
ON_A_GRID = step_times(prefill_ms_per_token=0.5, prefill_base_ms=1.0, decode_ms=10.0)
BY_SEQUENCES = step_times(prefill_ms_per_token=0.5, prefill_base_ms=1.0, decode_ms=10.0, decode_ms_per_sequence=0.5)
BY_CONTEXT = FittedCost(
    profile=FittedProfile(
        name="by-context",
        model="any",
        gpu="any",
        tp=1,
        prefill_base_ms=2.0,
        prefill_per_token_ms=0.3,
        prefill_per_token2_ms=0.001,
        decode=DecodeFit(base_ms=4.0, per_context_token_ms=0.013, per_sequence_ms=0.2),
        decode_large=DecodeFit(base_ms=5.0, per_context_token_ms=0.007, per_sequence_ms=0.3),
        large_batch_from=4,
        source="made up",
    )
)
ROOFLINE = RooflineCost(model=LLAMA, gpu=H100, tp=1)


# --- what runs --------------------------------------------------------------------------------------------------


@st.composite
def nodes(draw: st.DrawFn, *roles: Role) -> list[NodeSpec]:
    """One to three nodes of each role; memory from next to nothing to enough."""
    cost = draw(st.sampled_from([ALL_ALIKE, ON_A_GRID, BY_SEQUENCES, BY_CONTEXT, ROOFLINE]))
    block_size = draw(st.sampled_from([1, 4, 16]))
    made = []
    for role in roles:
        shape = node_spec(
            role=role,
            policy=draw(st.sampled_from(["chunked", "prefill_first"])) if role == "colocated" else "chunked",
            max_num_batched_tokens=draw(st.sampled_from([1, 3, 40, 200])),
            max_num_seqs=draw(st.integers(1, 8)),
            kv_blocks=draw(st.sampled_from([130, 220, 500, 2_000])) // block_size,
            block_size=block_size,
            num_reserved_decode_tokens=draw(st.sampled_from([0, 4, ALL_OUTPUT])),
            **draw(overlaps()),
        )
        bound = draw(st.sampled_from([None, 1, 8, 40])) if role == "prefill" else None
        shape = msgspec.structs.replace(shape, cost=cost, max_held_blocks=bound)
        made += [msgspec.structs.replace(shape, name=f"{role}-{n}") for n in range(draw(st.integers(1, 3)))]
    return made


@st.composite
def runs(draw: st.DrawFn) -> RunSpec:
    """A cluster under requests on a grid of instants, users who wait for their last one, and a drain that may cut."""
    instants = draw(st.lists(st.integers(0, 60), min_size=1, max_size=14))
    sizes = st.tuples(st.integers(1, 120), st.integers(1, 80))
    requests = [
        PlannedRequest(f"chat-{n:05d}", "chat", instant * 0.01, *draw(sizes))
        for n, instant in enumerate(sorted(instants))
    ]
    lengths = LengthPair(UniformLength(low=1, high=60), UniformLength(low=1, high=30))
    users = [UserPlan("users", n, 0.01 * n, 0.0, lengths, seed=n) for n in range(draw(st.integers(0, 3)))]
    cluster = draw(st.one_of(nodes("colocated"), nodes("prefill", "decode")))
    run = run_spec(
        cluster,
        load_plan(requests, users=users, duration_s=0.7, drain_s=draw(st.sampled_from([0.0, 0.305, 0.9, 2_000.0]))),
        payload_bytes_per_s=draw(st.sampled_from([1e5, 1e6, 1e10])),
        delay_s=draw(st.sampled_from([0.0, 0.003])),
        routing=draw(st.sampled_from(["least_loaded", "round_robin"])),
        request_s=draw(st.sampled_from([0.5, 10_000.0])),
        first_token=draw(FIRST_TOKENS),
        admission=draw(admissions(cluster)),
    )
    return draw(ways_of(run))


def _simulate(run: RunSpec, aborts: Iterable[tuple[float, int]], *, exact_steps: bool) -> Simulated:
    simulation = Simulation(run, exact_steps=exact_steps, after_event=Simulation.check_integrity)
    simulated = run_disturbed(simulation, aborts)
    assert simulation.recorder.strays == 0
    return simulated


# --- what is compared -------------------------------------------------------------------------------------------


def assert_same_instants(ours: ArrayLike, theirs: ArrayLike) -> None:
    """As many, none a microsecond apart; seconds."""
    a, b = np.asarray(ours, float), np.asarray(theirs, float)
    assert a.shape == b.shape
    assert (np.abs(a - b) <= MICROSECOND).all()


def assert_same_records(merged: Sequence[Record], single: Sequence[Record]) -> None:
    """Everything to the last bit, but for the instants that runs stand for."""
    assert len(merged) == len(single)
    for ours, theirs in zip(merged, single, strict=True):
        assert_same_instants(ours.times(), theirs.times())
        rest = [msgspec.structs.replace(record, token_times_s=[]) for record in (ours, theirs)]
        assert rest[0] == rest[1]


def assert_same_steps(merged: Sequence[StepRecord], single: Sequence[StepRecord]) -> None:
    by_node: defaultdict[str, list[StepRecord]] = defaultdict(list)
    for step in single:
        by_node[step.node].append(step)
    for row in merged:
        steps, by_node[row.node] = by_node[row.node][: row.steps], by_node[row.node][row.steps :]
        assert (row.start_s, row.end_s) == (steps[0].start_s, steps[-1].end_s), "the ends of a row are exact"
        both = list(expand_steps([row])), steps
        instants = [[(step.start_s, step.end_s, step.planned_s) for step in side] for side in both]
        assert_same_instants(*instants)
        shapes = [[(s.kind, s.prefill_tokens, s.decode_batch, s.requests) for s in side] for side in both]
        assert shapes[0] == shapes[1]
    assert not any(by_node.values()), "a step is missing"


@pytest.mark.slow
@drawn_slowly(200)
@given(runs(), st.lists(st.tuples(st.integers(0, 900).map(lambda n: n * 0.001), st.integers(0, 20)), max_size=4))
def test_merged_and_single_steps_agree(run: RunSpec, aborts: list[tuple[float, int]]) -> None:
    merged = _simulate(run, aborts, exact_steps=False)
    single = _simulate(run, aborts, exact_steps=True)
    assert_same_records(merged.records, single.records)
    assert_same_steps(merged.steps, single.steps)
    assert merged.memory == single.memory
    assert merged.preemptions == single.preemptions
    assert merged.peak_retained_bytes == single.peak_retained_bytes


# --- rows -------------------------------------------------------------------------------------------------------


def test_a_lone_request_is_a_few_rows_that_are_read_back_as_all_its_tokens_and_steps() -> None:
    simulated = simulate(run_spec(pair(cost=step_times(decode_ms=25.0)), load_plan([request(max_tokens=641)])))
    (record,) = simulated.records
    assert len(record.token_times_s) == 11, "the first token, and sixty-four steps a row"
    assert (record.output_tokens, len(record.times())) == (641, 641)
    assert [step.steps for step in simulated.steps if step.kind == "decode"] == [64] * 10
    assert len(list(expand_steps(simulated.steps))) == 641
    assert read_records(write_rows(simulated.records)) == simulated.records
    assert read_steps(write_rows(simulated.steps)) == simulated.steps
    assert sum(abs(step.lateness_s) for step in simulated.steps) < MICROSECOND


def test_requests_of_one_batch_share_their_rows() -> None:
    load = load_plan([request(name, max_tokens=30) for name in ("a", "b", "c")])
    records = by_id(simulate(run_spec([node_spec(max_num_batched_tokens=300)], load)).records)
    b, c = ([e for e in records[name].token_times_s if isinstance(e, TimeRun)] for name in ("b", "c"))
    assert [entry.n for entry in b] == [28]
    assert b[0] is c[0]


def test_a_summary_does_not_depend_on_how_steps_are_written() -> None:
    load = load_plan([request(f"r{n}", at_s=0.05 * n, prompt_tokens=50 + 7 * n, max_tokens=40) for n in range(30)])
    run = run_spec(pair(cost=BY_CONTEXT), load)
    merged = simulated_result(run)
    assert sum(step.steps for step in merged.steps) > 2 * len(merged.steps)
    single = Simulation(run, exact_steps=True).run()
    times = [np.concatenate([record.times() for record in records]) for records in (merged.records, single.records)]
    assert_same_instants(*times)
    assert merged.summary.completed == 30


# --- step times -------------------------------------------------------------------------------------------------


def _all_roofline_costs() -> list[CostModel]:
    costs = []
    for model in CATALOG.models:
        for gpu in CATALOG.gpus:
            try:
                costs.append(cost_model(cost="roofline", model=model, gpu=gpu, tp=1))
            except ConfigError:
                continue
    return costs


@pytest.mark.parametrize("cost", [BY_CONTEXT, ALL_ALIKE, *_all_roofline_costs()])
@pytest.mark.parametrize("batch", [1, 3, 4, 200])
def test_steps_in_a_row_take_what_each_takes_alone_and_rise_evenly(cost: CostModel, batch: int) -> None:
    for context_sum in (batch, 37 * batch, 5_000 * batch):
        context, seconds = context_sum, [0.0]
        for _ in range(4):
            seconds = cost.decode_steps_s(batch, context, 300)
            alone = [cost.step_s(StepShape((), batch, context + j * batch)) for j in range(len(seconds))]
            assert seconds == alone
            assert np.abs(np.diff(seconds, 2)).max(initial=0.0) < 1e-12
            context += len(seconds) * batch


def test_a_row_ends_where_arithmetic_overtakes_memory() -> None:
    """Attention on an MLA latent computes more for each byte than most GPUs can, but for the new tokens' own KV."""
    cost = next(c for c in _all_roofline_costs() if isinstance(c, RooflineCost) and 2 < _crossing_tokens(c) < 64)
    assert cost.model.mla is not None
    first = cost.decode_steps_s(8, 8, 300)
    assert len(first) == math.ceil(_crossing_tokens(cost) - 1)
    rest = cost.decode_steps_s(8, 8 + 8 * len(first), 300)
    assert len(rest) == 300
    assert rest[1] - rest[0] > first[1] - first[0]
    assert first + rest == [cost.step_s(StepShape((), 8, 8 + 8 * j)) for j in range(len(first) + 300)]


def _crossing_tokens(cost: RooflineCost) -> float:
    """The context of each sequence from which on its attention waits for arithmetic; infinite where it never does."""
    per_token, kv = cost._rates.decode_attention_per_token, cost._rates.kv_per_token
    return kv / (per_token - kv) if per_token > kv else math.inf
