"""Pools of different GPUs and tensor parallelism in one deployment, and what it costs where KV is split differently."""

from __future__ import annotations

import pytest

from emulator.core import strict
from emulator.core.catalog import find_gpu, find_model
from emulator.core.cost import kv_block_capacity
from emulator.core.deploy import plan_runs
from emulator.core.hardware import Gpu
from emulator.core.roofline import kv_shards, reshard_s_per_byte
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Topology
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog

CATALOG = load_catalog()
MB = 1_000_000


def _run(model: str, prefill: dict[str, object], decode: dict[str, object], **deployment: object) -> RunSpec:
    """One prefill and one decode pool, short prompts."""
    stream = {
        "name": "chat",
        "arrivals": {"process": "constant", "rate_per_s": 1},
        "prompt_tokens": 100,
        "output_tokens": 10,
    }
    pools = [{"role": "prefill", **prefill}, {"role": "decode", **decode}]
    data = {
        "name": "lab",
        "model": model,
        "gpu": "h100",
        "slo": {"ttft_ms": 500},
        "workload": {"duration": "4s", "streams": [stream]},
        "kv_network": {"bandwidth": ["10Gbps"]},
        "deployments": [{"name": "split", "pools": pools, **deployment}],
    }
    topology = strict.convert(data, Topology, "lab.toml")
    (run,) = plan_runs(topology, CATALOG, plan_load(topology.workload, {}))
    return run


def _message_s(run: RunSpec, nbytes: int) -> float:
    return run.message_s("prefill-0", "decode-0", nbytes)


def _stream(gpu: str) -> float:
    """Bytes a second that one GPU's memory streams."""
    found = find_gpu(CATALOG, gpu)
    assert found.mbu is not None
    return found.memory_gb_per_s * 1e9 * found.mbu


def test_equal_parallelism_costs_the_overhead_alone() -> None:
    run = _run("Llama-3.1-8B", {"tp": 2}, {"tp": 2}, message_overhead="1ms")
    assert [node.kv_shards for node in run.nodes] == [2, 2]
    assert _message_s(run, 10 * MB) == pytest.approx(1e-3)


def test_from_two_gpus_to_four_each_sends_to_two_and_every_byte_is_laid_out_anew() -> None:
    run = _run("Llama-3.1-8B", {"tp": 2}, {"tp": 4}, message_overhead="1ms")
    assert [node.kv_shards for node in run.nodes] == [2, 4]
    assert _message_s(run, 10 * MB) == pytest.approx(2 * 1e-3 + 10e6 * 2 / (4 * _stream("h100")))
    back = _run("Llama-3.1-8B", {"tp": 4}, {"tp": 2}, message_overhead="1ms")
    assert _message_s(back, 10 * MB) == pytest.approx(2 * 1e-3 + 10e6 * 2 / (2 * _stream("h100")))


def test_a_latent_that_every_gpu_holds_whole_needs_no_new_layout() -> None:
    run = _run("DeepSeek-V3", {"tp": 16, "gpu": "h200"}, {"tp": 32, "gpu": "h200"}, message_overhead="1ms")
    assert [node.kv_shards for node in run.nodes] == [1, 1]
    assert _message_s(run, 10 * MB) == pytest.approx(1e-3)


def test_beyond_its_kv_heads_a_model_is_split_no_further() -> None:
    """Llama-3.1-8B has 32 heads and 8 of keys and values: 8 and 16 GPUs hold the same eight parts, 16 each twice."""
    run = _run("Llama-3.1-8B", {"tp": 8}, {"tp": 16}, message_overhead="1ms")
    assert [node.kv_shards for node in run.nodes] == [8, 8]
    assert _message_s(run, 10 * MB) == pytest.approx(1e-3)
    run = _run("Llama-3.1-8B", {"tp": 1}, {"tp": 16}, message_overhead="1ms")
    assert _message_s(run, 10 * MB) == pytest.approx(8e-3 + 10e6 * 2 / (8 * _stream("h100")))


def test_shards_that_do_not_divide_count_whole_messages() -> None:
    run = _run("OPT-13B", {"tp": 2}, {"tp": 5}, message_overhead="1ms")
    assert [node.kv_shards for node in run.nodes] == [2, 5]
    assert _message_s(run, 0) == pytest.approx(3e-3), "five parts of two senders: one of them has three"


def test_without_a_measured_efficiency_memory_streams_at_its_datasheet_rate() -> None:
    gpu = Gpu(
        name="made-up",
        bf16_dense_tflops=100.0,
        memory_gb=80.0,
        memory_gb_per_s=1_000.0,
        link_gb_per_s_per_direction=100.0,
        tdp_w=500.0,
        source="made up",
    )
    model = find_model(CATALOG, "Llama-3.1-8B")
    assert reshard_s_per_byte(model, gpu, 4) == pytest.approx(2 / (1e12 * 4))
    assert kv_shards(model, 16) == model.kv_heads == 8
    assert reshard_s_per_byte(model, gpu, 16) == pytest.approx(2 / (1e12 * 8))


def test_pools_of_different_gpus_each_have_their_own_capacity_prices_and_limits() -> None:
    run = _run("Llama-3.1-8B", {"gpu": "h100", "tp": 2, "nodes": 2}, {"gpu": "a100-80g", "tp": 4})
    model = find_model(CATALOG, "Llama-3.1-8B")
    h100, a100 = find_gpu(CATALOG, "h100"), find_gpu(CATALOG, "a100-80g")
    prefill, _, decode = run.nodes
    assert (prefill.gpus, decode.gpus, run.gpus) == (2, 4, 8)
    assert prefill.kv_blocks == kv_block_capacity(model, h100, 2, 0.92, 16)
    assert decode.kv_blocks == kv_block_capacity(model, a100, 4, 0.92, 16)
    left = 4 * a100.memory_gb * 1e9 * 0.92 - model.weight_bytes()
    assert decode.kv_capacity_bytes == pytest.approx(left, rel=1e-4), "KV is split over all four"
    assert (prefill.max_num_batched_tokens, decode.max_num_batched_tokens) == (8_192, 2_048)
    assert h100.price_usd_per_h is not None
    assert a100.price_usd_per_h is not None
    assert run.holdings.usd_per_h == pytest.approx(4 * h100.price_usd_per_h + 4 * a100.price_usd_per_h)
    assert decode.reshard_s_per_byte == pytest.approx(2 / (4 * _stream("a100-80g")))
