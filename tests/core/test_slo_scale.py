"""The tightest SLO: exact on records, and the same as evaluating the scaled SLO itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.metrics import measure, meets_all
from emulator.core.records import Record
from emulator.core.slo_scale import deciding_metric, needed, scaled, share_within, tightest
from emulator.core.specs import Slo
from tests.core.made_records import made_record

SLO = Slo(ttft_ms=200.0, tpot_ms=40.0, itl_p99_ms=100.0)

factors = st.lists(st.one_of(st.floats(0.01, 10.0), st.just(math.inf)), min_size=1, max_size=40)


@st.composite
def records(draw: st.DrawFn) -> list[Record]:
    """Requests of one token or more, some of which did not complete."""
    return [
        made_record(
            f"r{n}",
            ttft_ms=draw(st.floats(1.0, 1_000.0)),
            gaps_ms=draw(st.lists(st.floats(1.0, 300.0), max_size=4)),
            outcome=draw(st.sampled_from(["completed", "completed", "failed", "unfinished"])),
        )
        for n in range(draw(st.integers(1, 20)))
    ]


def test_a_request_needs_what_its_worst_bound_needs() -> None:
    made = [
        made_record("ttft", ttft_ms=300.0, gaps_ms=(20.0, 20.0)),
        made_record("itl", ttft_ms=20.0, gaps_ms=(20.0, 20.0, 140.0)),
        made_record("one token", ttft_ms=50.0, gaps_ms=()),
        made_record("failed", outcome="failed"),
    ]
    found = needed(measure(made), SLO)
    itl = 20.0 + 0.98 * 120.0
    assert list(found.factors) == pytest.approx([1.5, max(60.0 / 40.0, itl / 100.0), 0.25, math.inf])
    assert deciding_metric([found], 0.3) == "ttft_ms"
    assert deciding_metric([found], 2.0) is None


@given(records(), st.floats(0.05, 20.0))
def test_a_factor_is_enough_for_the_requests_that_meet_the_scaled_slo(made: list[Record], factor: float) -> None:
    measured = measure(made)
    alone = needed(measured, SLO).factors
    near = np.isclose(alone, factor, rtol=1e-9)
    assert np.array_equal((alone <= factor)[~near], meets_all(measured, scaled(SLO, factor))[~near])


@given(st.lists(factors, min_size=1, max_size=4), st.floats(0.05, 1.0))
def test_the_tightest_factor_is_that_of_trying_them_all(runs: list[list[float]], target: float) -> None:
    arrays = [np.array(run) for run in runs]

    def holds(factor: float) -> bool:
        return float(np.mean([share_within(run, factor) for run in arrays])) >= target - 1e-9

    candidates = sorted({factor for run in runs for factor in run if factor < math.inf})
    expected = next((factor for factor in candidates if holds(factor)), None)
    found = tightest(arrays, target)
    assert found.factor == expected
    if len(runs) == 1:
        assert (found.low, found.high) == (None, None)
    if found.low is not None and found.factor is not None:
        assert found.low < found.factor
    if found.high is not None:
        assert found.factor is not None
        assert found.high >= found.factor


def test_the_interval_widens_with_the_spread_of_the_seeds() -> None:
    base = np.linspace(0.1, 1.0, 100)
    alike = tightest([base, base + 1e-6, base - 1e-6], 0.9)
    apart = tightest([base, base * 1.2, base * 0.8], 0.9)
    assert alike.low is not None
    assert alike.high is not None
    assert alike.high - alike.low < 0.05
    assert apart.factor is not None
    assert apart.low is not None
    assert apart.low < 0.95 * apart.factor
    assert apart.high is None or apart.high > 1.05 * apart.factor


def test_no_factor_holds_when_too_many_requests_failed() -> None:
    assert tightest([np.array([0.5, 0.5, math.inf])], 0.9).factor is None
    assert tightest([np.array([0.5] * 9 + [math.inf])], 0.9).factor == 0.5
