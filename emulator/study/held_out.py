"""Published measurements to which nothing was fitted, against the roofline, and what explains where it is far off."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

import msgspec

from emulator.core import roofline
from emulator.core.cost import Chunk, RooflineCost, StepShape, kv_block_capacity
from emulator.core.hardware import FP16_BYTES, Catalog
from emulator.core.held_out import (
    HeldOutSource,
    HeldOutStep,
    Kind,
    kind_of,
    parse_held_out,
    parse_held_out_sources,
)
from emulator.report.held_out_table import HeldOut, HeldOutTime
from emulator.report.step_errors import Errors
from emulator.study.step_models import Models, errors

FAR = 0.25
"""Beyond what error a row is an outlier, as for measurements of engines elsewhere."""

KINDS: tuple[Kind, ...] = ("16-bit dense", "fp8 dense", "16-bit MoE", "fp8 MoE", "16-bit MLA", "fp8 MLA")

UTILIZATION = 0.92
SERVED_CHUNK = 8192
"""Prompt tokens of a step under in-flight batching: assumed, the source does not state them."""

NEARLY_ALL = 0.95
"""From what expected share of the experts on a step is taken to read all weights."""

IMPLAUSIBLE_RATE = 0.9
"""Beyond what share of the datasheet's memory rate no stream reads all weights: they reach 0.78 to 0.88."""

NCCL_BASE_S, NCCL_HOP_S = 8.4e-6, {"NVLink": 3.4e-6, "PCIe": 5.7e-6}
"""Latency of a ring all-reduce and of each of its steps, protocol Simple: src/graph/tuning.cc of NCCL."""

SLOWEST_NVLINK_GB_PER_S = 100

SHORT_PROMPT = 128
ALIKE_MS = 1.0
"""Within what two GPUs miss the same time, for this to be the host's."""

NOTES = (
    "held out: no figure of the models was fitted to any of these rows; but their errors were known when the rules for "
    "fp8, output heads and fixed times of layers were revised from other sources",
    "what is said of outliers are calculations that could explain them, not findings about the engines",
    "a run is a batch prefilled and decoded to its end: ms for one token of each sequence, its share of the prefill in "
    "it, against the same sum of modelled steps",
)


class HeldOutFiles(NamedTuple):
    """What the catalog has of them."""

    steps: tuple[HeldOutStep, ...]
    sources: dict[str, HeldOutSource]


@cache
def load_held_out() -> HeldOutFiles:
    """Read the shipped files, once a process."""
    folder = resources.files("emulator") / "catalog"
    sources = tomllib.loads((folder / "held_out.toml").read_text(encoding="utf-8"))
    steps = parse_held_out((folder / "held_out.csv").read_text(encoding="utf-8"), "held_out.csv")
    return HeldOutFiles(tuple(steps), parse_held_out_sources(sources, "held_out.toml"))


def validate_held_out(catalog: Catalog) -> HeldOut:
    """Every held-out figure beside the roofline's, errors by kind, and by kind and GPU or source."""
    files, models = load_held_out(), Models(catalog)
    times = [_modelled(step, files.sources[step.source], models) for step in files.steps]
    rows = tuple(
        _explained(step, time, tuple(zip(files.steps, times, strict=True)), files.sources[step.source], models)
        for step, time in zip(files.steps, times, strict=True)
    )
    return HeldOut(sources=tuple(files.sources.values()), rows=rows, groups=tuple(_groups(rows)), notes=NOTES)


def held_out_errors(catalog: Catalog, gpu: str, kind: Kind, *, listed: bool = False) -> Errors:
    """Errors of the scored figures of one kind on one GPU, or of those that are listed alone."""
    files, models = load_held_out(), Models(catalog)
    known = {model.name: model for model in catalog.models}
    found = [
        _modelled(step, files.sources[step.source], models).error
        for step in files.steps
        if step.gpu == gpu
        and kind_of(known[step.model], step.weights) == kind
        and bool(files.sources[step.source].listed) == listed
    ]
    return errors(f"{kind} on {gpu}", "roofline", found, in_sample=False)


def _groups(rows: Sequence[HeldOutTime]) -> Iterator[Errors]:
    """Errors by kind, and within each by phase, GPU and source; then of what is listed alone."""
    for kind in KINDS:
        scored = [row for row in rows if row.kind == kind and row.scored]
        if scored:
            yield _error(kind, scored)
        for by in ("phase", "gpu", "source"):
            for value in dict.fromkeys(getattr(row, by) for row in scored):
                yield _error(f"{kind}, {value}", [row for row in scored if getattr(row, by) == value])
    listed = [row for row in rows if not row.scored]
    for of in dict.fromkeys((row.kind, row.source) for row in listed):
        part = [row for row in listed if (row.kind, row.source) == of]
        yield _error(f"listed, not scored: {', '.join(of)}", part)


