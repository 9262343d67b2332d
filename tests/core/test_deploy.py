"""From a topology to runs: one for each deployment and bandwidth, complete, or an error before anything starts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from emulator.core import strict
from emulator.core.cost import FittedCost, RooflineCost
from emulator.core.deploy import plan_runs
from emulator.core.errors import CapacityError, ConfigError, PdemuError
from emulator.core.hardware import Catalog
from emulator.core.run_spec import NicSpec, RunSpec
from emulator.core.specs import Topology
from emulator.core.workload import LoadPlan, plan_load
from emulator.lab.catalog_files import load_catalog

CATALOG = load_catalog()
COLOCATED = {"name": "colocated", "pools": [{"role": "colocated", "nodes": 2}]}
DISAGGREGATED = {"name": "1P1D", "pools": [{"role": "prefill"}, {"role": "decode", "policy": "chunked"}]}


def _topology(**changes: Any) -> Topology:
    """Qwen2.5-7B on L40S, colocated and 1P1D, KV at 2.5 and 10 Gbps."""
    stream = {
        "name": "chat",
        "arrivals": {"process": "constant", "rate_per_s": 1},
        "prompt_tokens": changes.pop("prompt_tokens", 1_000),
        "output_tokens": changes.pop("output_tokens", 100),
    }
    data = {
        "name": "lab",
        "model": "Qwen2.5-7B",
        "gpu": "L40S",
        "slo": {"ttft_ms": 500},
        "workload": {"duration": "4s", "streams": [stream], "seed": 7},
        "kv_network": {"bandwidth": ["2.5Gbps", "10Gbps"]},
        "deployments": [COLOCATED, DISAGGREGATED],
    }
    return strict.convert({**data, **changes}, Topology, "lab.toml")


def _load(topology: Topology) -> LoadPlan:
    return plan_load(topology.workload, {})


def _runs(topology: Topology) -> list[RunSpec]:
    return plan_runs(topology, CATALOG, _load(topology))


def test_every_deployment_runs_once_and_a_disaggregated_one_at_each_bandwidth() -> None:
    runs = _runs(_topology())
    assert [run.label for run in runs] == ["colocated", "1P1D@2.5Gbps", "1P1D@10Gbps"]
    assert [run.gpus for run in runs] == [2, 2, 2]
    assert [run.router.disaggregated for run in runs] == [False, True, True]
    assert [[node.name for node in run.nodes] for run in runs] == [
        ["colocated-0", "colocated-1"],
        ["prefill-0", "decode-0"],
        ["prefill-0", "decode-0"],
    ]
    assert len({id(run.load) for run in runs}) == 1, "all deployments get the same requests"
    assert {run.seed for run in runs} == {7}


def test_a_line_rate_carries_a_little_less_payload_and_a_payload_rate_all_of_it() -> None:
    (line,) = plan_runs(_topology(kv_network={"bandwidth": ["10Gbps"]}), CATALOG, _load(_topology()))[1:]
    network = {"bandwidth": ["10Gbps"], "rate_basis": "payload", "delay": "50us"}
    (payload,) = plan_runs(_topology(kv_network=network), CATALOG, _load(_topology()))[1:]
    assert line.link is not None
    assert payload.link is not None
    assert line.link.bandwidth_bps == 10e9
    assert line.link.payload_bps == pytest.approx(10e9 * 1448 / 1514)
    assert payload.link.payload_bps == 10e9
    assert payload.link.delay_s == pytest.approx(50e-6)


def test_a_pool_may_have_nics_of_its_own_and_each_direction_its_rate() -> None:
    pools = [
        {"role": "prefill", "nodes": 2, "kv_egress": "1Gbps"},
        {"role": "decode", "kv_ingress": "400Mbps"},
        {"role": "decode"},
    ]
    network = {"bandwidth": ["10Gbps"], "rate_basis": "payload", "delay": "1ms", "jitter": "50us"}
    (run,) = _runs(_topology(kv_network=network, deployments=[{"name": "2P2D", "pools": pools}]))
    assert run.link is not None
    assert run.link.jitter_s == pytest.approx(50e-6)
    assert run.link.nic("prefill-1") == NicSpec(egress_bps=1e9, ingress_bps=10e9)
    assert run.link.nic("decode-0") == NicSpec(egress_bps=10e9, ingress_bps=400e6)
    assert run.link.nic("decode-1") == NicSpec(egress_bps=10e9, ingress_bps=10e9)
    assert [run.link.pair_bps(*pair) for pair in run.kv_pairs] == [400e6, 1e9, 400e6, 1e9]


def test_several_bandwidths_are_refused_where_no_pool_would_use_them() -> None:
    pools = [{"role": "prefill", "kv_egress": "1Gbps"}, {"role": "decode", "kv_ingress": "1Gbps"}]
    with pytest.raises(ConfigError, match="equal runs"):
        _runs(_topology(deployments=[{"name": "1P1D", "pools": pools}]))


def test_a_deployment_says_how_its_messages_are_sent() -> None:
    terms = {"message_overhead": "2ms", "max_transfers_in_flight": 3, "transfer_order": "fair"}
    runs = _runs(_topology(deployments=[COLOCATED, {**DISAGGREGATED, **terms}]))
    links = [run.link for run in runs if run.link is not None]
    assert {(link.message_s, link.max_in_flight, link.order) for link in links} == {(0.002, 3, "fair")}
    assert runs[0].message_s("colocated-0", "colocated-1", 1_000) == 0.0
    assert runs[1].message_s("prefill-0", "decode-0", 1_000) == 0.002
    for key, value in terms.items():
        with pytest.raises(ConfigError, match="no KV leaves colocated ones"):
            _topology(deployments=[{**COLOCATED, key: value}])
    with pytest.raises(ConfigError, match="max_transfers_in_flight"):
        _topology(deployments=[{**DISAGGREGATED, "max_transfers_in_flight": 0}])


def test_where_shards_differ_a_message_pays_for_each_slice_and_for_its_bytes() -> None:
    run = _runs(_topology(deployments=[COLOCATED, {**DISAGGREGATED, "message_overhead": "2ms"}]))[1]
    prefill, decode = run.nodes
    nodes = (
        msgspec.structs.replace(prefill, kv_shards=4),
        msgspec.structs.replace(decode, kv_shards=2, reshard_s_per_byte=1e-9),
    )
    split = msgspec.structs.replace(run, nodes=nodes)
    assert split.message_s("prefill-0", "decode-0", 1_000_000) == pytest.approx(2 * 0.002 + 0.001)


def test_a_nic_of_a_colocated_pool_and_jitter_above_the_delay_are_refused() -> None:
    with pytest.raises(ConfigError, match="no KV leaves a colocated one"):
        _topology(deployments=[{"name": "a", "pools": [{"role": "colocated", "kv_egress": "1Gbps"}]}])
    with pytest.raises(ConfigError, match="jitter"):
        _topology(kv_network={"bandwidth": ["1Gbps"], "delay": "1ms", "jitter": "2ms"})


@pytest.mark.parametrize(
    ("gpu", "tokens", "seqs"), [("L40S", 2_048, 256), ("H100", 8_192, 1_024), ("h200", 8_192, 1_024)]
)
def test_batch_limits_follow_the_gpu_unless_stated(gpu: str, tokens: int, seqs: int) -> None:
    node = _runs(_topology(gpu=gpu))[0].nodes[0]
    assert (node.max_num_batched_tokens, node.max_num_seqs) == (tokens, seqs)
    stated = {"name": "a", "pools": [{"role": "colocated", "max_num_batched_tokens": 512, "max_num_seqs": 9}]}
    node = _runs(_topology(gpu=gpu, deployments=[stated]))[0].nodes[0]
    assert (node.max_num_batched_tokens, node.max_num_seqs) == (512, 9)


def test_kv_memory_is_what_the_weights_leave() -> None:
    node = _runs(_topology())[0].nodes[0]
    model = next(m for m in CATALOG.models if m.name == "Qwen2.5-7B")
    left = 48e9 * 0.92 - model.params_b * 2e9
    assert node.kv_bytes_per_token == 2 * 28 * 4 * 128 * 2
    assert node.kv_blocks == int(left // (node.kv_bytes_per_token * 16))


def test_pools_of_one_role_number_their_nodes_through_and_may_differ() -> None:
    pools = [{"role": "prefill", "nodes": 2, "gpu": "H100"}, {"role": "prefill"}, {"role": "decode", "tp": 2}]
    (run, _) = _runs(_topology(deployments=[{"name": "mixed", "pools": pools, "overlap": "chunk"}]))
    assert [node.name for node in run.nodes] == ["prefill-0", "prefill-1", "prefill-2", "decode-0"]
    assert [node.max_num_seqs for node in run.nodes] == [1_024, 1_024, 256, 256]
    assert run.gpus == 5
    assert {node.overlap for node in run.nodes} == {"chunk"}


def test_the_whole_output_may_be_reserved() -> None:
    pools = [{"role": "prefill"}, {"role": "decode", "num_reserved_decode_tokens": "all"}]
    run = _runs(_topology(deployments=[{"name": "1P1D", "pools": pools}], max_model_len=2_000))[0]
    assert [node.num_reserved_decode_tokens for node in run.nodes] == [512, 2_000]


def test_how_requests_are_handed_over_is_said_by_the_deployment() -> None:
    split = {**DISAGGREGATED, "first_token": "recompute", "admission": "prefill_first"}
    colocated, first, second = _runs(_topology(deployments=[COLOCATED, split]))
    assert (first.router.first_token, first.router.admission) == ("recompute", "prefill_first")
    assert [run.first_token for run in (colocated, first, second)] == [None, "recompute", "recompute"]


@pytest.mark.parametrize(
    ("deployment", "said"),
    [
        ({**COLOCATED, "first_token": "prefill"}, "first_token and admission are for prefill and decode pools"),
        ({**COLOCATED, "admission": "prefill_first"}, "first_token and admission are for prefill and decode pools"),
        (
            {**DISAGGREGATED, "admission": "prefill_first", "overlap": "chunk"},
            'so no KV can leave before: use overlap = "none", not "chunk"',
        ),
    ],
)
def test_ways_of_handing_over_that_do_not_go_together_are_refused(deployment: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _topology(deployments=[deployment])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_cost_model_is_the_topologys_choice() -> None:
    assert isinstance(_runs(_topology())[0].nodes[0].cost, RooflineCost)
    fitted = {
        "model": "Llama-2-70B",
        "gpu": "h100",
        "cost": "fitted",
        "profile": "article-70b",
        "deployments": [{"name": "a", "pools": [{"role": "colocated", "tp": 4}]}],
    }
    cost = _runs(_topology(**fitted))[0].nodes[0].cost
    assert isinstance(cost, FittedCost)
    assert cost.profile.name == "article-70b"


def test_a_run_is_complete_and_survives_json() -> None:
    for run in _runs(_topology(host_memory="4GiB", scale={"time": 2, "bytes": 10})):
        assert msgspec.json.decode(msgspec.json.encode(run), type=RunSpec) == run
        assert run.host_memory_bytes == 4 * 2**30


def test_deployments_can_be_chosen_by_name() -> None:
    topology = _topology()
    runs = plan_runs(topology, CATALOG, _load(topology), deployments=["1P1D"], verify_kv=True)
    assert [run.deployment for run in runs] == ["1P1D", "1P1D"]
    assert all(run.verify_kv for run in runs)
    with pytest.raises(ConfigError, match="lab: no deployment '2P1D'; there are colocated, 1P1D"):
        plan_runs(topology, CATALOG, _load(topology), deployments=["2P1D"])


def test_a_topology_brings_models_of_its_own() -> None:
    model = msgspec.structs.replace(next(m for m in CATALOG.models if m.name == "Qwen2.5-7B"), name="Mine-7B")
    topology = _topology(model="Mine-7B", models=[msgspec.to_builtins(model)])
    assert _runs(topology)[0].model == "Mine-7B"


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model": "Qwen2.5-7"}, ConfigError, "there is no model 'Qwen2.5-7' (did you mean 'Qwen2.5-7B'?)"),
        ({"gpu": "L4OS"}, ConfigError, "there is no gpu 'L4OS' (did you mean 'l40s'?)"),
        ({"cost": "fitted", "profile": "article-70b"}, ConfigError, "profile article-70b is for model Llama-2-70B"),
        ({"model": "Llama-2-70B"}, CapacityError, "lab, deployment colocated, colocated pool: Llama-2-70B does not"),
        (
            {"prompt_tokens": 32_700},
            ConfigError,
            "workload stream 'chat': a prompt of 32700 tokens and 100 output tokens exceed the context of Qwen2.5-7B",
        ),
        ({"max_model_len": 1_000}, ConfigError, "exceed the context of Qwen2.5-7B, 1000 tokens"),
        (
            {"prompt_tokens": {"distribution": "uniform", "low": 1, "high": 40_000}},
            ConfigError,
            "a prompt of 40000 tokens",
        ),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_anything_runs(
    changes: dict[str, Any], error: type[PdemuError], said: str
) -> None:
    with pytest.raises(error) as caught:
        _runs(_topology(**changes))
    assert said in str(caught.value)


def _small_memory(role: str) -> Topology:
    """A pool whose GPU keeps some 700 tokens of KV beside the weights; the other pools are roomy."""
    small = {"role": role, "gpu_memory_utilization": 0.3184}
    others = [{"role": other} for other in ("prefill", "decode") if other != role]
    pools = [small] if role == "colocated" else [small, *others]
    return _topology(deployments=[{"name": "tight", "pools": pools}], prompt_tokens=600, output_tokens=300)


def test_stated_lengths_must_fit_the_memory_of_every_node_that_holds_them() -> None:
    for role in ("colocated", "decode"):
        with pytest.raises(CapacityError, match=rf"do not fit the KV memory of tight's {role}-0, \d+ tokens; use shor"):
            _runs(_small_memory(role))


def test_a_prefill_node_has_to_hold_the_prompt_alone() -> None:
    run = _runs(_small_memory("prefill"))[0]
    room = run.nodes[0].kv_blocks * run.nodes[0].block_size
    assert 600 <= room < 900


def test_catalogs_are_searched_without_regard_to_case() -> None:
    assert _runs(_topology(model="qwen2.5-7b", gpu="l40s"))[0].model == "Qwen2.5-7B"
    with pytest.raises(ConfigError, match="known: none"):
        plan_runs(_topology(), Catalog(), _load(_topology()))


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_network": {"bandwidth": ["1Gbps", "1.0000001Gbps"]}},
        {"kv_network": {"bandwidth": ["200Mbps", "0.2Gbps"]}},
        {"deployments": [{**COLOCATED, "name": "summary.json"}, DISAGGREGATED]},
    ],
)
def test_two_results_never_have_one_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"would be the name of two results|the same is given twice"):
        _runs(_topology(**changes))


@pytest.mark.parametrize("name", ["colocated\n", "..", "a/b", "-x", ""])
def test_a_name_is_fit_for_a_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        _topology(deployments=[{**COLOCATED, "name": name}, DISAGGREGATED])
