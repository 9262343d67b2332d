"""Weights of 8 bits: half the memory and time to read them but for embeddings and output head, and an fp8 rate."""

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
    embeddings = 2 * LLAMA.vocab * LLAMA.hidden
    read = (LLAMA.params_b * 1e9 - embeddings) / (3350e9 * 0.86)
    assert saved == pytest.approx(read, rel=0.01)


def test_a_large_prefill_runs_at_the_fp8_rate_but_for_its_output_head_and_attention() -> None:
    shape = StepShape((Chunk(4096, 0),), 0, 0)
    fp16, fp8 = cost("fp16")._parts(shape), cost("fp8")._parts(shape)
    assert H100.mfu_linear is not None
    assert H100.mfu_linear_fp8 is not None
    quicker = 2 * H100.mfu_linear_fp8 / H100.mfu_linear
    assert fp8.compute_head == fp16.compute_head > 0
    assert fp8.compute_linear - fp8.compute_head == pytest.approx((fp16.compute_linear - fp16.compute_head) / quicker)
    assert fp8.attention == fp16.attention
    assert 0.55 < roofline.total_s(fp8) / roofline.total_s(fp16) < 0.7


def test_the_flops_of_a_step_are_those_of_its_parts_in_either_precision() -> None:
    shape = StepShape((Chunk(512, 0),), 64, 64 * 1000)
    (fp16, _), (fp8, _) = cost("fp16").work(shape), cost("fp8").work(shape)
    assert fp8 == pytest.approx(fp16)


def test_the_share_of_the_fp8_peak_is_as_the_best_matrix_products_relate() -> None:
    """Shares of the peak in fp8 and bf16 of stas00/ml-engineering's table of maximum achievable matmul FLOPS."""
    for name, fp8, bf16 in (("h100", 0.709, 0.803), ("h200", 0.734, 0.803), ("b200", 0.763, 0.776)):
        gpu = find_gpu(CATALOG, name)
        assert gpu.mfu_linear is not None
        assert gpu.mfu_linear_fp8 == pytest.approx(gpu.mfu_linear * fp8 / bf16, abs=0.001)
    for gpu in CATALOG.gpus:
        assert (gpu.mfu_linear_fp8 is None) == (gpu.fp8_efficiency_source is None)


SHAPES = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
DEEPGEMM = {
    64: (206, 289, 219, 336, 287, 295),
    128: (352, 535, 358, 645, 533, 510),
    4096: (1058, 990, 590, 1358, 1304, 1025),
}
"""TFLOP/s by rows and by N and K: every dense fp8 product in the first README of DeepGEMM, on H800 (H100's rates)."""


def deepgemm_errors(m: int) -> dict[tuple[int, int], float]:
    """The linear layers' formula over what was measured, less 1."""
    assert H100.mfu_linear_fp8 is not None
    assert H100.mbu is not None
    found = {}
    for (n, k), tflops in zip(SHAPES, DEEPGEMM[m], strict=True):
        compute = 2 * m * n * k / (1978e12 * H100.mfu_linear_fp8)
        memory = (n * k + m * k + 2 * m * n) / (3350e9 * H100.mbu)
        ours = (compute**roofline.NORM + memory**roofline.NORM) ** (1 / roofline.NORM)
        found[n, k] = ours * tflops * 1e12 / (2 * m * n * k) - 1
    return found


def test_fp8_products_that_are_wide_and_deep_are_met_and_others_are_modelled_as_too_fast() -> None:
    """All 18: those of a dense layer's size within 3 % at 4,096 rows; narrow or shallow ones up to 46 % too fast."""
    many = deepgemm_errors(4096)
    assert max(abs(many[7168, 16384]), abs(many[4096, 7168])) < 0.03
    every = [error for m in DEEPGEMM for error in deepgemm_errors(m).values()]
    assert len(every) == 18
    assert -0.47 < min(every) < -0.44
    assert max(every) < 0.03


def test_half_the_weights_leave_room_for_kv() -> None:
    """neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8 is two files of 5 and 4.08 GB: its output head is in 16 bits."""
    fp8 = weight_bytes_per_gpu(LLAMA, 1, "fp8")
    assert fp8 == pytest.approx(8.03e9 + 2 * LLAMA.vocab * LLAMA.hidden, rel=0.001)
    assert fp8 == pytest.approx(9.08e9, rel=0.01)
    assert weight_bytes_per_gpu(LLAMA, 1) == pytest.approx(2 * 8.03e9)
    more = kv_block_capacity(LLAMA, H100, 1, 0.92, 16, weights_dtype="fp8") - kv_block_capacity(
        LLAMA, H100, 1, 0.92, 16
    )
    assert more == pytest.approx((2 * 8.03e9 - fp8) / (131072 * 16), abs=1)


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
    assert fp8.nodes[0].weight_bytes == pytest.approx(68.98e9 + 2 * 32000 * 8192, rel=1e-4)
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
