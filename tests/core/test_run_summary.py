from __future__ import annotations

import json

import msgspec
import pytest

from emulator.core.run_summary import EndedBy, Fidelity, RunSummary, summarize
from emulator.core.specs import Slo
from tests.core.made_records import made_record, made_run

SLO = Slo(ttft_ms=150, tpot_ms=25)


def test_counts_and_shares() -> None:
    records = [made_record(), made_record(ttft_ms=200), made_record(outcome="failed")]
    run = made_run(records, SLO).summary
    assert (run.requests, run.completed, run.failed, run.unfinished, run.saturated) == (3, 2, 1, 0, False)
    assert run.slo_attainment == pytest.approx(1 / 3)
    assert run.slo_attainment_by_metric == pytest.approx({"ttft_ms": 1 / 3, "tpot_ms": 2 / 3})
    assert run.request_goodput == pytest.approx(0.1)
    assert run.requested_rate == pytest.approx(0.3)
    assert run.ttft_ms.p50 == pytest.approx(150)
    assert run.itl_ms.max == pytest.approx(20)


def test_costs_go_by_what_completed_and_what_met_the_slo() -> None:
    """In ten seconds 2 of 3 complete and 1 meets the SLO: 720 and 360 an hour at 7.20 USD/h, 2 and 1 in 10 kJ."""
    records = [made_record(), made_record(ttft_ms=200), made_record(outcome="failed")]
    costs = made_run(records, SLO).summary.costs
    assert (costs.usd_per_h, costs.watts) == (7.2, 1000)
    assert (costs.weight_copies, costs.weight_bytes, costs.kv_capacity_bytes) == (2, 32_000_000_000, 57_800_000_000)
    assert costs.requests_per_usd == pytest.approx(100)
    assert costs.goodput_requests_per_usd == pytest.approx(50)
    assert costs.requests_per_joule == pytest.approx(0.0002)
    assert costs.goodput_requests_per_joule == pytest.approx(0.0001)


def test_costs_that_are_not_known_are_null() -> None:
    costs = made_run([made_record()], SLO, holdings=None).summary.costs
    assert set(msgspec.to_builtins(costs).values()) == {None}


def test_a_run_with_unfinished_requests_is_saturated() -> None:
    run = made_run([made_record(), made_record(outcome="unfinished")], SLO).summary
    assert run.saturated
    assert run.unfinished == 1


@pytest.mark.parametrize("ended_by", ["stop", "limit"])
def test_a_run_whose_record_was_ended_before_its_requests_is_not_saturated(ended_by: EndedBy) -> None:
    run = made_run([made_record(), made_record(outcome="unfinished")], SLO, ended_by=ended_by).summary
    assert (run.saturated, run.unfinished, run.ended_by) == (False, 1, ended_by)


def test_breakdown_adds_up_to_the_mean_ttft() -> None:
    records = [made_record(ttft_ms=100 + 7 * i, wire_ms=3.0 + i) for i in range(5)]
    run = made_run(records, SLO, kv_bandwidth_bps=1e9).summary
    parts = msgspec.to_builtins(run.ttft_breakdown_ms)
    assert sum(parts.values()) == pytest.approx(run.ttft_ms.mean)
    assert parts["wire"] == pytest.approx(5.0)


def test_achieved_rate_counts_overlapping_transfers_once() -> None:
    spans = [(0.0, 1.0), (0.5, 2.0), (5.0, 6.0)]
    records = [
        msgspec.structs.replace(made_record(wire_ms=1.0), kv_start_s=start, kv_end_s=end, kv_bytes=30_000_000)
        for start, end in spans
    ]
    kv = made_run(records, SLO, kv_bandwidth_bps=1e9).summary.kv
    assert (kv.bytes, kv.transfers) == (90_000_000, 3)
    assert kv.achieved_bps == pytest.approx(8 * 90e6 / 3.0)
    assert kv.transfer_ms.mean == pytest.approx((1000 + 1500 + 1000) / 3)


def test_each_receiver_counts_its_own_time() -> None:
    records = [
        msgspec.structs.replace(
            made_record(wire_ms=1.0), kv_start_s=0.0, kv_end_s=1.0, kv_bytes=50_000_000, decode_node=node
        )
        for node in ("decode-1", "decode-0")
    ]
    assert made_run(records, SLO, kv_bandwidth_bps=1e9).summary.kv.achieved_bps == pytest.approx(4e8)


@pytest.mark.parametrize("records", [[], [made_record(outcome="unfinished")]])
def test_nothing_completed_is_null_and_never_nan(records: list[object]) -> None:
    run = summarize(records, deployment="colocated", gpus=2, slo=SLO, duration_s=10.0)  # type: ignore[arg-type]
    text = msgspec.json.encode(run).decode()
    assert "NaN" not in text
    document = json.loads(text)
    for metric in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        assert set(document[metric].values()) == {None}
    assert set(document["ttft_breakdown_ms"].values()) == {None}
    assert document["request_goodput"] == 0
    assert document["kv"]["achieved_bps"] is None


def test_fidelity_is_kept() -> None:
    run: RunSummary = made_run([], SLO, fidelity=Fidelity(ok=False, reasons=("late",))).summary
    assert run.fidelity.reasons == ("late",)
