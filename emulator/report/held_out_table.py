"""Held-out figures beside the roofline's, as part of the document of `pdemu validate --step-times`, and their tables.

The types stand here because the report may not import the study that fills them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from emulator.core.held_out import HeldOutSource
from emulator.report.step_errors import Errors, errors_table, percent, table_of


class HeldOutTime(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure beside the roofline's, in ms by the same measure.

    Not `scored` rows say why in `reason`; `batch` is assumed where the phase is `served`. `why` explains a scored row
    that is far off.
    """

    gpu: str
    model: str
    tp: int
    weights: str
    kv: str
    kind: str
    phase: str
    batch: int
    tokens: int
    new_tokens: int | None
    ms: float
    roofline_ms: float
    error: float
    source: str
    scored: bool
    reason: str = ""
    assumed: str = ""
    why: str = ""


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, where they are from, and their errors by kind, and by kind and phase, GPU and source."""

    sources: tuple[HeldOutSource, ...]
    rows: tuple[HeldOutTime, ...]
    groups: tuple[Errors, ...]
    notes: tuple[str, ...]


def render_held_out(found: HeldOut) -> list[RenderableType]:
    """Scored figures, explanations, figures that are listed alone, and errors."""
    scored = [row for row in found.rows if row.scored]
    listed = [row for row in found.rows if not row.scored]
    whys = list(dict.fromkeys(row.why for row in scored if row.why))
    return [
        _table("Held out", scored, whys),
        *(Text(f" [{number}] {why}") for number, why in enumerate(whys, start=1)),
        "",
        _table("Held out, listed, not scored", listed, ()),
        *(Text(f" · {_source_text(source)}") for source in found.sources),
        "",
        errors_table("Held out: errors by kind", found.groups),
        *(Text(f" · {note}") for note in found.notes),
    ]


def _source_text(source: HeldOutSource) -> str:
    assumed = f"; assumed: {source.assumed}" if source.assumed else ""
    listed = f"; not scored: {source.listed}" if source.listed else ""
    return f"{source.name}: {source.text}. Known: {source.known}{assumed}{listed}"


def _table(title: str, rows: Sequence[HeldOutTime], whys: Sequence[str]) -> Table:
    table = table_of(title, ("source", "GPU", "model", "kind", "step"), ("measured ms", "roofline ms", "error", "why"))
    for row in rows:
        table.add_row(
            row.source,
            f"{row.tp} x {row.gpu}",
            row.model,
            row.kind,
            _step_text(row),
            f"{row.ms:.3g}",
            f"{row.roofline_ms:.3g}",
            percent(row.error),
            f"[{whys.index(row.why) + 1}]" if row.why else "",
        )
    return table


def _step_text(row: HeldOutTime) -> str:
    new = "" if row.new_tokens is None else f" + {row.new_tokens:,}"
    return f"{row.phase} {row.batch} x {row.tokens:,}{new}"
