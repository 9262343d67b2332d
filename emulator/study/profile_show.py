"""`pdemu profile show`: what a cost model makes of a model on a GPU, step by step, and what bounds each."""

from __future__ import annotations

from typing import NamedTuple

from emulator.core.catalog import find_gpu, find_model
from emulator.core.cost import (
    Bound,
    Chunk,
    CostModel,
    RooflineCost,
    StepShape,
    cost_model,
    kv_block_capacity,
    step_limits,
    why_not_split,
)
from emulator.core.errors import CapacityError, ConfigError
from emulator.core.hardware import Catalog, FittedProfile, Gpu, Model, StepTable, WeightsDtype
from emulator.core.held_out import Kind, kind_of
from emulator.core.profile_fit import Phase
from emulator.report.profile_table import Profiled, Roof, Step, StepPoint
from emulator.report.step_errors import Errors
from emulator.study.held_out import held_out_errors

PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (512, 2048, 8192)
UTILIZATION = 0.92
BLOCK_TOKENS = 16
MOST_REQUESTS, MOST_TOKENS = 1 << 16, 1 << 30
"""Beyond what a single step is not asked for: far beyond what any machine holds."""


class Subject(NamedTuple):
    """What is shown: a cost model, the roofline that says what bounds its steps where there is one, its source."""

    model: Model
    gpu: Gpu
    tp: int
    cost: CostModel
    roofline: RooflineCost | None
    source: str


def subject(
    catalog: Catalog, model_name: str, gpu_name: str, *, tp: int, profile_name: str | None, weights: WeightsDtype
) -> Subject:
    """Find everything by name; raises ConfigError for what does not exist or does not belong together."""
    model, gpu = find_model(catalog, model_name), find_gpu(catalog, gpu_name)
    if profile_name is None:
        cost = cost_model(cost="roofline", model=model, gpu=gpu, tp=tp, weights=weights)
        assert isinstance(cost, RooflineCost)
        return Subject(model, gpu, tp, cost, cost, _roofline_source(catalog, cost))
    profile = _profile(catalog, profile_name)
    kind = "table" if isinstance(profile, StepTable) else "fitted"
    cost = cost_model(
        cost="table" if kind == "table" else "fitted", model=model, gpu=gpu, tp=tp, profile=profile, weights=weights
    )
    roofline = None
    if gpu.mfu_linear is not None and not why_not_split(model, tp):
        found = cost_model(cost="roofline", model=model, gpu=gpu, tp=tp)
        roofline = found if isinstance(found, RooflineCost) else None
    source = f"{kind} {profile.name}: {profile.source}"
    return Subject(model, gpu, tp, cost, roofline, f"{source}; the bound is the roofline's" if roofline else source)


def _roofline_source(catalog: Catalog, cost: RooflineCost) -> str:
    """What the efficiencies are from, and how far they can be trusted for just such a model and weights."""
    gpu, kind = cost.gpu, kind_of(cost.model, cost.weights)
    text = f"roofline: {gpu.name}'s efficiencies {gpu.efficiency_source}"
    if cost.weights == "fp8":
        text += f"; in fp8 {gpu.fp8_efficiency_source or 'the share of the peak is assumed to be that in 16 bits'}"
    scored = held_out_errors(catalog, gpu.name, kind)
    listed = held_out_errors(catalog, gpu.name, kind, listed=True)
    if scored.n:
        text += f"; held out: {_error_text(scored, kind)}"
    if listed.n:
        text += f"; held out, what the source does not state being assumed: {_error_text(listed, kind)}"
    if not scored.n and not listed.n and kind != "16-bit dense":
        text += f"; {kind} models on {gpu.name} were not compared with any measurement"
    return text


def _error_text(found: Errors, kind: Kind) -> str:
    assert found.median is not None
    assert found.worst is not None
    return f"{found.n} figures of {kind} models, median error {found.median:.0%}, worst {found.worst:+.0%}"


def _profile(catalog: Catalog, name: str) -> FittedProfile | StepTable:
    known: tuple[FittedProfile | StepTable, ...] = (*catalog.profiles, *catalog.tables)
    for profile in known:
        if profile.name.casefold() == name.casefold():
            return profile
    raise ConfigError(f"there is no profile {name!r}; known: {', '.join(profile.name for profile in known)}")


