from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core import metrics
from emulator.core.records import Outcome, Record, TimeRun
from emulator.core.specs import Slo
from tests.core.made_records import made_record
from tests.examples import examples

SLO = Slo(ttft_ms=150, tpot_ms=25, e2el_ms=400, itl_p99_ms=60)


def test_latencies_are_taken_from_the_scheduled_arrival() -> None:
    late = msgspec.structs.replace(made_record(scheduled_s=1.0, ttft_ms=100, gaps_ms=(10, 50)), sent_s=1.09)
    measured = metrics.measure([late])
    assert measured.latency_ms["ttft_ms"] == pytest.approx([100.0])
    assert measured.latency_ms["e2el_ms"] == pytest.approx([160.0])
    assert measured.latency_ms["tpot_ms"] == pytest.approx([30.0])


def test_itl_p99_interpolates_within_a_request() -> None:
    measured = metrics.measure([made_record(gaps_ms=(10, 20, 30)), made_record(gaps_ms=(5,)), made_record(gaps_ms=())])
    values = measured.latency_ms["itl_p99_ms"]
    assert values[:2] == pytest.approx([20 + 0.98 * 10, 5])
    assert np.isnan(values[2])


def test_gaps_are_pooled_over_completed_requests_only() -> None:
    cut = made_record(gaps_ms=(900.0,), outcome="unfinished")
    cut = msgspec.structs.replace(cut, first_token_s=0.1, token_times_s=[0.1, 1.0], output_tokens=2)
    measured = metrics.measure([made_record(gaps_ms=(10, 20)), cut, made_record(gaps_ms=(30,), scheduled_s=7)])
    assert measured.gaps_ms == pytest.approx([10, 20, 30])
    assert np.isnan(measured.latency_ms["ttft_ms"][1])


def test_rows_of_equal_shape_read_as_single_times() -> None:
    single = made_record(gaps_ms=(20, 20, 21, 22, 50))
    assert single.first_token_s is not None
    runs = [TimeRun(single.first_token_s, 0.020, 0.0, 3), TimeRun(single.first_token_s + 0.061, 0.022, 0.0, 2)]
    packed = msgspec.structs.replace(single, token_times_s=[*runs, single.token_times_s[-1]])
    one, other = metrics.measure([single]), metrics.measure([packed])
    assert other.gaps_ms == pytest.approx(one.gaps_ms)
    assert other.latency_ms["itl_p99_ms"] == pytest.approx(one.latency_ms["itl_p99_ms"])


def test_one_token_passes_tpot_and_itl_but_must_meet_ttft() -> None:
    measured = metrics.measure([made_record(gaps_ms=()), made_record(gaps_ms=(), ttft_ms=151)])
    assert np.isnan(measured.latency_ms["tpot_ms"]).all()
    assert {metric: list(met) for metric, met in metrics.meets(measured, SLO).items()} == {
        "ttft_ms": [True, False],
        "tpot_ms": [True, True],
        "e2el_ms": [True, True],
        "itl_p99_ms": [True, True],
    }


@pytest.mark.parametrize("outcome", ["failed", "unfinished"])
def test_what_did_not_complete_misses_every_bound(outcome: Outcome) -> None:
    measured = metrics.measure([made_record(outcome=outcome), made_record()])
    for met in metrics.meets(measured, SLO).values():
        assert list(met) == [False, True]
    assert metrics.share(metrics.meets_all(measured, SLO)) == 0.5
    assert metrics.share(metrics.meets_all(measured, Slo())) == 0.5


def test_goodput_is_per_second_of_the_arrival_window() -> None:
    measured = metrics.measure([made_record(), made_record(), made_record(ttft_ms=500)])
    assert metrics.request_goodput(metrics.meets_all(measured, SLO), 4.0) == 0.5


def test_output_throughput_counts_the_drain() -> None:
    measured = metrics.measure([made_record(scheduled_s=19.86, gaps_ms=(20, 20))])
    assert metrics.output_throughput(measured, 10.0) == pytest.approx(3 / 20.0)
    assert metrics.output_throughput(measured, 30.0) == pytest.approx(0.1)


def test_ttft_breakdown_by_hand() -> None:
    record = msgspec.structs.replace(
        made_record(scheduled_s=1.0, ttft_ms=100),
        queued_s=1.004,
        prefill_start_s=1.010,
        prefill_end_s=1.060,
        kv_ready_s=1.065,
        kv_start_s=1.066,
        kv_end_s=1.095,
    )
    parts = metrics.measure([record]).ttft_parts_ms
    assert {part: float(values[0]) for part, values in parts.items()} == pytest.approx(
        {"queue": 6, "prefill": 50, "decode_wait": 5, "wire": 30, "decode": 0, "orchestration": 9}
    )


