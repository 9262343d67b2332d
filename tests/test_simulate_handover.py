"""How a request is handed over: who streams its first token, and when decode memory is asked for; instants by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from emulator.core import metrics
from emulator.core.deployments import Admission, FirstToken
from emulator.core.records import Record, StepRecord
from emulator.core.run_spec import NodeSpec
from emulator.core.workload import PlannedRequest
from emulator.simulate import Simulated, Simulation, simulate
from tests.builders import ALL_OUTPUT, by_id, gaps_s, load_plan, node_spec, pair, request, run_spec, ttft_s
from tests.drawn import EVERY_FIRST_TOKEN

EXACT = 1e-9
STEP_S = 0.010
PREFILL_S = 0.100
TRANSFER_S = 0.100
"""Of a prompt of 100 tokens at 1 ms each, whose 100,000 bytes of KV go over 1 MB/s."""


def _alone(first_token: FirstToken, max_tokens: int, admission: Admission = "dispatch") -> Record:
    """One request on an idle cluster."""
    load = load_plan([request(max_tokens=max_tokens)])
    run = run_spec(pair(), load, payload_bytes_per_s=1e6, first_token=first_token, admission=admission)
    (record,) = simulate(run).records
    assert record.outcome == "completed"
    return record


def _parts_ms(record: Record) -> dict[str, float]:
    """The parts of a request's TTFT that are not 0; they add up to it."""
    parts = {part: float(values[0]) for part, values in metrics.measure([record]).ttft_parts_ms.items()}
    assert sum(parts.values()) == pytest.approx(ttft_s(record) * 1e3)
    return {part: round(value, 6) for part, value in parts.items() if abs(value) > 1e-6}


# --- the first token ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("admission", ["dispatch", "decode_reserve_first", "prefill_first"])
@pytest.mark.parametrize(
    ("first_token", "expected_ttft_s", "first_gap_s", "parts_ms"),
    [
        ("handoff", PREFILL_S + TRANSFER_S, STEP_S, {"prefill": 100, "wire": 100}),
        ("prefill", PREFILL_S, TRANSFER_S + STEP_S, {"prefill": 100}),
        ("recompute", PREFILL_S + TRANSFER_S + STEP_S, STEP_S, {"prefill": 100, "wire": 100, "decode": 10}),
    ],
)
def test_the_modes_differ_by_the_transfer_and_by_one_step(
    first_token: FirstToken,
    expected_ttft_s: float,
    first_gap_s: float,
    parts_ms: dict[str, float],
    admission: Admission,
) -> None:
    record = _alone(first_token, 3, admission)
    assert ttft_s(record) == pytest.approx(expected_ttft_s, abs=EXACT)
    assert gaps_s(record) == pytest.approx([first_gap_s, STEP_S], abs=EXACT)
    assert record.kv_bytes == 100_000, "the whole prompt's, also where the last token's is made again"
    assert record.kv_end_s == pytest.approx(PREFILL_S + TRANSFER_S, abs=EXACT)
    assert _parts_ms(record) == parts_ms


@pytest.mark.parametrize(
    ("first_token", "end_s", "kv_bytes", "nodes"),
    [
        ("handoff", PREFILL_S + TRANSFER_S, 100_000, ("prefill-0", "decode-0")),
        ("prefill", PREFILL_S, 0, ("prefill-0", "prefill-0")),
        ("recompute", PREFILL_S + TRANSFER_S + STEP_S, 100_000, ("prefill-0", "decode-0")),
    ],
)
def test_a_request_for_one_token_ends_with_it(
    first_token: FirstToken, end_s: float, kv_bytes: int, nodes: tuple[str, str]
) -> None:
    record = _alone(first_token, 1)
    assert record.times() == pytest.approx([end_s], abs=EXACT)
    assert record.finish_s == record.first_token_s
    assert record.kv_bytes == kv_bytes, "where prefill streams all that is wanted, no KV moves"
    assert (record.prefill_node, record.decode_node) == nodes


def test_the_last_token_is_computed_again_in_the_next_step_of_the_running_batch() -> None:
    load = load_plan(
        [request("runs", max_tokens=50), request("joins", at_s=PREFILL_S, prompt_tokens=104, max_tokens=2)]
    )
    for exact in (True, False):
        run = run_spec(pair(), load, payload_bytes_per_s=1e6, first_token="recompute")
        joins = by_id(Simulation(run, exact_steps=exact).run().records)["joins"]
        assert joins.kv_end_s == pytest.approx(0.308, abs=EXACT)
        assert joins.first_token_s == pytest.approx(0.320, abs=EXACT), "the running step ends at 0.310"
        assert _parts_ms(joins) == {"prefill": 104, "wire": 104, "decode": 12}


