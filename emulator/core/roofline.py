"""Step times from a model's shapes and a GPU's datasheet, for the many pairs that nobody has profiled.

One step is, in this order of kernels, on each GPU of a tensor-parallel group:

    linear layers   ((compute)^p + (weights + their activations)^p)^(1/p)        p = 3
                    compute of the step's tokens and, where the GPU says so, half a GEMM tile more
    attention       per phase, the larger of its arithmetic and its KV bytes
    element-wise    norms, rotary embedding, activation function: bytes
    all-reduce      two per layer, ring
    overhead        a fixed time per layer

A plain max(compute, weights) is up to 15 % too fast where the two are near each other (128 to 512 tokens), which
is where chunk budgets live; a p-norm with p of 3 to 4 follows measured sweeps there. Attention and element-wise
kernels run after the linear layers, not beside them, so their times add.

fp8 weights take half the bytes and run at the share of the fp8 peak that the GPU's `mfu_linear_fp8` says. Embedding and
output head stay in 16 bits, as published fp8 checkpoints have them ("ignore: lm_head" of llm-compressor's recipes,
"exclude_modules: lm_head" of ModelOpt's); so do activations between kernels and attention's arithmetic. KV is read at
its type. Kernels that quantise activations are taken as fused into those before them.

Against sweeps of measured kernels (prefill of 128 to 8,192 tokens; decode of 1 to 256 sequences), to which three or
four efficiencies of each GPU are fitted, the mean error is 2 to 4 % on H100 and H200 (worst 9.3 %) and 3 to 5 % on A100
(worst 23 %). H200's prefill lies between that sweep and other published sums of the same kernels, which are 6 to 9 %
above it. A100 at tp 8 is 14 to 23 % too fast from 512 to 1,024 tokens: its GEMMs have few tiles there (1,280 to 8,192
columns a GPU) and leave much of a second wave over 108 multiprocessors idle, which is not modelled, since a time that
rises in stairs is not what a mean over steps needs. All of this is of dense models with 16-bit weights. Nothing is
fitted to fp8 weights, mixtures of experts and MLA, which are held against published figures of engines (held out).
`pdemu validate --step-times` prints all of it. Whole engines add host time that is not modelled here.
"""

from __future__ import annotations

from typing import NamedTuple

from emulator.core.hardware import FP16_BYTES, Gpu, Model, WeightsDtype, weight_element_bytes

NORM = 3.0
"""p of the p-norm that joins compute and memory in the linear layers; 3.5 would be at most 3 % faster, where both are
equal."""

ATTENTION_MFU = 0.6
"""Share of the dense peak that causal prefill attention reaches at head size 128: FlashAttention-2 (Dao 2023) on
A100 and FlashAttention-3 (Shah et al. 2024) on H100 both publish 0.55 to 0.65 from 2,048 tokens on."""

LINK_EFFICIENCY = 0.8
"""Share of the link's datasheet rate that a large ring all-reduce reaches: 235 of 300 GB/s on A100 and 360 of
450 GB/s on H100 are the bus bandwidths that nccl-tests commonly shows."""

LINK_HOP_S = 0.3e-6
"""Latency of one of the 2(tp - 1) steps of a ring. NCCL's tuning model has 0.6 µs (LL over NVLink); engines use
one-shot kernels with fewer steps for small messages, so half of that is taken. Decode steps of the sweeps at tp 4 and
8 agree with it (mean error 3 %; 0.6 µs: 4 to 5 % on H100, none: 6 % on H200)."""

DENSE_KERNELS = 9
"""Kernels of a dense layer, one after another, whose fixed time a GPU's `per_layer_overhead_us` is: norm, QKV, rotary
embedding with the KV write, attention, output, norm, gate and up, activation, down."""

MLA_KERNELS = 6
"""What multi-head latent attention has more: both down-projections are one kernel as QKV was; then norms of the query
and of the KV latent, the query's up-projection, the absorbed products of keys and of values, and a KV write of its own
(forward_absorb of SGLang's deepseek_v2.py)."""

MOE_KERNELS = 4
"""What routed experts have more than an MLP: the router's GEMM, top-k, sorting of tokens by expert and the sum over
experts (vLLM's fused_moe.py); grouped GEMMs and activation take the places of gate and up, down and activation."""

SHARED_EXPERT_KERNELS = 4
"""A shared expert's own three, and the addition."""


class Rates(NamedTuple):
    """What a step costs per unit on one GPU, in seconds; precomputed, since a step's time is asked for very often."""

    linear_per_token: float
    linear_tile: float
    head_per_sequence: float
    weights: float
    expert_weights: float
    untouched_per_token: float
    linear_io_per_token: float
    prefill_attention_per_pair: float
    decode_attention_per_token: float
    kv_per_token: float
    elementwise_per_token: float
    all_reduce_per_token: float
    overhead: float
    all_reduce_latency: float


class Parts(NamedTuple):
    """Seconds of one step by what is waited for; `linear` joins compute_linear, of which compute_head is a part, and
    weights."""

    linear: float
    compute_linear: float
    compute_head: float
    memory_linear: float
    compute_attention: float
    memory_attention: float
    attention: float
    elementwise: float
    communication: float
    overhead: float


