"""From which bandwidth on a split pays, against every baseline and the best chunk budget on as many GPUs.

Baselines and chunk budgets are simulated once, since no KV of theirs crosses a network. Then each disaggregated
deployment is simulated over a grid of bandwidths and wherever the outcome changes between two, until the ends of each
change are as close as asked. Every outcome is that of `core.verdict`, over the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from emulator.core import verdict
from emulator.core.break_even import UNLIMITED_BPS, BreakEvenSummary, PairBreakEven, Tried, TriedBudget, conclude
from emulator.core.compare_summary import Verdict
from emulator.core.deploy import plan_runs
from emulator.core.deployments import Deployment
from emulator.core.errors import ConfigError
from emulator.core.grid import pool_seeds
from emulator.core.hardware import Catalog
from emulator.core.quantities import BitsPerSecond
from emulator.core.run_spec import RunSpec
from emulator.core.run_summary import RunResult
from emulator.core.specs import Scale, Topology
from emulator.core.trace import Trace
from emulator.core.turning import FINEST_TOLERANCE, Change, changes, first_bandwidths, next_bandwidths, rounded
from emulator.lab.parallel import Team, simulate_records
from emulator.lab.simulated import SIMULATE, simulated_result
from emulator.study import variants

DEFAULT_BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
MOST_SEEDS = 100

OnTried = Callable[[str, float, Mapping[str, Tried]], None]
"""Told of each deployment and bandwidth what it came to against each baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What to search: bandwidths in bits per second, until the ends of a change are within `tolerance` of each other.

    `deployments` and `baselines` are the topology's to compare (default: all), `budgets` the chunk budgets to try.
    """

    deployments: Sequence[str] = ()
    baselines: Sequence[str] = ()
    low_bps: float = 1e8
    high_bps: float = 4e11
    tolerance: float = 0.05
    budgets: Sequence[int] = DEFAULT_BUDGETS
    seeds: int = 1
    workers: int | None = None

    def __post_init__(self) -> None:
        if not self.low_bps < self.high_bps:
            low, high = BitsPerSecond(self.low_bps), BitsPerSecond(self.high_bps)
            raise ConfigError(f"--low {low} is not below --high {high}: nothing is left to search")
        if not FINEST_TOLERANCE <= self.tolerance <= 1:
            raise ConfigError(f"--tolerance {100 * self.tolerance:g}%: must be from 0.1% to 100%")
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise ConfigError(f"--seeds {self.seeds}: must be from 1 to {MOST_SEEDS}")


class Budget(NamedTuple):
    """A chunk budget as a colocated deployment on some number of GPUs."""

    tokens: int
    deployment: Deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search that can be made: a topology in virtual time, and who is compared with whom."""

    topology: Topology
    catalog: Catalog
    traces: Mapping[str, Trace]
    options: SearchOptions
    seeds: tuple[int, ...]
    disaggregated: tuple[Deployment, ...]
    baselines: tuple[Deployment, ...]
    budgets: tuple[Budget, ...]
    remarks: tuple[str, ...]

    def runs(self, deployments: Sequence[Deployment], bandwidths: Sequence[float]) -> list[RunSpec]:
        """Every run of these deployments: each seed, the disaggregated ones at each bandwidth."""
        topology = variants.with_bandwidths(variants.with_deployments(self.topology, deployments), bandwidths)
        found = []
        for seed in self.seeds:
            seeded = variants.with_seed(topology, seed)
            found += plan_runs(seeded, self.catalog, variants.load_of(seeded, self.traces))
        return found


Pair = tuple[str, str]
Trials = dict[Pair, dict[float, Tried]]


@dataclass(slots=True)
class Found:
    """What a search has found, with the deployment of the best budget for each number of GPUs."""

    summary: BreakEvenSummary
    best: Mapping[int, Budget]
    trials: Trials = field(default_factory=dict)


def plan_search(topology: Topology, catalog: Catalog, traces: Mapping[str, Trace], options: SearchOptions) -> Search:
    """Check that everything can be simulated. Raises ConfigError or CapacityError for whatever a user has to mend."""
    disaggregated = _chosen(topology, options.deployments, disaggregated=True)
    if not disaggregated:
        raise ConfigError(f"{topology.name}: no deployment is disaggregated, so there is no break-even; add a split")
    baselines = _chosen(topology, options.baselines, disaggregated=False)
    seeds = variants.useful_seeds(topology, options.seeds, traces)
    search = Search(
        topology=msgspec.structs.replace(topology, scale=Scale()),
        catalog=catalog,
        traces=traces,
        options=options,
        seeds=seeds,
        disaggregated=disaggregated,
        baselines=baselines,
        budgets=tuple(_budgets(topology, {deployment.gpus for deployment in disaggregated}, options.budgets)),
        remarks=tuple(_remarks(disaggregated, baselines, seeds=len(seeds), asked=options.seeds)),
    )
    every = [*disaggregated, *baselines, *(budget.deployment for budget in search.budgets)]
    search.runs(every, [options.low_bps, options.high_bps])
    return search


