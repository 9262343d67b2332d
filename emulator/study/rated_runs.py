"""The runs of a deployment at any request rate, and the rates that can be searched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from emulator.core import deployments, traffic
from emulator.core.deploy import plan_runs
from emulator.core.errors import ConfigError
from emulator.core.hardware import Catalog
from emulator.core.quantities import BitsPerSecond
from emulator.core.run_spec import NodeSpec, RunSpec
from emulator.core.search import BoundedBy, Span, Trial, judge
from emulator.core.specs import Scale, Topology
from emulator.core.trace import Trace
from emulator.core.workload import MAX_REQUESTS, LoadPlan, RatedArrivals, open_rate_per_s, plan_load, scale_rate

FEWEST_REQUESTS = 20
"""Unless told otherwise, no rate is tried at which fewer requests than this are expected in a run."""

ONE_RUN = "nothing in this traffic depends on the seed, so it was run once and there is no interval"
MOST_SEEDS = 100
MORE_MEMORY = 10
_GENERATOR_SHARE = 0.9
"""Of the most requests a run may have: random arrivals may come out somewhat more than their rate says."""


@dataclass(frozen=True)
class SearchOptions:
    """How to search: rates in requests per second of all open-loop streams together.

    `seeds` runs a rate; from `low` to `high` (default: 20 requests a run, and what the load generator can send) until
    the answer is known to `tolerance`; on `workers` processes (default: one a core).
    """

    seeds: int = 3
    low: float | None = None
    high: float | None = None
    tolerance: float = 0.02
    workers: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise ConfigError(f"--seeds {self.seeds}: must be from 1 to {MOST_SEEDS}")
        for name, rate in (("--low", self.low), ("--high", self.high)):
            if rate is not None and not 0 < rate < math.inf:
                raise ConfigError(f"{name} {rate:g}: must be above 0 requests per second, and finite")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ConfigError(f"--low {self.low:g} is above --high {self.high:g}: nothing is left to search")


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a search is about: a deployment of a topology, at a KV bandwidth when KV crosses a network."""

    deployment: str
    kv_bandwidth_bps: float | None = None

    @property
    def label(self) -> str:
        """`1P1D@5Gbps`, or the deployment alone."""
        if self.kv_bandwidth_bps is None:
            return self.deployment
        return f"{self.deployment}@{self.kv_bandwidth_bps / 1e9:g}Gbps"


class Outcome(NamedTuple):
    """What a search needs to know of one run: the share of requests that met the SLO, of how many, a failure."""

    attainment: float
    requests: int
    failure: str | None


def candidates(topology: Topology, deployments: Sequence[str] | None = None) -> list[Candidate]:
    """Every deployment, or those named, each disaggregated one at every KV bandwidth of the topology."""
    network = topology.kv_network
    found = []
    for deployment in _chosen(topology, deployments):
        if deployment.disaggregated and network is not None:
            found += [Candidate(deployment.name, float(bandwidth)) for bandwidth in network.bandwidth]
        else:
            found.append(Candidate(deployment.name))
    return found


def candidate_of(topology: Topology, deployment: str, kv_bandwidth_bps: float | None) -> Candidate:
    """One deployment at one KV bandwidth, which may be left out where the topology has one alone."""
    found = candidates(topology, [deployment])
    if found[0].kv_bandwidth_bps is None:
        return found[0]
    if kv_bandwidth_bps is not None:
        return Candidate(deployment, kv_bandwidth_bps)
    if len(found) > 1:
        raise ConfigError(
            f"{topology.name}, deployment {deployment}: [kv_network] has {len(found)} bandwidths, and a search is at "
            "one; say at which"
        )
    return found[0]


def base_run(topology: Topology, catalog: Catalog, traces: Mapping[str, Trace], candidate: Candidate) -> RunSpec:
    """The candidate's run in virtual time under the topology's own load."""
    topology = at_bandwidth(msgspec.structs.replace(topology, scale=Scale()), candidate.kv_bandwidth_bps)
    load = plan_load(topology.workload, traces)
    return plan_runs(topology, catalog, load, deployments=[candidate.deployment])[0]


def at_bandwidth(topology: Topology, kv_bandwidth_bps: float | None) -> Topology:
    """The topology with its KV network at one bandwidth; as it is for None."""
    if kv_bandwidth_bps is None or topology.kv_network is None:
        return topology
    network = msgspec.structs.replace(topology.kv_network, bandwidth=(BitsPerSecond(kv_bandwidth_bps),))
    return msgspec.structs.replace(topology, kv_network=network)


def seeded_runs(
    base: RunSpec, workload: traffic.Workload, traces: Mapping[str, Trace], seeds: Sequence[int]
) -> list[RunSpec]:
    """One run for each seed, all of `workload`."""
    loads = [plan_load(msgspec.structs.replace(workload, seed=seed), traces) for seed in seeds]
    return [msgspec.structs.replace(base, load=load, seed=seed) for load, seed in zip(loads, seeds, strict=True)]


