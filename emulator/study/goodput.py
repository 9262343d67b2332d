"""Goodput by simulation: the highest rate at which enough requests meet the SLO, for deployments and KV bandwidths.

Every rate is simulated once per seed (the workload's and the next ones), and `core.search` says which to try next.
Attainment near saturation depends on the length of a run: queues grow for as long as requests come faster than they
are served, so a longer run is stricter and its goodput lower. Compare only searches of one duration.

That KV memory is the limit is found by experiment: with ten times the memory, the lowest failing rate passes, its
attainment up by a point or more. (The rate at which that run fails in its turn is not searched.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np

from emulator.core.bounds import Demand, moved_tokens
from emulator.core.hardware import Catalog
from emulator.core.run_spec import RunSpec
from emulator.core.search import BoundedBy, Goodput, Trial, bracket, disorder, interval, next_rate
from emulator.core.specs import Topology
from emulator.core.trace import Trace
from emulator.lab.parallel import cores
from emulator.lab.simulated import simulated_result
from emulator.study.rated_runs import (
    MORE_MEMORY,
    Candidate,
    Outcome,
    RatedRuns,
    SearchOptions,
    candidate_of,
    candidates,
    rated_runs,
)
from emulator.study.searches import find_all

__all__ = ["Candidate", "Goodput", "SearchOptions", "Trial", "candidates", "goodput", "perform", "search_all"]

MATERIAL_ATTAINMENT = 0.01
DEFAULTS = SearchOptions()

OnTrial = Callable[[Candidate, Trial], None]
OnFound = Callable[[Candidate, Goodput], None]
Search = Generator[Sequence[RunSpec], Sequence[Outcome], Goodput]
"""A search asks for the outcomes of runs, in their order, and ends with what it has found."""


def goodput(
    topology: Topology,
    catalog: Catalog,
    traces: Mapping[str, Trace],
    deployment: str,
    *,
    kv_bandwidth_bps: float | None = None,
    options: SearchOptions = DEFAULTS,
    on_trial: Callable[[Trial], None] | None = None,
) -> Goodput:
    """The goodput of one deployment; `kv_bandwidth_bps` may be left out where the topology has one alone.

    Raises ConfigError or CapacityError for whatever a user has to mend.
    """

    def tell(_: Candidate, trial: Trial) -> None:
        if on_trial is not None:
            on_trial(trial)

    wanted = candidate_of(topology, deployment, kv_bandwidth_bps)
    return search_all(topology, catalog, traces, [wanted], options=options, on_trial=tell)[0]


def search_all(
    topology: Topology,
    catalog: Catalog,
    traces: Mapping[str, Trace],
    wanted: Sequence[Candidate],
    *,
    options: SearchOptions = DEFAULTS,
    on_trial: OnTrial | None = None,
) -> list[Goodput]:
    """The goodput of each candidate, all searched at once, in the order given.

    Raises ConfigError or CapacityError for whatever a user has to mend, before the first run.
    """
    planned = [rated_runs(topology, catalog, traces, candidate, options) for candidate in wanted]
    return perform(planned, workers=options.workers, on_trial=on_trial)


def perform(
    planned: Sequence[RatedRuns],
    *,
    workers: int | None = None,
    on_trial: OnTrial | None = None,
    on_found: OnFound | None = None,
) -> list[Goodput]:
    """Make the searches that have been planned, telling each trial, and each search when it has ended."""
    workers = min(workers or cores(), sum(len(runs.seeds) for runs in planned))
    searches = [_search(runs, on_trial, on_found) for runs in planned]
    return find_all(searches, simulated_outcome, workers=workers)


def _search(runs: RatedRuns, on_trial: OnTrial | None, on_found: OnFound | None) -> Search:
    """One candidate's search."""
    trials: list[Trial] = []
    while (rate := next_rate(trials, runs.span, runs.base.slo.target)) is not None:
        outcomes = yield runs.at(rate)
        trials.append(runs.trial(rate, outcomes))
        if on_trial is not None:
            on_trial(runs.candidate, trials[-1])
    failing = bracket(trials).failing
    relieved = None
    if failing is not None and (roomy := runs.with_more_memory(failing.rate_per_s)):
        outcomes = yield roomy
        relieved = runs.trial(failing.rate_per_s, outcomes)
    found = _concluded(runs, trials, relieved)
    if on_found is not None:
        on_found(runs.candidate, found)
    return found


