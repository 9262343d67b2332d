"""Where an outcome changes along the bandwidth: which bandwidth to try next, and what has been found so far.

Bisection in the logarithm, between every two neighbouring bandwidths that were run and differ in outcome, until they
are as close as asked. A start on a grid of factors of two finds changes that go back again, as long as they last for
such a factor; a narrower one may be missed, which is why a result lists every bandwidth that was run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from emulator.core.compare_summary import BreakEven
from emulator.core.specs import VerdictOutcome

START_FACTOR = 2.0
FINEST_TOLERANCE = 0.001
"""Bandwidths are tried to four digits, so that what is printed is what was run."""

_RANK: Mapping[VerdictOutcome, int] = {"hurts": -1, "no difference": 0, "helps": 1}


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Two neighbouring bandwidths that were run, bits per second, and the outcome at each."""

    low_bps: float
    high_bps: float
    below: VerdictOutcome
    above: VerdictOutcome


def rounded(bandwidth_bps: float) -> float:
    """To the four digits with which a bandwidth is printed."""
    return float(f"{bandwidth_bps:.4g}")


def first_bandwidths(low_bps: float, high_bps: float, own: Iterable[float] = ()) -> tuple[float, ...]:
    """Where to start: both ends, between them steps of at most a factor of two, and those of `own` that lie between."""
    steps = max(1, math.ceil(math.log(high_bps / low_bps) / math.log(START_FACTOR)))
    grid = {rounded(low_bps * (high_bps / low_bps) ** (step / steps)) for step in range(1, steps)}
    return tuple(sorted(grid | {low_bps, high_bps} | {bps for bps in own if low_bps < bps < high_bps}))


def changes(outcomes: Mapping[float, VerdictOutcome]) -> tuple[Change, ...]:
    """Every pair of neighbouring bandwidths with different outcomes, ascending."""
    return tuple(
        Change(low_bps=low, high_bps=high, below=outcomes[low], above=outcomes[high])
        for low, high in itertools.pairwise(sorted(outcomes))
        if outcomes[low] != outcomes[high]
    )


def next_bandwidths(outcomes: Mapping[float, VerdictOutcome], tolerance: float) -> tuple[float, ...]:
    """The middles, in the logarithm, of the changes whose ends are further apart than `tolerance`; none = finished."""
    return tuple(_middles(outcomes, tolerance))


def _middles(outcomes: Mapping[float, VerdictOutcome], tolerance: float) -> Iterator[float]:
    for change in changes(outcomes):
        if change.high_bps / change.low_bps - 1 > tolerance:
            middle = rounded(math.sqrt(change.low_bps * change.high_bps))
            if change.low_bps < middle < change.high_bps:
                yield middle


def is_monotone(outcomes: Mapping[float, VerdictOutcome]) -> bool:
    """Whether more bandwidth never makes the outcome worse, of hurts < no difference < helps."""
    return all(_RANK[change.below] < _RANK[change.above] for change in changes(outcomes))


def break_even(outcomes: Mapping[float, VerdictOutcome]) -> BreakEven | None:
    """The highest bandwidth that does not help and the lowest from which on all help; None where it is not so."""
    turns = [change for change in changes(outcomes) if "helps" in (change.below, change.above)]
    if len(turns) != 1 or turns[0].above != "helps":
        return None
    return BreakEven(low_bps=turns[0].low_bps, high_bps=turns[0].high_bps)
