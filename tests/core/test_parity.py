"""Live against simulated: the difference of each percentile, and which are too large."""

from __future__ import annotations

import msgspec
import pytest

from emulator.core.parity import run_parity
from emulator.core.run_summary import Distribution, RunSummary, summarize
from emulator.core.specs import Slo
from emulator.report.parity_table import conclusion, parity_html


def _with(summary: RunSummary, p50: float, p90: float, p99: float) -> RunSummary:
    return msgspec.structs.replace(summary, ttft_ms=Distribution(mean=p50, p50=p50, p90=p90, p99=p99, max=p99))


NOTHING = summarize([], deployment="1P1D", gpus=2, slo=Slo(), duration_s=1.0, kv_bandwidth_bps=1e9)


@pytest.mark.parametrize(
    ("live", "within"),
    [
        ((100.0, 200.0, 300.0), [True, True, True]),
        ((102.9, 205.9, 314.9), [True, True, True]),
        ((103.1, 193.9, 316.0), [False, False, False]),
        ((97.1, 194.1, 284.0), [True, True, False]),
    ],
)
def test_each_percentile_has_its_bound(live: tuple[float, float, float], within: list[bool]) -> None:
    parity = run_parity(_with(NOTHING, *live), _with(NOTHING, 100.0, 200.0, 300.0))
    ttft = [deviation for deviation in parity.deviations if deviation.metric == "ttft_ms"]
    assert [deviation.within for deviation in ttft] == within
    assert [deviation.difference for deviation in ttft] == [
        pytest.approx(seen / expected - 1) for seen, expected in zip(live, (100.0, 200.0, 300.0), strict=True)
    ]
    assert parity.within is all(within)


def test_what_only_one_of_the_drivers_has_is_not_within() -> None:
    assert run_parity(NOTHING, NOTHING).within, "nothing on both sides"
    assert not run_parity(_with(NOTHING, 1.0, 1.0, 1.0), NOTHING).within
    assert not run_parity(NOTHING, _with(NOTHING, 1.0, 1.0, 1.0)).within


def test_the_page_shows_both_values_where_they_differ_too_much() -> None:
    parity = (run_parity(_with(NOTHING, 150.0, 200.0, 300.0), _with(NOTHING, 100.0, 200.0, 300.0)),)
    text = "".join(parity_html(parity))
    assert "+50.0% (150.0/100.0)" in text
    assert "+0.0%" in text
    assert conclusion(parity) == "0 of 1 runs are within every bound of their simulation."
    assert parity_html(()) == []
