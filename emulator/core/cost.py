"""How long a step takes and how many bytes KV has, from counts of tokens alone.

Three cost models: `roofline` computes from shapes and datasheets (see `core.roofline`), `fitted` evaluates a published
three-term profile, `table` interpolates measured steps (see `core.table_cost`). All are plain data that travels to node
processes as JSON, and all are asked at every step of simulations with thousands of runs, so they precompute and use no
arrays.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal

import msgspec

from emulator.core import roofline
from emulator.core.errors import CapacityError, ConfigError
from emulator.core.hardware import (
    FP16_BYTES,
    CostName,
    DecodeFit,
    FittedProfile,
    Gpu,
    Model,
    StepTable,
    WeightsDtype,
)
from emulator.core.step_shape import Chunk, StepShape, mixed_ms
from emulator.core.table_cost import StepLimits, TableCost

__all__ = [
    "Bound",
    "Chunk",
    "CostModel",
    "FittedCost",
    "RooflineCost",
    "StepShape",
    "TableCost",
    "cost_model",
    "kv_block_capacity",
    "kv_bytes",
    "step_limits",
    "weight_bytes_per_gpu",
    "why_not_split",
]

Bound = Literal["compute", "memory", "communication", "overhead"]


class RooflineCost(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="cost", tag="roofline", dict=True
):
    """Step times from shapes and datasheet figures. Built by `cost_model`, which checks the GPU.

    KV is kept and read in `kv_element_bytes` an element; what attention computes does not depend on it.
    """

    model: Model
    gpu: Gpu
    tp: int
    kv_element_bytes: int = FP16_BYTES
    weights: WeightsDtype = "fp16"

    @cached_property
    def _rates(self) -> roofline.Rates:
        return roofline.rates(self.model, self.gpu, self.tp, self.kv_element_bytes, self.weights)

    def _parts(self, shape: StepShape) -> roofline.Parts:
        """Count a step's tokens; the output head runs once per chunk and decode, an unfinished chunk included."""
        tokens = kv = 0
        pairs = 0.0
        for n, context in shape.chunks:
            tokens += n
            pairs += n * context + n * (n + 1) / 2
            kv += context + 2 * n
        return roofline.parts(
            self._rates,
            tokens=tokens + shape.decode_batch,
            sampled=len(shape.chunks) + shape.decode_batch,
            pairs=pairs,
            prefill_kv=kv,
            decode_context=shape.decode_context_sum,
            decode_batch=shape.decode_batch,
        )

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step; 0 for a step without work."""
        if not shape.chunks and not shape.decode_batch:
            return 0.0
        return roofline.total_s(self._parts(shape))

    def decode_steps_s(self, batch: int, context_sum: int, most: int) -> list[float]:
        """Seconds of up to `most` decode steps of `batch` sequences in a row, as `step_s` has them to the last bit.

        The first attends to `context_sum` tokens, each further one to `batch` more, so while either arithmetic or
        memory decides attention, times rise by equal amounts; the list ends where that changes, and has at least one.
        """
        linear, elementwise, communication, overhead = self._beside_attention(batch)
        per_token, kv = self._rates.decode_attention_per_token, self._rates.kv_per_token
        contexts = range(context_sum, context_sum + most * batch, batch)
        if per_token <= kv:
            return [linear + kv * (n + batch) + elementwise + communication + overhead for n in contexts]
        if per_token * context_sum <= kv * (context_sum + batch):
            # Arithmetic is the larger from kv × batch / (per_token − kv) tokens on.
            contexts = contexts[: max(1, math.ceil((kv * batch / (per_token - kv) - context_sum) / batch))]
        attention = [max(per_token * n, kv * (n + batch)) for n in contexts]
        return [linear + seconds + elementwise + communication + overhead for seconds in attention]

    def _beside_attention(self, batch: int) -> tuple[float, float, float, float]:
        """Seconds of a decode step's linear layers, element-wise kernels, communication and overhead."""
        found = self._decode_parts.get(batch)
        if found is None:
            step = self._parts(StepShape((), batch, 0))
            found = self._decode_parts[batch] = (step.linear, step.elementwise, step.communication, step.overhead)
        return found

    @cached_property
    def _decode_parts(self) -> dict[int, tuple[float, float, float, float]]:
        return {}

    @property
    def fixed_s(self) -> float:
        """Fixed time of a step's layers, a part of every step."""
        return self._rates.overhead

    def work(self, shape: StepShape) -> tuple[float, float]:
        """FLOPs that each GPU computes in a step, and bytes that it moves to and from its memory."""
        return roofline.work(self.gpu, self._rates, self._parts(shape), self.weights)

    def bound(self, shape: StepShape) -> Bound:
        """What takes most of the step's time."""
        step = self._parts(shape)
        times: dict[Bound, float] = {
            "compute": step.compute_linear + step.compute_attention,
            "memory": step.memory_linear + step.memory_attention + step.elementwise,
            "communication": step.communication,
            "overhead": step.overhead,
        }
        return max(times, key=lambda name: times[name])


class FittedCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="cost", tag="fitted"):
    """Step times from a published profile.

    Prefill alone is a + b Σn + c Σ((context + n)² - context²) and decode alone base + b Σcontext + c batch: exactly
    the published formulas, since that is what they were fitted to, and a prompt's chunks sum to its quadratic term.

    A mixed step reads the weights once, which neither formula knows. The decode fit's base is that reading (with
    fixed overheads), the prefill time holds it too, so the two are joined as a p-norm (p = 3.5) instead of added;
    what each decode adds beyond the weights, its KV and its row in the batch, is added in full. Check: Llama-3.1-8B
    on H100, 8 decodes beside 2,048 prompt tokens gives 44.3 ms where vLLM measured 45.3 (the source does not state
    its chunk size; 2,048 is assumed).

    A profile's `step_overhead` becomes part of its terms here.
    """

    profile: FittedProfile

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "profile", self.profile.with_overhead_inside())

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step; 0 for a step without work."""
        ms = self._prefill_ms(shape.chunks) if shape.chunks else 0.0
        batch = shape.decode_batch
        if batch:
            fit = self._decode_fit(batch)
            base_ms = mixed_ms(ms, fit.base_ms) if shape.chunks else fit.base_ms
            ms = base_ms + fit.per_context_token_ms * shape.decode_context_sum + fit.per_sequence_ms * batch
        return ms * 1e-3

    def decode_steps_s(self, batch: int, context_sum: int, most: int) -> list[float]:
        """Seconds of `most` decode steps of `batch` sequences in a row, as `step_s` has them to the last bit.

        The first attends to `context_sum` tokens, each further one to `batch` more, so times rise by equal amounts.
        """
        fit = self._decode_fit(batch)
        base_ms, per_token_ms, rows_ms = fit.base_ms, fit.per_context_token_ms, fit.per_sequence_ms * batch
        contexts = range(context_sum, context_sum + most * batch, batch)
        return [(base_ms + per_token_ms * n + rows_ms) * 1e-3 for n in contexts]

    def _decode_fit(self, batch: int) -> DecodeFit:
        profile = self.profile
        if profile.large_batch_from is not None and batch >= profile.large_batch_from:
            assert profile.decode_large is not None
            return profile.decode_large
        return profile.decode

    def _prefill_ms(self, chunks: tuple[Chunk, ...]) -> float:
        tokens = squares = 0
        for n, context in chunks:
            tokens += n
            squares += n * (2 * context + n)
        profile = self.profile
        ms = profile.prefill_base_ms + profile.prefill_per_token_ms * tokens + profile.prefill_per_token2_ms * squares
        return max(ms, 0.0)


CostModel = RooflineCost | FittedCost | TableCost


def cost_model(
    *,
    cost: CostName,
    model: Model,
    gpu: Gpu,
    tp: int,
    profile: FittedProfile | StepTable | None = None,
    kv_element_bytes: int = FP16_BYTES,
    weights: WeightsDtype = "fp16",
) -> CostModel:
    """Build the cost model of one pool from a topology's choices. Measured step times are those of 16-bit KV.

    Raises ConfigError for a profile of another model, GPU or tp, for fp8 weights where their step times are not known,
    for a tp that the model's layers do not divide by, and for a GPU without measured efficiencies under roofline: none
    are assumed in silence.
    """
    if cost != "roofline":
        if profile is None:
            raise ConfigError(f'cost = "{cost}" needs profile = "NAME"')
        _check_profile(profile, model, gpu, tp)
        if weights == "fp8":
            raise ConfigError(
                f'weights = "fp8" needs cost = "roofline": profile {profile.name} was measured with 16-bit weights'
            )
        return TableCost(profile=profile) if isinstance(profile, StepTable) else FittedCost(profile=profile)
    if weights == "fp8" and gpu.fp8_dense_tflops is None:
        raise ConfigError(
            f'weights = "fp8": gpu {gpu.name} does not compute in fp8; use weights = "bf16", or a GPU that has '
            "fp8_dense_tflops"
        )
    if undivided := why_not_split(model, tp):
        raise ConfigError(undivided)
    missing = [name for name in ("mfu_linear", "mbu", "per_layer_overhead_us") if getattr(gpu, name) is None]
    if missing:
        raise ConfigError(
            f"gpu {gpu.name} has no measured {', '.join(missing)}, which the roofline cost needs: choose a GPU that "
            'has them, give them in a [[gpus]] entry under another name, or use cost = "fitted" with a profile'
        )
    return RooflineCost(model=model, gpu=gpu, tp=tp, kv_element_bytes=kv_element_bytes, weights=weights)


def step_limits(cost: CostModel) -> StepLimits:
    """Within what a cost model knows step times: a table as far as it was measured, the others everywhere."""
    return cost.limits if isinstance(cost, TableCost) else StepLimits()


def _check_profile(profile: FittedProfile | StepTable, model: Model, gpu: Gpu, tp: int) -> None:
    for what, has, asked in (("model", profile.model, model.name), ("gpu", profile.gpu, gpu.name)):
        if has.casefold() != asked.casefold():
            raise ConfigError(f"profile {profile.name} is for {what} {has}, not {asked}: change {what} or the profile")
    if profile.tp != tp:
        raise ConfigError(f"profile {profile.name} is for tp = {profile.tp}, not {tp}: change tp or the profile")


def kv_bytes(model: Model, tokens: int, bytes_per_element: int = FP16_BYTES) -> int:
    """KV cache bytes of `tokens` tokens, over all GPUs of a tensor-parallel group and without replicas."""
    return model.kv_bytes_per_token(bytes_per_element) * tokens


def weight_bytes_per_gpu(model: Model, tp: int, weights: WeightsDtype = "fp16") -> float:
    """Bytes of weights on each of `tp` GPUs, every expert included."""
    return roofline.weight_bytes(model, weights) / tp


def why_not_split(model: Model, tp: int) -> str:
    """Why `tp` GPUs cannot share the model's layers, or nothing; the rules are vLLM's (QKVParallelLinear, divide).

    Attention heads and the width of an MLP or expert must divide; KV heads too, or the GPUs must be a multiple of them,
    each head then being kept several times. An MLA latent is kept by every GPU.
    """
    if model.heads % tp:
        return f"tp = {tp} does not divide the {model.heads} heads of {model.name}"
    heads = model.kv_heads
    if model.mla is None and (heads % tp if tp <= heads else tp % heads):
        return f"tp = {tp} neither divides the {heads} KV heads of {model.name} nor is a multiple of them"
    widths = {"MLP": model.intermediate}
    if model.moe is not None:
        widths["expert"] = model.moe.expert_intermediate
    for what, width in widths.items():
        if width % tp:
            return f"tp = {tp} does not divide the {what} width {width:,} of {model.name}"
    return ""


def kv_block_capacity(
    model: Model,
    gpu: Gpu,
    tp: int,
    utilization: float,
    block_size: int,
    *,
    kv_element_bytes: int = FP16_BYTES,
    weights_dtype: WeightsDtype = "fp16",
) -> int:
    """Blocks of `block_size` tokens that fit beside the weights on `tp` GPUs.

    `utilization` of the memory is used, as vLLM's gpu_memory_utilization. 1 GB is 1e9 bytes, which is some 7 % less
    than a driver reports for most cards: that stands for activations and the context, which are not counted.
    Raises CapacityError when the weights, or a single block beside them, do not fit.
    """
    available = gpu.memory_gb * 1e9 * utilization
    weights = weight_bytes_per_gpu(model, tp, weights_dtype)
    block = model.kv_bytes_per_token(kv_element_bytes) * block_size / roofline.kv_shards(model, tp)
    if weights <= available < weights + block:
        raise CapacityError(
            f"a KV block of {block_size} tokens of {model.name} ({block / 1e9:.3g} GB a GPU) does not fit beside the "
            f"weights on {gpu.name}: use a smaller block_size, or more tensor parallelism"
        )
    if weights + block > available:
        raise CapacityError(
            f"{model.name} does not fit on {gpu.name} with tp = {tp}: weights need {weights / 1e9:.1f} GB a GPU, "
            f"{available / 1e9:.1f} GB are available ({gpu.memory_gb:g} GB x {utilization:g}); "
            f"{_what_fits(model, gpu, tp, utilization, weights_dtype)}"
        )
    return int((available - weights) // block)


def _what_fits(model: Model, gpu: Gpu, tp: int, utilization: float, weights: WeightsDtype) -> str:
    larger = f"a GPU with more than {weight_bytes_per_gpu(model, tp, weights) / 1e9 / utilization:.0f} GB"
    for more in (2, 4, 8, 16, 32, 64):
        fits = weight_bytes_per_gpu(model, more, weights) < gpu.memory_gb * 1e9 * utilization
        if more > tp and not why_not_split(model, more) and fits:
            return f"tp = {more} or {larger} would do"
    return f"{larger} would do"
