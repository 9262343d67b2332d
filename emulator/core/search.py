"""The highest request rate at which enough requests meet the SLO, from as few trials as decide it.

A trial is one rate, run with several seeds, here or elsewhere. The next rate to try is a pure function of the trials
so far, and so is the result: a rate that was not evaluated cannot be reported.

- First the bracket: from a first guess the rate doubles while trials pass, or halves while they fail.
- Then bisection (geometric mean, rounded to four digits) until the lowest failing rate is within the tolerance.
- Then, with two seeds or more, the ends of the interval: at most three steps outwards on a side on which no trial is
  clear of the target, and bisection between the trial that is and the next that is not, to ten times the tolerance.

The attainment of a trial is the mean over its seeds, with the Student t interval of that mean at 95 %. It passes
when the mean reaches the target. The interval of the rate spans from the highest evaluated rate whose whole interval
is at or above the target to the lowest one above it whose whole interval is below: both were run. One seed has no
spread, so its interval is 0 to 1 and the rate has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from emulator.core.errors import ConfigError

BoundedBy = Literal["low", "high", "load generator", "kv memory"]

ROUNDING = 1e-9
"""A mean of shares may miss a target that it equals by a few units of the last binary place."""

MIN_TOLERANCE = 0.001
_DIGITS = 4
_OUTWARDS = 8.0
_COARSER = 10.0

_T_975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
)  # fmt: skip
"""97.5th percentile of Student's t for 1 to 10 degrees of freedom."""
_Z_975 = 1.959964


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rate, run once per seed: the share of sent requests that met every SLO, 0 to 1.

    `attainment` has one share per seed, `mean` their mean and `low`…`high` its 95 % interval; `passes` says that the
    mean reaches the target. `requests` counts all seeds together, `failure` is why the first failed request failed.
    """

    rate_per_s: float
    attainment: tuple[float, ...]
    mean: float
    low: float
    high: float
    passes: bool
    requests: int = 0
    failure: str | None = None


class Goodput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The goodput of one deployment at one KV bandwidth (null when no KV network is used).

    `rate_per_s` is the highest evaluated rate that passes (null when none does) and `next_rate_per_s` the lowest
    evaluated above it that fails (null when none does); `low_per_s`…`high_per_s` is the interval of the rate, an end
    null where no trial was clear of the target. Rates are of all open-loop streams together, requests per second.
    `bounded_by`: the search ended at its `low` or `high` end or at what the load generator can send, or KV memory
    held the rate down. `notes` are sentences for the reader. `requests_per_usd` and `requests_per_joule` are what the
    goodput comes to at the price and power of the deployment (see `core.upkeep`), null where one is not known.
    """

    deployment: str
    kv_bandwidth_bps: float | None
    gpus: int
    rate_per_s: float | None
    per_gpu: float | None
    usd_per_h: float | None = None
    watts: float | None = None
    requests_per_usd: float | None = None
    requests_per_joule: float | None = None
    next_rate_per_s: float | None
    low_per_s: float | None
    high_per_s: float | None
    bounded_by: BoundedBy | None
    trials: tuple[Trial, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where to search: the first rate to try, and the lowest and highest, all requests per second.

    The search ends when the lowest failing rate is at most 1 + `tolerance` times the highest passing one.
    """

    start: float
    low: float
    high: float
    tolerance: float = 0.02

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.start <= self.high < math.inf:
            raise ConfigError(
                f"a search from {self.low:g} to {self.high:g} requests per second, beginning at {self.start:g}: the "
                "lowest rate must be above 0 and the first between the lowest and the highest"
            )
        if not MIN_TOLERANCE <= self.tolerance <= 1:
            raise ConfigError(f"tolerance {self.tolerance:.2%}: must be from {MIN_TOLERANCE:.1%} to 100%")


@dataclass(frozen=True, slots=True)
class Bracket:
    """The highest passing trial, and the lowest failing one above it."""

    passing: Trial | None
    failing: Trial | None


def judge(
    rate_per_s: float, attainment: Sequence[float], target: float, *, requests: int = 0, failure: str | None = None
) -> Trial:
    """The trial that the attainment of each seed (one or more, 0 to 1) makes at a rate."""
    mean, low, high = mean_interval(attainment)
    return Trial(
        rate_per_s=rate_per_s,
        attainment=tuple(attainment),
        mean=mean,
        low=low,
        high=high,
        passes=reaches(mean, target),
        requests=requests,
        failure=failure,
    )


def mean_interval(shares: Sequence[float]) -> tuple[float, float, float]:
    """Mean of shares, and its Student t interval at 95 % within 0 to 1; all of 0 to 1 for a single share."""
    values = np.asarray(shares, dtype=np.float64)
    mean = float(np.mean(values))
    if values.size < 2:
        return mean, 0.0, 1.0
    half = student_t_975(values.size - 1) * float(np.std(values, ddof=1)) / math.sqrt(values.size)
    return mean, max(0.0, mean - half), min(1.0, mean + half)


def student_t_975(freedom: int) -> float:
    """97.5th percentile of Student's t, within 0.001: a table, then the Cornish-Fisher expansion about the normal.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z, n = _Z_975, float(freedom)
    first = (z**3 + z) / (4 * n)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + first + second + third


def reaches(share: float, target: float) -> bool:
    """Whether a share is at or above the target, but for rounding."""
    return share >= target - ROUNDING


def bracket(trials: Sequence[Trial]) -> Bracket:
    """The trials on either side of the answer."""
    passing = max((t for t in trials if t.passes), key=lambda t: t.rate_per_s, default=None)
    above = 0.0 if passing is None else passing.rate_per_s
    failing = min((t for t in trials if t.rate_per_s > above), key=lambda t: t.rate_per_s, default=None)
    return Bracket(passing, failing)


def interval(trials: Sequence[Trial], target: float) -> tuple[float | None, float | None]:
    """The ends of the rate's interval, each an evaluated rate; None where no trial is clear of the target."""
    sure = [t.rate_per_s for t in trials if reaches(t.low, target)]
    passing = bracket(trials).passing
    above = 0.0 if passing is None else passing.rate_per_s
    lost = [t.rate_per_s for t in trials if t.rate_per_s > above and not reaches(t.high, target)]
    return max(sure, default=None), min(lost, default=None)


def next_rate(trials: Sequence[Trial], span: Span, target: float) -> float | None:
    """The rate to try next, in requests per second; None when the search is over."""
    if not trials:
        return span.start
    found = bracket(trials)
    if found.failing is None:
        assert found.passing is not None, "a trial that does not pass fails"
        if (rate := found.passing.rate_per_s) < span.high:
            return min(2 * rate, span.high)
    elif found.passing is None:
        if (rate := found.failing.rate_per_s) > span.low:
            return max(rate / 2, span.low)
    elif (middle := _middle(found.passing.rate_per_s, found.failing.rate_per_s, span.tolerance)) is not None:
        return middle
    return _for_interval(trials, span, target) if len(trials[0].attainment) > 1 else None


def _middle(below: float, above: float, tolerance: float) -> float | None:
    """A rate between the two; None when they are within the tolerance."""
    if above <= below * (1 + tolerance):
        return None
    exact = math.sqrt(below * above)
    rounded = float(f"{exact:.{_DIGITS}g}")
    return rounded if below < rounded < above else exact


def _for_interval(trials: Sequence[Trial], span: Span, target: float) -> float | None:
    """A rate that makes the interval narrower, or closes it; None when that will do."""
    found, (sure, lost) = bracket(trials), interval(trials, target)
    rates = sorted(t.rate_per_s for t in trials)
    coarse = _COARSER * span.tolerance
    if found.passing is not None:
        if sure is None:
            if rates[0] > max(span.low, found.passing.rate_per_s / _OUTWARDS):
                return max(rates[0] / 2, span.low)
        elif (middle := _middle(sure, min([r for r in rates if r > sure], default=sure), coarse)) is not None:
            return middle
    if found.failing is not None:
        if lost is None:
            if rates[-1] < min(span.high, found.failing.rate_per_s * _OUTWARDS):
                return min(2 * rates[-1], span.high)
        elif (middle := _middle(max([r for r in rates if r < lost], default=lost), lost, coarse)) is not None:
            return middle
    return None


def disorder(trials: Sequence[Trial]) -> str | None:
    """A sentence when attainment rises with the rate by more than the seeds explain; None when it does not.

    The two trials named are those that are furthest apart.
    """
    pairs = [(a, b) for a in trials for b in trials if a.rate_per_s < b.rate_per_s and a.high < b.low]
    if not pairs:
        return None
    low, high = max(pairs, key=lambda pair: pair[1].mean - pair[0].mean)
    return (
        f"attainment does not fall steadily with the rate: {low.mean:.1%} at {low.rate_per_s:.4g}/s, "
        f"{high.mean:.1%} at {high.rate_per_s:.4g}/s"
    )
