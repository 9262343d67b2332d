"""Live against simulated in a terminal and in the page: one row a run, the difference of each percentile."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.console import Group, RenderableType
from rich.text import Text

from emulator.core.parity import BOUNDS, METRICS
from emulator.core.summary import Deviation, RunParity
from emulator.report.table import NOTHING, bandwidth_text, folded, percent_text, run_grid

EXPLANATION = (
    "Difference of the live run from the simulation of the same run; in parentheses both values in ms where it is "
    "above its bound (P50 and P90 3 %, P99 5 %)."
)


def render(parity: Sequence[RunParity]) -> RenderableType:
    """The table for a rich Console, and below it how many runs are within every bound."""
    grid = run_grid("Live against simulated")
    for heading in ("KV", "SLO met\nlive/sim.", *_headings("\n")):
        grid.add_column(heading, justify="right", no_wrap=heading in ("KV",))
    for run in parity:
        cells = [Text(_cell(d), style="" if d.within else "bold red") for d in run.deviations]
        grid.add_row(folded(run.deployment), bandwidth_text(run.kv_bandwidth_bps), _attainments(run), *cells)
    return Group(grid, Text(conclusion(parity)))


def parity_html(parity: Sequence[RunParity]) -> list[str]:
    """The same for the report page; nothing where no run was simulated too."""
    if not parity:
        return []
    headings = "".join(f"<th>{heading}</th>" for heading in ("", "KV", "SLO met, live / simulated", *_headings(" ")))
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{escape(cell)}</td>"
            for cell in (
                run.deployment,
                bandwidth_text(run.kv_bandwidth_bps),
                _attainments(run),
                *map(_cell, run.deviations),
            )
        )
        + "</tr>"
        for run in parity
    )
    return [
        "<h2>Live against simulated</h2>",
        f'<p class="note">{escape(EXPLANATION)} {escape(conclusion(parity))}</p>',
        f"<table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>",
    ]


def conclusion(parity: Sequence[RunParity]) -> str:
    """How many runs are within every bound, in a sentence."""
    within = sum(run.within for run in parity)
    return f"{within} of {len(parity)} runs are within every bound of their simulation."


def _headings(separator: str) -> list[str]:
    names = [metric.removesuffix("_ms").upper() for metric in METRICS]
    return [f"{name}{separator}{percentile}" for name in names for percentile in BOUNDS]


def _attainments(run: RunParity) -> str:
    return f"{percent_text(run.slo_attainment_live)}/{percent_text(run.slo_attainment_simulated)}"


def _cell(deviation: Deviation) -> str:
    if deviation.difference is None:
        return NOTHING
    text = f"{deviation.difference:+.1%}"
    if deviation.within:
        return text
    return f"{text} ({deviation.live_ms:.1f}/{deviation.simulated_ms:.1f})"
