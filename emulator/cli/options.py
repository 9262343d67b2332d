"""Options that change what a topology says, shared by every command that runs one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from emulator.core import specs
from emulator.core.errors import ConfigError
from emulator.core.quantities import BitsPerSecond, Seconds
from emulator.core.workload import scale_rate
from emulator.lab.topology_files import load_topology, load_traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Options that change what a topology says; as typed."""

    kv_bandwidth: str | None
    rate: float | None
    duration: str | None
    trace: Path | None
    seed: int | None
    model: str | None = None


def read_topology(path: Path, traffic: Traffic) -> specs.Topology:
    """The topology of a file with the options laid over it."""
    topology = load_topology(path)
    workload = topology.workload
    changes: dict[str, object] = {}
    if traffic.duration is not None:
        changes["duration"] = _seconds(traffic.duration)
    if traffic.seed is not None:
        if traffic.seed < 0:
            raise ConfigError(f"--seed {traffic.seed}: must be 0 or more")
        changes["seed"] = traffic.seed
    if traffic.trace is not None:
        changes["streams"] = (specs.Stream(name="trace", arrivals=specs.Trace(file=str(traffic.trace))),)
    workload = msgspec.structs.replace(workload, **changes)
    if traffic.rate is not None:
        if not 0 < traffic.rate < math.inf:
            raise ConfigError(f"--rate {traffic.rate:g}: must be above 0 requests per second, and finite")
        workload = scale_rate(workload, traffic.rate, load_traces(workload))
    network = topology.kv_network
    if traffic.kv_bandwidth is not None:
        if network is None:
            raise ConfigError(f"--kv-bandwidth: {path} has no [kv_network], so no KV crosses a network in it")
        network = msgspec.structs.replace(network, bandwidth=_bandwidths(traffic.kv_bandwidth))
    model = traffic.model or topology.model
    return msgspec.structs.replace(topology, model=model, workload=workload, kv_network=network)


def _bandwidths(text: str) -> tuple[BitsPerSecond, ...]:
    try:
        rates = tuple(BitsPerSecond.parse(part) for part in text.split(","))
    except ConfigError as error:
        raise ConfigError(f"--kv-bandwidth: {error}") from None
    if len(set(rates)) != len(rates):
        raise ConfigError(f"--kv-bandwidth {text}: the same bandwidth is given twice")
    return rates


def _seconds(text: str) -> Seconds:
    try:
        seconds = Seconds(text) if text.replace(".", "", 1).isdecimal() else Seconds.parse(text)
    except ConfigError as error:
        raise ConfigError(f"--duration: {error}") from None
    if not seconds > 0:
        raise ConfigError(f"--duration {text}: must be above 0 s")
    return seconds
