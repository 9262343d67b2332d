"""Which deployment of a number of GPUs serves most, found with few simulations (see `lab.plan_rounds`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec

from emulator.core.bounds import Bound, Demand, goodput_bound
from emulator.core.errors import ConfigError
from emulator.core.hardware import Catalog
from emulator.core.plan import Impossible, Objective, Plan, in_order, reasons, runner_up
from emulator.core.specs import Topology
from emulator.core.trace import Trace
from emulator.core.workload import plan_load, scale_rate
from emulator.study.contenders import Fit, contenders
from emulator.study.plan_rounds import OnFound, PlanOptions, Rounds
from emulator.study.rated_runs import SearchOptions, search_span
from emulator.study.variants import with_bandwidths


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan checked and bounded, before its first simulation."""

    topology: Topology
    options: PlanOptions
    fits: Sequence[Fit]
    impossible: Sequence[Impossible]
    bounds: Mapping[str, Bound | None]
    notes: Sequence[str]


def prepare(topology: Topology, catalog: Catalog, traces: Mapping[str, Trace], options: PlanOptions) -> Prepared:
    """Everything that the GPUs can be, at the highest KV bandwidth of the topology, with bounds of what it can serve.

    Raises ConfigError or CapacityError for whatever a user has to mend.
    """
    topology, notes = _one_bandwidth(topology)
    fits, impossible = contenders(topology, catalog, traces, options.gpus, options.gpu_types)
    _check_objective(fits, options.objective)
    bounds = _bounds(fits, topology, traces, options)
    return Prepared(topology, options, fits, impossible, bounds, notes)


def perform(prepared: Prepared, catalog: Catalog, traces: Mapping[str, Trace], on_found: OnFound | None = None) -> Plan:
    """Rank what was prepared, and recommend the first."""
    topology, options = prepared.topology, prepared.options
    rounds = Rounds(prepared.fits, prepared.bounds, options, catalog=catalog, traces=traces, on_found=on_found)
    rounds.run()
    ranking = in_order(rounds.ranking(), options.objective)
    shown = {ranked.deployment for ranked in (ranking[0], runner_up(ranking)) if ranked is not None}
    ranking = tuple(
        msgspec.structs.replace(r, diagnosis=rounds.diagnosis(r.deployment)) if r.deployment in shown else r
        for r in ranking
    )
    network = topology.kv_network
    return Plan(
        topology=topology.name,
        gpus=options.gpus,
        kv_bandwidth_bps=float(network.bandwidth[0]) if network is not None else None,
        objective=options.objective,
        slo=topology.slo,
        duration_s=float(topology.workload.duration),
        seeds=options.seeds,
        tolerance=options.tolerance,
        recommended=ranking[0].deployment if ranking[0].rate_per_s else None,
        reasons=reasons(ranking, options.objective, topology.slo, options.tolerance),
        ranking=ranking,
        ruled_out=rounds.ruled_out(),
        impossible=tuple(prepared.impossible),
        notes=tuple(prepared.notes),
    )


def _one_bandwidth(topology: Topology) -> tuple[Topology, list[str]]:
    """The topology at the highest of its KV bandwidths, and a note where it has several."""
    if topology.kv_network is None or len(topology.kv_network.bandwidth) == 1:
        return topology, []
    highest = max(topology.kv_network.bandwidth)
    note = f"KV at {highest}, the highest of the topology's bandwidths; --kv-bandwidth plans for another"
    return with_bandwidths(topology, [highest]), [note]


def _check_objective(fits: Sequence[Fit], objective: Objective) -> None:
    """Raise ConfigError where dollars are asked for and a GPU has no price."""
    for fit in fits:
        for pool in fit.contender.pools:
            if objective == "per-dollar" and pool.price_usd_per_h is None:
                raise ConfigError(
                    f"--objective per-dollar: gpu {pool.gpu} has no price_usd_per_h in the catalog; give it in a "
                    "[[gpus]] entry under another name, or choose another objective"
                )


def _bounds(
    fits: Sequence[Fit], topology: Topology, traces: Mapping[str, Trace], options: PlanOptions
) -> dict[str, Bound | None]:
    """The bound of each contender's goodput; none where closed-loop users send requests that only a run tells."""
    workload = topology.workload
    span, _ = search_span(topology, traces, SearchOptions(seeds=options.seeds))

    @cache
    def demands(rate_per_s: float) -> list[Demand]:
        rated = scale_rate(workload, rate_per_s, traces)
        seeds = range(workload.seed, workload.seed + options.seeds)
        loads = (plan_load(msgspec.structs.replace(rated, seed=seed), traces) for seed in seeds)
        return [demand for load in loads if (demand := Demand.of(load)) is not None]

    if not demands(span.start):
        return {fit.contender.deployment: None for fit in fits}
    return {
        fit.contender.deployment: goodput_bound(fit.base, demands, start=span.start, low=span.low, high=span.high)
        for fit in fits
    }
