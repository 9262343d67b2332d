"""Live against simulated in a terminal and in the page: one row a run, the difference of each percentile."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.console import Group, RenderableType
from rich.text import Text

from emulator.core.compare_summary import Deviation, RunParity
from emulator.core.parity import BOUNDS, METRICS
from emulator.report.table import NOTHING, bandwidth_text, folded, percent_text, run_grid

EXPLANATION = (
    "How far the live run is from the simulation of the same run; in parentheses both values in ms where that is more "
    "than 3 % (P99: 5 %)."
)


HEADINGS = ("KV", "SLO met\nlive/simulated", "", *BOUNDS)


def render(parity: Sequence[RunParity]) -> RenderableType:
    """The table for a rich Console, and below it how many runs are within every bound."""
    grid = run_grid("Live against simulated")
    for heading in HEADINGS:
        grid.add_column(heading, justify="right", no_wrap=True)
    for run in parity:
        whose: tuple[str | Text, ...] = (folded(run.deployment), *_of_run(run))
        for metric in METRICS:
            cells = [Text(_cell(d), style="" if d.within else "bold red") for d in _of_metric(run, metric)]
            grid.add_row(*whose, metric.removesuffix("_ms").upper(), *cells)
            whose = ("",) * len(whose)
    return Group(grid, Text(EXPLANATION), Text(conclusion(parity)))


def parity_html(parity: Sequence[RunParity]) -> list[str]:
    """The same for the report page; nothing where no run was simulated too."""
    if not parity:
        return []
    headings = "".join(f"<th>{heading}</th>" for heading in ("", *HEADINGS))
    rows = [
        (run.deployment, *_of_run(run), metric.removesuffix("_ms").upper(), *map(_cell, _of_metric(run, metric)))
        for run in parity
        for metric in METRICS
    ]
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return [
        "<h2>Live against simulated</h2>",
        f'<p class="note">{escape(EXPLANATION)} {escape(conclusion(parity))}</p>',
        f"<table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table>",
    ]


def conclusion(parity: Sequence[RunParity]) -> str:
    """How many runs are within every bound, in a sentence."""
    within = sum(run.within for run in parity)
    return f"{within} of {len(parity)} runs are within every bound of their simulation."


def _of_run(run: RunParity) -> tuple[str, str]:
    attainments = f"{percent_text(run.slo_attainment_live)}/{percent_text(run.slo_attainment_simulated)}"
    return bandwidth_text(run.kv_bandwidth_bps), attainments


def _of_metric(run: RunParity, metric: str) -> list[Deviation]:
    return [deviation for deviation in run.deviations if deviation.metric == metric]


def _cell(deviation: Deviation) -> str:
    if deviation.difference is None:
        return NOTHING
    text = f"{deviation.difference:+.1%}"
    if deviation.within:
        return text
    return f"{text} ({deviation.live_ms:.1f}/{deviation.simulated_ms:.1f})"
