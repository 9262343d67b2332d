"""A trace's statistics for a terminal."""

from __future__ import annotations

from rich.table import Table

from emulator.core.trace_selection import counted
from emulator.core.trace_summary import Lengths, TraceSummary, changes, time_text

_HEADINGS = ("min", "p50", "mean", "p90", "p99", "max")


def head(found: TraceSummary) -> list[str]:
    """Lines about how the file was read and how its requests come."""
    reading = found.reading
    lines = [
        f"{reading.file}: {reading.format}, {time_text(reading, timed=found.duration_s is not None)}",
        f"{counted(reading.rows_read, 'row')} read, {reading.rows_used:,} used",
        *changes(reading),
    ]
    if reading.ignored:
        lines.append(f"not looked at: {', '.join(reading.ignored)}")
    if found.duration_s is not None:
        lines.append(_arrivals(found, found.duration_s))
    return lines


def lengths(found: TraceSummary) -> Table:
    """How long the requests are."""
    table = Table(box=None)
    table.add_column("tokens")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    table.add_row("prompt", *_cells(found.prompt_tokens))
    table.add_row("output", *_cells(found.output_tokens))
    return table


def _arrivals(found: TraceSummary, duration_s: float) -> str:
    if found.rate_per_s is None:
        return f"{duration_s:,.3f} s: all requests come at one instant"
    cv = "-" if found.inter_arrival_cv is None else f"{found.inter_arrival_cv:.3f}"
    return f"{duration_s:,.3f} s, {found.rate_per_s:.4g} requests/s, CV of inter-arrivals {cv}"


def _cells(found: Lengths) -> list[str]:
    return [f"{round(getattr(found, heading), 2):,}".removesuffix(".0") for heading in _HEADINGS]
