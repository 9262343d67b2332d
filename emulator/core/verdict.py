"""Does splitting prefill and decode help, hurt or make no difference, in which metric, and from which bandwidth on.

Every disaggregated deployment is held against every colocated one on the same number of GPUs, request by request.
What decides, in this order:

1. SLO attainment, the share of requests that meet every bound;
2. completion, when one side leaves more requests unfinished or failed: the latencies of those that did finish are
   then those of the lucky ones (survivor bias) and decide nothing;
3. the bounded latency that differs most, relative to its bound. Latencies are compared over the requests completed
   on both sides, and a side that left requests behind wins by a latency only if it still would with each of them
   counted as one bound slower.

A difference counts when its 95 % interval excludes 0, when enough pairs differ at all, and when it is material.
Where the fidelity of a run failed, nothing is concluded from it: the comparison is withheld, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from emulator.core import metrics
from emulator.core.bootstrap import interval_of_mean
from emulator.core.compare_summary import (
    BandwidthOutcome,
    BreakEven,
    BreakEvenReason,
    DecidingMetric,
    Difference,
    Verdict,
    Withheld,
)
from emulator.core.errors import ConfigError
from emulator.core.metrics import METRICS, PARTS, Bools, Floats, Measurements
from emulator.core.quantities import BitsPerSecond
from emulator.core.run_summary import RunResult, RunSummary
from emulator.core.specs import Slo, VerdictOutcome
from emulator.core.verdict_text import Comparison, write_text

MATERIAL_SHARE_OF_BOUND = 0.05
"""A latency difference below 5 % of its SLO bound decides nothing. A faithful emulation may still run steps late by
4 % of their length and links 3 % slow, so what is smaller can be the emulator's own; nor would it change a design."""

MATERIAL_ATTAINMENT = 0.01
"""Nor does a difference of less than one request in a hundred: requests that noise pushes over a bound."""

FEWEST_DIFFERING_PAIRS = 6
"""Fewer than six pairs that differ cannot tell at 95 %, even when all agree: a sign test of five gives
p = 2/2^5 = 0.06, while a bootstrap of so few is overconfident."""

SHARES: tuple[DecidingMetric, ...] = ("slo_attainment", "completion")


@dataclass(frozen=True)
class Judgement:
    """The verdicts, those on the best baseline marked, and the comparisons withheld."""

    verdicts: tuple[Verdict, ...]
    withheld: tuple[Withheld, ...]


@dataclass(frozen=True)
class _Side:
    """One run, measured once, its requests in order of arrival."""

    summary: RunSummary
    measured: Measurements
    met: Bools

    @classmethod
    def of(cls, result: RunResult, slo: Slo) -> _Side:
        measured = metrics.measure(sorted(result.records, key=lambda record: record.scheduled_s))
        return cls(result.summary, measured, metrics.meets_all(measured, slo))


def judge(results: Sequence[RunResult], slo: Slo) -> Judgement:
    """Compare every disaggregated deployment (all its bandwidths) with every colocated one.

    Requests are paired by `request_id`; those on one side only take no part. Raises ConfigError when deployments
    to compare differ in their number of GPUs. No disaggregated or no colocated run gives an empty judgement.
    """
    sides = [_Side.of(result, slo) for result in results]
    baselines = [side for side in sides if not side.summary.disaggregated]
    groups: dict[str, list[_Side]] = {}
    for side in sides:
        if side.summary.disaggregated:
            groups.setdefault(side.summary.deployment, []).append(side)
    check_equal_hardware(
        {name: group[0].summary.gpus for name, group in groups.items()},
        {baseline.summary.deployment: baseline.summary.gpus for baseline in baselines},
    )
    best = best_baseline(baseline.summary for baseline in baselines)
    verdicts: list[Verdict] = []
    withheld: list[Withheld] = []
    for group in groups.values():
        for baseline in baselines:
            compared, left = _compare_all(group, baseline, slo)
            withheld += left
            if compared:
                verdicts.append(_conclude(compared, slo, is_best=baseline.summary is best))
    return Judgement(tuple(verdicts), tuple(withheld))


