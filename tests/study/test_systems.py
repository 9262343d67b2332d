"""The presets of real systems: each runs alone and beside the others, and a faster link never serves fewer requests."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from emulator.core.deploy import plan_runs
from emulator.core.quantities import BitsPerSecond
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.lab.simulated import simulated_result
from emulator.lab.topology_files import load_topology
from emulator.study.goodput import SearchOptions, candidates, search_all

FOLDER = Path("topologies/systems")
SYSTEMS = ("vllm", "sglang", "dynamo", "distserve", "splitwise")


def test_all_has_every_system_beside_the_same_baselines() -> None:
    names = [d.name for d in load_topology(FOLDER / "all.toml").deployments]
    assert names == ["colocated-2048", "colocated-512", *SYSTEMS]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_serves_all_its_traffic_and_is_told_apart_from_the_others(system: str) -> None:
    topology = load_topology(FOLDER / f"{system}.toml")
    assert topology.deployments[-1].name == system
    load = plan_load(topology.workload, {})
    (run,) = plan_runs(topology, load_catalog(), load, deployments=[system])
    summary = simulated_result(run).summary
    assert summary.fidelity.ok, summary.fidelity.reasons
    assert summary.completed == summary.requests == len(load.open)
    others = [d for d in load_topology(FOLDER / "all.toml").deployments if d.name != system]
    assert msgspec.structs.replace(topology.deployments[-1], name="x") not in [
        msgspec.structs.replace(other, name="x") for other in others
    ]


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_four_times_the_bandwidth_never_lowers_goodput_beyond_the_searchs_interval(system: str) -> None:
    topology = load_topology(FOLDER / f"{system}.toml")
    rates = [BitsPerSecond(gbps * 1e9) for gbps in (2.5, 10)]
    assert topology.kv_network is not None
    network = msgspec.structs.replace(topology.kv_network, bandwidth=tuple(rates))
    topology = msgspec.structs.replace(topology, kv_network=network)
    wanted = [found for found in candidates(topology) if found.deployment == system]
    found = search_all(topology, load_catalog(), {}, wanted, options=SearchOptions(seeds=3, tolerance=0.05))
    assert len(found) == len(rates)
    for slower, faster in itertools.pairwise(sorted(found, key=lambda g: g.kv_bandwidth_bps or 0.0)):
        if slower.low_per_s is not None:
            assert faster.rate_per_s is not None
            assert faster.high_per_s is None or faster.high_per_s >= slower.low_per_s
