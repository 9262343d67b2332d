"""The tightest SLO that a run still holds: all its bounds times one factor, as DistServe's second axis has it.

A run does not depend on the SLO, so nothing is searched. Each request needs the factor max(latency ÷ bound) over the
bounds, one that did not complete needs an infinite one, and attainment as a function of the factor is a step function
of these numbers: the tightest factor is one of them, exactly.

With several seeds the attainment at a factor is the mean over the seeds. The interval of the factor spans from the
largest one at which the 95 % interval of that mean (Student t) is below the target to the smallest at which it is at
or above it. One seed has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from emulator.core.metrics import METRICS, Floats, Measurements, Metric, bounds_ms
from emulator.core.search import ROUNDING, student_t_975
from emulator.core.specs import Slo

NO_METRIC = -1


class SloScale(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The tightest multiple of the SLO that one deployment holds at one rate and KV bandwidth.

    `factor` is null when no multiple holds, because too many requests did not complete; `low`…`high` is its interval,
    an end null where the seeds cannot tell. `attainment` has one share per seed at the factor, `mean` their mean,
    `mean_as_stated` is that at the SLO as it is; `bounds_ms` are the bounds times the factor. `deciding_metric` is
    the bound that most of the requests beyond the factor miss by most. `rate_per_s` is of the open-loop streams, null
    when there is none. `requests` and `failed` (not completed) count all seeds together.
    """

    deployment: str
    kv_bandwidth_bps: float | None
    gpus: int
    rate_per_s: float | None
    factor: float | None
    low: float | None
    high: float | None
    attainment: tuple[float, ...]
    mean: float
    mean_as_stated: float
    bounds_ms: dict[Metric, float]
    deciding_metric: Metric | None
    requests: int
    failed: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Needed:
    """What each request of one run needs: the factor, and the metric (its place in METRICS) that needs it."""

    factors: Floats
    metrics: NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Tightest:
    """A factor and the ends of its interval; None for what does not exist."""

    factor: float | None
    low: float | None
    high: float | None


def needed(measured: Measurements, slo: Slo) -> Needed:
    """The smallest factor on all bounds of `slo` at which each request meets them; infinite where it did not complete.

    `slo` has at least one bound. TPOT and ITL of a request of one token are undefined and need nothing.
    """
    bounds = bounds_ms(slo)
    by_metric = np.zeros((len(METRICS), len(measured)))
    for metric, bound in bounds.items():
        values = measured.latency_ms[metric] / bound
        passed = np.isnan(values) & (measured.output_tokens <= 1) & (metric in ("tpot_ms", "itl_p99_ms"))
        by_metric[METRICS.index(metric)] = np.where(passed, 0.0, np.where(np.isnan(values), np.inf, values))
    factors = np.where(measured.completed, by_metric.max(axis=0), np.inf)
    metrics = np.where(measured.completed, by_metric.argmax(axis=0), NO_METRIC)
    return Needed(factors=factors, metrics=metrics.astype(np.int8))


def share_within(factors: Floats, factor: float) -> float:
    """The share of requests that a factor is enough for; 0 when there is none."""
    return float(np.mean(factors <= factor)) if factors.size else 0.0


def tightest(runs: Sequence[Floats], target: float) -> Tightest:
    """The smallest factor at which the mean over runs of the share within it reaches the target, with its interval."""
    values = np.unique(np.concatenate(runs))
    values = values[np.isfinite(values)]
    shares = np.array([np.searchsorted(np.sort(run), values, side="right") / max(1, run.size) for run in runs])
    mean = shares.mean(axis=0)
    factor = _first(values, mean >= target - ROUNDING)
    if len(runs) < 2:
        return Tightest(factor, None, None)
    half = student_t_975(len(runs) - 1) * shares.std(axis=0, ddof=1) / math.sqrt(len(runs))
    lost = values[mean + half < target - ROUNDING]
    return Tightest(factor, float(lost[-1]) if lost.size else None, _first(values, mean - half >= target - ROUNDING))


def deciding_metric(runs: Sequence[Needed], factor: float) -> Metric | None:
    """The metric that most completed requests beyond the factor need it for; None when all are within."""
    beyond = np.concatenate([run.metrics[(run.factors > factor) & (run.metrics != NO_METRIC)] for run in runs])
    return METRICS[int(np.bincount(beyond).argmax())] if beyond.size else None


def scaled(slo: Slo, factor: float) -> Slo:
    """The SLO with every bound times the factor."""
    return msgspec.structs.replace(slo, **{metric: bound * factor for metric, bound in bounds_ms(slo).items()})


def _first(values: Floats, holds: NDArray[np.bool_]) -> float | None:
    """The first value for which `holds`."""
    return float(values[np.argmax(holds)]) if holds.any() else None
