"""From exchanges to the document of a load test, and whether its generator kept its schedule."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from emulator.core.bench.arrivals import Pace, RampUp
from emulator.core.bench.faithful import Rates, judge
from emulator.core.bench.measures import Measures
from emulator.core.records import read_records, write_rows
from tests.core.made_exchanges import TWO, document, exchange, sent_late


def test_keys_and_values_are_vllms() -> None:
    found = document(TWO)
    assert found["duration"] == 2.0
    assert (found["completed"], found["failed"]) == (2, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (198, 8)
    assert found["request_throughput"] == pytest.approx(1.0)
    assert found["output_throughput"] == pytest.approx(4.0)
    assert found["total_token_throughput"] == pytest.approx(103.0)
    assert found["request_rate"] == 1.0
    assert found["burstiness"] == 1.0
    # from the send: TTFT 100 and 100, E2EL 200 and 300; TPOT (100)/2 and 200/4; gaps 50, 50, 100, 100
    assert found["mean_ttft_ms"] == pytest.approx(100.0)
    assert found["mean_e2el_ms"] == pytest.approx(250.0)
    assert found["std_e2el_ms"] == pytest.approx(50.0)
    assert (found["mean_tpot_ms"], found["median_tpot_ms"]) == (pytest.approx(50.0), pytest.approx(50.0))
    assert found["mean_itl_ms"] == pytest.approx(75.0)
    assert found["p50_itl_ms"] == pytest.approx(75.0)
    assert found["p99.9_e2el_ms"] == pytest.approx(299.9)


def test_latency_from_the_schedule_has_what_waited_before_the_send() -> None:
    found = document(TWO)
    assert found["mean_ttft_ms_from_schedule"] == pytest.approx((100 + 600) / 2)
    assert found["p50_e2el_ms_from_schedule"] == pytest.approx((200 + 800) / 2)
    assert "mean_itl_ms_from_schedule" not in found
    assert found["schedule_delay_ms"]["max"] == pytest.approx(100.0)
    assert found["concurrency_wait_ms"]["max"] == pytest.approx(400.0)


def test_goodput_counts_from_the_send_and_attainment_from_the_schedule() -> None:
    found = document(TWO)
    assert found["slo"] == {"ttft_ms": 150.0, "tpot_ms": 60.0}
    assert found["request_goodput"] == pytest.approx(1.0)
    assert found["request_goodput_from_schedule"] == pytest.approx(0.5)
    assert found["slo_attainment"] == pytest.approx(0.5)
    assert found["slo_attainment_from_send"] == pytest.approx(1.0)
    assert found["slo_attainment_by_metric"] == {"ttft_ms": 0.5, "tpot_ms": 1.0}


def test_what_failed_misses_every_bound_and_is_counted_by_reason() -> None:
    bad = [exchange(n, reason="HTTP 429", message="slow down") for n in (2, 3)]
    found = document([*TWO, *bad, exchange(4, times_s=(0.1,), reason="timeout")])
    assert found["failed"] == 3
    assert found["failed_by_reason"] == {"HTTP 429": 2, "timeout": 1}
    assert found["slo_attainment"] == pytest.approx(1 / 5)
    assert found["total_output_tokens"] == 8
    assert found["mean_ttft_ms"] == pytest.approx(100.0)


def test_an_interrupted_run_has_what_there_was() -> None:
    open_ones = [exchange(2, sent_s=1.5, times_s=(1.6,), ended=False), exchange(3, sent_s=None, ended=False)]
    found = document([*TWO, *open_ones], interrupted=True)
    assert (found["requests"], found["completed"], found["unfinished"], found["failed"]) == (4, 2, 2, 0)
    assert found["interrupted"] is True
    assert found["slo_attainment"] == pytest.approx(1 / 4)


def test_nothing_completed_is_null_and_not_zero() -> None:
    found = document([exchange(reason="timeout")], measures=Measures(), pace=Pace())
    assert found["mean_ttft_ms"] is None
    assert found["p99_itl_ms"] is None
    assert found["request_goodput"] is None
    assert found["slo_attainment"] is None
    assert found["max_output_tokens_per_s"] is None
    assert found["tokens"]["tokens_per_chunk"] is None
    json.dumps(found, allow_nan=False)


def test_only_the_metrics_asked_for_are_there() -> None:
    found = document(TWO, measures=Measures(latencies=("itl",)))
    assert {key for key in found if key.startswith("p99")} == {"p99_itl_ms"}


def test_details_have_a_value_for_each_request() -> None:
    failed = exchange(2, reason="HTTP 500", message="oops")
    found = document([*TWO, failed], detailed=True)
    assert found["input_lens"] == [100, 98, 100]
    assert found["output_lens"] == [3, 5, 0]
    assert found["ttfts"] == pytest.approx([0.1, 0.1, 0.0])
    assert found["itls"] == [pytest.approx([0.05, 0.05]), pytest.approx([0.1, 0.1]), []]
    assert found["latencies"] == pytest.approx([0.2, 0.3, 0.0])
    assert found["start_times"] == [e.sent_s for e in (*TWO, failed)]
    assert found["queue_times"] == pytest.approx([0.0, 0.5, 0.0])
    assert found["errors"] == ["", "", "HTTP 500: oops"]
    assert "ttfts" not in document(TWO)


def test_what_was_not_sent_has_no_start() -> None:
    found = document([*TWO, exchange(2, sent_s=None, ended=False)], detailed=True)
    assert (found["start_times"][2], found["queue_times"][2], found["latencies"][2]) == (None, None, 0.0)


def test_tokens_that_are_counted_differently_are_counted() -> None:
    unstated = exchange(2, times_s=(0.1, 0.2))
    tokens = document([*TWO, unstated])["tokens"]
    assert tokens == {
        "output_counted_by": {"usage": 2, "chunks": 1},
        "asked_input_tokens": 300,
        "asked_output_tokens": 9,
        "input_deviation": pytest.approx(298 / 300 - 1),
        "input_mismatches": 1,
        "output_mismatches": 2,
        "usage_chunk_mismatches": 1,
        "tokens_per_chunk": pytest.approx(10 / 8),
    }


def test_peaks_are_those_of_whole_seconds() -> None:
    found = document([exchange(n, sent_s=n * 0.5, times_s=(n * 0.5 + 0.1, n * 0.5 + 0.2)) for n in range(4)])
    assert found["max_output_tokens_per_s"] == 4.0
    assert found["max_concurrent_requests"] == 2


def test_infinite_rates_are_words() -> None:
    found = document(TWO[:1], pace=Pace(burstiness=math.inf))
    assert (found["request_rate"], found["burstiness"], found["requested_rate"]) == ("inf", "inf", "inf")
    ramp = document(TWO, pace=Pace(ramp_up=RampUp("linear", 1.0, 3.0)))
    assert (ramp["ramp_up_strategy"], ramp["ramp_up_start_rps"], ramp["ramp_up_end_rps"]) == ("linear", 1.0, 3.0)
    assert ramp["requested_rate"] == pytest.approx(2.0)
    assert ramp["rps_change_events"] == [
        {"rps": 1.0, "timestamp": "1970-01-01T00:00:00+00:00"},
        {"rps": 2, "timestamp": "1970-01-01T00:00:00.500000+00:00"},
        {"rps": 3, "timestamp": "1970-01-01T00:00:00.500000+00:00"},
    ]


def test_records_are_those_of_every_run() -> None:
    failed = exchange(1, times_s=(0.1, 0.3), reason="timeout", message="after 5 s")
    rows = read_records(write_rows(e.record() for e in [TWO[0], failed]))
    assert [(r.outcome, r.output_tokens, r.first_token_s, r.finish_s, r.reason) for r in rows] == [
        ("completed", 3, 0.1, 0.2, ""),
        ("failed", 2, 0.1, 0.3, "timeout: after 5 s"),
    ]


# --- fidelity -----------------------------------------------------------------------------------------------------


def test_a_schedule_that_is_kept_is_faithful() -> None:
    exchanges = sent_late([0.001] * 100)
    found = judge(exchanges, Rates.of(exchanges), [0.0005] * 50, at_once=False)
    assert found.ok
    assert found.schedule_delay_ms_p99 == pytest.approx(1.0)


def test_a_generator_that_falls_behind_says_so() -> None:
    late = sent_late([n * 0.01 for n in range(100)])
    found = judge(late, Rates.of(late), [0.0], at_once=False)
    assert not found.ok
    assert any("could not keep its schedule" in reason for reason in found.reasons)
    assert any("9.091 requests/s where 10 were due" in reason for reason in found.reasons)


def test_a_loop_that_lags_fails() -> None:
    exchanges = sent_late([0.0] * 10)
    found = judge(exchanges, Rates.of(exchanges), [0.01] * 10, at_once=False)
    assert [reason.split(" ms")[0] for reason in found.reasons] == ["p99 lag of its event loop 10.00"]


def test_all_at_once_is_no_schedule_to_keep() -> None:
    exchanges = [exchange(n, sent_s=n * 0.001, times_s=(1.0,)) for n in range(100)]
    assert judge(exchanges, Rates.of(exchanges), [0.0], at_once=True).ok
    assert not judge(exchanges, Rates.of(exchanges), [0.0], at_once=False).ok
    assert document(exchanges, pace=Pace())["fidelity"]["ok"]


def test_what_the_limit_on_concurrency_keeps_back_is_not_the_generators_fault() -> None:
    exchanges = [
        exchange(n, scheduled_s=n * 0.1, due_s=float(n), sent_s=n + 0.001, times_s=(n + 1.0,)) for n in range(30)
    ]
    found = document(exchanges, max_concurrency=1)
    assert found["fidelity"]["ok"]
    assert found["requested_rate"] == pytest.approx(10.0)
    assert found["achieved_rate"] == pytest.approx(29 / 29.001)


def test_the_document_is_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(document(TWO, detailed=True)))["completed"] == 2
