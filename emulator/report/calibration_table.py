"""A calibration in a terminal: rates beside the datasheet's, steps, interference, mixed steps, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from emulator.core.calibration import ACTIVITIES, SHARINGS, Calibration, Spread, norm_error
from emulator.core.datasheet import Share
from emulator.core.hardware import Gpu
from emulator.core.step_shape import MIXED_NORM
from emulator.report.step_errors import NOTHING, percent, table_of

FIGURE_COLUMNS = ("median", "least", "most", "samples")


def render(found: Calibration, gpu: Gpu | None, shares: Sequence[Share]) -> RenderableType:
    """Everything that was measured; `shares` are those of the datasheet of `gpu`, where the catalog has it."""
    parts: list[RenderableType] = [
        Text(found.device if found.driver in found.device else f"{found.device} ({found.driver})", style="bold"),
        Text(f"{found.measured_at}, in {found.took_s:.0f} s{', quick' if found.quick else ''}", style="dim"),
        "",
        _rates(found),
    ]
    if gpu is not None and shares:
        parts += ["", _datasheet(gpu, shares)]
    if found.steps:
        parts += ["", _steps(found)]
    if found.interference:
        parts += ["", _interference(found)]
    if found.mixed is not None:
        parts += ["", _mixed(found)]
    return Group(*parts, *_left_out(found))


def _rates(found: Calibration) -> Table:
    table = table_of("Alone", ("what", "unit"), FIGURE_COLUMNS)
    for gemm in found.gemms:
        table.add_row(f"GEMM K {gemm.k}, {gemm.operands}", "TFLOP/s", *_figures(gemm.tflops))
    if found.read is not None:
        table.add_row("read", "GB/s", *_figures(found.read.gb_per_s))
        table.add_row("read, its launch", "µs", *_figures(found.read.launch_us))
    for copy in found.copies:
        table.add_row(f"copy {copy.direction}", "GB/s", *_figures(copy.gb_per_s))
    if found.fill is not None:
        table.add_row("small kernel, an iteration", "µs", *_figures(found.fill.iteration_us))
        table.add_row("small kernel, its launch", "µs", *_figures(found.fill.launch_us))
    if found.launch is not None:
        table.add_row("launch after launch, host and GPU", "µs", *_figures(found.launch.device_us))
        table.add_row("launch, the host's call", "µs", *_figures(found.launch.call_us))
    return table


def _datasheet(gpu: Gpu, shares: Sequence[Share]) -> RenderableType:
    table = table_of(
        f"Against the datasheet of {gpu.name}", ("what", "unit"), ("measured", "datasheet", "share", "catalog's")
    )
    for one in shares:
        table.add_row(
            one.what,
            one.unit,
            f"{one.measured:.4g}",
            f"{one.datasheet:.4g}",
            percent(one.share, signed=False),
            percent(one.catalog, signed=False),
        )
    return Group(table, Text(gpu.source, style="dim"))


def _steps(found: Calibration) -> RenderableType:
    table = table_of(
        "Steps alone: how much longer than asked, at the median and at worst",
        ("work", "loop"),
        ("ms", "step", "worst", "its work", "worst", "factor", "rate", "samples"),
    )
    for step in found.steps:
        unit = "TFLOP/s" if step.activity == "prefill" else "GB/s"
        table.add_row(
            step.activity,
            step.loop,
            f"{step.target_ms:g}",
            percent(step.error.median),
            percent(_worst(step.error)),
            percent(step.work_error.median),
            percent(_worst(step.work_error)),
            f"{step.factor:.3f}",
            NOTHING if step.rate is None else f"{step.rate.median:.4g} {unit}",
            str(step.error.n),
        )
    return table


def _interference(found: Calibration) -> RenderableType:
    table = table_of(
        "Interference: how many times longer the first takes beside the other, median (least to most)",
        ("on", "what"),
        tuple(f"beside {beside}" for beside in ACTIVITIES),
    )
    by_cell = {(cell.sharing, cell.activity, cell.beside): cell.slowdown for cell in found.interference}
    for sharing in SHARINGS:
        for activity in ACTIVITIES:
            cells = [by_cell.get((sharing, activity, beside)) for beside in ACTIVITIES]
            if any(cell is not None for cell in cells):
                table.add_row(sharing, activity, *map(_slowdown, cells))
    return table


def _mixed(found: Calibration) -> RenderableType:
    assert found.mixed is not None
    table = table_of(
        "Mixed steps: GEMMs beside a read on a second stream",
        (),
        ("tokens", "GEMMs ms", "read ms", "together ms", f"p-norm {MIXED_NORM:g}"),
    )
    for point in found.mixed.points:
        table.add_row(
            f"{point.tokens:,}",
            *(f"{spread.median:.3f}" for spread in (point.gemm_ms, point.read_ms, point.together_ms)),
            percent(norm_error(point)),
        )
    return Group(table, Text(f"p that fits best: {found.mixed.norm:.2f} (the model of mixed steps has {MIXED_NORM:g})"))


def _left_out(found: Calibration) -> list[Text]:
    """A line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for line in found.left_out:
        what, _, why = line.partition(": ")
        by_reason.setdefault(why, []).append(what)
    return [Text(f"Not measured ({why}): {'; '.join(whats)}", style="yellow") for why, whats in by_reason.items()]


def _figures(spread: Spread) -> tuple[str, ...]:
    return (*(f"{value:.4g}" for value in (spread.median, spread.min, spread.max)), str(spread.n))


def _worst(spread: Spread) -> float:
    return max(spread.min, spread.max, key=abs)


def _slowdown(spread: Spread | None) -> str:
    return NOTHING if spread is None else f"{spread.median:.2f} ({spread.min:.2f} to {spread.max:.2f})"
