"""Conditional disaggregation: which prompts are prefilled where they are decoded, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from emulator.core import metrics
from emulator.core.deployments import Admission, Conditional, FirstToken
from emulator.core.effects import Send
from emulator.core.messages import (
    Finished,
    Generate,
    NodeFinish,
    Prefill,
    PrefillDone,
    Reserve,
    StepTokens,
    TokenCount,
    Tokens,
)
from emulator.core.records import Record, RequestTimes
from emulator.core.router import Router
from emulator.core.run_summary import summarize
from emulator.core.specs import Slo
from emulator.core.workload import PlannedRequest
from emulator.simulate import simulate
from tests.builders import by_id, gaps_s, load_plan, pair, request, run_spec, ttft_s
from tests.drawn import EVERY_ADMISSION, EVERY_FIRST_TOKEN
from tests.routers import known_router, submit

SHORT = Conditional(eff_isl_threshold=100)


def _router(conditional: Conditional, *, prefill: int = 1, decode: int = 1, **ways: Any) -> Router:
    return known_router(prefill=prefill, decode=decode, conditional=conditional, **ways)


# --- the choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("admission", EVERY_ADMISSION)
def test_a_prompt_up_to_the_threshold_goes_to_a_decode_node_alone(admission: Admission) -> None:
    router = _router(SHORT, admission=admission)
    assert submit(router, "short", 100) == [Send("decode-0", Generate("short", 100, 10))]
    longer = submit(router, "long", 101)
    assert longer[-1] == Send("prefill-0", Prefill("long", 101, 10, admission == "decode_reserve_first"))
    reserve = Reserve("long", 101, 10, source="prefill-0")
    assert [s.message for s in longer[:-1]] == ([] if admission == "prefill_first" else [reserve])


def test_the_decode_node_is_the_one_with_most_free_memory() -> None:
    router = _router(SHORT, decode=2)
    assert [submit(router, f"r{n}", size)[0].peer for n, size in enumerate((100, 20, 20, 70))] == [
        "decode-0",
        "decode-1",
        "decode-1",
        "decode-1",
    ]


def test_a_prompt_stays_where_more_than_so_many_are_not_prefilled_yet() -> None:
    router = _router(Conditional(max_prefill_queue_size=1))
    peers = [[send.peer for send in submit(router, name)] for name in ("a", "b", "c")]
    assert peers == [["decode-0", "prefill-0"], ["decode-0", "prefill-0"], ["decode-0"]]
    router.handle("prefill-0", PrefillDone("a", RequestTimes()), 1.0)
    assert [send.peer for send in submit(router, "d")] == ["decode-0", "prefill-0"], "a is no longer in the queue"


def test_the_queue_is_that_of_the_node_that_would_take_it() -> None:
    router = _router(Conditional(max_prefill_queue_size=0), prefill=2)
    submit(router, "a", 500)
    assert [send.peer for send in submit(router, "b", 50)] == ["decode-0", "prefill-1"]
    assert [send.peer for send in submit(router, "c", 50)] == ["decode-0"]


def test_what_prefill_streams_alone_stays_at_prefill() -> None:
    assert submit(_router(SHORT, first_token="prefill"), "a", 10, 1) == [Send("prefill-0", Generate("a", 10, 1))]


def test_it_needs_no_prefill_node() -> None:
    router = _router(SHORT, prefill=0)
    assert submit(router, "short", 10) == [Send("decode-0", Generate("short", 10, 10))]
    (refused,) = submit(router, "long", 1_000)
    assert isinstance(refused.message, Finished)
    assert refused.message.detail == "no prefill node is left"


# --- its life -------------------------------------------------------------------------------------------------------


def test_its_tokens_come_from_the_decode_node_and_its_record_names_that_twice() -> None:
    router = _router(SHORT)
    submit(router, "a", 10, 1)
    finished = StepTokens((TokenCount("a", 1),), (NodeFinish("a", "length"),))
    tokens, end = router.handle("decode-0", finished, 1.0)
    assert tokens == Send("client", Tokens((TokenCount("a", 1),)))
    assert isinstance(end.message, Finished)
    assert (end.message.prefill_node, end.message.decode_node) == ("decode-0", "decode-0")
    assert router.live_requests == 0
    router.check_integrity()


def test_a_lost_decode_node_costs_a_retry_on_another_one() -> None:
    router = _router(SHORT, decode=2)
    submit(router, "a", 10)
    assert router.lost("decode-0") == [Send("decode-1", Generate("a~1", 10, 10))]
    router.check_integrity()


@pytest.mark.parametrize("first_token", EVERY_FIRST_TOKEN)
@pytest.mark.parametrize("admission", EVERY_ADMISSION)
def test_its_first_token_comes_at_the_end_of_its_prefill(first_token: FirstToken, admission: Admission) -> None:
    run = run_spec(
        pair(), load_plan([request()]), payload_bytes_per_s=1e6,
        first_token=first_token, admission=admission, conditional=SHORT,
    )  # fmt: skip
    (record,) = simulate(run).records
    assert (record.prefill_node, record.decode_node, record.kv_bytes) == ("decode-0", "decode-0", 0)
    assert ttft_s(record) == pytest.approx(0.1)
    assert gaps_s(record) == pytest.approx([0.01, 0.01])
    parts = {part: float(values[0]) for part, values in metrics.measure([record]).ttft_parts_ms.items()}
    assert parts == pytest.approx({part: 100 if part == "prefill" else 0 for part in parts}, abs=1e-6)


def test_it_interferes_with_decodes_as_on_a_colocated_node() -> None:
    """A decode step takes 10 ms; the one that the short one's 80 ms of prefill fall into, these and at most 10 more."""
    load = [request("long", prompt_tokens=200, max_tokens=9), request("short", at_s=0.215, prompt_tokens=80)]
    records = _records(load)
    assert 0.080 <= max(gaps_s(records["long"])) <= 0.090
    undisturbed = _records([load[0]])
    assert max(gaps_s(undisturbed["long"])) == pytest.approx(0.010)


def _records(load: Sequence[PlannedRequest]) -> dict[str, Record]:
    return by_id(simulate(run_spec(pair(), load_plan(load), conditional=SHORT)).records)


def test_the_decode_node_must_hold_prompt_and_output() -> None:
    run = run_spec(pair(decode_blocks=8), load_plan([request(prompt_tokens=100, max_tokens=40)]), conditional=SHORT)
    (record,) = simulate(run).records
    assert record.outcome == "failed"
    assert "need KV for 140 tokens, decode-0 has room for 128" in record.reason


# --- how many -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first_token", "local"), [("handoff", 2), ("prefill", 1), ("recompute", 2)])
def test_a_summary_counts_those_whose_kv_stayed(first_token: FirstToken, local: int) -> None:
    """Where prefill streams the only token, nobody decodes, and that is no local prefill."""
    load = load_plan([request("a"), request("b", prompt_tokens=500), request("c", max_tokens=1)])
    run = run_spec(pair(), load, first_token=first_token, conditional=SHORT)
    records = simulate(run).records
    summary = summarize(
        records, deployment="1P1D", gpus=2, slo=Slo(), duration_s=1.0, kv_bandwidth_bps=8e9, first_token=run.first_token
    )
    assert summary.kv.local_prefills == local
