"""What deployments cost, worked out by hand, and one arithmetic for every command."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from emulator.core import strict
from emulator.core.catalog import find_gpu
from emulator.core.deploy import plan_runs
from emulator.core.grid import pool_seeds
from emulator.core.plan import Contender, PlannedPool
from emulator.core.roles import Role
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Slo, Topology
from emulator.core.upkeep import Costs, Holdings, Upkeep, known_sum, per_kj
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog
from tests.builders import load_plan, node_spec, run_spec
from tests.core.made_records import HOLDINGS, made_record, made_run

CATALOG = load_catalog()
COLOCATED = {"name": "colocated", "pools": [{"role": "colocated", "tp": 2}]}
SPLIT = {"name": "1P1D", "pools": [{"role": "prefill"}, {"role": "decode"}]}


def first_run(deployment: dict[str, Any], gpu: str = "l40s") -> RunSpec:
    """Qwen2.5-7B, 7.62e9 parameters of 2 bytes, on one deployment."""
    arrivals = {"process": "constant", "rate_per_s": 1}
    stream = {"name": "chat", "arrivals": arrivals, "prompt_tokens": 100, "output_tokens": 10}
    data = {
        "name": "lab",
        "model": "Qwen2.5-7B",
        "gpu": gpu,
        "slo": {},
        "workload": {"duration": "4s", "streams": [stream]},
        "kv_network": {"bandwidth": ["10Gbps"]},
        "deployments": [deployment],
    }
    topology = strict.convert(data, Topology, "lab.toml")
    return plan_runs(topology, CATALOG, plan_load(topology.workload, {}))[0]


# --- price, power and memory ----------------------------------------------------------------------------------


def test_a_split_holds_the_weights_twice_and_tensor_parallelism_once() -> None:
    split, colocated = first_run(SPLIT).holdings, first_run(COLOCATED).holdings
    assert (split.weight_copies, split.weight_bytes) == (2, 30_480_000_000)
    assert (colocated.weight_copies, colocated.weight_bytes) == (1, 15_240_000_000)
    assert split.usd_per_h == colocated.usd_per_h == pytest.approx(2 * 1.86)
    assert split.watts == colocated.watts == 700


def test_kv_room_is_that_of_all_nodes() -> None:
    """48 GB x 0.92 less 15.24 GB leave 31,520 blocks of 16 tokens of 57,344 bytes on each of two nodes."""
    run = first_run(SPLIT)
    assert [node.kv_capacity_bytes for node in run.nodes] == [31_520 * 16 * 57_344] * 2
    assert run.holdings.kv_capacity_bytes == 57_839_452_160


def test_pools_of_different_gpus_add_up() -> None:
    pools = [{"role": "prefill", "gpu": "h100"}, {"role": "decode", "gpu": "a100-80g", "nodes": 2, "tp": 2}]
    held = first_run({"name": "1P2D", "pools": pools}).holdings
    assert held.usd_per_h == pytest.approx(2.95 + 4 * 1.30)
    assert held.watts == 700 + 4 * 400
    assert held.weight_copies == 3


def test_a_gpu_without_a_price_leaves_the_dollars_unknown_and_the_joules_known() -> None:
    nodes = [
        msgspec.structs.replace(node_spec(f"colocated-{n}"), upkeep=Upkeep.of_gpus(find_gpu(CATALOG, gpu), 1))
        for n, gpu in enumerate(("gb200", "l40s"))
    ]
    held = run_spec(nodes, load_plan()).holdings
    assert (held.usd_per_h, held.watts) == (None, 1200 + 350)
    costs = Costs.of(held, completed_per_s=3.1, goodput_per_s=1.55)
    assert (costs.requests_per_usd, costs.goodput_requests_per_usd) == (None, None)
    assert costs.requests_per_joule == pytest.approx(0.002)
    assert costs.goodput_requests_per_joule == pytest.approx(0.001)


def test_nodes_that_stand_for_no_gpu_cost_nothing_that_is_known() -> None:
    held = run_spec([node_spec()], load_plan()).holdings
    assert held == Holdings(kv_capacity_bytes=1_000 * 16 * 1_000)


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    assert known_sum([1, 2]) == 3
    assert known_sum([1.5, None]) is None
    assert Upkeep.total([Upkeep(usd_per_h=1.0, watts=2.0), Upkeep(watts=3.0)]) == Upkeep(watts=5.0)


# --- what is bought -------------------------------------------------------------------------------------------


def test_requests_per_dollar_and_per_joule() -> None:
    """At 7.20 USD/h, 4 requests/s are 14,400 an hour, 2,000 a dollar; at 1,000 W, 0.004 a joule."""
    costs = Costs.of(HOLDINGS, completed_per_s=4.0, goodput_per_s=3.0)
    assert costs.requests_per_usd == pytest.approx(2_000)
    assert costs.goodput_requests_per_usd == pytest.approx(1_500)
    assert costs.requests_per_joule == pytest.approx(0.004)
    assert costs.goodput_requests_per_joule == pytest.approx(0.003)
    assert per_kj(costs.goodput_requests_per_joule) == pytest.approx(3.0)
    assert (costs.usd_per_h, costs.watts, costs.weight_copies) == (7.2, 1_000, 2)


def test_a_plan_counts_as_a_run_does() -> None:
    """One H100 to prefill and two L40S to decode: 2.95 + 2 x 1.86 USD/h, 700 + 2 x 350 W."""
    pools = [{"role": "prefill", "gpu": "h100"}, {"role": "decode", "nodes": 2}]
    costs = Costs.of(first_run({"name": "1P2D", "pools": pools}).holdings, completed_per_s=2.0, goodput_per_s=2.0)
    contender = Contender(deployment="1P2D", pools=(planned("prefill", "h100", 1), planned("decode", "l40s", 2)))
    assert contender.value(2.0, "per-dollar") == pytest.approx(costs.goodput_requests_per_usd)
    assert costs.goodput_requests_per_usd == pytest.approx(7_200 / 6.67)
    assert contender.value(2.0, "per-watt") == pytest.approx(per_kj(costs.goodput_requests_per_joule))
    assert per_kj(costs.goodput_requests_per_joule) == pytest.approx(2.0 / 1.4)
    assert contender.value(2.0, "goodput") == 2.0


def planned(role: Role, gpu: str, nodes: int) -> PlannedPool:
    """A pool of a plan, its nodes of one GPU each."""
    upkeep = Upkeep.of_gpus(find_gpu(CATALOG, gpu), nodes)
    assert upkeep.watts is not None
    return PlannedPool(
        role=role,
        nodes=nodes,
        gpu=gpu,
        tp=1,
        policy="chunked",
        max_num_batched_tokens=2048,
        price_usd_per_h=upkeep.usd_per_h,
        tdp_w=upkeep.watts,
    )


def test_runs_under_several_seeds_pay_for_the_time_of_all() -> None:
    """Two completed in the ten seconds of one run and four in those of the other: 0.3/s."""
    results = [made_run([made_record(f"r{n}") for n in range(count)], Slo()) for count in (2, 4)]
    pooled = pool_seeds(results, Slo()).summary.costs
    assert pooled.requests_per_usd == pytest.approx(0.3 * 3_600 / 7.2)
    assert pooled.requests_per_joule == pytest.approx(0.3 / 1_000)
    assert (pooled.usd_per_h, pooled.weight_bytes) == (HOLDINGS.usd_per_h, HOLDINGS.weight_bytes)
