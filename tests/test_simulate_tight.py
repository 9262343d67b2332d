"""Clusters whose decode memory hardly holds what it is given: requests lose it often, and are prefilled anew."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.physics import violations
from emulator.core.run_spec import RunSpec
from emulator.core.workload import PlannedRequest
from emulator.simulate import Simulation
from tests.builders import load_plan, node_spec, run_spec, step_times
from tests.disturbed import ABORTS, DELAYS_S, LOSSES, SlowControl, assert_nothing_is_held, lost, run_disturbed
from tests.drawn import EVERY_ADMISSION, EVERY_FIRST_TOKEN, EVERY_TRANSFER_MODE
from tests.examples import drawn_slowly
from tests.handed_over import handed_over
from tests.test_simulate_fast import assert_same_records, assert_same_steps
from tests.test_simulate_properties import DRAIN_S, CountedTickets, assert_ended_once

COST = step_times(prefill_ms_per_token=0.5, prefill_base_ms=1.0, decode_ms=10.0, decode_ms_per_sequence=0.5)
LONGEST = 70
"""Prompt and output of any request: memory is for one such request and little more."""


@st.composite
def tight_runs(draw: st.DrawFn) -> RunSpec:
    """Many requests at once with outputs longer than their prompts, on nodes that reserve for the prompts alone."""
    block_size = draw(st.sampled_from([1, 4]))
    blocks = -(-(LONGEST + draw(st.integers(0, 20))) // block_size)
    nodes = [
        node_spec(
            f"{role}-{n}",
            role="prefill" if role == "prefill" else "decode",
            cost=COST,
            kv_blocks=blocks * (draw(st.integers(1, 4)) if role == "prefill" else 1),
            block_size=block_size,
            max_num_seqs=draw(st.sampled_from([2, 64])),
            overlap=draw(st.sampled_from(["none", "chunk"])),
            max_num_batched_tokens=draw(st.sampled_from([16, 200])),
        )
        for role in ("prefill", "decode")
        for n in range(draw(st.integers(1, 2)))
    ]
    sizes = st.tuples(st.integers(1, 20), st.integers(1, 50))
    requests = [
        PlannedRequest(f"chat-{n:05d}", "chat", draw(st.integers(0, 10)) * 0.01, *draw(sizes))
        for n in range(draw(st.integers(4, 12)))
    ]
    run = run_spec(
        nodes,
        load_plan(requests, duration_s=0.5, drain_s=DRAIN_S),
        payload_bytes_per_s=draw(st.sampled_from([1e5, 1e7])),
        delay_s=draw(st.sampled_from([0.0, 0.003])),
        routing=draw(st.sampled_from(["least_loaded", "round_robin"])),
    )
    return handed_over(
        run,
        first_token=draw(st.sampled_from(EVERY_FIRST_TOKEN)),
        admission=draw(st.sampled_from(EVERY_ADMISSION)),
        transfer_mode=draw(st.sampled_from(EVERY_TRANSFER_MODE)),
        preemption="prefill",
        max_transfers_in_flight=draw(st.integers(1, 2)),
    )


@pytest.mark.slow
@drawn_slowly(200)
@given(tight_runs())
def test_everybody_comes_to_the_end_with_every_token_and_no_law_is_broken(run: RunSpec) -> None:
    simulation = CountedTickets(run)
    simulated = simulation.run()
    assert_nothing_is_held(simulation)
    assert simulation.recorder.strays == 0
    for record in simulated.records:
        assert_ended_once(record)
        assert record.outcome == "completed", record.reason
        assert record.preemptions < record.max_tokens, "an attempt without a token"
        streamed_by_prefill = run.first_token == "prefill" and (record.preemptions or record.max_tokens == 1)
        attempts = 1 + record.preemptions
        assert simulation.tickets[record.request_id] in (attempts - bool(streamed_by_prefill), attempts)
    assert violations(run, simulated.records, simulated.steps, simulated=True) == []


@pytest.mark.slow
@drawn_slowly(150)
@given(tight_runs(), ABORTS)
def test_merged_and_single_steps_agree_on_what_is_given_up(run: RunSpec, aborts: list[tuple[float, int]]) -> None:
    merged, single = (
        Simulation(run, exact_steps=exact, after_event=Simulation.check_integrity) for exact in (False, True)
    )
    ours, theirs = run_disturbed(merged, aborts), run_disturbed(single, aborts)
    assert merged.recorder.strays == single.recorder.strays == 0
    assert_same_records(ours.records, theirs.records)
    assert_same_steps(ours.steps, theirs.steps)
    assert ours.preemptions == theirs.preemptions


@pytest.mark.slow
@drawn_slowly(200)
@given(
    tight_runs(),
    DELAYS_S,
    ABORTS,
    LOSSES,
)
def test_messages_that_cross_and_nodes_that_are_lost_lose_and_leak_nothing(
    run: RunSpec, delays_s: list[float], aborts: list[tuple[float, int]], losses: list[tuple[float, int, bool]]
) -> None:
    simulation = SlowControl(run, delays_s)
    simulated = run_disturbed(simulation, aborts, losses)
    simulation.settle()
    assert_nothing_is_held(simulation, lost=lost(simulation))
    assert simulation.recorder.strays == 0
    for record in simulated.records:
        assert_ended_once(record)
        assert record.outcome == "completed" or losses or record.reason == "aborted", record.reason
