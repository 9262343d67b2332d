"""`--scale`: a factor by hand, or `auto`: measure this machine and pick the smallest that leaves half of it idle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from emulator.core.autoscale import Capacity, Choice, Demand, choose, demand
from emulator.core.deploy import plan_runs
from emulator.core.errors import ConfigError
from emulator.core.hardware import Catalog
from emulator.core.specs import Scale, Topology
from emulator.core.trace import Trace
from emulator.core.workload import plan_load
from emulator.lab.capacity import machine_capacity
from emulator.lab.simulated import simulated_result

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Scaled:
    """A topology at the scale that was asked for, and what to say about it (empty when there is nothing to say)."""

    topology: Topology
    remark: str = ""


def apply_scale(
    topology: Topology,
    asked: str | None,
    catalog: Catalog,
    traces: Mapping[str, Trace],
    deployments: Sequence[str] | None = None,
) -> Scaled:
    """The topology with `scale.time` as asked: a number from 1 on, or `auto`. Raises ConfigError for anything else."""
    if asked is None:
        return Scaled(topology)
    if asked != AUTO:
        return Scaled(_stretched(topology, _factor(asked)))
    at_rest = _stretched(topology, 1.0)
    runs = plan_runs(at_rest, catalog, plan_load(topology.workload, traces), deployments=deployments)
    capacity = machine_capacity(links=any(run.link is not None for run in runs))
    demands = []
    for run in runs:
        result = simulated_result(run)
        demands.append(demand(run, result.records, result.steps, capacity))
    choice = choose(demands, capacity)
    return Scaled(_stretched(topology, float(choice.scale_time)), _remark(choice, demands, capacity))


def _remark(choice: Choice, demands: Sequence[Demand], capacity: Capacity) -> str:
    step_ms = (capacity.step_cpu_s + capacity.token_cpu_s) * 1e3
    parts = [f"a step takes {step_ms:.2f} ms of CPU on {capacity.cores} cores"]
    parts.append(f"the busiest second needs {max(wanted.cpu for wanted in demands):.2f} of them")
    if capacity.link_bps < math.inf:
        carried = f"KV links carry {capacity.link_bps / 1e9:.1f} Gbps here"
        parts.insert(0, f"{carried}, a transfer is {capacity.late_s * 1e3:.2f} ms late")
    decides = f" ({choice.limit} decide{'s' if choice.limit == 'CPU' else ''})" if choice.limit else ""
    return f"--scale auto: {', '.join(parts)}: scale.time = {choice.scale_time} leaves half idle{decides}"


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= 1e4:
        raise ConfigError(f"--scale {text}: must be auto, or a number from 1 to 10000")
    return factor


def _stretched(topology: Topology, factor: float) -> Topology:
    return msgspec.structs.replace(topology, scale=Scale(time=factor, bytes=topology.scale.bytes))
