"""Mixed nodes and nodes that help out: who is asked for what, which way KV may go, and what a topology may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from emulator.core import strict
from emulator.core.autoscale import peak_payload_bps
from emulator.core.bounds import Demand, limits, servable_share
from emulator.core.deploy import plan_runs
from emulator.core.deployments import Admission, Conditional, RoleSwitching
from emulator.core.effects import Send
from emulator.core.errors import ConfigError
from emulator.core.messages import Generate, KvReceived, Prefill, PrefillDone, Reserve
from emulator.core.probe import Prober
from emulator.core.records import RequestTimes
from emulator.core.roles import Role
from emulator.core.router import Router
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Topology
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.simulate import Simulation
from emulator.study.variants import Ratio, deployments_like
from tests.builders import load_plan, node_spec, request, run_spec, step_times
from tests.drawn import EVERY_ADMISSION
from tests.routers import known_router, submit

CATALOG = load_catalog()
SWITCHING = RoleSwitching(max_queued_prompt_tokens=200, max_kv_usage=0.5)
NO_TIMES = RequestTimes()


def _place(router: Router, request_id: str, prompt_tokens: int = 100, max_tokens: int = 10) -> tuple[str, str]:
    """Where a request is to be prefilled, and where decoded."""
    sends = submit(router, request_id, prompt_tokens, max_tokens)
    at = {type(send.message): send.peer for send in sends}
    if Generate in at:
        return at[Generate], at[Generate]
    return at[Prefill], at[Reserve]


# --- mixed nodes ----------------------------------------------------------------------------------------------------


def test_where_both_choices_fall_on_one_node_it_serves_alone() -> None:
    router = known_router(mixed=2)
    assert submit(router, "a") == [Send("mixed-0", Generate("a", 100, 10))]
    assert submit(router, "b") == [Send("mixed-1", Generate("b", 100, 10))]


def test_kv_moves_where_one_node_has_fewer_prompts_and_another_more_memory() -> None:
    router = known_router(mixed=2)
    assert _place(router, "a", 100, 10) == ("mixed-0", "mixed-0")
    assert _place(router, "b", 50, 5_000) == ("mixed-1", "mixed-1")
    assert _place(router, "c", 100, 10) == ("mixed-1", "mixed-0")


def test_a_node_that_takes_kv_in_sends_none_until_it_is_there() -> None:
    router = known_router(mixed=2)
    for name, size in (("a", (100, 10)), ("b", (50, 5_000)), ("moves", (100, 10)), ("d", (10, 9_000))):
        _place(router, name, *size)
    assert _place(router, "e", 30, 10) == ("mixed-0", "mixed-0"), "mixed-1 has more memory, but mixed-0 takes KV in"
    router.handle("mixed-1", PrefillDone("moves", NO_TIMES), 1.0)
    router.handle("mixed-0", KvReceived("moves", NO_TIMES), 1.0)
    assert _place(router, "f", 100, 10) == ("mixed-1", "mixed-1")
    assert _place(router, "g", 5, 10) == ("mixed-0", "mixed-1"), "now it may"


def test_at_equal_load_nodes_do_what_is_their_own() -> None:
    assert _place(known_router(mixed=1, prefill=1, decode=1), "a") == ("prefill-0", "decode-0")


def test_mixed_nodes_take_what_the_others_have_too_much_of() -> None:
    router = known_router(prefill=1, decode=1, mixed=1)
    _place(router, "a", 500, 10)
    assert _place(router, "b", 100, 10) == ("mixed-0", "mixed-0"), "fewer prompts, and more memory than decode-0"
    assert _place(router, "c", 450, 10) == ("mixed-0", "mixed-0")
    assert _place(router, "d", 100, 10) == ("prefill-0", "decode-0"), "550 are queued at mixed-0, 500 here"


def test_prompts_that_a_node_holds_for_others_count_as_its_memory() -> None:
    router = known_router(prefill=1, decode=2, role_switching=SWITCHING)
    for n in range(2):
        assert _place(router, f"r{n}", 6_000, 10) == ("prefill-0", f"decode-{n}")
        router.handle("prefill-0", PrefillDone(f"r{n}", NO_TIMES), 1.0)
    assert _place(router, "c", 100, 2_000) == ("prefill-0", "decode-0"), "it helps out, but 12,000 are still held there"
    router.handle("decode-0", KvReceived("r0", NO_TIMES), 2.0)
    router.handle("decode-1", KvReceived("r1", NO_TIMES), 2.0)
    router.handle("prefill-0", PrefillDone("c", NO_TIMES), 2.0)
    assert _place(router, "d", 100, 8_000) == ("prefill-0", "prefill-0")


@pytest.mark.parametrize("admission", EVERY_ADMISSION)
def test_a_lone_mixed_node_beside_prefill_nodes_decodes_and_sends_nothing(admission: Admission) -> None:
    router = known_router(prefill=1, mixed=1, admission=admission)
    assert [s.peer for s in submit(router, "a", 100)][-1] == "prefill-0"
    assert submit(router, "b", 50) == [Send("mixed-0", Generate("b", 50, 10))]


# --- the decode node is chosen later ----------------------------------------------------------------------------------


def test_prefill_first_chooses_among_the_others_when_the_prompt_is_computed() -> None:
    router = known_router(mixed=3, admission="prefill_first")
    for n in range(3):
        submit(router, f"own-{n}", 10, 100 * (n + 1))
    submit(router, "fourth", 5, 1_000)  # to mixed-0, where fewest tokens are; then it is the fullest
    assert submit(router, "a", 5) == [Send("mixed-1", Generate("a", 5, 10))]
    assert submit(router, "b", 400, 10) == [Send("mixed-2", Prefill("b", 400, 10))], "mixed-1 has more memory"
    submit(router, "c", 1, 8_000)
    sends = router.handle("mixed-2", PrefillDone("b", NO_TIMES), 1.0)
    router.check_integrity()
    (reserve,) = sends
    assert reserve.peer in ("mixed-0", "mixed-1")
    assert reserve.message == Reserve("b", 400, 10, source="mixed-2")


def test_a_lost_node_that_stood_ready_for_a_request_costs_it_a_retry() -> None:
    router = known_router(mixed=2, admission="prefill_first")
    submit(router, "a", 100, 10)
    submit(router, "b", 50, 5_000)
    assert submit(router, "c", 100, 10) == [Send("mixed-1", Prefill("c", 100, 10))]
    sends = router.lost("mixed-0")
    assert Send("mixed-1", Generate("c~1", 100, 10)) in sends
    router.check_integrity()


# --- helping out ------------------------------------------------------------------------------------------------------


def test_decode_nodes_take_prompts_once_more_than_so_many_tokens_are_queued_everywhere_else() -> None:
    router = known_router(prefill=2, decode=1, role_switching=SWITCHING)
    assert [_place(router, f"r{n}", 150)[0] for n in range(5)] == [
        "prefill-0", "prefill-1", "prefill-0", "prefill-1", "decode-0",
    ]  # fmt: skip
    for name in ("r0", "r2"):
        router.handle("prefill-0", PrefillDone(name, NO_TIMES), 1.0)
    assert _place(router, "r5", 150)[0] == "prefill-0"


def test_what_a_helping_node_prefills_while_it_takes_kv_in_it_decodes() -> None:
    router = known_router(prefill=1, decode=2, role_switching=SWITCHING)
    assert _place(router, "a", 300) == ("prefill-0", "decode-0")
    assert _place(router, "b", 50) == ("decode-1", "decode-1"), "most free memory, and nothing to move"
    assert _place(router, "c", 60, 9_000) == ("decode-0", "decode-0"), "the fewest prompts; KV is on its way there"


def test_prefill_nodes_decode_once_so_much_memory_is_given_away_everywhere_else() -> None:
    router = known_router(prefill=1, decode=1, role_switching=SWITCHING)
    assert _place(router, "a", 100, 7_900) == ("prefill-0", "decode-0"), "8,000 of 16,000"
    router.handle("prefill-0", PrefillDone("a", NO_TIMES), 1.0)
    assert _place(router, "b", 1, 1) == ("prefill-0", "prefill-0")


def test_kv_goes_back_where_nothing_comes_from_there() -> None:
    router = known_router(prefill=1, decode=1, role_switching=SWITCHING)
    assert _place(router, "a", 100, 8_000) == ("prefill-0", "prefill-0"), "with it more than half would be given away"
    assert _place(router, "b", 150, 7_800) == ("prefill-0", "decode-0")
    router.handle("prefill-0", PrefillDone("b", NO_TIMES), 1.0)
    router.handle("decode-0", KvReceived("b", NO_TIMES), 1.0)
    assert _place(router, "c", 150, 2_000) == ("prefill-0", "decode-0"), "both are beyond half; it has more left"
    router.handle("prefill-0", PrefillDone("c", NO_TIMES), 2.0)
    router.handle("decode-0", KvReceived("c", NO_TIMES), 2.0)
    assert _place(router, "d", 150, 10) == ("prefill-0", "prefill-0")
    assert _place(router, "e", 20, 10) == ("decode-0", "prefill-0"), "250 are queued there, and it has more memory"


def test_without_thresholds_nobody_helps() -> None:
    router = known_router(prefill=1, decode=1)
    assert {_place(router, f"r{n}", 3_000) for n in range(8)} == {("prefill-0", "decode-0")}


def test_helpers_take_over_from_a_pool_that_is_lost() -> None:
    router = known_router(prefill=1, decode=1, role_switching=SWITCHING)
    router.lost("prefill-0")
    assert _place(router, "a") == ("decode-0", "decode-0")


# --- whole runs -----------------------------------------------------------------------------------------------------


CROSSED = {  # seconds between two, blocks of each node, prompts and outputs: found without the rule, to be stuck there
    "before": (0.01, 12, [(140, 20), (100, 2), (20, 50), (60, 2), (140, 2), (60, 50), (20, 20), (60, 2)]),
    "after": (0.05, 10, [(140, 20), (60, 20), (140, 20), (140, 20), (20, 20), (20, 20), (100, 20), (20, 50)]),
}


@pytest.mark.parametrize("crossed", CROSSED)
@pytest.mark.parametrize("admission", EVERY_ADMISSION)
def test_nodes_full_of_prompts_for_each_other_do_not_wait_for_ever(admission: Admission, crossed: str) -> None:
    """Memory that was reserved before a prompt, or holds one after it, waits for memory of nodes that wait for it."""
    gap_s, blocks, sizes = CROSSED[crossed]
    shape = node_spec(role="mixed", kv_blocks=blocks, max_num_batched_tokens=32)
    nodes = [msgspec.structs.replace(shape, name=f"mixed-{n}") for n in range(3)]
    requests = [
        request(f"r{n}", at_s=n * gap_s, prompt_tokens=prompt, max_tokens=output)
        for n, (prompt, output) in enumerate(sizes)
    ]
    run = run_spec(nodes, load_plan(requests, drain_s=500.0), payload_bytes_per_s=1e6, admission=admission)
    records = Simulation(run, after_event=Simulation.check_integrity).run().records
    assert {record.outcome for record in records} == {"completed"}
    assert any(record.kv_bytes for record in records)


# --- who has which end of the network -------------------------------------------------------------------------------


def _run(counts: Mapping[Role, int], **rules: Any) -> RunSpec:
    nodes = [node_spec(f"{role}-{n}", role=role) for role, count in counts.items() for n in range(count)]
    return run_spec(nodes, load_plan([request()]), **rules)


@pytest.mark.parametrize(
    ("counts", "switching", "pairs"),
    [
        ({"prefill": 1, "decode": 2}, None, "p0>d0 p0>d1"),
        ({"mixed": 2}, None, "m0>m1 m1>m0"),
        ({"prefill": 1, "mixed": 1}, None, "p0>m0"),
        ({"mixed": 1, "decode": 1}, None, "m0>d0"),
        ({"prefill": 1, "mixed": 1, "decode": 1}, None, "p0>m0 p0>d0 m0>d0"),
        ({"prefill": 1, "decode": 1}, SWITCHING, "p0>d0 d0>p0"),
    ],
)
def test_kv_crosses_from_who_may_prefill_to_who_may_decode(
    counts: Mapping[Role, int], switching: RoleSwitching | None, pairs: str
) -> None:
    run = _run(counts, role_switching=switching)
    assert " ".join(f"{a[0]}{a[-1]}>{b[0]}{b[-1]}" for a, b in run.kv_pairs) == pairs
    assert Prober.of(run).pairs == run.kv_pairs, "each is probed before a run"
    assert {source for source, _ in run.kv_pairs} == set(run.kv_senders)
    assert {destination for _, destination in run.kv_pairs} == set(run.kv_receivers)
    assert peak_payload_bps(run) == min(len(run.kv_senders), len(run.kv_receivers)) * 8e9


# --- bounds -----------------------------------------------------------------------------------------------------------

DEMAND = Demand(np.full(24, 1000.0), np.full(24, 101.0))
DOUBLES: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("mixed", "mixed"))


def test_a_bound_counts_nodes_that_do_both_for_both_and_once_for_all() -> None:
    """In the 11 s of a run a node does 11 of these prompts, or decodes 11 of the outputs, or does half of each."""
    cost = step_times(decode_ms=0.0, decode_ms_per_sequence=10.0)
    split, mixed = (
        run_spec(
            [node_spec(f"{role}-{n}", role=role, cost=cost) for n, role in enumerate(roles)],
            load_plan([request()], drain_s=1.0),
        )
        for roles in DOUBLES
    )
    assert limits(split) == ("prefill", "decode", "KV network")
    assert [servable_share(split, DEMAND, limit) * 24 for limit in limits(split)] == pytest.approx([11, 11, 24])
    assert limits(mixed) == ("prefill", "decode", "prefill and decode")
    assert [servable_share(mixed, DEMAND, limit) * 24 for limit in limits(mixed)] == pytest.approx([22, 22, 11])


def test_kv_that_may_stay_bounds_nothing() -> None:
    assert limits(_run({"mixed": 2})) == ("prefill", "decode", "prefill and decode")
    assert limits(_run({"prefill": 1, "decode": 1}, role_switching=SWITCHING))[-1] == "prefill and decode"
    queue = Conditional(max_prefill_queue_size=2)
    assert "KV network" not in limits(_run({"prefill": 1, "decode": 1}, conditional=queue))
    short = Conditional(eff_isl_threshold=1000)
    run = _run({"prefill": 1, "decode": 1}, conditional=short, payload_bytes_per_s=1.0)
    assert servable_share(run, DEMAND, "KV network") == 1.0, "none of these moves"
    longer = Demand(DEMAND.prompts + 1, DEMAND.outputs)
    assert servable_share(run, longer, "KV network") == 0.0


# --- what a topology may say ----------------------------------------------------------------------------------------


def _topology(*pools: dict[str, Any], **keys: Any) -> Topology:
    stream = {
        "name": "chat",
        "arrivals": {"process": "constant", "rate_per_s": 1},
        "prompt_tokens": 1_000,
        "output_tokens": 100,
    }
    data = {
        "name": "lab",
        "model": "Qwen2.5-7B",
        "gpu": "L40S",
        "slo": {"ttft_ms": 500},
        "workload": {"duration": "4s", "streams": [stream]},
        "kv_network": {"bandwidth": keys.pop("bandwidth", ["10Gbps"])},
        "deployments": [{"name": "it", "pools": pools, **keys}],
    }
    return strict.convert(data, Topology, "lab.toml")


P, D, C = {"role": "prefill"}, {"role": "decode"}, {"role": "colocated"}
M, M2 = {"role": "mixed"}, {"role": "mixed", "nodes": 2}
SWITCH = {"max_queued_prompt_tokens": 1_000}


@pytest.mark.parametrize(
    ("pools", "keys", "said"),
    [
        ([M], {}, "deployments[0]: one mixed node: a deployment is colocated pools alone, prefill and decode pools"),
        ([P], {}, "deployments[0]: pools of prefill: a deployment is colocated pools alone"),
        ([C, M2], {}, "deployments[0]: pools of colocated and mixed: a deployment is colocated pools alone"),
        ([M2], {"role_switching": SWITCH}, "deployments[0]: role_switching is for prefill and decode pools; mixed"),
        ([C], {"role_switching": SWITCH}, "deployments[0]: conditional and role_switching are for prefill and decode"),
        ([C], {"conditional": {"eff_isl_threshold": 9}}, "deployments[0]: conditional and role_switching are for"),
        ([P, D], {"conditional": {}}, "conditional: give eff_isl_threshold, max_prefill_queue_size or both"),
        ([P, D], {"conditional": {"eff_isl": 9}}, "conditional: unknown key 'eff_isl'"),
        ([P, D], {"conditional": {"eff_isl_threshold": 0}}, "eff_isl_threshold = 0: expected `int` >= 1"),
        ([P, D], {"role_switching": {}}, "role_switching: key 'max_queued_prompt_tokens' is missing"),
        ([P, D], {"role_switching": SWITCH | {"max_kv_usage": 2}}, "max_kv_usage = 2: expected `float` <= 1.0"),
        ([{**M2, "policy": "prefill_first"}], {}, "pools[0]: policy prefill_first is for colocated pools"),
        ([C], {"overlap": "layer"}, 'deployments[0]: overlap = "layer" is for prefill and decode pools'),
        ([P, D], {"layer_groups": 4}, 'deployments[0]: layer_groups is for overlap = "layer", not "none"'),
        ([P, D], {"overlap": "chunk", "layer_min_tokens": 9}, "deployments[0]: layer_min_tokens is for overlap"),
        (
            [{**P, "num_reserved_decode_tokens": 0}, D],
            {},
            "num_reserved_decode_tokens is for pools that take KV in",
        ),
        ([{**C, "num_reserved_decode_tokens": "all"}], {}, "num_reserved_decode_tokens is for pools that take KV in"),
    ],
)
def test_what_does_not_go_together_is_one_line(pools: list[dict[str, Any]], keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _topology(*pools, **keys)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pools", [[M2], [P, M], [M, D], [P, M, D], [M, M]])
def test_pools_that_together_prefill_and_decode_are_a_deployment(pools: list[dict[str, Any]]) -> None:
    topology = _topology(*pools)
    (run,) = plan_runs(topology, CATALOG, plan_load(topology.workload, {}))
    assert run.router.disaggregated
    assert run.link is not None
    assert next(node.name for node in run.nodes if node.role == "mixed") == "mixed-0"


@pytest.mark.parametrize(
    ("pools", "keys", "fixed"),
    [
        ([{**M2, "kv_egress": "1Gbps", "kv_ingress": "1Gbps"}], {}, True),
        ([{**M2, "kv_egress": "1Gbps"}], {}, False),
        ([{**P, "kv_egress": "1Gbps"}, {**D, "kv_ingress": "1Gbps"}], {}, True),
        ([{**P, "kv_egress": "1Gbps"}, {**D, "kv_ingress": "1Gbps"}], {"role_switching": SWITCH}, False),
    ],
)
def test_bandwidths_that_no_nic_has_are_refused(pools: list[dict[str, Any]], keys: dict[str, Any], fixed: bool) -> None:
    topology = _topology(*pools, bandwidth=["1Gbps", "2Gbps"], **keys)
    load = plan_load(topology.workload, {})
    if fixed:
        with pytest.raises(ConfigError, match="every pool has a NIC of its own"):
            plan_runs(topology, CATALOG, load)
    else:
        assert len(plan_runs(topology, CATALOG, load)) == 2


def test_a_ratio_is_like_no_deployment_with_mixed_nodes() -> None:
    (made,) = deployments_like(_topology(M2, first_token="prefill"), Ratio(prefill=2, decode=1))
    assert [(pool.role, pool.nodes) for pool in made.pools] == [("prefill", 2), ("decode", 1)]
    assert made.first_token == "handoff"