def useful_seeds(base: RunSpec, workload: traffic.Workload, traces: Mapping[str, Trace], count: int) -> tuple[int, ...]:
    """The workload's seed and the next ones, `count` of them; the first alone where nothing depends on it."""
    seeds = tuple(range(workload.seed, workload.seed + count))
    random_link = base.link is not None and base.link.jitter_s > 0
    if count == 1 or random_link:
        return seeds
    first, second = (run.load for run in seeded_runs(base, workload, traces, seeds[:2]))
    return seeds if first != second else seeds[:1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedRuns:
    """A candidate's runs at any rate of `span`, whose upper end is `upper_end`; all but the load is planned once."""

    candidate: Candidate
    base: RunSpec
    workload: traffic.Workload
    traces: Mapping[str, Trace]
    span: Span
    upper_end: BoundedBy
    seeds: tuple[int, ...]
    notes: tuple[str, ...]

    def at(self, rate_per_s: float) -> list[RunSpec]:
        """One run for each seed."""
        return seeded_runs(self.base, scale_rate(self.workload, rate_per_s, self.traces), self.traces, self.seeds)

    def with_more_memory(self, rate_per_s: float) -> list[RunSpec]:
        """The runs at a rate with MORE_MEMORY times the KV memory, or what all their requests at once need, if less.

        None where that is no more than there is.
        """
        runs = self.at(rate_per_s)
        needed = [max(_blocks_at_once(node, run.load) for run in runs) for node in self.base.nodes]
        nodes = tuple(
            msgspec.structs.replace(node, kv_blocks=max(node.kv_blocks, min(MORE_MEMORY * node.kv_blocks, blocks)))
            for node, blocks in zip(self.base.nodes, needed, strict=True)
        )
        return [msgspec.structs.replace(run, nodes=nodes) for run in runs] if nodes != self.base.nodes else []

    def trial(self, rate_per_s: float, outcomes: Sequence[Outcome]) -> Trial:
        """What the runs at a rate come to."""
        return judge(
            rate_per_s,
            [outcome.attainment for outcome in outcomes],
            self.base.slo.target,
            requests=sum(outcome.requests for outcome in outcomes),
            failure=next((outcome.failure for outcome in outcomes if outcome.failure is not None), None),
        )


def _blocks_at_once(node: NodeSpec, load: LoadPlan) -> int:
    """KV blocks that all open requests of a load and one of each user take together, growth reserved."""
    extra = node.num_reserved_decode_tokens + node.block_size
    tokens = sum(request.prompt_tokens + request.max_tokens + extra for request in load.open)
    return (tokens + len(load.users) * (node.max_model_len + extra)) // node.block_size


def rated_runs(
    topology: Topology, catalog: Catalog, traces: Mapping[str, Trace], candidate: Candidate, options: SearchOptions
) -> RatedRuns:
    """Plan a candidate's runs, and where to search. Raises ConfigError or CapacityError."""
    span, upper_end = search_span(topology, traces, options)
    workload = scale_rate(topology.workload, span.start, traces)
    base = base_run(msgspec.structs.replace(topology, workload=workload), catalog, traces, candidate)
    seeds = useful_seeds(base, workload, traces, options.seeds)
    return RatedRuns(
        candidate=candidate,
        base=base,
        workload=workload,
        traces=traces,
        span=span,
        upper_end=upper_end,
        seeds=seeds,
        notes=tuple(_notes(workload, one_run=len(seeds) < options.seeds)),
    )


def search_span(topology: Topology, traces: Mapping[str, Trace], options: SearchOptions) -> tuple[Span, BoundedBy]:
    """Where to search, and what its upper end is: as asked, or what the load generator can send.

    The first rate is the topology's own. Raises ConfigError for a workload without a rate, or an empty range.
    """
    workload = topology.workload
    if not any(isinstance(stream.arrivals, RatedArrivals) for stream in workload.streams):
        raise ConfigError(
            f"{topology.name}: no stream of the workload has a rate to search: users of a closed loop make their own "
            "rate, and `at` lists single requests; a poisson, constant, gamma or trace stream has one (`pdemu goodput "
            "--slo-scale` needs none)"
        )
    own = open_rate_per_s(workload, traces)
    reachable, why = _reachable(workload, traces, own)
    high = reachable if options.high is None else min(options.high, reachable)
    low = options.low or min(own, high, FEWEST_REQUESTS / float(workload.duration))
    if low > high:
        raise ConfigError(f"--low {low:g}: at most {high:.4g} requests per second can be sent, because {why}")
    upper_end: BoundedBy = "high" if high == options.high else "load generator"
    return Span(start=min(max(own, low), high), low=low, high=high, tolerance=options.tolerance), upper_end


def _reachable(workload: traffic.Workload, traces: Mapping[str, Trace], own: float) -> tuple[float, str]:
    """The highest rate that can be sent for the whole duration, and why not more; `own` is the workload's."""
    duration_s = float(workload.duration)
    limits = [(_GENERATOR_SHARE * MAX_REQUESTS / duration_s, f"a run may have {MAX_REQUESTS} requests")]
    for stream in workload.streams:
        if isinstance(stream.arrivals, traffic.Trace) and (trace := traces.get(stream.name)) is not None:
            share = (stream.arrivals.rate_per_s or trace.rate_per_s or own) / own
            why = f"{stream.arrivals.file} has {len(trace.rows)} requests for {duration_s:g}s"
            limits.append(((len(trace.rows) - 1) / duration_s / share, why))
    return min(limits)


def _notes(workload: traffic.Workload, *, one_run: bool) -> list[str]:
    """What a reader must know of a workload whose rate is searched."""
    notes = []
    for stream in workload.streams:
        if isinstance(stream.arrivals, traffic.ClosedLoop):
            notes.append(
                f"the {stream.arrivals.users} users of stream {stream.name} make their own rate: they go on beside "
                "the rate searched, which is that of the other streams, and count in the attainment"
            )
        elif isinstance(stream.arrivals, traffic.At):
            notes.append(
                f"the requests of stream {stream.name} have fixed times: they are sent beside the rate searched"
            )
    if one_run:
        notes.append(ONE_RUN)
    return notes


def _chosen(topology: Topology, names: Sequence[str] | None) -> list[deployments.Deployment]:
    known = {deployment.name: deployment for deployment in topology.deployments}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"{topology.name}: no deployment {name!r}; there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or known)]
