"""Measured step times beside those of the cost models: the document of `pdemu validate --step-times`, and its tables.

The types stand here because the report may not import the study that fills them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from emulator.report.held_out_table import HeldOut, render_held_out
from emulator.report.step_errors import NOTHING, Errors, errors_table, percent, table_of


class Modelled(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile or table of the catalog gives for a step; `error` is it over the measured time, less 1."""

    profile: str
    ms: float
    error: float


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """One published step beside the models.

    Not `scored` rows say why in `reason`; where the source has no tokens, `implied_tokens` are those at which the
    roofline takes as long. `why` explains a scored row that is far off.
    """

    gpu: str
    model: str
    tp: int
    phase: str
    batch: int
    tokens: int | None
    ms: float
    source: str
    group: str
    in_sample: bool
    scored: bool
    reason: str = ""
    roofline_ms: float | None = None
    roofline_error: float | None = None
    implied_tokens: int | None = None
    profiles: tuple[Modelled, ...] = ()
    why: str = ""


class SizeErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Absolute errors of the roofline over the prefills of one GPU's sweeps with prompts of `tokens` each."""

    gpu: str
    tokens: int
    n: int
    median: float
    worst: float


class MixedTime(msgspec.Struct, frozen=True, kw_only=True):
    """Decodes beside a chunk of prompts, with an assumed chunk, since the source does not state it.

    `implied_chunk_tokens` are those at which the model takes as long as was measured.
    """

    gpu: str
    model: str
    batch: int
    assumed_chunk_tokens: int
    assumed_context: int
    cost: str
    decode_measured_ms: float
    decode_ms: float
    mixed_measured_ms: float
    mixed_ms: float
    error: float
    slows_prefill: float
    implied_chunk_tokens: int | None


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document."""

    steps: tuple[StepTime, ...]
    groups: tuple[Errors, ...]
    sweeps: tuple[Errors, ...]
    sizes: tuple[SizeErrors, ...]
    mixed: tuple[MixedTime, ...]
    held_out: HeldOut
    notes: tuple[str, ...]


def render(found: StepTimes) -> RenderableType:
    """Every step, then errors by group and over the sweeps, mixed steps, and what explains and qualifies them."""
    scored = [step for step in found.steps if step.scored]
    listed = [step for step in found.steps if not step.scored]
    whys = list(dict.fromkeys(step.why for step in scored if step.why))
    return Group(
        _steps_table("Measured steps", scored, whys),
        *(Text(f" [{number}] {why}") for number, why in enumerate(whys, start=1)),
        "",
        _listed_table(listed),
        "",
        errors_table("Errors by kind", found.groups),
        "",
        errors_table("Against the sweeps of single steps", found.sweeps),
        "",
        _sizes_table(found.sizes),
        "",
        _mixed_table(found.mixed),
        "",
        *render_held_out(found.held_out),
        "",
        *(Text(f" · {note}") for note in found.notes),
    )


def _steps_table(title: str, steps: Sequence[StepTime], whys: Sequence[str]) -> Table:
    table = table_of(
        title,
        ("kind", "GPU", "model", "step"),
        ("measured ms", "roofline ms", "error", "profile ms", "error", "why"),
    )
    for step in steps:
        own = step.profiles[0] if step.profiles else None
        table.add_row(
            step.group + (" (in-sample)" if step.in_sample else ""),
            f"{step.tp} x {step.gpu}",
            step.model,
            _step_text(step),
            f"{step.ms:g}",
            NOTHING if step.roofline_ms is None else f"{step.roofline_ms:.2f}",
            percent(step.roofline_error),
            NOTHING if own is None else f"{own.ms:.2f}",
            NOTHING if own is None else percent(own.error),
            f"[{whys.index(step.why) + 1}]" if step.why else "",
        )
    return table


def _listed_table(steps: Sequence[StepTime]) -> Table:
    table = table_of(
        "Listed, not scored",
        ("source", "GPU", "model", "step"),
        ("measured ms", "roofline ms", "implied context", "reason"),
    )
    for step in steps:
        table.add_row(
            step.source,
            f"{step.tp} x {step.gpu}",
            step.model,
            _step_text(step),
            f"{step.ms:g}",
            NOTHING if step.roofline_ms is None else f"{step.roofline_ms:.2f} ({percent(step.roofline_error)})",
            NOTHING if step.implied_tokens is None else f"{step.implied_tokens:,}",
            step.reason,
        )
    return table


def _sizes_table(sizes: Sequence[SizeErrors]) -> Table:
    """By prompt length down and GPU across."""
    gpus = list(dict.fromkeys(size.gpu for size in sizes))
    by_place = {(size.gpu, size.tokens): size for size in sizes}
    table = table_of(
        "Prefill sweeps by prompt length: median and worst of the roofline, in-sample", (), ("tokens", *gpus)
    )
    for tokens in sorted({size.tokens for size in sizes}):
        cells = [by_place.get((gpu, tokens)) for gpu in gpus]
        texts = [NOTHING if c is None else f"{percent(c.median, signed=False)}, {percent(c.worst)}" for c in cells]
        table.add_row(f"{tokens:,}", *texts)
    return table


def _mixed_table(mixed: Sequence[MixedTime]) -> Table:
    table = table_of(
        "Decodes beside a chunk of prompts (assumed chunk and context: see below)",
        ("step", "by"),
        ("alone ms", "measured", "mixed ms", "measured", "error", "slows prefill", "implied chunk"),
    )
    for step in mixed:
        table.add_row(
            f"{step.batch} decodes + {step.assumed_chunk_tokens:,} tokens on {step.gpu}",
            step.cost,
            f"{step.decode_ms:.1f}",
            f"{step.decode_measured_ms:g}",
            f"{step.mixed_ms:.1f}",
            f"{step.mixed_measured_ms:g}",
            percent(step.error),
            percent(step.slows_prefill),
            NOTHING if step.implied_chunk_tokens is None else f"{step.implied_chunk_tokens:,}",
        )
    return table


def _step_text(step: StepTime) -> str:
    tokens = "?" if step.tokens is None else f"{step.tokens:,}"
    return f"{step.phase} {step.batch} x {tokens}"
