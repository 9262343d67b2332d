"""Weights of 8 bits: half the memory, half the time to read them, and the GPU's fp8 peak."""

from __future__ import annotations

import msgspec
import pytest

from emulator.core import roofline, strict
from emulator.core.catalog import find_gpu, find_model
from emulator.core.cost import Chunk, RooflineCost, StepShape, cost_model, kv_block_capacity, weight_bytes_per_gpu
from emulator.core.deploy import plan_runs
from emulator.core.errors import ConfigError
from emulator.core.hardware import WeightsDtype
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Topology
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.lab.simulated import simulated_result

CATALOG = load_catalog()
LLAMA, H100 = find_model(CATALOG, "Llama-3.1-8B"), find_gpu(CATALOG, "h100")
FP8_GPUS = {"h100", "h200", "l40s", "l4", "rtx4090", "mi300x", "b200", "gb200"}


def cost(weights: WeightsDtype) -> RooflineCost:
    made = cost_model(cost="roofline", model=LLAMA, gpu=H100, tp=1, weights=weights)
    assert isinstance(made, RooflineCost)
    return made


def test_bf16_takes_the_time_of_fp16() -> None:
    for shape in (StepShape((Chunk(700, 0),), 0, 0), StepShape((), 8, 8000)):
        assert cost("bf16").step_s(shape) == cost("fp16").step_s(shape)


def test_a_small_decode_step_reads_half_the_weights() -> None:
    shape = StepShape((), 1, 100)
    saved = cost("fp16").step_s(shape) - cost("fp8").step_s(shape)
    embedding = LLAMA.vocab * LLAMA.hidden
    read = (LLAMA.params_b * 1e9 - embedding) / (3350e9 * 0.86)
    assert saved == pytest.approx(read, rel=0.01)


def test_a_large_prefill_runs_at_the_fp8_peak_but_for_its_attention() -> None:
    shape = StepShape((Chunk(4096, 0),), 0, 0)
    fp16, fp8 = cost("fp16")._parts(shape), cost("fp8")._parts(shape)
    assert fp8.compute_linear == pytest.approx(fp16.compute_linear / 2)
    assert fp8.attention == fp16.attention
    assert 0.5 < roofline.total_s(fp8) / roofline.total_s(fp16) < 0.65


def test_half_the_weights_leave_room_for_kv() -> None:
    assert weight_bytes_per_gpu(LLAMA, 1, "fp8") == weight_bytes_per_gpu(LLAMA, 1) / 2 == pytest.approx(8.03e9)
    more = kv_block_capacity(LLAMA, H100, 1, 0.92, 16, weights_dtype="fp8") - kv_block_capacity(
        LLAMA, H100, 1, 0.92, 16
    )
    assert more == pytest.approx(8.03e9 / (131072 * 16), abs=1)


def test_gpus_without_an_fp8_rate_are_refused() -> None:
    for gpu in CATALOG.gpus:
        assert (gpu.fp8_dense_tflops is not None) == (gpu.name in FP8_GPUS)
    a100 = find_gpu(CATALOG, "a100-80g")
    with pytest.raises(ConfigError, match='weights = "fp8": gpu a100-80g does not compute in fp8'):
        cost_model(cost="roofline", model=LLAMA, gpu=a100, tp=1, weights="fp8")


def topology(**changes: object) -> Topology:
    stream = {
        "name": "chat",
        "arrivals": {"process": "constant", "rate_per_s": 5.0},
        "prompt_tokens": 1000,
        "output_tokens": 50,
    }
    return strict.convert(
        {
            "name": "weights",
            "model": "Llama-2-70B",
            "gpu": "h100",
            "slo": {},
            "workload": {"duration": "2s", "streams": [stream]},
            "deployments": [{"name": "colocated", "pools": [{"role": "colocated", "tp": 2}]}],
            **changes,
        },
        Topology,
        "weights.toml",
    )


def planned(**changes: object) -> RunSpec:
    made = topology(**changes)
    (run,) = plan_runs(made, CATALOG, plan_load(made.workload, {}))
    return run


def test_a_topology_says_it_once_for_time_and_memory() -> None:
    fp16, fp8 = planned(), planned(weights="fp8")
    assert fp8.nodes[0].kv_blocks > 5 * fp16.nodes[0].kv_blocks
    assert fp8.nodes[0].weight_bytes == pytest.approx(68.98e9)
    assert fp16.nodes[0].weight_bytes == pytest.approx(2 * 68.98e9)
    again = msgspec.json.decode(msgspec.json.encode(fp8), type=RunSpec)
    assert again.nodes[0].cost == fp8.nodes[0].cost
    quick, slow = simulated_result(fp8).summary, simulated_result(fp16).summary
    assert quick.fidelity.ok, "fp8 steps are within the fp8 peaks of the laws of physics"
    assert quick.tpot_ms.p50 is not None
    assert slow.tpot_ms.p50 is not None
    assert quick.tpot_ms.p50 < 0.7 * slow.tpot_ms.p50


def test_an_unknown_kind_of_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights = 'int4'.*allowed: fp16, bf16, fp8"):
        topology(weights="int4")


def test_fp8_weights_need_the_roofline() -> None:
    with pytest.raises(ConfigError, match="was measured with 16-bit weights"):
        planned(
            cost="fitted",
            profile="article-70b",
            weights="fp8",
            deployments=[{"name": "colocated", "pools": [{"role": "colocated", "tp": 4}]}],
        )
