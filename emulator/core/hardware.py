"""What is emulated: models, GPUs and step-time profiles, as frozen facts without behaviour beyond arithmetic."""

from __future__ import annotations

from typing import Literal

import msgspec

FP16_BYTES = 2


class MlaShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Multi-head latent attention: what is cached per token and layer, in elements (DeepSeek-V2, 2024)."""

    latent_dim: int
    rope_dim: int


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shape of a decoder model. `source` says where the figures come from."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    params_b: float
    active_params_b: float
    gated_mlp: bool
    context_tokens: int
    source: str
    mla: MlaShape | None = None

    def kv_bytes_per_token(self, bytes_per_element: int = FP16_BYTES) -> int:
        """KV cache bytes of one token: 2 × layers × kv_heads × head_dim × bytes, or the MLA latent per layer."""
        if self.mla is not None:
            return self.layers * (self.mla.latent_dim + self.mla.rope_dim) * bytes_per_element
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_element

    def weight_bytes(self, bytes_per_element: int = FP16_BYTES) -> float:
        """Bytes of all weights, every expert included."""
        return self.params_b * 1e9 * bytes_per_element


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A GPU's dense peak rates and memory, with the roofline efficiencies where they are known.

    `mfu_linear` and `mbu` are fractions of the datasheet's peak that linear layers and memory streams reach;
    `per_layer_overhead_us` is the fixed time of a layer's kernels.
    """

    name: str
    bf16_dense_tflops: float
    memory_gb: float
    memory_gb_per_s: float
    link_gb_per_s_per_direction: float
    tdp_w: float
    source: str
    fp8_dense_tflops: float | None = None
    price_usd_per_h: float | None = None
    mfu_linear: float | None = None
    mbu: float | None = None
    per_layer_overhead_us: float | None = None
    efficiency_source: str | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256


class DecodeFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Decode ms = base_ms + per_context_token_ms × Σ context + per_sequence_ms × batch."""

    base_ms: float
    per_context_token_ms: float
    per_sequence_ms: float


class FittedProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Three-term step times as published profiles give them.

    Prefill ms = prefill_base_ms + prefill_per_token_ms × Σ n + prefill_per_token2_ms × Σ n². From
    `large_batch_from` sequences on, `decode_large` replaces `decode` (DistServe fits two ranges).
    """

    name: str
    model: str
    gpu: str
    tp: int
    prefill_base_ms: float
    prefill_per_token_ms: float
    prefill_per_token2_ms: float
    decode: DecodeFit
    source: str
    decode_large: DecodeFit | None = None
    large_batch_from: int | None = None


class Catalog(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every known model, GPU and profile by name. Names are looked up without regard to case."""

    models: tuple[Model, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    profiles: tuple[FittedProfile, ...] = ()


CostName = Literal["roofline", "fitted"]
