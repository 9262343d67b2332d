"""A sweep in a terminal: maps of where splitting helps and of what was best where.

A map has one axis across and one down; with more axes there is one for each of their values. Its words are those of
the verdict against the best baseline of each point, in letters where the words would not fit.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from emulator.core.grid import AXES, Axes, Axis, Outcome, PointResult
from emulator.core.quantities import BitsPerSecond
from emulator.core.specs import Slo, VerdictOutcome
from emulator.report.table import NOTHING, OUTCOME_STYLES

AXIS_NAMES: Mapping[Axis, str] = {
    "kv_bandwidth_bps": "KV bandwidth",
    "rate_per_s": "requests/s",
    "prompt_tokens": "prompt tokens",
    "output_tokens": "output tokens",
}
WORDS: Mapping[VerdictOutcome, str] = {"helps": "helps", "hurts": "hurts", "no difference": "same"}
LETTERS: Mapping[VerdictOutcome, str] = {"helps": "H", "hurts": "x", "no difference": "="}
LETTERS_TEXT = "H helps, x hurts, = no difference"
RULE_TEXT = (
    "An outcome is that of the metric that differs most against its bound, also where both meet the SLO; outcomes.csv "
    "names it."
)
WORDS_WIDTH = 7
LABEL_WIDTH = 16
MOST_PANELS = 12

Place = tuple[float | None, ...]
Cell = Callable[[PointResult], Text]


def render(results: Sequence[PointResult], axes: Axes, slo: Slo, *, width: int = 100) -> RenderableType:
    """Every map of a finished sweep, for a rich Console of `width` columns."""
    names = list(dict.fromkeys(outcome.deployment for result in results for outcome in result.outcomes))
    columns = len(axes.values(axes.varied[0])) if axes.varied else 1
    words = LABEL_WIDTH + columns * max(WORDS_WIDTH, 9) <= width
    parts: list[RenderableType] = []
    for name in names:
        title = f"{name} against the best baseline" + ("" if words else f" ({LETTERS_TEXT})")
        parts += [*_maps(title, results, axes, _outcome_cell(name, WORDS if words else LETTERS)), ""]
    if names:
        parts += [RULE_TEXT, ""]
    if not names:
        parts += ["No outcome: it takes a disaggregated and a colocated deployment on equally many GPUs.", ""]
    for gpus in sorted({best.gpus for result in results for best in result.best}):
        parts += [*_best(results, axes, gpus, slo.target), ""]
    return Group(*parts[:-1])


def axis_text(axis: Axis, value: float | None) -> str:
    """`5Gbps`, `2.5`, or a dash where the topology decides."""
    if value is None:
        return NOTHING
    return str(BitsPerSecond(value)) if axis == "kv_bandwidth_bps" else f"{value:g}"


def _best(results: Sequence[PointResult], axes: Axes, gpus: int, target: float) -> list[RenderableType]:
    """What was best where on so many GPUs: each deployment has a letter, in brackets where it misses the target."""
    winners = {result.point.index: next(best for best in result.best if best.gpus == gpus) for result in results}
    counts = Counter(best.deployment for best in winners.values())
    letters = {name: chr(ord("a") + n % 26) for n, name in enumerate(sorted(counts))}

    def cell(result: PointResult) -> Text:
        best = winners[result.point.index]
        letter = letters[best.deployment]
        return Text(letter) if (best.slo_attainment or 0.0) >= target else Text(f"({letter})", style="dim")

    title = f"Best on {gpus} GPU{'' if gpus == 1 else 's'}: the best baseline, unless a split helps against it"
    legend = [f"  {letters[name]} = {name}, at {counts[name]} of {len(results)} points" for name in letters]
    if any((best.slo_attainment or 0.0) < target for best in winners.values()):
        legend.append(f"  in brackets: even the best meets the SLO for less than {100 * target:g}% of the requests")
    return [*_maps(title, results, axes, cell), *legend]


def _outcome_cell(name: str, texts: Mapping[VerdictOutcome, str]) -> Cell:
    def cell(result: PointResult) -> Text:
        found = _against_best(result, name)
        return Text(NOTHING) if found is None else Text(texts[found.outcome], style=OUTCOME_STYLES[found.outcome])

    return cell


def _against_best(result: PointResult, name: str) -> Outcome | None:
    return next((o for o in result.outcomes if o.best_baseline and o.deployment == name), None)


@dataclass(frozen=True)
class _Layout:
    """Which axis goes across, which down, and of which there is one map for each value."""

    axes: Axes
    across: Axis | None
    down: Axis | None
    others: tuple[Axis, ...]

    @classmethod
    def of(cls, axes: Axes) -> _Layout:
        across, down = (*axes.varied, None, None)[:2]
        return cls(axes, across, down, axes.varied[2:])

    def values(self, axis: Axis | None) -> Sequence[float | None]:
        return (None,) if axis is None else self.axes.values(axis)


def _maps(title: str, results: Sequence[PointResult], axes: Axes, cell: Cell) -> list[RenderableType]:
    """One map, or one for each value of the axes beyond two."""
    layout = _Layout.of(axes)
    by_place = {_place(result.point.axes()): result for result in results}
    fixed: dict[Axis, float | None] = {axis: next(iter(axes.values(axis)), None) for axis in AXES}
    panels = list(itertools.product(*(axes.values(axis) for axis in layout.others)))
    parts: list[RenderableType] = [Text(title, style="bold")]
    for panel in panels[:MOST_PANELS]:
        chosen = fixed | dict(zip(layout.others, panel, strict=True))
        if panel:
            where = ", ".join(f"{AXIS_NAMES[axis]} {axis_text(axis, chosen[axis])}" for axis in layout.others)
            parts.append(Text(f"  {where}:"))
        parts.append(_map(layout, by_place, chosen, cell))
    if len(panels) > MOST_PANELS:
        parts.append(f"  ... and {len(panels) - MOST_PANELS} more such maps, all in outcomes.csv")
    return parts


def _map(
    layout: _Layout, by_place: Mapping[Place, PointResult], chosen: Mapping[Axis, float | None], cell: Cell
) -> Table:
    """The points at the chosen values of all axes but those across and down; `?` where a point is not there."""
    across, down = layout.across, layout.down
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    heading = " \\ ".join(AXIS_NAMES[axis] for axis in (down, across) if axis is not None)
    table.add_column(heading, justify="right", no_wrap=True)
    for value in layout.values(across):
        table.add_column(axis_text(across, value) if across else "", justify="right", no_wrap=True)
    for row in layout.values(down):
        cells = []
        for column in layout.values(across):
            there = {axis: value for axis, value in ((across, column), (down, row)) if axis is not None}
            result = by_place.get(_place({**chosen, **there}))
            cells.append(Text("?") if result is None else cell(result))
        table.add_row(axis_text(down, row) if down else "", *cells)
    return table


def _place(axes: Mapping[Axis, float | None]) -> Place:
    return tuple(axes[axis] for axis in AXES)