def _error(name: str, rows: Sequence[HeldOutTime]) -> Errors:
    return errors(name, "roofline", [row.error for row in rows], in_sample=False)


# --- single figures ---------------------------------------------------------------------------------------------


def _modelled(step: HeldOutStep, source: HeldOutSource, models: Models) -> HeldOutTime:
    cost = _cost(step, models)
    batch = step.batch or _held(step, cost)
    ms = _ms(step, cost, batch)
    return HeldOutTime(
        gpu=step.gpu,
        model=step.model,
        tp=step.tp,
        weights=step.weights,
        kv=step.kv,
        kind=kind_of(cost.model, step.weights),
        phase=step.phase,
        batch=batch,
        tokens=step.tokens,
        new_tokens=step.new_tokens,
        ms=step.ms,
        roofline_ms=ms,
        error=ms / step.ms - 1,
        source=step.source,
        scored=not source.listed,
        reason=source.listed,
        assumed=source.assumed,
    )


def _cost(step: HeldOutStep, models: Models) -> RooflineCost:
    return models.roofline(step.model, step.gpu, step.tp, step.weights, 1 if step.kv == "fp8" else FP16_BYTES)


def _ms(step: HeldOutStep, cost: RooflineCost, batch: int) -> float:
    """What the roofline has for a figure, by the same measure (see HeldOutStep.ms)."""
    if step.phase == "decode":
        return cost.step_s(StepShape((), batch, batch * step.tokens)) * 1e3
    if step.phase == "prefill":
        return _prefill_s(cost, batch, step.tokens) * 1e3
    new = step.new_tokens or 1
    if step.phase == "run":
        return (_prefill_s(cost, batch, step.tokens) + _decode_s(cost, batch, step.tokens, new - 1)) / new * 1e3
    together = max(1, SERVED_CHUNK // step.tokens)
    prefill_s = _prefill_s(cost, together, step.tokens) / together
    decode_s = cost.step_s(StepShape((), batch, batch * (step.tokens + new // 2))) / batch
    return (prefill_s / new + decode_s) * 1e3


def _prefill_s(cost: RooflineCost, batch: int, tokens: int) -> float:
    return cost.step_s(StepShape((Chunk(tokens, 0),) * batch, 0, 0))


def _decode_s(cost: RooflineCost, batch: int, context: int, steps: int) -> float:
    """`steps` decode steps in a row, the first at `context` tokens each."""
    seconds, done = 0.0, 0
    while done < steps:
        found = cost.decode_steps_s(batch, batch * (context + done), steps - done)
        seconds, done = seconds + sum(found), done + len(found)
    return seconds


def _held(step: HeldOutStep, cost: RooflineCost) -> int:
    """Requests that the memory holds to their end."""
    tokens = step.tokens + (step.new_tokens or 0)
    blocks = kv_block_capacity(
        cost.model,
        cost.gpu,
        cost.tp,
        UTILIZATION,
        1,
        kv_element_bytes=cost.kv_element_bytes,
        weights_dtype=cost.weights,
    )
    return max(1, blocks // tokens)


# --- explanations -----------------------------------------------------------------------------------------------

_Row = tuple[HeldOutStep, HeldOutTime]


def _explained(
    step: HeldOutStep, time: HeldOutTime, rows: Sequence[_Row], source: HeldOutSource, models: Models
) -> HeldOutTime:
    """The figure with what calculations offer for why it is far from the roofline's."""
    if not time.scored or abs(time.error) <= FAR:
        return time
    cost = _cost(step, models)
    slower = time.error < 0  # the engine, than the roofline
    reasons = [
        "" if slower else _implausible(step, time, cost) or _without_overhead(time, cost),
        _other_version(step, time, rows) if slower else "",
        _ungrouped(step, time, cost, source.grouped_attention) if slower and source.grouped_attention else "",
        _all_reduce(time, cost) if slower else "",
        _host(step, time, rows) if slower else "",
    ]
    why = "; ".join(reason for reason in reasons if reason) or "not explained"
    return msgspec.structs.replace(time, why=why)


def _implausible(step: HeldOutStep, time: HeldOutTime, cost: RooflineCost) -> str:
    """Whether the figure leaves no time to read the weights."""
    model, tokens = cost.model, time.batch * (step.tokens if step.phase == "prefill" else 1)
    touched = 1 - (1 - model.moe.experts_per_token / model.moe.experts) ** tokens if model.moe is not None else 1.0
    floor_ms = roofline.weight_bytes(model, cost.weights) / cost.tp / (cost.gpu.memory_gb_per_s * 1e6)
    if touched < NEARLY_ALL or floor_ms < IMPLAUSIBLE_RATE * step.ms:
        return ""
    return (
        f"reading all {cost.weights} weights in the published time takes {floor_ms / step.ms:.0%} of the datasheet's "
        "memory rate: fewer experts or smaller weights were read"
    )


def _without_overhead(time: HeldOutTime, cost: RooflineCost) -> str:
    """Whether the fixed time of layers, fitted to vLLM's kernels, is what the engine does not have."""
    fixed_ms = cost.fixed_s * 1e3
    if time.roofline_ms - fixed_ms > time.ms * (1 + FAR):
        return ""
    return (
        f"the fixed time of layers ({fixed_ms:.1f} of {time.roofline_ms:.1f} ms) is that of vLLM's kernels; an engine "
        "that compiles a step whole may have less"
    )


def _other_version(step: HeldOutStep, time: HeldOutTime, rows: Sequence[_Row]) -> str:
    """Whether another version of the engine is nearer for the same."""
    same = ("gpu", "model", "tp", "weights", "phase", "batch", "tokens", "new_tokens")
    for other, found in rows:
        alike = all(getattr(other, name) == getattr(step, name) for name in same)
        if alike and other.source != step.source and abs(found.error) < 0.75 * abs(time.error):
            return f"{other.source} takes {other.ms:.1f} ms for the same ({found.error:+.0%})"
    return ""


def _ungrouped(step: HeldOutStep, time: HeldOutTime, cost: RooflineCost, known: str) -> str:
    """Whether attention that reads KV for every query head anew would take longer than was measured."""
    model, gpu = cost.model, cost.gpu
    if step.new_tokens is None or model.heads == model.kv_heads or gpu.mbu is None:
        return ""
    kv = model.kv_bytes_per_token(cost.kv_element_bytes)
    more = kv * (model.heads / model.kv_heads / cost.tp - 1 / roofline.kv_shards(model, cost.tp))
    context = time.batch * (step.tokens + step.new_tokens / 2)
    most_ms = time.roofline_ms + more * context / (gpu.memory_gb_per_s * 1e9 * gpu.mbu) * 1e3
    if most_ms < step.ms:
        return ""
    return f"reading KV once for every query head would take {most_ms:.1f} ms, and {known}"


def _all_reduce(time: HeldOutTime, cost: RooflineCost) -> str:
    """Whether NCCL's own latencies, where one-shot kernels are modelled, fill much of what is missing."""
    if cost.tp == 1:
        return ""
    link = "NVLink" if cost.gpu.link_gb_per_s_per_direction >= SLOWEST_NVLINK_GB_PER_S else "PCIe"
    hops = 2 * (cost.tp - 1)
    more_ms = 2 * cost.model.layers * (NCCL_BASE_S + hops * (NCCL_HOP_S[link] - roofline.LINK_HOP_S)) * 1e3
    missing_ms = time.ms - time.roofline_ms
    if more_ms < missing_ms / 4:
        return ""
    return (
        f"all-reduces by NCCL's rings (latencies of its tuning.cc) instead of one-shot kernels would take "
        f"{more_ms:.1f} of the {missing_ms:.1f} ms missing; which the engine used is not stated"
    )


def _host(step: HeldOutStep, time: HeldOutTime, rows: Sequence[_Row]) -> str:
    """Whether a short prompt misses the same time on another GPU."""
    if step.phase != "prefill" or step.tokens > SHORT_PROMPT:
        return ""
    same = ("model", "tp", "weights", "phase", "batch", "tokens", "source")
    missing_ms = time.ms - time.roofline_ms
    for other, found in rows:
        if other.gpu == step.gpu or any(getattr(other, name) != getattr(step, name) for name in same):
            continue
        there_ms = found.ms - found.roofline_ms
        if abs(there_ms - missing_ms) <= ALIKE_MS:
            return (
                f"{missing_ms:.1f} ms are missing here and {there_ms:.1f} ms on {other.gpu}, whatever the GPU's rates, "
                "as a fixed time of the engine would be"
            )
    return ""