def kv_shards(model: Model, tp: int) -> int:
    """Over how many of `tp` GPUs the KV cache is split: heads beyond kv_heads and an MLA latent are replicated."""
    return 1 if model.mla is not None else min(tp, model.kv_heads)


def reshard_s_per_byte(model: Model, gpu: Gpu, tp: int) -> float:
    """Laying received KV out anew: each byte is read and written once, on all GPUs that hold a part of their own.

    Seconds a byte of KV that is counted once, also where several GPUs hold the same. Memory streams at its datasheet
    rate where the GPU's efficiency is not known, which is too kind.
    """
    return 2 / (gpu.memory_gb_per_s * 1e9 * (gpu.mbu or 1.0) * kv_shards(model, tp))


def rates(model: Model, gpu: Gpu, tp: int, kv_element_bytes: int = FP16_BYTES, weights: WeightsDtype = "fp16") -> Rates:
    """Precompute a step's costs; `gpu` must have its efficiencies, and for fp8 weights that peak (see cost_model)."""
    assert gpu.mfu_linear is not None
    assert gpu.mbu is not None
    assert gpu.per_layer_overhead_us is not None
    peak_flops = gpu.bf16_dense_tflops * 1e12
    flops = _linear_flops(gpu, weights) * tp
    weight_bytes = weight_element_bytes(weights)
    attention_flops = peak_flops * ATTENTION_MFU * tp
    stream = gpu.memory_gb_per_s * 1e9 * gpu.mbu
    link = gpu.link_gb_per_s_per_direction * 1e9 * LINK_EFFICIENCY
    embedding = model.vocab * model.hidden
    linear = _linear_params(model)
    experts = _expert_params(model)
    always_read = (linear - experts * _active_share(model)) * weight_bytes + embedding * FP16_BYTES
    hops = 2 * (tp - 1)
    return Rates(
        linear_per_token=2 * linear / flops,
        linear_tile=2 * linear / flops * gpu.gemm_tile_tokens / 2,
        head_per_sequence=2 * embedding / (peak_flops * gpu.mfu_linear * tp),
        weights=always_read / tp / stream,
        expert_weights=experts * weight_bytes / tp / stream,
        untouched_per_token=1 - _active_share(model),
        linear_io_per_token=_linear_io_elements(model, tp) * FP16_BYTES / stream,
        prefill_attention_per_pair=_prefill_attention_flops(model) / attention_flops,
        decode_attention_per_token=_decode_attention_flops(model) / attention_flops,
        kv_per_token=model.kv_bytes_per_token(kv_element_bytes) / kv_shards(model, tp) / stream,
        elementwise_per_token=_elementwise_elements(model, tp) * FP16_BYTES / stream,
        all_reduce_per_token=2 * model.layers * hops / tp * model.hidden * FP16_BYTES / link,
        overhead=model.layers * gpu.per_layer_overhead_us * 1e-6 * (_layer_kernels(model) / DENSE_KERNELS),
        all_reduce_latency=2 * model.layers * hops * LINK_HOP_S,
    )


def parts(
    costs: Rates, *, tokens: int, sampled: int, pairs: float, prefill_kv: int, decode_context: int, decode_batch: int
) -> Parts:
    """Time the kernels of one step.

    `tokens` pass through the linear layers and `sampled` of them through the output head; `pairs` are query-key
    pairs of prefill attention, `prefill_kv` the KV tokens that it reads and writes; `decode_context` is the sum of
    tokens that `decode_batch` decodes attend to.
    """
    head = costs.head_per_sequence * sampled
    compute = costs.linear_per_token * tokens + costs.linear_tile + head
    memory = costs.weights + costs.linear_io_per_token * tokens
    if costs.expert_weights:
        memory += costs.expert_weights * (1 - costs.untouched_per_token**tokens)
    prefill_compute = costs.prefill_attention_per_pair * pairs
    prefill_memory = costs.kv_per_token * prefill_kv
    decode_compute = costs.decode_attention_per_token * decode_context
    decode_memory = costs.kv_per_token * (decode_context + decode_batch)
    return Parts(
        linear=(compute**NORM + memory**NORM) ** (1 / NORM),
        compute_linear=compute,
        compute_head=head,
        memory_linear=memory,
        compute_attention=prefill_compute + decode_compute,
        memory_attention=prefill_memory + decode_memory,
        attention=max(prefill_compute, prefill_memory) + max(decode_compute, decode_memory),
        elementwise=costs.elementwise_per_token * tokens,
        communication=costs.all_reduce_per_token * tokens + costs.all_reduce_latency,
        overhead=costs.overhead,
    )


def work(gpu: Gpu, costs: Rates, step: Parts, weights: WeightsDtype) -> tuple[float, float]:
    """FLOPs that one GPU computes in a step, and bytes that it moves to and from its memory."""
    assert gpu.mfu_linear is not None
    assert gpu.mbu is not None
    linear = (step.compute_linear - step.compute_head - costs.linear_tile) * _linear_flops(gpu, weights)
    linear += step.compute_head * _linear_flops(gpu, "fp16")
    attention = step.compute_attention * gpu.bf16_dense_tflops * 1e12 * ATTENTION_MFU
    moved_s = step.memory_linear + step.memory_attention + step.elementwise
    return linear + attention, moved_s * gpu.memory_gb_per_s * 1e9 * gpu.mbu


