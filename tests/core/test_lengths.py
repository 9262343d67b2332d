"""Lengths: each distribution has the figures that it states, and the built-in set those that were published."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from emulator.core import traffic
from emulator.core.lengths import (
    AZURE_CONV_OUTPUT,
    AZURE_CONV_PROMPT,
    LengthPair,
    Lengths,
    LengthSource,
    PublishedQuantiles,
    StatedLengths,
    quantile_function,
    stated_lengths,
)
from emulator.core.quantities import Seconds

ONE = traffic.FixedLength(tokens=1)


def _draw(lengths: Lengths, n: int = 40_000, seed: int = 7) -> NDArray[np.int64]:
    """Shape (2, n): prompts, outputs."""
    return np.array(LengthSource(lengths, seed).draw(n)).T


def test_fixed_is_always_the_same() -> None:
    pair = LengthPair(traffic.FixedLength(tokens=512), traffic.FixedLength(tokens=3))
    assert LengthSource(pair, 1).draw(3) == [(512, 3)] * 3


def test_uniform_reaches_both_ends_evenly() -> None:
    prompts, outputs = _draw(LengthPair(traffic.UniformLength(low=5, high=8), traffic.UniformLength(low=9, high=9)))
    values, counts = np.unique(prompts, return_counts=True)
    assert values.tolist() == [5, 6, 7, 8]
    assert counts == pytest.approx([10_000] * 4, rel=0.04)
    assert set(outputs.tolist()) == {9}


def test_lognormal_has_its_median_and_sigma() -> None:
    prompts, _ = _draw(LengthPair(traffic.LognormalLength(median=800, sigma=0.5), ONE))
    logs = np.log(prompts)
    assert np.median(prompts) == pytest.approx(800, rel=0.02)
    assert logs.std() == pytest.approx(0.5, rel=0.02)


def test_lognormal_is_clipped_even_where_it_would_overflow() -> None:
    wild = traffic.LognormalLength(median=100, sigma=1000, low=16, high=4096)
    prompts, _ = _draw(LengthPair(wild, ONE))
    assert (prompts.min(), prompts.max()) == (16, 4096)
    assert np.mean(prompts == 16) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("published", [AZURE_CONV_PROMPT, AZURE_CONV_OUTPUT])
def test_quantile_function_passes_through_what_is_published(published: PublishedQuantiles) -> None:
    shares = np.array([0, 0.5, 0.9, 0.99, 1])
    knots = [published.minimum, published.p50, published.p90, published.p99, published.maximum]
    assert quantile_function(published, shares) == pytest.approx(knots, rel=1e-9)
    grid = quantile_function(published, (np.arange(200_000) + 0.5) / 200_000)
    assert np.all(np.diff(grid) > 0)
    assert grid.mean() == pytest.approx(published.mean, rel=1e-3)


@pytest.mark.parametrize(("row", "published"), [(0, AZURE_CONV_PROMPT), (1, AZURE_CONV_OUTPUT)])
def test_azure_conv_like_has_the_published_figures(row: int, published: PublishedQuantiles) -> None:
    tokens = _draw("azure-conv-like", n=200_000)[row]
    assert tokens.mean() == pytest.approx(published.mean, rel=0.03)
    assert np.quantile(tokens, 0.5) == pytest.approx(published.p50, rel=0.03)
    assert np.quantile(tokens, 0.9) == pytest.approx(published.p90, rel=0.03)
    assert np.quantile(tokens, 0.99) == pytest.approx(published.p99, rel=0.05)
    assert tokens.min() >= published.minimum
    assert tokens.max() <= published.maximum


def test_azure_conv_like_draws_prompt_and_output_independently() -> None:
    prompts, outputs = _draw("azure-conv-like")
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.02


@pytest.mark.parametrize(
    "lengths",
    [
        "azure-conv-like",
        LengthPair(traffic.LognormalLength(median=800, sigma=0.5), traffic.UniformLength(low=1, high=900)),
    ],
)
def test_one_at_a_time_gives_what_all_at_once_gives(lengths: Lengths) -> None:
    source = LengthSource(lengths, 3)
    assert [source.draw(1)[0] for _ in range(50)] == LengthSource(lengths, 3).draw(50)
    assert LengthSource(lengths, 3).draw(50) != LengthSource(lengths, 4).draw(50)


def test_stated_lengths_are_those_that_are_certain_to_be_possible() -> None:
    poisson = traffic.Poisson(rate_per_s=1)
    drawn = traffic.UniformLength(low=1, high=10_000)
    lognormal = traffic.LognormalLength(median=100, sigma=1, low=16)
    streams = (
        traffic.Stream(name="fixed", arrivals=poisson, prompt_tokens=4000, output_tokens=96),
        traffic.Stream(name="mixed", arrivals=poisson, prompt_tokens=drawn, output_tokens=lognormal),
        traffic.Stream(name="azure", arrivals=poisson, lengths="azure-conv-like"),
        traffic.Stream(name="replay", arrivals=traffic.Trace(file="t.csv")),
    )
    stated = stated_lengths(traffic.Workload(streams=streams, duration=Seconds(20.0)))
    assert stated == (StatedLengths("fixed", 4000, 96), StatedLengths("mixed", 10_000, 16))
    assert stated[0].total_tokens == 4096
