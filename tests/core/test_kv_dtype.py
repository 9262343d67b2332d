"""`kv_dtype`: KV of 8 bits an element is half the bytes, in memory, on the wire and in what attention reads."""

from __future__ import annotations

import msgspec
import pytest

from emulator.core import strict
from emulator.core.catalog import find_gpu, find_model
from emulator.core.cost import Chunk, RooflineCost, StepShape, cost_model, kv_block_capacity
from emulator.core.deploy import plan_runs
from emulator.core.deployments import Deployment, KvDtype
from emulator.core.errors import ConfigError
from emulator.core.run_spec import NodeSpec
from emulator.core.specs import Topology
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.study import variants

CATALOG = load_catalog()
H100 = find_gpu(CATALOG, "h100")


def _topology(kv_dtypes: tuple[KvDtype, ...] = ("fp16", "fp8"), **changes: object) -> Topology:
    """A 1P1D deployment by the name of each type, and a colocated one, on H100."""
    pools = [{"role": "prefill"}, {"role": "decode"}]
    deployments: list[dict[str, object]] = [{"name": d, "kv_dtype": d, "pools": pools} for d in kv_dtypes]
    deployments.append({"name": "colocated-fp8", "kv_dtype": "fp8", "pools": [{"role": "colocated", "nodes": 2}]})
    stream = {
        "name": "chat",
        "arrivals": {"process": "constant", "rate_per_s": 1},
        "prompt_tokens": 1_000,
        "output_tokens": 100,
    }
    data: dict[str, object] = {
        "name": "lab",
        "model": "Llama-3.1-8B",
        "gpu": "h100",
        "slo": {"ttft_ms": 500},
        "workload": {"duration": "4s", "streams": [stream]},
        "kv_network": {"bandwidth": ["10Gbps"]},
        "deployments": deployments,
    }
    return strict.convert({**data, **changes}, Topology, "lab.toml")


def _nodes(topology: Topology) -> dict[str, NodeSpec]:
    """The first node of each deployment."""
    runs = plan_runs(topology, CATALOG, plan_load(topology.workload, {}))
    return {run.deployment: run.nodes[0] for run in runs}


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen2.5-7B"])
def test_bytes_are_half_and_blocks_twice_as_many(model: str) -> None:
    nodes = _nodes(_topology(model=model))
    wide, narrow = nodes["fp16"], nodes["fp8"]
    shape = find_model(CATALOG, model)
    assert narrow.kv_bytes_per_token == 2 * shape.layers * shape.kv_heads * shape.head_dim
    assert wide.kv_bytes_per_token == 2 * narrow.kv_bytes_per_token
    assert narrow.kv_blocks - 2 * wide.kv_blocks in (0, 1)
    assert nodes["colocated-fp8"].kv_blocks == narrow.kv_blocks


def test_an_mla_latent_is_no_exception() -> None:
    model, gpu = find_model(CATALOG, "DeepSeek-V3"), find_gpu(CATALOG, "mi300x")
    assert model.mla is not None
    latent = model.layers * (model.mla.latent_dim + model.mla.rope_dim)
    blocks = [kv_block_capacity(model, gpu, 16, 0.9, 16, kv_element_bytes=n) for n in (2, 1)]
    left = gpu.memory_gb * 1e9 * 0.9 - model.weight_bytes() / 16
    assert blocks == [int(left / (16 * latent * n)) for n in (2, 1)]


def test_attention_reads_half_and_computes_as_much() -> None:
    """Decode of a large batch is bound by KV: what it takes beyond the weights and the rest is halved."""
    wide, narrow = (
        RooflineCost(model=find_model(CATALOG, "Llama-3.1-8B"), gpu=H100, tp=1, kv_element_bytes=n) for n in (2, 1)
    )
    nothing = wide.step_s(StepShape((), 64, 0)) - 64 * wide._rates.kv_per_token
    shape = StepShape((), 64, 200_000)
    assert narrow.step_s(shape) - nothing == pytest.approx((wide.step_s(shape) - nothing) / 2)
    prefill = StepShape((Chunk(4_096, 0),), 0, 0)
    assert narrow.step_s(prefill) == wide.step_s(prefill), "a prefill's attention is bound by arithmetic"
    last_chunk = StepShape((Chunk(1, 100_000),), 0, 0)
    assert narrow.step_s(last_chunk) < wide.step_s(last_chunk), "but not where a token attends to much"
    steps = narrow.decode_steps_s(64, 200_000, 5)
    assert steps == [narrow.step_s(StepShape((), 64, 200_000 + 64 * j)) for j in range(5)]


def test_step_times_of_a_profile_stay_as_they_were_measured() -> None:
    profile = next(p for p in CATALOG.profiles if p.tp == 1)
    model, gpu = find_model(CATALOG, profile.model), find_gpu(CATALOG, profile.gpu)
    costs = [cost_model(cost="fitted", model=model, gpu=gpu, tp=1, profile=profile, kv_element_bytes=n) for n in (1, 2)]
    assert costs[0] == costs[1]


def test_a_run_written_before_there_were_types_reads_as_16_bits() -> None:
    cost = RooflineCost(model=find_model(CATALOG, "Llama-3.1-8B"), gpu=H100, tp=1)
    data = msgspec.to_builtins(cost)
    del data["kv_element_bytes"]
    assert msgspec.convert(data, RooflineCost) == cost


def test_deployments_made_from_a_topology_keep_its_type() -> None:
    topology = _topology(("fp8",))
    assert variants.deployment_of(topology, variants.parse_ratio("2P1D")).kv_dtype == "fp8"
    assert variants.deployment_of(topology, variants.parse_ratio("3C")).kv_dtype == "fp8"


def test_another_type_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="kv_dtype") as refused:
        strict.convert({"name": "a", "kv_dtype": "fp4", "pools": [{"role": "colocated"}]}, Deployment, "lab.toml")
    assert "\n" not in str(refused.value)
