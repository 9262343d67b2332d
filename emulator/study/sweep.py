"""A sweep: every point of a grid simulated for every deployment, on the same requests, in parallel over cores."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from emulator import __version__
from emulator.core import strict, traffic
from emulator.core.deploy import plan_runs
from emulator.core.errors import ConfigError
from emulator.core.grid import Axes, Point, PointResult, Row, judge_point, pool_seeds, run_row, slices
from emulator.core.hardware import Catalog
from emulator.core.run_spec import RunSpec
from emulator.core.run_summary import RunResult
from emulator.core.specs import Scale, Topology
from emulator.core.trace import Trace
from emulator.core.workload import LoadPlan
from emulator.lab.parallel import Team, cores
from emulator.lab.simulated import simulated_result
from emulator.study import variants
from emulator.study.sweep_folder import SweepFolder
from emulator.study.variants import Ratio

MOST_SEEDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to simulate: the topology with the deployments of every point, and the grid; all of it checked."""

    topology: Topology
    axes: Axes
    seeds: tuple[int, ...]
    catalog: Catalog
    traces: Mapping[str, Trace]
    remarks: tuple[str, ...] = ()

    def identity(self) -> dict[str, Any]:
        """What makes two sweeps the same one, so that the second may go on where the first stopped.

        Trace files count by what is in them, wherever they are.
        """
        identity = {
            "pdemu": __version__,
            "topology": strict.to_builtins(_without_folders(self.topology)),
            "axes": self.axes,
            "seeds": self.seeds,
            "traces": sorted(_digest(msgspec.structs.replace(trace, reading=None)) for trace in self.traces.values()),
            "catalog": _digest(self.catalog),
        }
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(identity))  # as it is read back
        return plain


def plan_sweep(
    topology: Topology,
    catalog: Catalog,
    traces: Mapping[str, Trace],
    axes: Axes,
    *,
    deployments: Sequence[str] = (),
    ratios: Sequence[Ratio] = (),
    seeds: int = 1,
) -> Sweep:
    """Check that every point can be simulated. Raises ConfigError or CapacityError for whatever a user has to mend.

    `deployments` are the topology's to use (default: all), `ratios` what to make of them instead of running them as
    they are. An axis without values stays as the topology has it; the bandwidths are then its own.
    """
    if not 1 <= seeds <= MOST_SEEDS:
        raise ConfigError(f"--seeds {seeds}: must be from 1 to {MOST_SEEDS}")
    topology = msgspec.structs.replace(topology, scale=Scale())
    if deployments:
        topology = variants.with_deployments(topology, variants.chosen_deployments(topology, deployments))
    if ratios:
        made = [deployment for ratio in ratios for deployment in variants.deployments_like(topology, ratio)]
        topology = variants.with_deployments(topology, made)
    axes = msgspec.structs.replace(axes, kv_bandwidth_bps=_bandwidths(topology, axes))
    for option, values in (("--prompt", axes.prompt_tokens), ("--output", axes.output_tokens)):
        if values:
            variants.check_fixed_lengths(topology.workload, option)
    _check_extremes(topology, catalog, traces, axes)
    useful = variants.useful_seeds(
        topology,
        seeds,
        traces,
        prompt_tokens=max(axes.prompt_tokens, default=None),
        output_tokens=max(axes.output_tokens, default=None),
    )
    remarks = _remarks(topology)
    if len(useful) < seeds:
        remarks.append("No seed changes this traffic, so each point is run once.")
    return Sweep(topology=topology, axes=axes, seeds=useful, catalog=catalog, traces=traces, remarks=tuple(remarks))


def run_sweep(sweep: Sweep, folder: SweepFolder, *, workers: int | None = None) -> Iterator[PointResult]:
    """Simulate the points that the folder lacks, one result at a time, each in the folder before it is passed on.

    When all are there, the folder gets its tables. Closing the iterator ends the workers and leaves a folder with
    which another run can go on.
    """
    missing = [point for point in sweep.axes.points() if point.index not in folder.done]
    with Team(partial(simulate_points, sweep), workers) as team:
        for _, result in team.stream(slices(missing, workers or cores())):
            folder.add(result)
            yield result
    folder.finish()


def simulate_points(sweep: Sweep, points: Sequence[Point]) -> Iterator[PointResult]:
    """One result a point; neighbours of equal traffic share their requests and their colocated runs."""
    colocated = [d.name for d in sweep.topology.deployments if not d.disaggregated]
    disaggregated = [d.name for d in sweep.topology.deployments if d.disaggregated]
    for _, group in itertools.groupby(points, key=lambda point: point.traffic):
        cell = list(group)
        traffic = [_traffic(sweep, cell[0], seed) for seed in sweep.seeds]
        baselines = _simulate(sweep, traffic, colocated, None)
        for point in cell:
            done = baselines + _simulate(sweep, traffic, disaggregated, point.kv_bandwidth_bps)
            rows: list[Row] = [
                run_row(point, run, result.summary)
                for deployed in done
                for run, result in zip(deployed.runs, deployed.results, strict=True)
            ]
            pooled = [pool_seeds(deployed.results, sweep.topology.slo) for deployed in done]
            yield judge_point(point, rows, pooled, sweep.topology.slo)