def total_s(step: Parts) -> float:
    """Seconds of the whole step."""
    return step.linear + step.attention + step.elementwise + step.communication + step.overhead


def weight_bytes(model: Model, weights: WeightsDtype = "fp16") -> float:
    """Bytes of all weights, every expert included; embeddings, output head and norms stay in 16 bits."""
    kept = model.active_params_b * 1e9 - _linear_params(model)
    return model.weight_bytes(weight_element_bytes(weights)) + kept * (FP16_BYTES - weight_element_bytes(weights))


def _linear_flops(gpu: Gpu, weights: WeightsDtype) -> float:
    """FLOP/s that one GPU reaches in large linear layers."""
    assert gpu.mfu_linear is not None
    if weights != "fp8":
        return gpu.bf16_dense_tflops * 1e12 * gpu.mfu_linear
    assert gpu.fp8_dense_tflops is not None
    return gpu.fp8_dense_tflops * 1e12 * (gpu.mfu_linear_fp8 or gpu.mfu_linear)


def _layer_kernels(model: Model) -> int:
    """Kernels of one layer; a layer of a mixture of experts that is dense in truth counts as one that is not."""
    routed = model.moe is not None or model.active_params_b < model.params_b
    shared = model.moe is not None and model.moe.shared_experts > 0
    return DENSE_KERNELS + MLA_KERNELS * (model.mla is not None) + MOE_KERNELS * routed + SHARED_EXPERT_KERNELS * shared


def _linear_params(model: Model) -> float:
    """Parameters of the linear layers that one token uses, without the output head.

    From the shapes of query, key, value, output and MLP matrices; for a mixture of experts or MLA, whose shapes a
    Model does not hold in full, the active parameters less input embedding and output head.
    """
    if model.moe is not None or model.mla is not None or model.active_params_b < model.params_b:
        return model.active_params_b * 1e9 - 2 * model.vocab * model.hidden
    attention = model.hidden * (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    mlp = (3 if model.gated_mlp else 2) * model.hidden * model.intermediate
    return float(model.layers * (attention + mlp))


def _active_share(model: Model) -> float:
    """Share of the expert parameters that one token uses.

    Without expert counts the whole model counts as experts, of which active/total is used.
    """
    if model.moe is not None:
        return model.moe.experts_per_token / model.moe.experts
    return model.active_params_b / model.params_b


def _expert_params(model: Model) -> float:
    """Parameters of all routed experts, 0 for a dense model.

    total - active = the experts that a token leaves unused, which are (1 - share) of all. A step of T tokens, each
    choosing its experts alike and independently, touches 1 - (1 - share)^T of them on average: an assumption, as
    real routing is skewed (fewer) and a batch's tokens are alike (fewer still).
    """
    unused = (model.params_b - model.active_params_b) * 1e9
    return unused / (1 - _active_share(model)) if unused else 0.0


def _mlp_width(model: Model) -> int:
    if model.moe is None:
        return model.intermediate
    return (model.moe.experts_per_token + model.moe.shared_experts) * model.moe.expert_intermediate


def _linear_io_elements(model: Model, tp: int) -> float:
    """Activations that the linear layers of the whole model read and write per token on one GPU, in elements.

    Per layer: hidden in for query-key-value and for the MLP, hidden out of both; what lies between is split by tp.
    MLA's extra projections are taken as full attention heads.
    """
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    mlp = (3 if model.gated_mlp else 2) * _mlp_width(model)
    return model.layers * (4 * model.hidden + (qkv + model.heads * model.head_dim + mlp) / tp)


def _elementwise_elements(model: Model, tp: int) -> float:
    """Activations that element-wise kernels read and write per token on one GPU, in elements.

    Per layer: two fused residual-and-norm kernels (2 hidden in, 2 out each), rotary embedding of queries and keys
    (in and out), the activation function (gate and up in, one out; without a gate one in, one out).
    """
    rotary = 2 * (model.heads + model.kv_heads) * model.head_dim
    activation = (3 if model.gated_mlp else 2) * _mlp_width(model)
    return model.layers * (8 * model.hidden + (rotary + activation) / tp)


def _prefill_attention_flops(model: Model) -> float:
    """FLOPs of one query-key pair over all layers and heads: 2 for each element of a score and of its value."""
    key = model.head_dim + (model.mla.rope_dim if model.mla is not None else 0)
    return 2.0 * model.layers * model.heads * (key + model.head_dim)


def _decode_attention_flops(model: Model) -> float:
    """As in prefill, but MLA decodes on the latent itself (its absorbed form, DeepSeek-V2)."""
    if model.mla is None:
        return _prefill_attention_flops(model)
    return 2.0 * model.layers * model.heads * (2 * model.mla.latent_dim + model.mla.rope_dim)
