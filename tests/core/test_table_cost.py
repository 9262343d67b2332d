"""Tables of measured steps: exact where measured, straight lines between, nothing beyond."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core import strict
from emulator.core.bounds import Demand, least_costs
from emulator.core.catalog import find_gpu, find_model, find_table, parse_catalog
from emulator.core.cost import Chunk, CostModel, StepShape, TableCost, cost_model, step_limits
from emulator.core.deploy import plan_runs
from emulator.core.deployments import Policy
from emulator.core.errors import ConfigError
from emulator.core.hardware import StepTable
from emulator.core.roles import Role
from emulator.core.specs import Topology
from emulator.core.step_shape import MIXED_NORM
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.simulate import simulate
from tests.builders import load_plan, node_spec, request, run_spec
from tests.examples import examples

CATALOG = load_catalog()
TABLES = [TableCost(profile=table) for table in CATALOG.tables]
MEDIANS = TableCost(profile=find_table(CATALOG, "splitwise-llama-2-70b-h100-tp8-medians"))

BY_HAND = TableCost(
    profile=StepTable(
        name="by-hand",
        model="any",
        gpu="any",
        tp=1,
        prefill=((100, 20.0), (200, 30.0), (600, 80.0), (1000, 160.0)),
        prefill_batched=((400, 60.0), (2000, 300.0)),
        decode=((1, 10.0), (2, 12.0), (8, 24.0)),
        decode_context=500,
        decode_contexts=((250, 10.0), (500, 10.5), (1000, 12.5)),
        source="made up",
    )
)


def prefill_ms(*chunks: tuple[int, int], cost: TableCost = BY_HAND) -> float:
    return cost.step_s(StepShape(tuple(Chunk(*chunk) for chunk in chunks), 0, 0)) * 1e3


def decode_ms(batch: int, context: float, cost: TableCost = BY_HAND) -> float:
    return cost.step_s(StepShape((), batch, int(batch * context))) * 1e3


# --- what was measured ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", TABLES, ids=lambda cost: cost.profile.name)
def test_every_measured_step_is_met_exactly(cost: TableCost) -> None:
    table = cost.profile
    for tokens, ms in table.prefill:
        assert prefill_ms((tokens, 0), cost=cost) == pytest.approx(ms)
    for tokens, ms in table.prefill_batched or ():
        assert prefill_ms(*((512, 0),) * (tokens // 512), cost=cost) == pytest.approx(ms)
    for batch, ms in table.decode:
        assert decode_ms(batch, table.decode_context, cost) == pytest.approx(ms)
    for context, ms in table.decode_contexts or ():
        assert decode_ms(1, context, cost) == pytest.approx(ms)


def test_splitwise_medians_are_those_published() -> None:
    """Rounded in step_times.csv: 54 and 845 ms of prefill, 50.2 ms for 64 decodes at 576 tokens (H100, tp 8)."""
    assert len(CATALOG.tables) == 6
    assert prefill_ms((512, 0), cost=MEDIANS) == pytest.approx(54, abs=1)
    assert prefill_ms((8192, 0), cost=MEDIANS) == pytest.approx(845, abs=0.5)
    assert decode_ms(64, 576, MEDIANS) == pytest.approx(50.2, abs=0.05)


def test_the_batch_that_is_bad_data_is_left_out() -> None:
    for table in CATALOG.tables:
        assert table.decode[-1][0] == (32 if table.tp == 2 else 64)
        assert ("bad data" in table.source) == (table.tp == 2)


# --- between and beyond -----------------------------------------------------------------------------------------


def test_times_lie_on_straight_lines_between_measured_ones() -> None:
    assert prefill_ms((150, 0)) == pytest.approx(25)
    assert prefill_ms((500, 0)) == pytest.approx(67.5)
    assert decode_ms(5, 500) == pytest.approx(18)
    assert decode_ms(1, 750) == pytest.approx(10 * 11.5 / 10.5)
    assert decode_ms(8, 750) == pytest.approx(24 * 11.5 / 10.5), "both lines' product"


def test_smaller_than_measured_takes_as_long_as_the_smallest() -> None:
    assert prefill_ms((1, 0)) == prefill_ms((100, 0)) == pytest.approx(20)
    assert decode_ms(2, 10) == decode_ms(2, 250) == pytest.approx(12 * 10 / 10.5)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (StepShape((Chunk(1001, 0),), 0, 0), "prefill was measured up to 1000, not to 1001"),
        (StepShape((Chunk(1, 1000),), 0, 0), "prefill was measured up to 1000"),
        (StepShape((Chunk(1000, 0), Chunk(1000, 0), Chunk(1, 0)), 0, 0), "prefill_batched was measured up to 2000"),
        (StepShape((), 9, 9), "decode was measured up to 8, not to 9"),
        (StepShape((), 1, 1001), "decode_contexts was measured up to 1000"),
    ],
)
def test_nothing_is_extrapolated(shape: StepShape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BY_HAND.step_s(shape)


def test_a_chunk_takes_what_its_prompt_takes_more_but_no_less_than_a_prompt_of_its_length() -> None:
    assert prefill_ms((200, 800)) == pytest.approx(160 - 120)
    assert prefill_ms((50, 950)) == pytest.approx(20), "the smallest prompt, not 160 - 150"


def test_several_prompts_take_what_was_measured_for_their_tokens_but_no_less_than_the_longest() -> None:
    assert prefill_ms((200, 0), (200, 0)) == pytest.approx(60)
    assert prefill_ms((100, 0), (100, 0)) == pytest.approx(30), "below what was measured, as one prompt"
    assert prefill_ms((900, 0), (100, 0)) == pytest.approx(150)
    assert prefill_ms((1000, 0), (1, 0)) == pytest.approx(160), "as the longer alone, not the 150 of so many tokens"
    assert prefill_ms((200, 800), (200, 0)) == pytest.approx(60 + 10), "and what the first takes for its context"


def test_a_mixed_step_joins_the_prefill_and_one_decode_and_adds_the_other_decodes() -> None:
    mixed = BY_HAND.step_s(StepShape((Chunk(200, 0),), 8, 4000)) * 1e3
    assert mixed == pytest.approx((30**MIXED_NORM + 10**MIXED_NORM) ** (1 / MIXED_NORM) + 14)


# --- properties -------------------------------------------------------------------------------------------------

costs = st.sampled_from([BY_HAND, *TABLES])
quick = examples(80)


@quick
@given(costs, st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_chunks_take_at_least_as_long_as_the_whole_prompt(cost: TableCost, sizes: list[int]) -> None:
    done, in_chunks = 0, 0.0
    for tokens in sizes:
        if done + tokens > cost.limits.max_tokens:
            break
        in_chunks += prefill_ms((tokens, done), cost=cost)
        done += tokens
    assert in_chunks >= prefill_ms((done, 0), cost=cost) - 1e-9


@quick
@given(costs, st.integers(1, 8), st.integers(0, 900), st.integers(0, 7), st.integers(1, 400))
def test_decode_steps_in_a_row_are_single_ones_and_rise_evenly(
    cost: TableCost, batch: int, context: int, more: int, most: int
) -> None:
    context_sum = context * batch + more % batch
    seconds = cost.decode_steps_s(batch, context_sum, min(most, cost.limits.max_tokens - context - 1))
    assert seconds
    assert seconds == [cost.step_s(StepShape((), batch, context_sum + j * batch)) for j in range(len(seconds))]
    assert np.abs(np.diff(seconds, 2)).max(initial=0.0) < 1e-12


KINDS: list[tuple[Role, Policy]] = [("prefill", "chunked"), ("decode", "chunked"), ("colocated", "chunked")]


@quick
@given(costs, st.sampled_from(KINDS), st.lists(st.tuples(st.integers(1, 300), st.integers(0, 600)), max_size=3),
       st.integers(0, 8), st.integers(1, 900))  # fmt: skip
def test_no_step_is_cheaper_than_its_least_costs(
    cost: TableCost, kind: tuple[Role, Policy], chunks: list[tuple[int, int]], batch: int, context: int
) -> None:
    role, policy = kind
    chunks, batch = ([] if role == "decode" else chunks), (0 if role == "prefill" else batch)
    node = node_spec(role=role, policy=policy, cost=cost, max_num_batched_tokens=1000, max_num_seqs=8)  # type: ignore[arg-type]
    least = least_costs(node, Demand(np.array([100.0]), np.array([10.0])), mixed=role == "colocated")
    shape = StepShape(tuple(Chunk(*chunk) for chunk in chunks), batch, batch * context)
    tokens = sum(n for n, _ in chunks)
    at_least = tokens * least.prompt_token_s + batch * (least.decode_token_s + context * least.decode_context_s)
    assert cost.step_s(shape) >= at_least - 1e-12


def test_a_simulation_with_merged_steps_has_the_records_of_single_ones() -> None:
    limits = BY_HAND.limits
    node = msgspec.structs.replace(
        node_spec(max_num_batched_tokens=limits.max_num_batched_tokens, max_num_seqs=limits.max_num_seqs),
        cost=BY_HAND,
        max_model_len=limits.max_tokens,
        min_prompt_tokens=limits.min_prompt_tokens,
    )
    requests = [request(f"r{n}", at_s=0.05 * n, prompt_tokens=100 + 40 * n, max_tokens=300) for n in range(10)]
    run = run_spec([node], load_plan([*requests, request("short", prompt_tokens=99)]))
    merged, single = simulate(run), simulate(run, exact_steps=True)
    assert len(merged.steps) < len(single.steps)
    for ours, exact in zip(merged.records, single.records, strict=True):
        assert ours.times() == pytest.approx(exact.times(), abs=1e-9)
        assert (ours.request_id, ours.outcome, ours.reason) == (exact.request_id, exact.outcome, exact.reason)
    outcome = {record.request_id: record for record in merged.records}
    assert [r.outcome for r in merged.records].count("completed") == 10
    assert "measured from 100 prompt tokens on" in outcome["short"].reason


def test_it_travels_as_json() -> None:
    again = msgspec.json.decode(msgspec.json.encode(MEDIANS), type=CostModel)
    assert again == MEDIANS


# --- topologies -------------------------------------------------------------------------------------------------


def topology(prompt: int | dict[str, object] = 1000, output: int = 100, **changes: object) -> Topology:
    pool = {"role": "colocated", "tp": 8, **changes}
    return strict.convert(
        {
            "name": "tables",
            "model": "Llama-2-70B",
            "gpu": "h100",
            "cost": "table",
            "profile": MEDIANS.profile.name,
            "slo": {},
            "workload": {
                "duration": "1s",
                "streams": [
                    {
                        "name": "chat",
                        "arrivals": {"process": "at", "times_s": [0.0]},
                        "prompt_tokens": prompt,
                        "output_tokens": output,
                    }
                ],
            },
            "deployments": [{"name": "colocated", "pools": [pool]}],
        },
        Topology,
        "tables.toml",
    )


def test_a_node_keeps_within_the_table() -> None:
    made = topology()
    (run,) = plan_runs(made, CATALOG, plan_load(made.workload, {}))
    (node,) = run.nodes
    assert isinstance(node.cost, TableCost)
    assert (node.max_num_batched_tokens, node.max_num_seqs) == (8192, 64)
    assert (node.min_prompt_tokens, node.max_model_len) == (128, 4096), "the model's own context ends before the table"
    assert step_limits(node.cost).max_tokens == 8192


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (topology(prompt=127), "'chat': a prompt of 127 tokens lies below the 128 from which table"),
        (topology(prompt=8000, output=193), "beyond the 8192 tokens up to which table splitwise.* was measured"),
        (topology(max_num_seqs=65), "max_num_seqs = 65 is beyond .*; use at most 64"),
        (topology(max_num_batched_tokens=40000), "max_num_batched_tokens = 40000 is beyond.*at most 32768"),
        (topology(tp=4), "is for tp = 8, not 4"),
        (topology({"distribution": "uniform", "low": 100, "high": 3000}), "a prompt of 100 tokens lies below"),
        (
            topology({"distribution": "lognormal", "median": 50, "sigma": 0.1, "high": 120}),
            "a prompt of 120 tokens lies below",
        ),
    ],
)
def test_what_the_table_does_not_hold_is_refused_before_the_run(made: Topology, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_runs(made, CATALOG, plan_load(made.workload, {}))


def test_a_distribution_that_may_be_drawn_within_the_table_is_not_refused() -> None:
    """Of a lognormal neither end is certain to be drawn; those that are outside are refused one by one."""
    made = topology({"distribution": "lognormal", "median": 1000, "sigma": 1.0, "low": 1, "high": 3900})
    assert plan_runs(made, CATALOG, plan_load(made.workload, {}))


def test_an_unknown_table_says_what_exists() -> None:
    with pytest.raises(ConfigError, match=r"no table 'distserve-opt-13b-tp1'.*splitwise-llama-2-70b"):
        find_table(CATALOG, "distserve-opt-13b-tp1")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("prefill", "[[200, 3.0], [100, 2.0]]", "prefill: sizes must rise"),
        ("prefill", "[[100, 3.0]]", "prefill"),
        ("prefill", "[[100, 0.0], [200, 2.0]]", "prefill"),
        ("decode", "[[2, 10.0], [4, 11.0]]", "decode must begin with 1"),
        ("prefill_batched", "[[100, 10.0], [400, 11.0]]", "prefill_batched must begin above"),
    ],
)
def test_a_table_that_cannot_be_is_refused(key: str, value: str, message: str) -> None:
    lines = {
        "name": '"x"', "model": '"m"', "gpu": '"g"', "tp": "1", "source": '"s"', "decode_context": "5",
        "prefill": "[[100, 1.0], [200, 2.0]]", "decode": "[[1, 1.0], [2, 2.0]]",
    }  # fmt: skip

    def text() -> str:
        return "[[tables]]\n" + "\n".join(f"{k} = {v}" for k, v in lines.items())

    assert parse_catalog({"x": text()}).tables[0].name == "x"
    lines[key] = value
    with pytest.raises(ConfigError, match=message):
        parse_catalog({"x": text()})


def test_fp8_weights_are_refused_where_16_bits_were_measured() -> None:
    with pytest.raises(ConfigError, match='needs cost = "roofline"'):
        cost_model(
            cost="table",
            model=find_model(CATALOG, "Llama-2-70B"),
            gpu=find_gpu(CATALOG, "h100"),
            tp=8,
            profile=MEDIANS.profile,
            weights="fp8",
        )
