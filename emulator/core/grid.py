"""A sweep as data: the axes, the points of their grid, and the tidy rows that a point leaves.

One row of `runs` is one deployment under one seed at one point; one row of `outcomes` is a disaggregated deployment
against a colocated one on equally many GPUs at one point, all seeds together. Units are in the names of the columns;
an axis on which a point says nothing (null) is as the topology has it. Costs are as in `core.upkeep`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from emulator.core import verdict
from emulator.core.compare_summary import DecidingMetric, Verdict
from emulator.core.metrics import PARTS
from emulator.core.roles import Role
from emulator.core.run_spec import RunSpec
from emulator.core.run_summary import RunResult, RunSummary, summarize
from emulator.core.specs import Slo, VerdictOutcome

Axis = Literal["kv_bandwidth_bps", "rate_per_s", "prompt_tokens", "output_tokens"]
AXES: tuple[Axis, ...] = get_args(Axis)
Cell = str | int | float | bool | None
Row = dict[str, Cell]

_LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "itl_p99_ms", "e2el_ms")
_STATISTICS = ("mean", "p50", "p90", "p99", "max")


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the grid, by its number; null on an axis that is not swept."""

    index: int
    kv_bandwidth_bps: float | None = None
    rate_per_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def traffic(self) -> tuple[float | None, int | None, int | None]:
        """What decides which requests are sent, and so all that a colocated deployment does."""
        return self.rate_per_s, self.prompt_tokens, self.output_tokens

    def axes(self) -> dict[Axis, float | None]:
        """Its place on every axis."""
        return {axis: getattr(self, axis) for axis in AXES}


class Axes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The values of each axis, ascending; none on an axis that is not swept."""

    kv_bandwidth_bps: tuple[float, ...] = ()
    rate_per_s: tuple[float, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()

    def values(self, axis: Axis) -> tuple[float, ...]:
        """The values of one axis."""
        found: tuple[float, ...] = getattr(self, axis)
        return found

    @property
    def varied(self) -> tuple[Axis, ...]:
        """The axes with more than one value."""
        return tuple(axis for axis in AXES if len(self.values(axis)) > 1)

    def points(self) -> tuple[Point, ...]:
        """The whole grid; points of equal traffic stand together, in order of bandwidth."""
        outer = itertools.product(*((getattr(self, axis) or (None,)) for axis in AXES[1:]))
        places = itertools.product(outer, self.kv_bandwidth_bps or (None,))
        return tuple(
            Point(index=index, kv_bandwidth_bps=bandwidth, rate_per_s=rate, prompt_tokens=prompt, output_tokens=output)
            for index, ((rate, prompt, output), bandwidth) in enumerate(places)
        )


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A disaggregated deployment against a baseline on as many GPUs; see `core.verdict` for what decides.

    `difference` is that of the deciding metric, disaggregated minus baseline: a share for attainment and completion,
    milliseconds for a latency. All null for no difference.
    """

    deployment: str
    baseline: str
    best_baseline: bool
    outcome: VerdictOutcome
    deciding_metric: DecidingMetric | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    pairs: int
    left_out: int


