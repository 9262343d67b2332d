"""The laws hold where prompts are prefilled and moved again, and a token or a byte too few or too many is found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest

from emulator.core.deployments import FirstToken, TransferMode
from emulator.core.physics import violations
from emulator.core.records import Record, StepRecord, expand_steps
from emulator.core.run_spec import NodeSpec, RunSpec
from emulator.simulate import simulate
from tests.builders import by_id, load_plan, node_spec, pair, request, run_spec
from tests.drawn import EVERY_FIRST_TOKEN, EVERY_TRANSFER_MODE
from tests.handed_over import handed_over

SHORT_OF_MEMORY = load_plan([request(f"r{i}", prompt_tokens=100, max_tokens=80) for i in range(6)])
TWO_OF_EACH = [
    node_spec(f"{role}-{n}", role=role, kv_blocks=1_000 if role == "prefill" else 24)
    for role in ("prefill", "decode")
    for n in (0, 1)
]


def _run(
    nodes: Sequence[NodeSpec], first_token: FirstToken = "handoff", transfer_mode: TransferMode = "push"
) -> RunSpec:
    run = run_spec(nodes, SHORT_OF_MEMORY, first_token=first_token)
    return handed_over(run, transfer_mode=transfer_mode, preemption="prefill")


ONE_OF_EACH = _run(pair(decode_blocks=24))


def _rows(run: RunSpec) -> tuple[list[Record], list[StepRecord]]:
    simulated = simulate(run)
    return simulated.records, list(expand_steps(simulated.steps))


@pytest.mark.parametrize("nodes", [pair(decode_blocks=24), TWO_OF_EACH], ids=["1P1D", "2P2D"])
@pytest.mark.parametrize(
    ("first_token", "transfer_mode"), list(itertools.product(EVERY_FIRST_TOKEN, EVERY_TRANSFER_MODE))
)
def test_a_run_that_prefills_anew_breaks_no_law(
    first_token: FirstToken, transfer_mode: TransferMode, nodes: Sequence[NodeSpec]
) -> None:
    run = _run(nodes, first_token, transfer_mode)
    records, steps = _rows(run)
    assert all(record.outcome == "completed" for record in records)
    assert sum(record.preemptions for record in records) > 1
    assert violations(run, records, steps, simulated=True) == []
    assert violations(run, records, steps) == []


def _without(steps: Sequence[StepRecord], node: str, kind: str) -> list[StepRecord]:
    """The last step of a kind on a node left out."""
    row = max(n for n, step in enumerate(steps) if (step.node, step.kind) == (node, kind))
    return [*steps[:row], *steps[row + 1 :]]


@pytest.mark.parametrize("run", [ONE_OF_EACH, _run(TWO_OF_EACH)], ids=["1P1D", "2P2D"])
def test_a_prompt_that_was_not_computed_again_is_found(run: RunSpec) -> None:
    records, steps = _rows(run)
    lost = _without(steps, "prefill-0", "prefill")
    (found,) = violations(run, records, lost, simulated=True)
    tokens = sum(step.prefill_tokens for step in steps) - sum(step.prefill_tokens for step in lost)
    assert found.endswith(f"all nodes computed {tokens} prompt tokens less than were needed")


@pytest.mark.parametrize("run", [ONE_OF_EACH, _run(TWO_OF_EACH)], ids=["1P1D", "2P2D"])
def test_a_token_that_nobody_decoded_is_found_and_one_too_many(run: RunSpec) -> None:
    records, steps = _rows(run)
    row = max(n for n, step in enumerate(steps) if step.kind == "decode")
    for batch, words in ((steps[row].decode_batch - 1, "have 1 more"), (steps[row].decode_batch + 1, "have -1 more")):
        changed = [*steps[:row], msgspec.structs.replace(steps[row], decode_batch=batch), *steps[row + 1 :]]
        (found,) = violations(run, records, changed, simulated=True)
        assert words in found


@pytest.mark.parametrize(
    "change",
    [
        {"kv_bytes_again": 0},
        {"kv_bytes_again": 100_000},
        {"kv_bytes_again": 180_000},
        {"kv_bytes_again": 150_001},
        {"kv_bytes_again": 300_000},
        {"preemptions": 0},
        {"preemptions": 3},
    ],
    ids=str,
)
def test_kv_that_was_not_moved_again_as_often_as_the_request_lost_it_is_found(change: dict[str, int]) -> None:
    """100 tokens and one to 79 more, once."""
    records, steps = _rows(ONE_OF_EACH)
    once = next(n for n, record in enumerate(records) if record.preemptions == 1)
    assert 101_000 <= records[once].kv_bytes_again <= 179_000
    records[once] = msgspec.structs.replace(records[once], **change)
    found = violations(ONE_OF_EACH, records, steps, simulated=True)
    assert any("KV is not conserved" in sentence and "bytes again" in sentence for sentence in found), found


def test_nothing_moves_again_where_it_is_recomputed() -> None:
    run = run_spec(pair(decode_blocks=24), SHORT_OF_MEMORY)
    records, steps = _rows(run)
    assert any(by_id(records)[record.request_id].preemptions for record in records)
    records[0] = msgspec.structs.replace(records[0], kv_bytes_again=101_000)
    (found,) = violations(run, records, steps, simulated=True)
    assert found.endswith("brought 101000 bytes again")