def find_break_even(search: Search, on_tried: OnTried) -> Found:
    """Simulate until the ends of every change are within the tolerance."""
    colocated = _simulate_colocated(search)
    best = {gpus: _best_budget(search, gpus, colocated) for gpus in {d.gpus for d in search.disaggregated}}
    rivals = {
        deployment.name: tuple(
            colocated[name]
            for name in (
                *(baseline.name for baseline in search.baselines if baseline.gpus == deployment.gpus),
                best[deployment.gpus].deployment.name,
            )
        )
        for deployment in search.disaggregated
    }
    with Team(partial(judge_at, search, rivals), search.options.workers) as team:
        trials: Trials = {(name, rival.summary.deployment): {} for name, found in rivals.items() for rival in found}
        _bisect(search, team, trials, on_tried)
        pairs = _conclude(search, team, trials, {b.deployment.name: b.tokens for b in best.values()})
    options = search.options
    summary = BreakEvenSummary(
        topology=search.topology.name,
        low_bps=options.low_bps,
        high_bps=options.high_bps,
        tolerance=options.tolerance,
        seeds=search.seeds,
        slo=search.topology.slo,
        launcher=SIMULATE,
        live_launcher=None,
        budgets=tuple(
            TriedBudget.of(
                budget.tokens,
                colocated[budget.deployment.name].summary,
                best=budget == best[budget.deployment.gpus],
            )
            for budget in search.budgets
        ),
        pairs=tuple(pairs),
        remarks=search.remarks,
    )
    return Found(summary, best, trials)


# --- simulating -----------------------------------------------------------------------------------------------


class At(NamedTuple):
    """A disaggregated deployment at some bandwidths."""

    deployment: str
    bandwidths_bps: tuple[float, ...]


def judge_at(search: Search, rivals: Mapping[str, Sequence[RunResult]], at: At) -> Iterator[tuple[Verdict, ...]]:
    """Simulate a deployment at these bandwidths; its verdict against each of its rivals (one answer)."""
    deployment = next(d for d in search.disaggregated if d.name == at.deployment)
    runs = search.runs([deployment], at.bandwidths_bps)
    of_bandwidth = [runs[place :: len(at.bandwidths_bps)] for place in range(len(at.bandwidths_bps))]
    slo = search.topology.slo
    results = [pool_seeds([simulated_result(run) for run in seeded], slo) for seeded in of_bandwidth]
    yield verdict.judge([*results, *rivals[at.deployment]], slo).verdicts


def _simulate_colocated(search: Search) -> dict[str, RunResult]:
    """Every baseline and chunk budget, all seeds together, by name."""
    deployments = [*search.baselines, *(budget.deployment for budget in search.budgets)]
    runs = search.runs(deployments, [search.options.low_bps])
    results = dict(simulate_records(runs, workers=search.options.workers))
    by_name: dict[str, list[RunResult]] = {}
    for index, run in enumerate(runs):
        by_name.setdefault(run.deployment, []).append(results[index])
    return {name: pool_seeds(found, search.topology.slo) for name, found in by_name.items()}


def _best_budget(search: Search, gpus: int, colocated: Mapping[str, RunResult]) -> Budget:
    there = [budget for budget in search.budgets if budget.deployment.gpus == gpus]
    best = verdict.best_baseline(colocated[budget.deployment.name].summary for budget in there)
    assert best is not None, "a simulation is always faithful"
    return next(budget for budget in there if budget.deployment.name == best.deployment)


def _try(team: Team[At, tuple[Verdict, ...]], tasks: Sequence[At], trials: Trials, on_tried: OnTried) -> None:
    """Simulate, and note what the bandwidth of each task came to against each rival."""
    for index, verdicts in team.stream(tasks):
        at = tasks[index]
        against = {found.baseline: Tried.of(found.by_bandwidth[-1]) for found in verdicts}
        for baseline, tried in against.items():
            trials[at.deployment, baseline][tried.kv_bandwidth_bps] = tried
        on_tried(at.deployment, at.bandwidths_bps[-1], against)


def _bisect(search: Search, team: Team[At, tuple[Verdict, ...]], trials: Trials, on_tried: OnTried) -> None:
    """Try the grid, then the middles of all changes until none is too wide, then on either side of each.

    A change found at half or twice the bandwidths of another is narrowed down like any other.
    """
    options, network = search.options, search.topology.kv_network
    assert network is not None, "a topology with a disaggregated deployment has a KV network"
    first = first_bandwidths(options.low_bps, options.high_bps, map(float, network.bandwidth))
    tasks = [At(deployment.name, (bps,)) for deployment in search.disaggregated for bps in first]
    while tasks:
        _try(team, tasks, trials, on_tried)
        wanted = {
            At(deployment, (bps,))
            for (deployment, _), tried in trials.items()
            for bps in next_bandwidths({b: at.outcome for b, at in tried.items()}, options.tolerance)
        }
        tasks = sorted(wanted) or sorted(_half_and_twice(trials))


