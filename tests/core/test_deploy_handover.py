"""Transfer mode and preemption in a topology: where they belong, and what must fit for them."""

from __future__ import annotations

import pytest

from emulator.core import strict
from emulator.core.deploy import plan_runs
from emulator.core.deployments import Deployment
from emulator.core.errors import CapacityError, ConfigError
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Topology
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog

SPLIT = {"name": "1P1D", "pools": [{"role": "prefill"}, {"role": "decode"}]}
COLOCATED = {"name": "both", "pools": [{"role": "colocated"}]}


@pytest.mark.parametrize("change", [{"transfer_mode": "pull"}, {"preemption": "prefill"}], ids=str)
def test_colocated_pools_have_neither(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="transfer_mode and preemption are for prefill and decode pools") as caught:
        strict.convert(COLOCATED | change, Deployment, "lab.toml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("overlap", ["chunk", "layer"])
def test_whole_prompts_are_read(overlap: str) -> None:
    with pytest.raises(ConfigError, match=rf'use overlap = "none", not "{overlap}", or transfer_mode = "push"$'):
        strict.convert(SPLIT | {"transfer_mode": "pull", "overlap": overlap}, Deployment, "lab.toml")


def _run(prompt_tokens: int, output_tokens: int, **changes: object) -> RunSpec:
    """A prefill node that keeps some 700 tokens of KV beside the weights, and a roomy decode node."""
    pools = [{"role": "prefill", "gpu_memory_utilization": 0.3184}, {"role": "decode"}]
    data = {
        "name": "lab",
        "model": "Qwen2.5-7B",
        "gpu": "l40s",
        "slo": {"ttft_ms": 200},
        "workload": {
            "duration": "1s",
            "streams": [
                {
                    "name": "chat",
                    "arrivals": {"process": "at", "times_s": [0.0]},
                    "prompt_tokens": prompt_tokens,
                    "output_tokens": output_tokens,
                }
            ],
        },
        "kv_network": {"bandwidth": ["10Gbps"]},
        "deployments": [{"name": "tight", "pools": pools, **changes}],
    }
    topology = strict.convert(data, Topology, "lab.toml")
    (run,) = plan_runs(topology, load_catalog(), plan_load(topology.workload, {}))
    return run


def test_router_and_nodes_know_how_kv_moves_and_who_computes_it_again() -> None:
    run = _run(100, 100, transfer_mode="pull", preemption="prefill", max_transfers_in_flight=3)
    assert (run.router.transfer_mode, run.router.preemption) == ("pull", "prefill")
    assert {(n.transfer_mode, n.preemption, n.max_transfers_in_flight) for n in run.nodes} == {("pull", "prefill", 3)}


def test_what_is_prefilled_anew_must_fit_the_prefill_node_with_what_was_generated() -> None:
    run = _run(600, 300)
    room = run.nodes[0].kv_blocks * run.nodes[0].block_size
    assert 600 <= room < 900, "the prompt alone"
    assert _run(600, room - 600, preemption="prefill").router.preemption == "prefill"
    with pytest.raises(CapacityError, match=rf"do not fit the KV memory of tight's prefill-0, {room} tokens"):
        _run(600, room - 599, preemption="prefill")
