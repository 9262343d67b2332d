"""Live runs on either side of what a simulated break-even found: do they fall where the simulation says?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from emulator.core.break_even import LiveCheck, PairBreakEven
from emulator.core.compare_summary import CompareSummary
from emulator.core.hardware import Catalog
from emulator.core.run_spec import RunSpec
from emulator.core.run_summary import RunResult
from emulator.core.specs import Topology
from emulator.core.trace import Trace
from emulator.lab import experiment as lab
from emulator.lab.scale import apply_scale
from emulator.live.status import Interim
from emulator.study import variants
from emulator.study.break_even import Found, half_and_twice


class Display(Protocol):
    """Told how the runs of an experiment get on."""

    def progress(self, run: RunSpec, status: Interim) -> None:
        """A run is under way, or waits for something."""

    def result(self, run: RunSpec, result: RunResult) -> None:
        """A run has ended."""


MakeDisplay = Callable[[Sequence[RunSpec]], AbstractContextManager[Display]]


def confirm(
    found: Found,
    topology: Topology,
    catalog: Catalog,
    traces: dict[str, Trace],
    how: lab.Conditions,
    *,
    scale: str | None,
    folder: Path,
    show: MakeDisplay,
) -> Found:
    """Run every pair that turns somewhere at half and at twice the bandwidths found, with `topology` as it is live.

    One comparison for each disaggregated deployment, in a folder of its own below `folder`, with all baselines against
    which it turns.
    """
    pairs = list(found.summary.pairs)
    for name in dict.fromkeys(pair.deployment for pair in pairs if pair.changes):
        turning = [pair for pair in pairs if pair.deployment == name and pair.changes]
        variant = _variant(found, topology, turning)
        scaled = apply_scale(variant, scale, catalog, traces).topology
        prepared = lab.prepare(scaled, catalog, traces, how, out=folder / f"live-{name}")
        with show(prepared.runs) as display:
            summary = lab.compare(prepared, display.progress, display.result)
        pairs = [_checked(pair, found, summary) if pair in turning else pair for pair in pairs]
    document = msgspec.structs.replace(found.summary, pairs=tuple(pairs), live_launcher=how.launcher)
    return Found(document, found.best, found.trials)


def _variant(found: Found, topology: Topology, turning: Sequence[PairBreakEven]) -> Topology:
    """The deployment, the baselines against which it turns, and every bandwidth to run."""
    known = {deployment.name: deployment for deployment in topology.deployments}
    known |= {budget.deployment.name: budget.deployment for budget in found.best.values()}
    names = [turning[0].deployment, *(pair.baseline for pair in turning)]
    bandwidths = sorted({bps for pair in turning for bps in half_and_twice(pair.changes)})
    return variants.with_bandwidths(variants.with_deployments(topology, [known[name] for name in names]), bandwidths)


def _checked(pair: PairBreakEven, found: Found, summary: CompareSummary) -> PairBreakEven:
    checks = tuple(_check(pair, bps, found, summary) for bps in half_and_twice(pair.changes))
    return msgspec.structs.replace(pair, live=checks)


def _check(pair: PairBreakEven, bandwidth_bps: float, found: Found, summary: CompareSummary) -> LiveCheck:
    """What a live run at one bandwidth says of a pair, beside what the simulation says there."""
    expected = found.trials[pair.deployment, pair.baseline][bandwidth_bps].outcome
    for verdict in summary.verdict:
        if (verdict.deployment, verdict.baseline) == (pair.deployment, pair.baseline):
            for at in verdict.by_bandwidth:
                if at.kv_bandwidth_bps == bandwidth_bps:
                    return LiveCheck(
                        kv_bandwidth_bps=bandwidth_bps,
                        expected=expected,
                        outcome=at.outcome,
                        deciding_metric=at.deciding_metric,
                        as_expected=at.outcome == expected,
                        stamps=_stamps(pair, bandwidth_bps, summary),
                    )
    reasons = (
        left.reason
        for left in summary.withheld
        if (left.deployment, left.baseline) == (pair.deployment, pair.baseline)
        and left.kv_bandwidth_bps in (None, bandwidth_bps)
    )
    return LiveCheck(
        kv_bandwidth_bps=bandwidth_bps,
        expected=expected,
        outcome=None,
        deciding_metric=None,
        as_expected=None,
        reason=next(reasons, "no verdict was reached"),
    )


def _stamps(pair: PairBreakEven, bandwidth_bps: float, summary: CompareSummary) -> tuple[str, ...]:
    """Which nodes shared a device, in the two runs that a check compares."""
    compared = ((pair.deployment, bandwidth_bps), (pair.baseline, None))
    runs = [run for run in summary.runs if (run.deployment, run.kv_bandwidth_bps) in compared]
    return tuple(f"{run.deployment}: {stamp}" for run in runs for stamp in run.device.stamps())