def check_equal_hardware(disaggregated: Mapping[str, int], colocated: Mapping[str, int]) -> None:
    """Raise ConfigError, naming both, unless deployments to compare have equally many GPUs (name -> GPUs)."""
    for name, gpus in disaggregated.items():
        for other, other_gpus in colocated.items():
            if gpus != other_gpus:
                raise ConfigError(
                    f"deployments {name} ({gpus} GPUs) and {other} ({other_gpus} GPUs) cannot be compared: "
                    "give both the same number of GPUs"
                )


def best_baseline(summaries: Iterable[RunSummary]) -> RunSummary | None:
    """The colocated run to beat: highest attainment, then goodput, then lowest mean TTFT, of the faithful ones."""

    def rank(summary: RunSummary) -> tuple[float, float, float]:
        ttft = summary.ttft_ms.mean
        return (summary.slo_attainment or 0.0, summary.request_goodput, -np.inf if ttft is None else -ttft)

    faithful = [summary for summary in summaries if not summary.disaggregated and summary.fidelity.ok]
    return max(faithful, key=rank, default=None)


def _compare_all(group: Sequence[_Side], baseline: _Side, slo: Slo) -> tuple[list[Comparison], list[Withheld]]:
    """Comparisons at each bandwidth, ascending, and those withheld."""
    name, other = group[0].summary.deployment, baseline.summary.deployment
    if not baseline.summary.fidelity.ok:
        reason = _infidelity(baseline.summary)
        return [], [Withheld(deployment=name, baseline=other, kv_bandwidth_bps=None, reason=reason)]
    compared: list[Comparison] = []
    withheld: list[Withheld] = []
    for side in sorted(group, key=_bandwidth_bps):
        pairs = _pair(side.measured, baseline.measured)
        if not side.summary.fidelity.ok:
            reason = _infidelity(side.summary)
        elif not pairs[0].size:
            reason = "no request was sent in both runs"
        else:
            compared.append(_compare(side, baseline, pairs, slo))
            continue
        withheld.append(Withheld(deployment=name, baseline=other, kv_bandwidth_bps=_bandwidth_bps(side), reason=reason))
    return compared, withheld


def _bandwidth_bps(side: _Side) -> float:
    assert side.summary.kv_bandwidth_bps is not None
    return side.summary.kv_bandwidth_bps


def _infidelity(summary: RunSummary) -> str:
    bandwidth = summary.kv_bandwidth_bps
    at = "" if bandwidth is None else f" at {BitsPerSecond(bandwidth)}"
    why = "; ".join(summary.fidelity.reasons) or "no reason was recorded"
    return f"the emulation of {summary.deployment}{at} was not faithful: {why}"


