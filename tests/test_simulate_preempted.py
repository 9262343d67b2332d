"""What loses its memory is prefilled anew (`preemption = "prefill"`): instants by hand, and progress in any case."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from emulator.core.deployments import FirstToken, TransferMode
from emulator.core.records import Record
from emulator.lab.simulated import simulated_result
from emulator.simulate import Simulated, Simulation, simulate
from tests.builders import by_id, load_plan, node_spec, pair, request, run_spec
from tests.drawn import EVERY_FIRST_TOKEN, EVERY_TRANSFER_MODE
from tests.handed_over import handed_over

EXACT = 1e-9
STEP_S = 0.010
MS = 1e-3
"""A prompt token takes 1 ms."""
US = 1e-6
"""Its KV, of 1,000 bytes, takes 1 µs at 1 GB/s."""


def _two(first_token: FirstToken, transfer_mode: TransferMode) -> Simulated:
    """Two prompts of 96 tokens with 60 to come each; decode has memory for both until each has some 16."""
    load = load_plan([request(name, prompt_tokens=96, max_tokens=60) for name in ("a", "b")])
    run = handed_over(
        run_spec(pair(decode_blocks=14), load),
        first_token=first_token,
        transfer_mode=transfer_mode,
        preemption="prefill",
    )
    return Simulation(run, after_event=Simulation.check_integrity).run()


def _before_the_gap(record: Record) -> int:
    """How many tokens came before the first gap of many steps."""
    return int(np.flatnonzero(np.diff(record.times()) > 5 * STEP_S)[0]) + 1


@pytest.mark.parametrize("transfer_mode", EVERY_TRANSFER_MODE)
@pytest.mark.parametrize("first_token", EVERY_FIRST_TOKEN)
def test_a_request_that_lost_its_memory_goes_on_when_it_is_prefilled_and_moved_again(
    first_token: FirstToken, transfer_mode: TransferMode
) -> None:
    simulated = _two(first_token, transfer_mode)
    records = by_id(simulated.records)
    a, b = records["a"], records["b"]
    assert (a.preemptions, b.preemptions, simulated.preemptions) == (0, 1, 1)
    assert a.finish_s is not None
    known = 96 + _before_the_gap(b)
    assert (b.output_tokens, b.kv_bytes, b.kv_bytes_again) == (60, 96_000, known * 1_000)
    last_s, next_s = b.times()[known - 97], b.times()[known - 96]
    if first_token == "prefill":
        assert next_s == pytest.approx(last_s + known * MS, abs=EXACT), "the prefill node is idle"
    else:
        step_s = STEP_S if first_token == "recompute" else 0.0
        assert next_s == pytest.approx(a.finish_s + known * US + step_s, abs=EXACT), "its KV waits for a's memory"
    prefilled = [step.prefill_tokens for step in simulated.steps if step.node == "prefill-0"]
    assert prefilled == [96, 96, known]
    assert not any(step.prefill_tokens for step in simulated.steps if step.node == "decode-0")
    assert b.prefill_end_s == pytest.approx(0.192, abs=EXACT), "the first time"


@pytest.mark.parametrize("first_token", EVERY_FIRST_TOKEN)
@pytest.mark.parametrize("left", [1, 2])
def test_even_the_last_token_alone_is_prefilled_for(first_token: FirstToken, left: int) -> None:
    """b wants so many tokens more than it has when it loses its memory."""
    before = _before_the_gap(by_id(_two(first_token, "push").records)["b"])
    load = load_plan(
        [
            request("a", prompt_tokens=96, max_tokens=60),
            request("b", prompt_tokens=96, max_tokens=before + left),
        ]
    )
    run = handed_over(run_spec(pair(decode_blocks=14), load), first_token=first_token, preemption="prefill")
    for exact in (True, False):
        b = by_id(Simulation(run, exact_steps=exact).run().records)["b"]
        assert (b.outcome, b.output_tokens, b.preemptions) == ("completed", before + left, 1)
        streamed_by_prefill = first_token == "prefill" and left == 1
        assert b.kv_bytes_again == (0 if streamed_by_prefill else (96 + before) * 1_000)


def test_a_summary_counts_what_was_preempted_and_moved_again() -> None:
    load = load_plan([request(name, prompt_tokens=96, max_tokens=60) for name in ("a", "b", "c")])
    run = handed_over(run_spec(pair(decode_blocks=14), load), preemption="prefill")
    result = simulated_result(run)
    again = sum(record.kv_bytes_again for record in result.records)
    assert result.summary.preemptions == sum(record.preemptions for record in result.records) > 1
    assert (result.summary.kv.bytes, result.summary.kv.bytes_again) == (3 * 96_000 + again, again)
    assert result.summary.fidelity.ok


@pytest.mark.parametrize(
    ("first_token", "transfer_mode"), list(itertools.product(EVERY_FIRST_TOKEN, EVERY_TRANSFER_MODE))
)
def test_requests_that_take_each_others_memory_again_and_again_all_come_to_their_end(
    first_token: FirstToken, transfer_mode: TransferMode
) -> None:
    """Memory for one that is at its end and one that begins; eight of them at a time."""
    nodes = [
        node_spec("prefill-0", role="prefill", block_size=1),
        node_spec("decode-0", role="decode", kv_blocks=80, block_size=1),
    ]
    load = load_plan([request(f"r{n}", prompt_tokens=10, max_tokens=60) for n in range(8)])
    run = handed_over(run_spec(nodes, load), first_token=first_token, transfer_mode=transfer_mode, preemption="prefill")
    records = simulate(run).records
    assert all(record.outcome == "completed" for record in records)
    assert max(record.preemptions for record in records) > 5
    assert all(record.preemptions < record.max_tokens for record in records), "a token for each attempt"