def _end_of_range(runs: RatedRuns, trials: Sequence[Trial]) -> BoundedBy | None:
    """The end of the range at which the search ended without an answer inside it, if any."""
    found = bracket(trials)
    if found.passing is None:
        return "low"
    return runs.upper_end if found.failing is None else None


def _concluded(runs: RatedRuns, trials: Sequence[Trial], relieved: Trial | None) -> Goodput:
    """What the trials come to; `relieved` is the lowest failing one again with more KV memory, if that was run."""
    found = bracket(trials)
    low, high = interval(trials, runs.base.slo.target)
    rate = None if found.passing is None else found.passing.rate_per_s
    upkeep = runs.base.holdings
    bounded_by, notes = _end_of_range(runs, trials), list(runs.notes)
    if found.failing is not None and relieved is not None and _is_relief(found.failing, relieved):
        bounded_by = "kv memory"
        notes.append(
            f"KV memory is the limit: at {relieved.rate_per_s:.4g}/s, attainment is {found.failing.mean:.1%}, and "
            f"{relieved.mean:.1%} with {MORE_MEMORY} times the memory"
        )
    if rate is not None and (carried := _carried_per_s(runs, rate)) < rate:
        notes.append(
            f"the KV network carries {carried:.4g} requests/s for long: {rate:.4g}/s holds because a run of "
            f"{runs.base.load.duration_s:g}s ends before the queue has grown; a longer --duration is stricter"
        )
    if (unsteady := disorder(trials)) is not None:
        notes.append(unsteady)
    return Goodput(
        deployment=runs.candidate.deployment,
        kv_bandwidth_bps=runs.candidate.kv_bandwidth_bps,
        gpus=runs.base.gpus,
        rate_per_s=rate,
        per_gpu=None if rate is None else rate / runs.base.gpus,
        next_rate_per_s=None if found.failing is None else found.failing.rate_per_s,
        low_per_s=low,
        high_per_s=high,
        bounded_by=bounded_by,
        trials=tuple(sorted(trials, key=lambda trial: trial.rate_per_s)),
        notes=tuple(notes),
        usd_per_h=upkeep.usd_per_h,
        watts=upkeep.watts,
        requests_per_usd=None if rate is None else upkeep.per_usd(rate),
        requests_per_joule=None if rate is None else upkeep.per_joule(rate),
    )


def _carried_per_s(runs: RatedRuns, rate_per_s: float) -> float:
    """Requests per second whose KV all NICs together carry; infinite where none has to cross, or users send some."""
    base, load = runs.base, runs.at(rate_per_s)[0].load
    if base.link is None or load.users or not load.open:
        return math.inf
    sent = sum(base.link.nic(name).egress_bps for name in base.kv_senders)
    taken_in = sum(base.link.nic(name).ingress_bps for name in base.kv_receivers)
    demand = Demand.of(load)
    tokens = 0.0 if demand is None else float(np.mean(moved_tokens(base, demand)))
    return min(sent, taken_in) / (8 * tokens * base.nodes[0].kv_bytes_per_token) if tokens else math.inf


def _is_relief(failing: Trial, relieved: Trial) -> bool:
    return relieved.passes and relieved.mean >= failing.mean + MATERIAL_ATTAINMENT


def simulated_outcome(run: RunSpec) -> Outcome:
    """Simulate a run; no request at all counts as none that met the SLO."""
    summary = simulated_result(run).summary
    return Outcome(summary.slo_attainment or 0.0, summary.requests, summary.failure)
