"""Live against simulated: the same run by both drivers, metric by metric.

The simulator has no control messages, no late steps and no operating system; what it shows differently from a live run
is what those cost, and where a decision fell the other way because of them.
"""

from __future__ import annotations

from emulator.core.compare_summary import Deviation, JudgedMetric, Percentile, RunParity
from emulator.core.run_summary import RunSummary

METRICS: tuple[JudgedMetric, ...] = ("ttft_ms", "tpot_ms")
BOUNDS: dict[Percentile, float] = {"p50": 0.03, "p90": 0.03, "p99": 0.05}
"""How far a live percentile may be from the simulated one, as a share of it."""


def run_parity(live: RunSummary, simulated: RunSummary) -> RunParity:
    """How far a live run is from the simulation of the same run."""
    return RunParity(
        deployment=live.deployment,
        kv_bandwidth_bps=live.kv_bandwidth_bps,
        completed_live=live.completed,
        completed_simulated=simulated.completed,
        slo_attainment_live=live.slo_attainment,
        slo_attainment_simulated=simulated.slo_attainment,
        deviations=tuple(
            _deviation(metric, percentile, live, simulated) for metric in METRICS for percentile in BOUNDS
        ),
    )


def _deviation(metric: JudgedMetric, percentile: Percentile, live: RunSummary, simulated: RunSummary) -> Deviation:
    bound = BOUNDS[percentile]
    seen: float | None = getattr(getattr(live, metric), percentile)
    expected: float | None = getattr(getattr(simulated, metric), percentile)
    difference = seen / expected - 1 if seen is not None and expected else None
    return Deviation(
        metric=metric,
        percentile=percentile,
        live_ms=seen,
        simulated_ms=expected,
        difference=difference,
        bound=bound,
        within=abs(difference) <= bound if difference is not None else seen == expected,
    )