class _Traffic(NamedTuple):
    """What one seed sends at a point, and the topology that says so."""

    topology: Topology
    load: LoadPlan


class _Deployed(NamedTuple):
    """A deployment's runs, one a seed."""

    runs: list[RunSpec]
    results: list[RunResult]


def _traffic(sweep: Sweep, point: Point, seed: int) -> _Traffic:
    topology = variants.with_seed(_rated(sweep.topology, point.rate_per_s, sweep.traces), seed)
    load = variants.load_of(
        topology, sweep.traces, prompt_tokens=point.prompt_tokens, output_tokens=point.output_tokens
    )
    return _Traffic(topology, load)


def _simulate(
    sweep: Sweep, traffic: Sequence[_Traffic], names: Sequence[str], kv_bandwidth_bps: float | None
) -> list[_Deployed]:
    if not names:
        return []
    planned = [
        plan_runs(
            topology if kv_bandwidth_bps is None else variants.with_bandwidths(topology, [kv_bandwidth_bps]),
            sweep.catalog,
            load,
            deployments=names,
        )
        for topology, load in traffic
    ]
    return [_Deployed(list(runs), [simulated_result(run) for run in runs]) for runs in zip(*planned, strict=True)]


# --- planning -------------------------------------------------------------------------------------------------


def _bandwidths(topology: Topology, axes: Axes) -> tuple[float, ...]:
    """The bandwidths to run: as asked, else the topology's; none where no KV crosses a network."""
    split = any(deployment.disaggregated for deployment in topology.deployments)
    if axes.kv_bandwidth_bps:
        if topology.kv_network is None:
            raise ConfigError(f"--kv-bandwidth: {topology.name} has no [kv_network], so no KV crosses a network in it")
        if not split:
            raise ConfigError(f"--kv-bandwidth: no deployment of {topology.name} that is run is disaggregated")
        return axes.kv_bandwidth_bps
    return tuple(sorted(map(float, topology.kv_network.bandwidth))) if split and topology.kv_network else ()


def _check_extremes(topology: Topology, catalog: Catalog, traces: Mapping[str, Trace], axes: Axes) -> None:
    """Plan the lowest and the highest rate with the longest lengths: what goes there goes everywhere between."""
    if axes.kv_bandwidth_bps:
        topology = variants.with_bandwidths(topology, axes.kv_bandwidth_bps)
    prompt, output = max(axes.prompt_tokens, default=None), max(axes.output_tokens, default=None)
    for rate in sorted({*axes.rate_per_s[:1], *axes.rate_per_s[-1:]}) or (None,):
        rated = _rated(topology, rate, traces)
        load = variants.load_of(rated, traces, prompt_tokens=prompt, output_tokens=output)
        for run in plan_runs(rated, catalog, load):
            _check_lengths(run, prompt, output)


def _rated(topology: Topology, rate_per_s: float | None, traces: Mapping[str, Trace]) -> Topology:
    return topology if rate_per_s is None else variants.with_rate(topology, rate_per_s, traces)


def _check_lengths(run: RunSpec, prompt: int | None, output: int | None) -> None:
    """Refuse fixed lengths that no node of the run could hold; where one is not fixed it counts as one token."""
    if prompt is None and output is None:
        return
    option = f"--prompt {prompt}" if prompt is not None else f"--output {output}"
    total = (prompt or 1) + (output or 1)
    for node in run.nodes:
        if total > node.max_model_len:
            raise ConfigError(
                f"{option}: {total} tokens with the rest of the request exceed the context of {run.model}, "
                f"{node.max_model_len} tokens"
            )
        room = node.kv_blocks * node.block_size
        if ((prompt or 1) if node.role == "prefill" else total) > room:
            raise ConfigError(
                f"{option}: does not fit the KV memory of {run.deployment}'s {node.name}, {room} tokens; use a larger "
                "GPU or more tensor parallelism"
            )


def _remarks(topology: Topology) -> list[str]:
    """What a reader must know before the sweep starts: deployments that have nothing to be compared with."""
    baselines = {deployment.gpus for deployment in topology.deployments if not deployment.disaggregated}
    return [
        f"{deployment.name} has {deployment.gpus} GPUs and no colocated deployment has as many: it is simulated, but "
        "there is nothing to compare it with."
        for deployment in topology.deployments
        if deployment.disaggregated and deployment.gpus not in baselines
    ]


def _digest(value: Trace | Catalog) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]


def _without_folders(topology: Topology) -> Topology:
    streams = tuple(
        msgspec.structs.replace(
            stream, arrivals=msgspec.structs.replace(stream.arrivals, file=Path(stream.arrivals.file).name)
        )
        if isinstance(stream.arrivals, traffic.Trace)
        else stream
        for stream in topology.workload.streams
    )
    return msgspec.structs.replace(topology, workload=msgspec.structs.replace(topology.workload, streams=streams))
