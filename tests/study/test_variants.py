"""Variants of a topology change what they say and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from emulator.core import deployments, traffic
from emulator.core.deployments import Pool
from emulator.core.errors import ConfigError
from emulator.core.specs import Topology
from emulator.core.workload import plan_load
from emulator.lab.topology_files import load_topology
from emulator.study import variants
from emulator.study.variants import Ratio, parse_ratio
from tests.live.lab import SMALL, TOPOLOGIES

TOPOLOGY = load_topology(SMALL)
QUICKSTART = load_topology(TOPOLOGIES / "quickstart.toml")


def _with_stream(stream: traffic.Stream, topology: Topology = TOPOLOGY) -> Topology:
    workload = msgspec.structs.replace(topology.workload, streams=(stream,))
    return msgspec.structs.replace(topology, workload=workload)


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ("2P2D", Ratio(prefill=2, decode=2)),
        (" 1P3D ", Ratio(prefill=1, decode=3)),
        ("12C", Ratio(colocated=12)),
    ],
)
def test_a_ratio_reads_as_it_is_written(text: str, ratio: Ratio) -> None:
    assert parse_ratio(text) == ratio
    assert str(ratio) == text.strip()


@pytest.mark.parametrize(
    "text", ["", "2P", "2D2P", "2p2d", "P2D", "0P4D", "4P0D", "0C", "257C", "2P2D1C", "-1C", "1.5C"]
)
def test_what_is_no_ratio_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a ratio"):
        parse_ratio(text)


def test_a_ratio_takes_its_nodes_from_the_topology() -> None:
    made = variants.deployment_of(TOPOLOGY, parse_ratio("3P2D"))
    assert (made.name, made.gpus, made.overlap) == ("3P2D", 5, "chunk")
    assert [(pool.role, pool.nodes) for pool in made.pools] == [("prefill", 3), ("decode", 2)]
    colocated = variants.deployment_of(TOPOLOGY, parse_ratio("4C"))
    assert [(pool.policy, pool.nodes) for pool in colocated.pools] == [("prefill_first", 4)]


def test_pools_may_be_given_instead() -> None:
    made = variants.deployment_of(
        TOPOLOGY,
        parse_ratio("1P2D"),
        prefill=Pool(role="prefill", gpu="h100", tp=2),
        decode=Pool(role="decode", gpu="l40s"),
    )
    assert [(pool.gpu, pool.tp, pool.nodes) for pool in made.pools] == [("h100", 2, 1), ("l40s", 1, 2)]
    assert made.gpus == 4


def test_a_topology_without_the_kind_lends_the_make_of_its_nodes() -> None:
    pool = Pool(role="colocated", gpu="l40s", tp=2, policy="prefill_first", max_num_batched_tokens=99)
    alone = variants.with_deployments(TOPOLOGY, [deployments.Deployment(name="a", pools=(pool,))])
    made = variants.deployment_of(alone, parse_ratio("1P1D"))
    assert [(p.role, p.gpu, p.tp, p.policy, p.max_num_batched_tokens) for p in made.pools] == [
        ("prefill", "l40s", 2, "chunked", None),
        ("decode", "l40s", 2, "chunked", None),
    ]


def test_a_ratio_is_made_in_every_way_the_topology_has() -> None:
    made = variants.deployments_like(QUICKSTART, parse_ratio("4C"))
    assert [(d.name, d.gpus, d.pools[0].policy, d.pools[0].max_num_batched_tokens) for d in made] == [
        ("4C-colocated-prefill-first", 4, "prefill_first", None),
        ("4C-colocated-chunked-2048", 4, "chunked", 2048),
        ("4C-colocated-chunked-512", 4, "chunked", 512),
    ]
    assert [d.name for d in variants.deployments_like(QUICKSTART, parse_ratio("2P2D"))] == ["2P2D"]


def test_two_pools_of_a_role_have_no_ratio() -> None:
    pools = (Pool(role="prefill"), Pool(role="prefill", gpu="l40s"), Pool(role="decode"))
    mixed = variants.with_deployments(TOPOLOGY, [deployments.Deployment(name="mixed", pools=pools)])
    with pytest.raises(ConfigError, match="mixed: has several pools of one role"):
        variants.deployments_like(mixed, parse_ratio("2P2D"))


def test_a_chunk_budget_is_of_whole_nodes() -> None:
    pool = Pool(role="prefill", tp=2, kv_egress=TOPOLOGY.kv_network.bandwidth[0] if TOPOLOGY.kv_network else None)
    made = variants.chunked_deployment(pool, 256, gpus=6, name="c")
    assert made.gpus == 6
    assert [(p.role, p.nodes, p.policy, p.max_num_batched_tokens, p.kv_egress) for p in made.pools] == [
        ("colocated", 3, "chunked", 256, None)
    ]
    with pytest.raises(ConfigError, match="5 GPUs cannot be divided"):
        variants.chunked_deployment(pool, 256, gpus=5, name="c")


def test_deployments_that_cannot_be_together_are_refused() -> None:
    split = TOPOLOGY.deployments[1]
    with pytest.raises(ConfigError, match="1P1D is there twice"):
        variants.with_deployments(TOPOLOGY, [split, split])
    with pytest.raises(ConfigError, match="no deployment is left"):
        variants.with_deployments(TOPOLOGY, [])
    offline = msgspec.structs.replace(TOPOLOGY, deployments=TOPOLOGY.deployments[:1], kv_network=None)
    with pytest.raises(ConfigError, match=r"1P1D is disaggregated, which needs \[kv_network\]"):
        variants.with_deployments(offline, [split])
    with pytest.raises(ConfigError, match=r"has no \[kv_network\]"):
        variants.with_bandwidths(offline, [1e9])
    with pytest.raises(ConfigError, match="no deployment 'nowhere'; there are colocated, 1P1D"):
        variants.chosen_deployments(TOPOLOGY, ["nowhere"])


def test_fixed_lengths_leave_all_else_of_the_requests() -> None:
    """Of distributions and of named joint sets alike: arrivals, ids and the other length stay."""
    for topology in (TOPOLOGY, QUICKSTART):
        before = plan_load(topology.workload, {})
        after = variants.load_of(topology, {}, prompt_tokens=77)
        assert [(r.request_id, r.scheduled_s, r.max_tokens) for r in after.open] == [
            (r.request_id, r.scheduled_s, r.max_tokens) for r in before.open
        ]
        assert {r.prompt_tokens for r in after.open} == {77}
        assert {r.prompt_tokens for r in before.open} != {77}
        assert {r.max_tokens for r in variants.load_of(topology, {}, output_tokens=5).open} == {5}


def test_closed_loop_users_keep_their_lengths() -> None:
    worked = load_topology(TOPOLOGIES / "worked-example.toml")
    before, after = plan_load(worked.workload, {}), variants.load_of(worked, {}, prompt_tokens=77)
    assert after.users == before.users
    assert {r.prompt_tokens for r in after.open} == {77}


def test_traffic_without_lengths_of_its_own_gets_no_fixed_ones() -> None:
    trace = _with_stream(traffic.Stream(name="t", arrivals=traffic.Trace(file="t.csv")))
    with pytest.raises(ConfigError, match="--prompt: stream t replays a trace"):
        variants.check_fixed_lengths(trace.workload, "--prompt")
    users = traffic.Stream(name="u", arrivals=traffic.ClosedLoop(users=2), prompt_tokens=5, output_tokens=5)
    with pytest.raises(ConfigError, match="--output: every stream is closed-loop"):
        variants.check_fixed_lengths(_with_stream(users).workload, "--output")
    variants.check_fixed_lengths(TOPOLOGY.workload, "--prompt")


def test_seeds_count_only_where_they_change_what_is_sent() -> None:
    assert variants.useful_seeds(TOPOLOGY, 3, {}) == (3, 4, 5)
    assert variants.useful_seeds(TOPOLOGY, 3, {}, prompt_tokens=5) == (3, 4, 5), "outputs are still drawn"
    assert variants.useful_seeds(TOPOLOGY, 3, {}, prompt_tokens=5, output_tokens=5) == (3,)
    users = traffic.Stream(name="u", arrivals=traffic.ClosedLoop(users=2), prompt_tokens=5, output_tokens=5)
    assert variants.useful_seeds(_with_stream(users), 2, {}) == (3,)


def test_bandwidth_rate_and_seed_change_themselves_alone() -> None:
    faster = variants.with_bandwidths(TOPOLOGY, [1e9, 2e9])
    assert faster.kv_network is not None
    assert faster.kv_network.bandwidth == (1e9, 2e9)
    seeded = variants.with_seed(TOPOLOGY, 9)
    assert seeded.workload.seed == 9
    rated = variants.with_rate(TOPOLOGY, 20.0, {})
    assert len(plan_load(rated.workload, {}).open) == 2 * len(plan_load(TOPOLOGY.workload, {}).open)
    assert [r.prompt_tokens for r in plan_load(rated.workload, {}).open][:15] == [
        r.prompt_tokens for r in plan_load(TOPOLOGY.workload, {}).open
    ]