@pytest.mark.parametrize("first_token", EVERY_FIRST_TOKEN)
def test_a_preempted_request_is_recomputed_from_what_it_has_and_keeps_every_token(first_token: FirstToken) -> None:
    load = load_plan([request(name, prompt_tokens=96, max_tokens=60) for name in ("a", "b")])
    simulated = simulate(run_spec(pair(decode_blocks=14), load, first_token=first_token))
    assert simulated.preemptions == 1
    assert [(r.output_tokens, r.kv_bytes) for r in simulated.records] == [(60, 96_000)] * 2
    recomputed = [step for step in simulated.steps if step.node == "decode-0" and step.prefill_tokens]
    assert len(recomputed) == 1


# --- admission ------------------------------------------------------------------------------------------------------


def _two_prefill_nodes(admission: Admission, first_token: FirstToken = "handoff") -> dict[str, Record]:
    """A long prompt and a short one on a prefill node each; decode has memory for one of them at a time."""
    nodes = [
        *(node_spec(f"prefill-{n}", role="prefill") for n in (0, 1)),
        node_spec("decode-0", role="decode", kv_blocks=8),
    ]
    load = load_plan([request("long", prompt_tokens=112), request("short", prompt_tokens=32)])
    return by_id(simulate(run_spec(nodes, load, admission=admission, first_token=first_token)).records)


@pytest.mark.parametrize(
    ("admission", "short_starts_s", "short_ttft_s"),
    [
        # Long has its KV at 0.112112, and its two steps after that end at 0.132112.
        ("dispatch", 0.0, 0.132112 + 0.000032),
        ("decode_reserve_first", 0.132112, 0.132112 + 0.032 + 0.000032),
        ("prefill_first", 0.0, 0.032 + 0.000032),
    ],
)
def test_admission_decides_who_holds_decode_memory_while_prompts_are_computed(
    admission: Admission, short_starts_s: float, short_ttft_s: float
) -> None:
    records = _two_prefill_nodes(admission)
    assert records["short"].prefill_start_s == pytest.approx(short_starts_s, abs=EXACT)
    assert ttft_s(records["short"]) == pytest.approx(short_ttft_s, abs=EXACT)
    assert ttft_s(records["long"]) == pytest.approx(0.112 + 0.000112, abs=EXACT)


@pytest.mark.parametrize(
    ("admission", "parts_ms"),
    [
        ("dispatch", {"prefill": 32, "decode_wait": 132.112 - 32, "wire": 0.032}),
        ("decode_reserve_first", {"prefill": 32, "decode_wait": 132.112, "wire": 0.032}),
        ("prefill_first", {"prefill": 32, "wire": 0.032}),
    ],
)
def test_waiting_for_decode_memory_is_told_from_queueing(admission: Admission, parts_ms: dict[str, float]) -> None:
    assert _parts_ms(_two_prefill_nodes(admission)["short"]) == pytest.approx(parts_ms)


def test_a_wait_for_decode_memory_after_the_first_token_shows_in_the_first_gap() -> None:
    short = _two_prefill_nodes("dispatch", "prefill")["short"]
    assert _parts_ms(short) == {"prefill": 32}
    # Long streams its first token at 0.112 and still ends at 0.132112.
    assert gaps_s(short) == pytest.approx([0.132112 + 0.000032 + STEP_S - 0.032, STEP_S], abs=EXACT)


def test_with_memory_reserved_first_prefill_holds_nothing_that_decode_does_not_wait_for() -> None:
    nodes = pair(prefill_blocks=12, decode_blocks=8)
    load = load_plan([request(f"r{n}", prompt_tokens=96, max_tokens=21) for n in range(4)])
    simulation = Simulation(
        run_spec(nodes, load, admission="decode_reserve_first"), after_event=Simulation.check_integrity
    )
    simulated = simulation.run()
    turn_s = 0.096 + 0.000096 + 20 * STEP_S
    assert [r.prefill_start_s for r in simulated.records] == pytest.approx([turn_s * n for n in range(4)], abs=EXACT)
    assert [r.finish_s for r in simulated.records] == pytest.approx([turn_s * n for n in (1, 2, 3, 4)], abs=EXACT)
    assert _most_blocks(simulated.steps, "prefill-0") == 6, "one prompt at a time"


def _most_blocks(steps: Sequence[StepRecord], node: str) -> int:
    return max(step.kv_blocks_used for step in steps if step.node == node)


# --- reservation ----------------------------------------------------------------------------------------------------


def _served(nodes: Sequence[NodeSpec], requests: Sequence[PlannedRequest]) -> Simulated:
    return simulate(run_spec(nodes, load_plan(requests)))


def test_with_the_whole_output_reserved_nobody_is_preempted_and_the_next_one_waits() -> None:
    requests = [request(name, prompt_tokens=96, max_tokens=60) for name in ("a", "b")]
    tight = _served(pair(decode_blocks=14, num_reserved_decode_tokens=32), requests)
    assert tight.preemptions == 0, "96 and 32 tokens are 8 of 14 blocks: b waits for a"
    first, second = _served(pair(decode_blocks=14, num_reserved_decode_tokens=ALL_OUTPUT), requests).records
    assert second.kv_start_s == first.finish_s
    loose = _served(pair(decode_blocks=14, num_reserved_decode_tokens=16), requests)
    assert loose.preemptions == 1, "7 blocks each fit, 10 each do not"