def _pair(ours: Measurements, theirs: Measurements) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the requests that both runs have, in order of arrival."""
    rows = {request_id: row for row, request_id in enumerate(theirs.request_ids)}
    both = [(row, rows[name]) for row, name in enumerate(ours.request_ids) if name in rows]
    found = np.array(both, dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _compare(ours: _Side, theirs: _Side, pairs: tuple[np.ndarray, np.ndarray], slo: Slo) -> Comparison:
    """One comparison at one bandwidth."""
    mine, other = pairs
    bounds = metrics.bounds_ms(slo)
    done, their_done = ours.measured.completed[mine], theirs.measured.completed[other]
    completed_both = done & their_done
    only_ours, only_theirs = int(np.count_nonzero(done & ~their_done)), int(np.count_nonzero(their_done & ~done))
    differences: dict[DecidingMetric, Difference] = {
        "slo_attainment": _difference(_minus(ours.met[mine], theirs.met[other]), MATERIAL_ATTAINMENT),
        "completion": _difference(_minus(done, their_done), MATERIAL_ATTAINMENT),
    }
    for metric in METRICS:
        values = ours.measured.latency_ms[metric][mine] - theirs.measured.latency_ms[metric][other]
        known = values[~np.isnan(values)]
        differences[metric] = _latency_difference(
            known, bounds.get(metric), only_ours=only_ours, only_theirs=only_theirs
        )
    deciding = _deciding_metric(differences, bounds)
    parts, their_parts = ours.measured.ttft_parts_ms, theirs.measured.ttft_parts_ms
    changes = {part: _mean((parts[part][mine] - their_parts[part][other])[completed_both]) for part in PARTS}
    return Comparison(
        outcome=BandwidthOutcome(
            kv_bandwidth_bps=_bandwidth_bps(ours),
            outcome=_outcome(deciding, differences),
            deciding_metric=deciding,
            pairs=int(mine.size),
            left_out=int(mine.size - np.count_nonzero(completed_both)),
            differences=differences,
        ),
        ours=ours.summary,
        theirs=theirs.summary,
        part_changes_ms=changes,
    )


def _minus(ours: Bools, theirs: Bools) -> Floats:
    return ours.astype(np.float64) - theirs.astype(np.float64)


def _mean(values: Floats) -> float:
    return float(np.mean(values)) if values.size else 0.0


def _difference(values: Floats, material: float | None) -> Difference:
    """The mean of paired differences, its interval, and whether it decides (never without a `material` size)."""
    if values.size < 2:
        mean = float(values[0]) if values.size else None
        return Difference(mean=mean, low=None, high=None, pairs=int(values.size), decides=False)
    mean = float(np.mean(values))
    low, high = interval_of_mean(values)
    decides = (
        material is not None
        and abs(mean) >= material
        and (low > 0 or high < 0)
        and np.count_nonzero(values) >= FEWEST_DIFFERING_PAIRS
    )
    return Difference(mean=mean, low=low, high=high, pairs=int(values.size), decides=bool(decides))


def _latency_difference(values: Floats, bound: float | None, *, only_ours: int, only_theirs: int) -> Difference:
    """The difference of a latency; it decides only if it holds with the winner's missing requests a bound slower.

    `only_ours` and `only_theirs` count the pairs that completed on that side alone.
    """
    if bound is None:
        return _difference(values, None)
    material = MATERIAL_SHARE_OF_BOUND * bound
    difference = _difference(values, material)
    mean = difference.mean or 0.0
    missing = only_theirs if mean < 0 else only_ours
    charged = (abs(mean) * values.size - missing * bound) / max(1, values.size + missing)
    return msgspec.structs.replace(difference, decides=difference.decides and charged >= material)


def _deciding_metric(
    differences: Mapping[DecidingMetric, Difference], bounds: Mapping[metrics.Metric, float]
) -> DecidingMetric | None:
    for name in SHARES:
        if differences[name].decides:
            return name
    sizes = {m: abs(differences[m].mean or 0.0) / bound for m, bound in bounds.items() if differences[m].decides}
    return max(sizes, key=lambda metric: sizes[metric], default=None)


def _outcome(deciding: DecidingMetric | None, differences: Mapping[DecidingMetric, Difference]) -> VerdictOutcome:
    if deciding is None:
        return "no difference"
    rises = (differences[deciding].mean or 0.0) > 0
    return "helps" if rises == (deciding in SHARES) else "hurts"


def _conclude(compared: Sequence[Comparison], slo: Slo, *, is_best: bool) -> Verdict:
    """The verdict from comparisons in ascending order of bandwidth."""
    last = compared[-1]
    by_bandwidth = tuple(comparison.outcome for comparison in compared)
    break_even, reason = _break_even(by_bandwidth)
    return Verdict(
        deployment=last.ours.deployment,
        baseline=last.theirs.deployment,
        best_baseline=is_best,
        outcome=last.outcome.outcome,
        deciding_metric=last.outcome.deciding_metric,
        break_even=break_even,
        break_even_reason=reason,
        text=write_text(last, by_bandwidth, break_even, reason, metrics.bounds_ms(slo)),
        by_bandwidth=by_bandwidth,
    )


def _break_even(outcomes: Sequence[BandwidthOutcome]) -> tuple[BreakEven | None, BreakEvenReason | None]:
    """The bandwidths on either side of the turn to `helps`, or why there is none."""
    helps = [outcome.outcome == "helps" for outcome in outcomes]
    if len(helps) == 1:
        return None, "only one bandwidth"
    if all(helps):
        return None, "always helps"
    if not any(helps):
        return None, "never helps"
    turn = helps.index(True)
    if not all(helps[turn:]):
        return None, "not monotone"
    low, high = outcomes[turn - 1], outcomes[turn]
    return BreakEven(low_bps=low.kv_bandwidth_bps, high_bps=high.kv_bandwidth_bps), None