def point(of: Subject, phase: Phase, batch: int, tokens: int) -> StepPoint:
    """One step; raises ConfigError for one that the cost model knows nothing of."""
    if batch < 1 or tokens < (1 if phase == "prefill" else 0):
        raise ConfigError(f"--batch {batch} --tokens {tokens}: a step has at least 1 request, and a prompt 1 token")
    if batch > MOST_REQUESTS or tokens > MOST_TOKENS:
        raise ConfigError(
            f"--batch {batch} --tokens {tokens}: use at most {MOST_REQUESTS:,} requests of {MOST_TOKENS:,} tokens each"
        )
    if outside := _outside(of, phase, batch, tokens):
        raise ConfigError(f"{phase} of {batch} x {tokens} tokens {outside}")
    shape = shape_of(phase, batch, tokens)
    note = _too_large(of, batch, tokens)
    return StepPoint(
        ms=of.cost.step_s(shape) * 1e3, bound=_bound(of, shape), source=of.source, fits=not note, note=note
    )


def profiled(of: Subject) -> Profiled:
    """Steps over prompt lengths and batches, and the roofline that they stand under."""
    shapes = [("prefill", 1, tokens) for tokens in PROMPTS]
    shapes += [("decode", batch, tokens) for tokens in CONTEXTS for batch in BATCHES]
    room = _room(of)
    steps = []
    for phase_name, batch, tokens in shapes:
        phase: Phase = "prefill" if phase_name == "prefill" else "decode"
        if tokens > of.model.context_tokens or _outside(of, phase, batch, tokens):
            continue
        shape = shape_of(phase, batch, tokens)
        seconds = of.cost.step_s(shape)
        flops, nbytes = (None, None) if of.roofline is None else of.roofline.work(shape)
        steps.append(
            Step(
                phase=phase,
                batch=batch,
                tokens=tokens,
                ms=seconds * 1e3,
                bound=_bound(of, shape),
                fits=room is not None and batch * tokens <= room,
                flops_per_byte=None if flops is None or not nbytes else flops / nbytes,
                tflops=None if flops is None else flops / seconds / 1e12,
            )
        )
    return Profiled(
        model=of.model.name,
        gpu=of.gpu.name,
        tp=of.tp,
        source=of.source,
        kv_tokens=room,
        roof=Roof(peak_tflops=_peak_tflops(of), memory_gb_per_s=of.gpu.memory_gb_per_s),
        steps=tuple(steps),
    )


def shape_of(phase: Phase, batch: int, tokens: int) -> StepShape:
    """`batch` prompts of `tokens` each, or decodes at `tokens` of context."""
    if phase == "prefill":
        return StepShape((Chunk(tokens, 0),) * batch, 0, 0)
    return StepShape((), batch, batch * tokens)


def _bound(of: Subject, shape: StepShape) -> Bound | None:
    return None if of.roofline is None else of.roofline.bound(shape)


def _peak_tflops(of: Subject) -> float:
    fp8 = isinstance(of.cost, RooflineCost) and of.cost.weights == "fp8"
    return of.gpu.fp8_dense_tflops or 0.0 if fp8 else of.gpu.bf16_dense_tflops


def _outside(of: Subject, phase: Phase, batch: int, tokens: int) -> str:
    """How a step lies outside of what a table knows, or nothing."""
    limits = step_limits(of.cost)
    if phase == "decode":
        if batch > limits.max_num_seqs:
            return f"lies beyond the {limits.max_num_seqs} sequences up to which table {limits.name} was measured"
        return limits.beyond(tokens)
    if batch * tokens > limits.max_num_batched_tokens:
        most = limits.max_num_batched_tokens
        return f"lies beyond the {most} prompt tokens up to which table {limits.name} was measured"
    return limits.below(tokens) or limits.beyond(tokens)


def _too_large(of: Subject, batch: int, tokens: int) -> str:
    """Why no GPUs of the kind would come to such a step, or nothing."""
    room = _room(of)
    if room is None:
        return f"the weights of {of.model.name} do not fit the memory of {of.tp} x {of.gpu.name}"
    if tokens > of.model.context_tokens:
        return f"{tokens:,} tokens are beyond the context of {of.model.name}, {of.model.context_tokens:,} tokens"
    if batch * tokens > room:
        return f"{batch * tokens:,} tokens are more than the {room:,} tokens of KV that fit beside the weights"
    return ""


def _room(of: Subject) -> int | None:
    """Tokens of KV beside the weights; None where not even these fit."""
    weights: WeightsDtype = of.cost.weights if isinstance(of.cost, RooflineCost) else "fp16"
    try:
        blocks = kv_block_capacity(of.model, of.gpu, of.tp, UTILIZATION, BLOCK_TOKENS, weights_dtype=weights)
    except CapacityError:
        return None
    return blocks * BLOCK_TOKENS
