"""What is emulated: models, GPUs and step-time profiles, as frozen facts without behaviour beyond arithmetic."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

import msgspec

FP16_BYTES = 2

WeightsDtype = Literal["fp16", "bf16", "fp8"]
"""What a model's weights are held in; fp16 and bf16 take the same memory and time."""

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Line = Annotated[tuple[tuple[_Count, _Positive], ...], msgspec.Meta(min_length=2)]


class MlaShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Multi-head latent attention: what is cached per token and layer, in elements (DeepSeek-V2, 2024)."""

    latent_dim: _Count
    rope_dim: _Count


class MoeShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Mixture of experts: routed experts of a layer, how many of them a token uses, and their width.

    `shared_experts` are used by every token beside the routed ones.
    """

    experts: _Count
    experts_per_token: _Count
    expert_intermediate: _Count
    shared_experts: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.experts_per_token >= self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} must be below experts {self.experts}")


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shape of a decoder model; parameters are in units of 1e9. `source` says where the figures come from.

    `active_params_b` are those that one token uses (a mixture of experts has more). `context_tokens` is the
    longest sequence that the model was made for (max_position_embeddings).
    """

    name: str
    layers: _Count
    hidden: _Count
    heads: _Count
    kv_heads: _Count
    head_dim: _Count
    intermediate: _Count
    vocab: _Count
    params_b: _Positive
    active_params_b: _Positive
    gated_mlp: bool
    context_tokens: _Count
    source: str
    mla: MlaShape | None = None
    moe: MoeShape | None = None

    def __post_init__(self) -> None:
        if self.active_params_b > self.params_b:
            raise ValueError(f"active_params_b {self.active_params_b} is above params_b {self.params_b}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")

    def kv_bytes_per_token(self, bytes_per_element: int = FP16_BYTES) -> int:
        """KV cache bytes of one token: 2 × layers × kv_heads × head_dim × bytes, or the MLA latent per layer."""
        if self.mla is not None:
            return self.layers * (self.mla.latent_dim + self.mla.rope_dim) * bytes_per_element
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_element

    def weight_bytes(self, bytes_per_element: int = FP16_BYTES) -> float:
        """Bytes of all weights, every expert included."""
        return self.params_b * 1e9 * bytes_per_element


def weight_element_bytes(weights: WeightsDtype) -> int:
    """Bytes of one weight."""
    return 1 if weights == "fp8" else FP16_BYTES


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A GPU's dense peak rates and memory, with the roofline efficiencies where they are known.

    `mfu_linear` and `mbu` are fractions of the datasheet's peak that linear layers and memory streams reach;
    `mfu_linear_fp8` is that of linear layers in fp8 (`mfu_linear` where it is not known). `per_layer_overhead_us` is
    the fixed time of a dense layer's kernels, `gemm_tile_tokens` the height of the tiles that linear layers compute
    whole, in tokens, where small steps show it. 1 GB is 1e9 bytes. `link_gb_per_s_per_direction` is the interconnect
    between the GPUs of one machine (NVLink, or PCIe where there is none). The batch limits are vLLM's defaults for the
    GPU.
    """

    name: str
    bf16_dense_tflops: _Positive
    memory_gb: _Positive
    memory_gb_per_s: _Positive
    link_gb_per_s_per_direction: _Positive
    tdp_w: _Positive
    source: str
    fp8_dense_tflops: _Positive | None = None
    price_usd_per_h: _Positive | None = None
    mfu_linear: _Fraction | None = None
    mfu_linear_fp8: _Fraction | None = None
    mbu: _Fraction | None = None
    per_layer_overhead_us: _NotNegative | None = None
    gemm_tile_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    efficiency_source: str | None = None
    fp8_efficiency_source: str | None = None
    max_num_batched_tokens: _Count = 2048
    max_num_seqs: _Count = 256


class DecodeFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Decode ms = base_ms + per_context_token_ms × Σ context + per_sequence_ms × batch."""

    base_ms: _NotNegative
    per_context_token_ms: _NotNegative
    per_sequence_ms: _NotNegative


class StepOverhead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an engine spends on every step beside the GPU: ms = base_ms + per_token_ms × tokens.

    Tokens are those of the prompts in a prefill step and of all contexts in a decode step, as simdistserve counts.
    """

    base_ms: _NotNegative
    per_token_ms: _NotNegative


class FittedProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Three-term step times as published profiles give them.

    Prefill ms = prefill_base_ms + prefill_per_token_ms × Σ n + prefill_per_token2_ms × Σ n². From
    `large_batch_from` sequences on, `decode_large` replaces `decode` (DistServe fits two ranges). The quadratic term
    may be negative, as one published fit has it. `step_overhead` comes on top of either.
    """

    name: str
    model: str
    gpu: str
    tp: _Count
    prefill_base_ms: _NotNegative
    prefill_per_token_ms: _NotNegative
    prefill_per_token2_ms: float
    decode: DecodeFit
    source: str
    decode_large: DecodeFit | None = None
    large_batch_from: _Count | None = None
    step_overhead: StepOverhead | None = None

    def __post_init__(self) -> None:
        if (self.decode_large is None) != (self.large_batch_from is None):
            raise ValueError("decode_large and large_batch_from belong together: give both or neither")

    def with_overhead_inside(self) -> FittedProfile:
        """The same step times with the overhead as part of their terms, which have its form."""
        extra = self.step_overhead
        if extra is None:
            return self

        def slower(fit: DecodeFit) -> DecodeFit:
            return DecodeFit(
                base_ms=fit.base_ms + extra.base_ms,
                per_context_token_ms=fit.per_context_token_ms + extra.per_token_ms,
                per_sequence_ms=fit.per_sequence_ms,
            )

        return msgspec.structs.replace(
            self,
            prefill_base_ms=self.prefill_base_ms + extra.base_ms,
            prefill_per_token_ms=self.prefill_per_token_ms + extra.per_token_ms,
            decode=slower(self.decode),
            decode_large=slower(self.decode_large) if self.decode_large is not None else None,
            step_overhead=None,
        )


class StepTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured step times, as pairs of a size and ms in order of size, to be interpolated between them.

    `prefill` by prompt tokens of one prompt, `prefill_batched` by those of several together (from where that was
    measured on). `decode` by sequences of `decode_context` tokens each, `decode_contexts` by the context of one.
    """

    name: str
    model: str
    gpu: str
    tp: _Count
    prefill: Line
    decode: Line
    decode_context: _Count
    source: str
    prefill_batched: Line | None = None
    decode_contexts: Line | None = None

    def __post_init__(self) -> None:
        for key in ("prefill", "prefill_batched", "decode", "decode_contexts"):
            line = getattr(self, key)
            if line is not None and any(after <= before for (before, _), (after, _) in pairwise(line)):
                raise ValueError(f"{key}: sizes must rise from pair to pair")
        if self.decode[0][0] != 1:
            raise ValueError("decode must begin with 1 sequence")
        if self.prefill_batched is not None and self.prefill_batched[0][0] <= self.prefill[0][0]:
            raise ValueError("prefill_batched must begin above the first size of prefill")


class Catalog(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every known model, GPU, profile and table by name. Names are looked up without regard to case."""

    models: tuple[Model, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    profiles: tuple[FittedProfile, ...] = ()
    tables: tuple[StepTable, ...] = ()


CostName = Literal["roofline", "fitted", "table"]
