"""The points at which a search has ended, run live: do the real processes attain what the simulation says?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from emulator.core.device_use import DeviceUse
from emulator.core.errors import CapacityError
from emulator.core.hardware import Catalog
from emulator.core.run_summary import RunSummary
from emulator.core.search import Goodput
from emulator.core.search_summary import LivePoint
from emulator.core.slo_scale import SloScale, scaled
from emulator.core.specs import Topology
from emulator.core.trace import Trace
from emulator.core.workload import scale_rate
from emulator.lab import experiment as lab
from emulator.study.rated_runs import Candidate, at_bandwidth


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate's topology at one rate and SLO, and the attainment that its first seed has in the simulation."""

    candidate: Candidate
    topology: Topology
    rate_per_s: float | None
    slo_factor: float
    simulated: float

    @property
    def label(self) -> str:
        """`1P1D@5Gbps-at-6.5`, a folder's name."""
        if self.slo_factor != 1.0:
            return f"{self.candidate.label}-slo-{self.slo_factor:.4g}"
        return f"{self.candidate.label}-at-{self.rate_per_s:.6g}"


def goodput_points(topology: Topology, traces: Mapping[str, Trace], rows: Sequence[Goodput]) -> list[Point]:
    """The highest passing rate of each row and the lowest failing one above it, as far as there are any."""
    points = []
    for row in rows:
        trials = {trial.rate_per_s: trial for trial in row.trials}
        for rate in (row.rate_per_s, row.next_rate_per_s):
            if rate is not None:
                at_rate = msgspec.structs.replace(topology, workload=scale_rate(topology.workload, rate, traces))
                points.append(_point(row, at_rate, rate, 1.0, trials[rate].attainment[0]))
    return points


def slo_points(topology: Topology, rows: Sequence[SloScale]) -> list[Point]:
    """Each row at its tightest SLO, if there is one."""
    return [
        _point(
            row,
            msgspec.structs.replace(topology, slo=scaled(topology.slo, row.factor)),
            row.rate_per_s,
            row.factor,
            row.attainment[0],
        )
        for row in rows
        if row.factor is not None
    ]


def _point(row: Goodput | SloScale, topology: Topology, rate: float | None, factor: float, simulated: float) -> Point:
    candidate = Candidate(row.deployment, row.kv_bandwidth_bps)
    return Point(candidate, at_bandwidth(topology, row.kv_bandwidth_bps), rate, factor, simulated)


def prepare(
    point: Point, catalog: Catalog, traces: dict[str, Trace], how: lab.Conditions, folder: Path
) -> lab.Experiment:
    """The live run of a point, checked against this machine. Raises CapacityError where it does not fit."""
    names = [point.candidate.deployment]
    return lab.prepare(point.topology, catalog, traces, how, deployments=names, out=folder / point.label)


def run(point: Point, experiment: lab.Experiment, on_progress: lab.OnProgress, on_result: lab.OnResult) -> LivePoint:
    """Run a prepared point live, its folder complete when it ends. An unfaithful run's attainment is withheld."""
    summary = asyncio.run(lab.perform(experiment, on_progress, on_result))[0].summary
    withheld = None if summary.fidelity.ok else "; ".join(summary.fidelity.reasons) or "the run was not faithful"
    return _live_point(point, experiment.launcher, experiment.folder, summary, withheld)


def refused(point: Point, launcher: str, folder: Path, error: CapacityError) -> LivePoint:
    """A point that does not fit this machine."""
    return _live_point(point, launcher, folder / point.label, None, str(error))


def _live_point(
    point: Point, launcher: str, folder: Path, summary: RunSummary | None, withheld: str | None
) -> LivePoint:
    return LivePoint(
        deployment=point.candidate.deployment,
        kv_bandwidth_bps=point.candidate.kv_bandwidth_bps,
        rate_per_s=point.rate_per_s,
        slo_factor=point.slo_factor,
        launcher=launcher,
        shaping="none" if summary is None else summary.shaping,
        seed=point.topology.workload.seed,
        simulated=point.simulated,
        live=None if summary is None or withheld is not None else summary.slo_attainment,
        withheld=withheld,
        fidelity=None if summary is None else summary.fidelity,
        folder=str(folder),
        device=DeviceUse() if summary is None else summary.device,
    )