class Best(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The best deployment on some number of GPUs at a point, and its attainment there (null without requests)."""

    gpus: int
    deployment: str
    slo_attainment: float | None


class PointResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a point comes to: its rows, its outcomes, and which deployment was best in each group of equal GPUs."""

    point: Point
    runs: tuple[Row, ...]
    outcomes: tuple[Outcome, ...]
    best: tuple[Best, ...]


def slices(points: Sequence[Point], workers: int) -> list[tuple[Point, ...]]:
    """The points as tasks for `workers` processes.

    Points of equal traffic share their colocated runs, so they stay together, unless that would leave workers idle.
    """
    groups = [tuple(group) for _, group in itertools.groupby(points, key=lambda point: point.traffic)]
    parts = -(-2 * workers // len(groups)) if groups else 1
    found = []
    for group in groups:
        size = -(-len(group) // parts)
        found += [group[start : start + size] for start in range(0, len(group), size)]
    return found


def pool_seeds(results: Sequence[RunResult], slo: Slo) -> RunResult:
    """The runs of one deployment under several seeds as one run, their requests told apart by the seed."""
    if len(results) == 1:
        return results[0]
    first = results[0].summary
    records = [
        msgspec.structs.replace(record, request_id=f"{result.summary.seed}/{record.request_id}")
        for result in results
        for record in result.records
    ]
    summary = summarize(
        records,
        deployment=first.deployment,
        gpus=first.gpus,
        slo=slo,
        duration_s=sum(result.summary.duration_s for result in results),
        kv_bandwidth_bps=first.kv_bandwidth_bps,
        launcher=first.launcher,
        shaping=first.shaping,
        holdings=first.costs,
        first_token=first.first_token,
    )
    return RunResult(summary, records)


def judge_point(point: Point, rows: Sequence[Row], results: Sequence[RunResult], slo: Slo) -> PointResult:
    """The point's rows with its outcomes: each disaggregated result against the colocated ones on as many GPUs."""
    outcomes: list[Outcome] = []
    best: list[Best] = []
    for gpus in sorted({result.summary.gpus for result in results}):
        equal = [result for result in results if result.summary.gpus == gpus]
        verdicts = verdict.judge(equal, slo).verdicts
        outcomes += [_outcome(found) for found in verdicts]
        winner = best_deployment([result.summary for result in equal], verdicts)
        best.append(Best(gpus=gpus, deployment=winner.deployment, slo_attainment=winner.slo_attainment))
    return PointResult(point=point, runs=tuple(rows), outcomes=tuple(outcomes), best=tuple(best))


def best_deployment(summaries: Sequence[RunSummary], verdicts: Sequence[Verdict]) -> RunSummary:
    """The best of deployments on equally many GPUs: the best baseline, unless one helps against it.

    Among several that help, or where there is no baseline: highest attainment, then request goodput, then lowest mean
    TTFT, as for the best baseline (`verdict.best_baseline`).
    """
    colocated = verdict.best_baseline(summaries)
    helping = {found.deployment for found in verdicts if found.best_baseline and found.outcome == "helps"}
    candidates = [s for s in summaries if s.disaggregated and (s.deployment in helping or colocated is None)]
    if colocated is not None and not candidates:
        return colocated
    return max(candidates, key=_merit)


def _merit(summary: RunSummary) -> tuple[float, float, float]:
    ttft = summary.ttft_ms.mean
    return summary.slo_attainment or 0.0, summary.request_goodput, -math.inf if ttft is None else -ttft


def _outcome(found: Verdict) -> Outcome:
    at = found.by_bandwidth[-1]
    decided = at.differences[at.deciding_metric] if at.deciding_metric is not None else None
    return Outcome(
        deployment=found.deployment,
        baseline=found.baseline,
        best_baseline=found.best_baseline,
        outcome=at.outcome,
        deciding_metric=at.deciding_metric,
        difference=decided.mean if decided else None,
        difference_low=decided.low if decided else None,
        difference_high=decided.high if decided else None,
        pairs=at.pairs,
        left_out=at.left_out,
    )


# --- rows -----------------------------------------------------------------------------------------------------


def run_row(point: Point, run: RunSpec, summary: RunSummary) -> Row:
    """One run as a flat row; the point's axes first. A colocated one uses no KV network, whatever the bandwidth."""
    roles: list[Role] = [node.role for node in run.nodes]
    row: Row = {
        **_place(point),
        "seed": summary.seed,
        "deployment": summary.deployment,
        "disaggregated": summary.disaggregated,
        "gpus": summary.gpus,
        "prefill_nodes": roles.count("prefill"),
        "decode_nodes": roles.count("decode"),
        "mixed_nodes": roles.count("mixed"),
        "colocated_nodes": roles.count("colocated"),
        "requests": summary.requests,
        "completed": summary.completed,
        "failed": summary.failed,
        "unfinished": summary.unfinished,
        "saturated": summary.saturated,
        "requested_rate_per_s": summary.requested_rate,
        "slo_attainment": summary.slo_attainment,
    }
    row |= {f"slo_attainment_{metric}": share for metric, share in summary.slo_attainment_by_metric.items()}
    row |= {
        "request_goodput_per_s": summary.request_goodput,
        "request_goodput_per_s_per_gpu": summary.request_goodput / summary.gpus,
        "output_tokens_per_s": summary.output_throughput,
    }
    row |= msgspec.structs.asdict(summary.costs)
    row |= {f"{name}_{which}": getattr(getattr(summary, name), which) for name in _LATENCIES for which in _STATISTICS}
    row |= {f"ttft_{part}_ms_mean": getattr(summary.ttft_breakdown_ms, part) for part in PARTS}
    row |= {
        "kv_bytes": summary.kv.bytes,
        "kv_transfers": summary.kv.transfers,
        "local_prefills": summary.kv.local_prefills,
        "kv_transfer_ms_p50": summary.kv.transfer_ms.p50,
        "kv_transfer_ms_p99": summary.kv.transfer_ms.p99,
        "kv_achieved_bps": summary.kv.achieved_bps,
    }
    return row


def outcome_row(point: Point, outcome: Outcome) -> Row:
    """One outcome as a flat row; the point's axes first."""
    return {**_place(point), **msgspec.structs.asdict(outcome)}


def _place(point: Point) -> Row:
    return {"point": point.index, **{str(axis): value for axis, value in point.axes().items()}}
