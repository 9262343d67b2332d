"""The tightest multiple of the SLO that deployments hold at the topology's own traffic, by simulation.

One run per seed is enough: a run does not depend on the SLO, so the search is over its records (`core.slo_scale`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from emulator.core.errors import ConfigError
from emulator.core.hardware import Catalog
from emulator.core.metrics import bounds_ms, measure
from emulator.core.run_spec import RunSpec
from emulator.core.slo_scale import Needed, SloScale, deciding_metric, needed, scaled, share_within, tightest
from emulator.core.specs import Topology
from emulator.core.trace import Trace
from emulator.core.workload import RatedArrivals, open_rate_per_s
from emulator.lab.parallel import cores
from emulator.lab.simulated import simulated_result
from emulator.study.rated_runs import ONE_RUN, Candidate, base_run, seeded_runs, useful_seeds
from emulator.study.searches import find_all

OnResult = Callable[[Candidate, SloScale], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRuns:
    """A candidate's runs of one traffic, one per seed; `rate_per_s` is that of its open-loop streams, if it has any."""

    candidate: Candidate
    runs: tuple[RunSpec, ...]
    rate_per_s: float | None
    notes: tuple[str, ...]


def fixed_runs(
    topology: Topology, catalog: Catalog, traces: Mapping[str, Trace], candidate: Candidate, seeds: int
) -> FixedRuns:
    """Plan a candidate's runs. Raises ConfigError or CapacityError for whatever a user has to mend."""
    if not bounds_ms(topology.slo):
        raise ConfigError(f"{topology.name}: [slo] bounds no latency, so there is nothing to scale; give ttft_ms, say")
    workload = topology.workload
    rated = any(isinstance(stream.arrivals, RatedArrivals) for stream in workload.streams)
    base = base_run(topology, catalog, traces, candidate)
    runs = seeded_runs(base, workload, traces, useful_seeds(base, workload, traces, seeds))
    return FixedRuns(
        candidate=candidate,
        runs=tuple(runs),
        rate_per_s=open_rate_per_s(workload, traces) if rated else None,
        notes=() if len(runs) == seeds else (ONE_RUN,),
    )


def perform(
    planned: Sequence[FixedRuns], *, workers: int | None = None, on_result: OnResult | None = None
) -> list[SloScale]:
    """The tightest SLO of each candidate, in the order given."""
    workers = min(workers or cores(), sum(len(each.runs) for each in planned))
    return find_all([_fold(each, on_result) for each in planned], simulated_needs, workers=workers)


def simulated_needs(run: RunSpec) -> Needed:
    """Simulate a run; the factor on the SLO that each of its requests needs."""
    return needed(measure(simulated_result(run).records), run.slo)


def _fold(fixed: FixedRuns, on_result: OnResult | None) -> Generator[Sequence[RunSpec], Sequence[Needed], SloScale]:
    """One candidate: all its runs at once, then what they come to."""
    answers = yield fixed.runs
    slo, factors = fixed.runs[0].slo, [answer.factors for answer in answers]
    found = tightest(factors, slo.target)
    loosest = sys.float_info.max if found.factor is None else found.factor
    attainment = tuple(share_within(each, loosest) for each in factors)
    result = SloScale(
        deployment=fixed.candidate.deployment,
        kv_bandwidth_bps=fixed.candidate.kv_bandwidth_bps,
        gpus=fixed.runs[0].gpus,
        rate_per_s=fixed.rate_per_s,
        factor=found.factor,
        low=found.low,
        high=found.high,
        attainment=attainment,
        mean=float(np.mean(attainment)),
        mean_as_stated=float(np.mean([share_within(each, 1.0) for each in factors])),
        bounds_ms={} if found.factor is None else bounds_ms(scaled(slo, found.factor)),
        deciding_metric=None if found.factor is None else deciding_metric(answers, found.factor),
        requests=sum(each.size for each in factors),
        failed=sum(int(np.count_nonzero(np.isinf(each))) for each in factors),
        notes=fixed.notes,
    )
    if on_result is not None:
        on_result(fixed.candidate, result)
    return result
