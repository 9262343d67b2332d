"""The search for the highest rate: the known answer is found, and nothing is reported that was not evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.errors import ConfigError
from emulator.core.search import (
    Span,
    Trial,
    bracket,
    disorder,
    interval,
    judge,
    mean_interval,
    next_rate,
    student_t_975,
)

TARGET = 0.9
MOST_TRIALS = 100

Attain = Callable[[float, int], float]


def searched(attain: Attain, span: Span, *, seeds: int = 1, target: float = TARGET) -> list[Trial]:
    """Every trial of a search in which `attain` gives the share of a rate and a seed."""
    trials: list[Trial] = []
    while (rate := next_rate(trials, span, target)) is not None:
        trials.append(judge(rate, [attain(rate, seed) for seed in range(seeds)], target))
        assert len(trials) <= MOST_TRIALS, "a search must end"
    return trials


@st.composite
def spans(draw: st.DrawFn) -> Span:
    """A range of up to a million to one, a first rate in it, and a tolerance."""
    low = draw(st.floats(1e-3, 10.0))
    high = low * draw(st.floats(1.0, 1e6))
    start = min(high, low * (high / low) ** draw(st.floats(0.0, 1.0)))
    return Span(start=max(low, start), low=low, high=high, tolerance=draw(st.floats(0.001, 0.5)))


def step(knee: float) -> Attain:
    """All requests meet the SLO up to the knee, none above."""
    return lambda rate, seed: 1.0 if rate <= knee else 0.0


@given(spans(), st.floats(0.0, 1.0), st.integers(1, 3))
def test_a_step_is_found_to_the_tolerance(span: Span, where: float, seeds: int) -> None:
    knee = span.low * (span.high / span.low) ** where
    trials = searched(step(knee), span, seeds=seeds)
    found = bracket(trials)
    if knee >= span.high:
        assert found.passing is not None
        assert (found.passing.rate_per_s, found.failing) == (span.high, None)
    elif knee < span.low:
        assert found.passing is None
        assert found.failing is not None
        assert found.failing.rate_per_s == span.low
    else:
        assert found.passing is not None
        assert found.failing is not None
        assert found.passing.rate_per_s <= knee < found.failing.rate_per_s
        assert found.failing.rate_per_s <= found.passing.rate_per_s * (1 + span.tolerance) * (1 + 1e-12)
    assert disorder(trials) is None


@given(st.floats(0.5, 50.0), st.floats(2.0, 12.0), st.floats(0.1, 0.99), st.floats(0.1, 1_000.0))
def test_a_curve_is_found_where_it_crosses_the_target(knee: float, steep: float, target: float, start: float) -> None:
    answer = knee * ((1 - target) / target) ** (1 / steep)
    span = Span(start=start, low=1e-3, high=1e5, tolerance=0.02)
    found = bracket(searched(lambda rate, seed: 1 / (1 + (rate / knee) ** steep), span, target=target))
    assert found.passing is not None
    assert answer / 1.0201 <= found.passing.rate_per_s <= answer * (1 + 1e-9)


@given(spans(), st.integers(0, 2**32), st.integers(1, 5))
def test_whatever_the_function_only_evaluated_rates_come_out(span: Span, chaos: int, seeds: int) -> None:
    def attain(rate: float, seed: int) -> float:
        return float(np.random.default_rng([chaos, seed, int(rate * 1e9)]).random())

    trials = searched(attain, span, seeds=seeds, target=0.5)
    rates = [trial.rate_per_s for trial in trials]
    assert len(set(rates)) == len(rates), "no rate is run twice"
    assert all(span.low <= rate <= span.high for rate in rates)
    found = bracket(trials)
    assert found.passing in [None, *trials]
    assert found.failing in [None, *trials]
    assert set(interval(trials, 0.5)) <= {None, *rates}
    if found.passing is not None and found.failing is not None:
        assert found.passing.rate_per_s < found.failing.rate_per_s
    if found.passing is None:
        assert min(rates) == span.low
    if found.failing is None:
        assert max(rates) == span.high


@given(st.integers(0, 2**32), st.integers(2, 6))
def test_the_interval_of_a_noisy_curve_holds_the_answer(chaos: int, seeds: int) -> None:
    knees = 10.0 * np.exp(np.random.default_rng(chaos).normal(0.0, 0.1, size=seeds))
    span = Span(start=3.0, low=0.01, high=1e4, tolerance=0.02)
    trials = searched(lambda rate, seed: float(1 / (1 + (rate / knees[seed]) ** 8)), span, seeds=seeds)
    found, (low, high) = bracket(trials), interval(trials, TARGET)
    assert found.passing is not None
    assert found.failing is not None
    assert low is not None, "far below the knee every seed attains the target"
    assert low <= found.passing.rate_per_s
    if high is not None:
        assert high >= found.failing.rate_per_s
    ends = {trial.rate_per_s: trial for trial in trials}
    assert ends[low].low >= TARGET
    assert high is None or ends[high].high < TARGET


def test_an_interval_that_the_bracket_left_open_is_closed_and_narrowed() -> None:
    spread = (0.0, 0.02, 0.04)
    half = 4.3027 * 0.02 / math.sqrt(3)
    clear_below, clear_above = 100 * (0.1 - half), 100 * (0.1 + half)

    def attain(rate: float, seed: int) -> float:
        return 1.02 - 0.01 * rate - spread[seed]

    span = Span(start=12.0, low=1.0, high=100.0, tolerance=0.05)
    trials = searched(attain, span, seeds=3)
    low, high = interval(trials, TARGET)
    assert low is not None
    assert high is not None
    assert low <= clear_below <= 1.5 * low
    assert high / 1.5 <= clear_above <= high
    alone = searched(attain, span, seeds=1)
    assert interval(alone, TARGET) == (None, None), "a single seed has no spread"
    assert len(alone) < len(trials)


def test_attainment_that_rises_with_the_rate_is_noted_and_noise_is_not() -> None:
    dip = [judge(1.0, [0.5, 0.51], TARGET), judge(2.0, [0.95, 0.95], TARGET), judge(4.0, [0.1, 0.1], TARGET)]
    note = disorder(dip)
    assert note is not None
    assert "50.5% at 1/s" in note
    assert "95.0% at 2/s" in note
    assert disorder([judge(1.0, [0.8, 1.0], TARGET), judge(2.0, [0.9, 1.0], TARGET)]) is None


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.706), (2, 4.303), (10, 2.228), (11, 2.201), (30, 2.042), (99, 1.984)]
)
def test_students_t_is_that_of_the_tables(freedom: int, expected: float) -> None:
    assert student_t_975(freedom) == pytest.approx(expected, abs=1e-3)


def test_the_interval_of_a_mean_is_students() -> None:
    mean, low, high = mean_interval([0.90, 0.92, 0.94])
    half = 4.3027 * 0.02 / math.sqrt(3)
    assert (mean, low, high) == pytest.approx((0.92, 0.92 - half, 0.92 + half))
    assert mean_interval([0.99, 1.0])[2] == 1.0, "a share is at most 1"
    assert mean_interval([0.9]) == (0.9, 0.0, 1.0)


def test_a_mean_that_is_the_target_passes_in_spite_of_rounding() -> None:
    shares = [0.7, 0.8, 0.9]
    assert sum(shares) / 3 < 0.8
    assert judge(1.0, shares, 0.8).passes


@pytest.mark.parametrize(
    ("low", "start", "high", "tolerance"),
    [(0.0, 1.0, 2.0, 0.02), (2.0, 1.0, 3.0, 0.02), (1.0, 2.0, math.inf, 0.02), (1.0, 1.0, 1.0, 0.0)],
)
def test_a_search_that_cannot_be_is_refused(low: float, start: float, high: float, tolerance: float) -> None:
    with pytest.raises(ConfigError):
        Span(start=start, low=low, high=high, tolerance=tolerance)