LIVED = msgspec.structs.replace(
    made_record(scheduled_s=1.0, ttft_ms=100, gaps_ms=(30, 10)),
    queued_s=1.004,
    prefill_start_s=1.010,
    prefill_end_s=1.060,
    kv_ready_s=1.065,
    kv_start_s=1.066,
    kv_end_s=1.085,
)
"""Its KV is ready 5 ms after its prefill and 20 ms on the way; the client has its first token at 1.1 s."""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # The decode node had computed the last token again at 1.097 s.
        ({"streamed_s": 1.097}, {"decode_wait": 5, "wire": 20, "decode": 12, "orchestration": 7}),
        # The first token was streamed when the prefill was done, and reached the client only after the KV had arrived.
        ({"streamed_s": 1.060}, {"orchestration": 44}),
        # It had to wait for its ticket before the prefill, and the ticket was there at its end.
        ({"admitted_s": 1.009, "kv_ready_s": 1.060}, {"queue": 1, "decode_wait": 5, "wire": 25, "orchestration": 19}),
    ],
)
def test_ttft_breakdown_where_the_first_token_is_streamed_or_memory_asked_for_otherwise(
    changes: dict[str, float], expected: dict[str, float]
) -> None:
    parts = metrics.measure([msgspec.structs.replace(LIVED, **changes)]).ttft_parts_ms
    nothing = dict.fromkeys(metrics.PARTS, 0.0)
    assert {part: float(values[0]) for part, values in parts.items()} == pytest.approx(
        {**nothing, "queue": 6, "prefill": 50, **expected}
    )


def test_without_a_kv_network_the_rest_is_orchestration() -> None:
    parts = metrics.measure([made_record(ttft_ms=100)]).ttft_parts_ms
    assert (parts["wire"][0], parts["decode_wait"][0]) == (0, 0)
    assert parts["queue"][0] + parts["prefill"][0] == pytest.approx(100)


def test_no_records_at_all() -> None:
    measured = metrics.measure([])
    assert len(measured) == 0
    assert metrics.share(metrics.meets_all(measured, SLO)) is None
    assert metrics.output_throughput(measured, 10.0) == 0


INSTANTS = st.one_of(st.none(), st.floats(0, 10))


@st.composite
def any_record(draw: st.DrawFn) -> Record:
    gaps = draw(st.lists(st.floats(0, 200), max_size=6))
    made = made_record(
        scheduled_s=draw(st.floats(0, 5)),
        ttft_ms=draw(st.floats(0, 300)),
        gaps_ms=gaps,
        outcome=draw(st.sampled_from(["completed", "completed", "failed", "unfinished"])),
    )
    names = ("queued_s", "admitted_s", "prefill_start_s", "prefill_end_s", "kv_ready_s", "kv_end_s", "streamed_s")
    return msgspec.structs.replace(made, **{name: draw(INSTANTS) for name in names})


RECORDS = st.lists(any_record(), max_size=12)


@given(RECORDS)
@examples(60)
def test_the_parts_add_up_to_ttft(records: list[Record]) -> None:
    measured = metrics.measure(records)
    total = np.sum([measured.ttft_parts_ms[part] for part in metrics.PARTS], axis=0)
    np.testing.assert_allclose(total, measured.latency_ms["ttft_ms"], atol=1e-8)


@given(RECORDS)
@examples(60)
def test_meeting_all_is_no_more_than_meeting_each(records: list[Record]) -> None:
    measured = metrics.measure(records)
    met = metrics.meets_all(measured, SLO)
    for within in metrics.meets(measured, SLO).values():
        assert np.count_nonzero(met) <= np.count_nonzero(within)
        assert not np.any(met & ~within)


@given(RECORDS, st.randoms())
@examples(40)
def test_the_order_of_records_does_not_matter(records: list[Record], random: object) -> None:
    shuffled = list(records)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = metrics.measure(records), metrics.measure(shuffled)
    np.testing.assert_allclose(np.sort(other.gaps_ms), np.sort(one.gaps_ms))
    for metric in metrics.METRICS:
        np.testing.assert_allclose(np.sort(other.latency_ms[metric]), np.sort(one.latency_ms[metric]))


@given(st.lists(st.lists(st.floats(0, 1000), max_size=8), min_size=1, max_size=6), st.sampled_from([0.0, 50.0, 99.0]))
@examples(60)
def test_percentile_within_agrees_with_numpy(groups: list[list[float]], q: float) -> None:
    sizes = np.array([len(group) for group in groups])
    found = metrics.percentile_within(np.array([v for g in groups for v in g]), sizes, q)
    expected = [np.percentile(group, q) if group else np.nan for group in groups]
    np.testing.assert_allclose(found, expected, atol=1e-9)
