"""What messages of KV cost a request, and how those of several share the link; instants by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core import metrics
from emulator.core.deployments import TransferOrder
from emulator.core.physics import violations
from emulator.core.records import Record
from emulator.simulate import simulate
from tests.builders import by_id, load_plan, pair, request, run_spec, step_times, ttft_s
from tests.examples import examples
from tests.link_messages import TERMS, over_messages

COST_S = 0.004
RATE = 1e6
PREFILL_S = TRANSFER_S = 0.1
"""Of a prompt of 100 tokens at 1 ms each, whose 100,000 bytes of KV go over 1 MB/s."""


def _records(requests: int = 1, *, tokens_a_step: int = 2_048, chunks: bool = False, **terms: Any) -> list[Record]:
    """Requests of 100 tokens that come at once to one prefill node, whose KV goes to one decode node."""
    load = load_plan([request(f"r{n}") for n in range(requests)])
    nodes = pair(overlap="chunk" if chunks else "none", max_num_batched_tokens=tokens_a_step)
    run = over_messages(run_spec(nodes, load, payload_bytes_per_s=RATE), **terms)
    records = by_id(simulate(run).records)
    return [records[f"r{n}"] for n in range(requests)]


def test_a_prompt_in_one_message_pays_once_and_the_cost_is_part_of_the_link() -> None:
    (record,) = _records(message_s=COST_S)
    assert record.kv_ready_s == pytest.approx(PREFILL_S)
    assert record.kv_start_s == pytest.approx(PREFILL_S + COST_S)
    assert ttft_s(record) == pytest.approx(PREFILL_S + COST_S + TRANSFER_S)
    parts = metrics.measure([record]).ttft_parts_ms
    assert parts["wire"][0] == pytest.approx((COST_S + TRANSFER_S) * 1e3)
    assert parts["orchestration"][0] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("chunk", [10, 25, 50])
@pytest.mark.parametrize("cost_s", [COST_S, 0.04])
def test_chunks_that_leave_while_the_next_is_computed_pay_each(chunk: int, cost_s: float) -> None:
    """A chunk takes as long to send as to compute, so with its cost it makes the next one wait."""
    (record,) = _records(tokens_a_step=chunk, chunks=True, message_s=cost_s)
    messages = 100 // chunk
    each_s = cost_s + TRANSFER_S / messages
    assert ttft_s(record) == pytest.approx(PREFILL_S / messages + messages * each_s)


@pytest.mark.parametrize(
    ("terms", "ends_s"),
    [
        ({}, [0.4, 0.5]),
        ({"message_s": 0.05}, [0.45, 0.6]),
        ({"message_s": 0.05, "max_in_flight": 2}, [0.45, 0.55]),
        ({"max_in_flight": 2, "order": "fair"}, [0.5, 0.5]),
        ({"message_s": 0.05, "max_in_flight": 2, "order": "fair"}, [0.55, 0.55]),
    ],
)
def test_two_prompts_that_are_computed_together(terms: dict[str, Any], ends_s: list[float]) -> None:
    """The first request is computed and sent alone, the others then in one step that ends at 0.3 s."""
    _, *records = _records(3, **terms)
    assert [record.kv_ready_s for record in records] == pytest.approx([0.3, 0.3])
    assert [record.kv_end_s for record in records] == pytest.approx(ends_s)


@pytest.mark.parametrize(("order", "first"), [("fifo", "r0"), ("fair", "r1")])
def test_with_chunks_fair_lets_a_short_prompt_pass_a_long_one(order: TransferOrder, first: str) -> None:
    """A slow link: the chunks of the long prompt queue up, and the short one's only chunk comes after them."""
    load = load_plan([request("r0", prompt_tokens=400), request("r1", at_s=0.01, prompt_tokens=100)])
    cost = step_times(prefill_ms_per_token=0.1)
    nodes = pair(cost=cost, overlap="chunk", max_num_batched_tokens=100)
    run = over_messages(run_spec(nodes, load, payload_bytes_per_s=RATE), order=order)
    records = simulate(run).records
    assert min(records, key=lambda record: record.kv_end_s or 0.0).request_id == first


sizes = st.lists(st.tuples(st.integers(1, 150), st.integers(0, 40)), min_size=1, max_size=10)


@given(sizes=sizes, terms=TERMS, chunks=st.booleans(), rate=st.sampled_from([1e5, 1e6]))
@examples(60)
def test_no_run_is_beyond_physics_whatever_its_messages(
    sizes: list[tuple[int, int]], terms: dict[str, Any], chunks: bool, rate: float
) -> None:
    load = load_plan([request(f"r{n}", at_s=at / 100, prompt_tokens=p) for n, (p, at) in enumerate(sizes)])
    nodes = pair(overlap="chunk" if chunks else "none", max_num_batched_tokens=64)
    run = over_messages(run_spec(nodes, load, payload_bytes_per_s=rate, delay_s=0.003), **terms)
    simulated = simulate(run)
    assert {record.outcome for record in simulated.records} == {"completed"}
    assert violations(run, simulated.records, simulated.steps, simulated=True) == []


def test_kv_that_leaves_before_its_message_is_paid_for_is_beyond_physics() -> None:
    load = load_plan([request()])
    free = run_spec(pair(), load, payload_bytes_per_s=RATE)
    simulated = simulate(free)
    (found,) = violations(over_messages(free, message_s=COST_S), simulated.records, simulated.steps, simulated=True)
    assert "KV was sent before its message's cost was spent: that of r0, 0.004 s" in found
