"""Step times of a cost model as a table and under their roofline, in a terminal; and errors of a profile's fit.

The types stand here because the report may not import the study that fills them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from emulator.core.cost import Bound
from emulator.core.profile_fit import Phase, ProfileFit
from emulator.report.step_errors import NOTHING, percent, table_of

WIDTH, HEIGHT = 64, 16
DECADES = 3
"""How far down the plot's y axis reaches."""

BOUND_STYLES: dict[Bound | None, str] = {
    "compute": "red",
    "memory": "blue",
    "communication": "magenta",
    "overhead": "yellow",
    None: "dim",
}


class StepPoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step: how long, what takes most of it (by the roofline; null without one), and who says so.

    `fits` is false and `note` says why where the GPUs' memory or the model's context is too small for it.
    """

    ms: float
    bound: Bound | None
    source: str
    fits: bool = True
    note: str = ""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One of the steps shown; FLOPs and bytes are those of one GPU, null where no roofline tells them.

    `fits` says whether so much KV fits beside the weights.
    """

    phase: Phase
    batch: int
    tokens: int
    ms: float
    bound: Bound | None
    fits: bool
    flops_per_byte: float | None
    tflops: float | None


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU can do at most, from its datasheet."""

    peak_tflops: float
    memory_gb_per_s: float

    def tflops(self, flops_per_byte: float) -> float:
        """The most at an intensity."""
        return min(self.peak_tflops, flops_per_byte * self.memory_gb_per_s / 1e3)


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of a model on a GPU; `kv_tokens` fit beside the weights, null where not even these do."""

    model: str
    gpu: str
    tp: int
    source: str
    kv_tokens: int | None
    roof: Roof
    steps: tuple[Step, ...]


def render(found: Profiled) -> RenderableType:
    """Prefill by prompt length, decode by batch and context, and both under the roofline."""
    parts: list[RenderableType] = [
        Text(f"{found.model} on {found.tp} x {found.gpu}", style="bold"),
        Text(found.source, style="dim"),
        "",
        _prefill_table([step for step in found.steps if step.phase == "prefill"]),
        "",
        _decode_table([step for step in found.steps if step.phase == "decode"]),
        *_footnotes(found),
    ]
    if any(step.tflops is not None for step in found.steps):
        parts += ["", _plot(found)]
    return Group(*parts)


def render_point(point: StepPoint) -> Text:
    """One step in a line."""
    mark = "" if point.fits else "*"
    line = Text(f"{point.ms:.3f} ms{mark}, bound by {point.bound or 'what no roofline tells'} ({point.source})")
    if point.note:
        line.append(f"\n* {point.note}", style="yellow")
    return line


def render_fit(found: ProfileFit) -> RenderableType:
    """What the fit makes of each measurement."""
    table = table_of("Measured and fitted", ("line", "step"), ("measured ms", "fitted ms", "error"))
    for row in found.rows:
        what = f"prefill {row.batch} x {row.tokens:,}" if row.phase == "prefill" else f"decode {row.batch}"
        after = f" after {row.context:,}" if row.phase == "prefill" and row.context else ""
        at = f" x {row.context:,}" if row.phase == "decode" else ""
        table.add_row(str(row.line), what + after + at, f"{row.ms:g}", f"{row.fitted_ms:.3f}", percent(row.error))
    lines = [
        Text(f"{name}: {error.rows} rows, mean error {error.mean:.1%}, worst {error.worst:+.1%}")
        for name, error in (("prefill", found.prefill), ("decode", found.decode))
    ]
    return Group(table, *lines)


# --- tables -----------------------------------------------------------------------------------------------------


def _prefill_table(steps: Sequence[Step]) -> Table:
    table = table_of("Prefill of one prompt", (), ("tokens", "ms", "tokens/s", "TFLOP/s a GPU", "bound by"))
    for step in steps:
        table.add_row(
            f"{step.tokens:,}",
            _ms(step),
            f"{step.tokens / step.ms * 1e3:,.0f}",
            NOTHING if step.tflops is None else f"{step.tflops:.0f}",
            _bound(step),
        )
    return table


def _decode_table(steps: Sequence[Step]) -> Table:
    contexts = sorted({step.tokens for step in steps})
    table = table_of(
        "Decode step by context of each sequence",
        (),
        ("sequences", *(f"{tokens:,} tokens: ms, bound by" for tokens in contexts)),
    )
    by_size = {(step.batch, step.tokens): step for step in steps}
    for batch in sorted({step.batch for step in steps}):
        cells: list[RenderableType] = [f"{batch}"]
        for tokens in contexts:
            step = by_size.get((batch, tokens))
            cells.append(NOTHING if step is None else Text.assemble(_ms(step), " ", _bound(step)))
        table.add_row(*cells)
    return table


def _footnotes(found: Profiled) -> list[Text]:
    if found.kv_tokens is None:
        return [Text("The weights do not fit the memory of so many GPUs.", style="yellow")]
    if all(step.fits for step in found.steps):
        return []
    return [Text(f"* more than the {found.kv_tokens:,} tokens of KV that fit beside the weights", style="dim")]


def _ms(step: Step) -> str:
    return f"{step.ms:.2f}{'' if step.fits else '*'}"


def _bound(step: Step) -> Text:
    return Text(step.bound or NOTHING, style=BOUND_STYLES[step.bound])


# --- the plot -------------------------------------------------------------------------------------------------


def _plot(found: Profiled) -> Text:
    """TFLOP/s of one GPU over FLOPs a byte, both logarithmic; prefill and decode under the datasheet's roof."""
    points = [
        (step.flops_per_byte, step.tflops, step.phase[0])
        for step in found.steps
        if step.flops_per_byte is not None and step.tflops is not None
    ]
    left, right = math.log10(min(x for x, _, _ in points)), math.log10(max(x for x, _, _ in points))
    top = math.log10(found.roof.peak_tflops)
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]

    def row_of(tflops: float) -> int:
        return min(HEIGHT - 1, max(0, round((top - math.log10(tflops)) / DECADES * (HEIGHT - 1))))

    def column_of(intensity: float) -> int:
        return round((math.log10(intensity) - left) / max(right - left, 1e-9) * (WIDTH - 1))

    for column in range(WIDTH):
        intensity = 10 ** (left + column / (WIDTH - 1) * (right - left))
        tflops = found.roof.tflops(intensity)
        cells[row_of(tflops)][column] = "-" if tflops == found.roof.peak_tflops else "/"
    for intensity, tflops, mark in points:
        cells[row_of(tflops)][column_of(intensity)] = mark
    lines = ["Roofline: TFLOP/s of a GPU over FLOPs a byte, both logarithmic; p prefill, d decode"]
    for number, line in enumerate(cells):
        value = f"{10 ** (top - number / (HEIGHT - 1) * DECADES):.3g}" if number % 5 == 0 else ""
        lines.append(f"{value:>8} |{''.join(line)}")
    lines.append(f"{'':>8} +{'-' * WIDTH}")
    lines.append(f"{'':>8}  {10**left:<{WIDTH // 2}.3g}{10**right:>{WIDTH // 2}.3g}")
    return Text("\n".join(lines))