def _half_and_twice(trials: Trials) -> set[At]:
    """What is left to try at half and twice the bandwidths found, with which live runs are to agree."""
    return {
        At(deployment, (bps,))
        for (deployment, _), tried in trials.items()
        for bps in half_and_twice(changes({b: at.outcome for b, at in tried.items()}))
        if bps not in tried
    }


def half_and_twice(found: Sequence[Change]) -> list[float]:
    """Half of the lower end of every change and twice its upper end; ascending."""
    return sorted(
        {rounded(change.low_bps / 2) for change in found} | {rounded(2 * change.high_bps) for change in found}
    )


def _conclude(
    search: Search, team: Team[At, tuple[Verdict, ...]], trials: Trials, budget_of: Mapping[str, int]
) -> list[PairBreakEven]:
    """What each pair comes to, in the words of the verdict over those bandwidths that tell most."""
    wanted = {pair: At(pair[0], _telling(search.options, tried)) for pair, tried in trials.items()}
    tasks = sorted(set(wanted.values()))
    told = {(tasks[index], found.baseline): found for index, verdicts in team.stream(tasks) for found in verdicts}
    pairs = []
    for (deployment, baseline), tried in trials.items():
        said = told[wanted[deployment, baseline], baseline]
        last = Tried.of(said.by_bandwidth[-1])
        pairs.append(
            conclude(
                deployment,
                baseline,
                [tried[bps] for bps in sorted(tried)],
                chunk_budget=budget_of.get(baseline),
                unlimited=last if last.kv_bandwidth_bps == UNLIMITED_BPS else None,
                detail=said.text,
            )
        )
    return pairs


def _telling(options: SearchOptions, tried: Mapping[float, Tried]) -> tuple[float, ...]:
    """Both ends of the range and of every change; where nothing changes and it does not help, up to no limit."""
    found = changes({bps: at.outcome for bps, at in tried.items()})
    if not found and tried[options.high_bps].outcome != "helps":
        return options.high_bps, UNLIMITED_BPS
    ends = {bps for change in found for bps in (change.low_bps, change.high_bps)}
    return tuple(sorted({options.low_bps, options.high_bps} | ends))


# --- planning -------------------------------------------------------------------------------------------------


def _chosen(topology: Topology, names: Sequence[str], *, disaggregated: bool) -> tuple[Deployment, ...]:
    """The deployments named, or all of the kind; raises ConfigError for one of the other kind."""
    option, kind = ("--deployment", "disaggregated") if disaggregated else ("--baseline", "colocated")
    known = [deployment for deployment in topology.deployments if deployment.disaggregated == disaggregated]
    chosen = variants.chosen_deployments(topology, names) if names else tuple(known)
    for deployment in chosen:
        if deployment.disaggregated != disaggregated:
            there = ", ".join(d.name for d in known) or "none"
            raise ConfigError(f"{option} {deployment.name}: is not {kind}; those of {topology.name} are: {there}")
    return chosen


def _budgets(topology: Topology, gpus: set[int], tokens: Sequence[int]) -> Iterator[Budget]:
    """Every chunk budget on each number of GPUs, on nodes like the topology's first chunked colocated ones."""
    colocated = [(d, pool) for d in topology.deployments if not d.disaggregated for pool in d.pools]
    chunked = ((d, pool) for d, pool in colocated if pool.policy == "chunked")
    like, pool = next(chunked, (topology.deployments[0], variants.pool_of(topology, "colocated")))
    taken = {deployment.name for deployment in topology.deployments}
    for count in sorted(gpus):
        for budget in tokens:
            name = f"chunk-budget-{budget}" + (f"-on-{count}" if len(gpus) > 1 else "")
            while name in taken:
                name += "+"
            yield Budget(
                budget, variants.chunked_deployment(pool, budget, gpus=count, name=name, kv_dtype=like.kv_dtype)
            )


def _remarks(
    disaggregated: Sequence[Deployment], baselines: Sequence[Deployment], *, seeds: int, asked: int
) -> Iterator[str]:
    """What a reader must know before the search starts."""
    for deployment in disaggregated:
        for baseline in baselines:
            if baseline.gpus != deployment.gpus:
                yield (
                    f"{deployment.name} ({deployment.gpus} GPUs) is not compared with {baseline.name} "
                    f"({baseline.gpus} GPUs): only equal numbers of GPUs are."
                )
    if seeds < asked:
        yield "No seed changes this traffic, so each bandwidth is run once."
    elif seeds == 1:
        yield "One seed: the outcome may turn elsewhere for the same traffic drawn anew; --seeds N judges N together."
