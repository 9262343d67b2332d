"""`--scale`: a factor by hand, or `auto`: measure this machine and pick the smallest that leaves half of it idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from emulator.core.autoscale import scale_time_for
from emulator.core.deploy import plan_runs
from emulator.core.errors import ConfigError
from emulator.core.hardware import Catalog
from emulator.core.specs import Scale, Topology
from emulator.core.trace import Trace
from emulator.core.workload import plan_load
from emulator.lab.capacity import link_capacity_bps

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
    if all(run.link is None for run in runs):
        return Scaled(at_rest, "--scale auto: no KV crosses a network, so scale.time = 1")
    capacity_bps = link_capacity_bps()
    factor = max(scale_time_for(run, capacity_bps) for run in runs)
    remark = (
        f"--scale auto: KV links carry {capacity_bps / 1e9:.1f} Gbps here, so scale.time = {factor} leaves half idle"
    )
    return Scaled(_stretched(topology, float(factor)), remark)


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
