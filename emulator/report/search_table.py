"""Goodput, or the tightest SLO, in a terminal: a row for each deployment and KV bandwidth, and what bounds it below.

Built to be read at 100 columns, as the comparison is.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from emulator.core.metrics import bounds_ms
from emulator.core.quantities import Seconds
from emulator.core.search import Goodput
from emulator.core.search_summary import Advantage, LivePoint, SearchSummary
from emulator.core.slo_scale import SloScale
from emulator.core.upkeep import per_kj
from emulator.core.verdict_text import METRIC_NAMES
from emulator.report.device_lines import sharing_lines
from emulator.report.table import NAME_WIDTH, NOTHING, WIDE, bandwidth_text, figure_text, ms_text, percent_text

SLO_HEADINGS = ("decided\nby", "met at\nSLO as is", "tighter\nthan best")
GOODPUT_HEADINGS = (
    "KV",
    "GPUs",
    "goodput\nreq/s",
    "95 %\ninterval",
    "per GPU\nreq/s",
    "per\ndollar",
    "per\nkJ",
    "fails at\nreq/s",
    "of best\ncolocated",
)
GOODPUT_LEFT_OUT_WHEN_NARROW = ("GPUs", "per\ndollar", "per\nkJ")
LIVE_TITLE = "SLO attainment, simulated against live (one seed)"
MISSING_END = "A missing end of an interval (-): no run was clear of the target on that side."

Row = Goodput | SloScale


def render(found: SearchSummary, *, width: int = WIDE) -> RenderableType:
    """What a terminal of `width` columns shows of a search; for a rich Console."""
    narrow = width < WIDE
    rows: Sequence[Row] = found.goodput or found.slo_scale
    table = goodput_table(found, narrow=narrow) if found.goodput else slo_table(found, narrow=narrow)
    parts: list[RenderableType] = [Text(title(found), style="bold"), table]
    parts += [Padding(Text(line, style="yellow"), (0, 1)) for line in remarks(rows, found.advantages)]
    if any(_seeds(row) > 1 and None in _ends(row) for row in rows):
        parts.append(Padding(Text(MISSING_END), (0, 1)))
    if found.goodput and not narrow:
        parts.append(Padding(Text(f"Per dollar and kJ: {found.cost_basis}."), (0, 1)))
    if found.live:
        parts += ["", Text(LIVE_TITLE, style="bold"), live_table(found.live)]
        parts += [Padding(Text(line), (0, 1)) for line in live_lines(found.live)]
    return Group(*parts)


def title(found: SearchSummary) -> str:
    """What the table shows, and from which runs."""
    share = f"{100 * found.slo.target:.4g}% of requests"
    runs = f"simulated, {found.seeds} {'seed' if found.seeds == 1 else 'seeds'} of {Seconds(found.duration_s)}"
    if found.goodput:
        return f"Goodput: the highest rate at which {share} meet the SLO ({runs})"
    rate = found.slo_scale[0].rate_per_s
    at = "" if rate is None else f" at {rate_text(rate)} requests/s"
    return f"Tightest multiple of the SLO that {share} meet{at} ({runs})"


def goodput_table(found: SearchSummary, *, narrow: bool = False) -> Table:
    """One row a search: goodput in total and per GPU, its interval, and how it compares, in requests per second.

    What a dollar and a kJ buy is in requests. A `narrow` one leaves it out, and the number of GPUs.
    """
    left_out = GOODPUT_LEFT_OUT_WHEN_NARROW if narrow else ()
    table = _table([heading for heading in GOODPUT_HEADINGS if heading not in left_out])
    for row, advantage in zip(found.goodput, found.advantages, strict=True):
        more, less = _at_least(row), row.rate_per_s is None
        cells = (
            bandwidth_text(row.kv_bandwidth_bps),
            str(row.gpus),
            f"< {rate_text(row.next_rate_per_s)}" if less else f"{more}{rate_text(row.rate_per_s)}",
            interval_text(row.low_per_s, row.high_per_s),
            NOTHING if row.per_gpu is None else f"{more}{rate_text(row.per_gpu)}",
            _bought(row.requests_per_usd, more),
            _bought(per_kj(row.requests_per_joule), more),
            rate_text(row.next_rate_per_s),
            advantage_text(advantage),
        )
        shown = [cell for heading, cell in zip(GOODPUT_HEADINGS, cells, strict=True) if heading not in left_out]
        table.add_row(_folded(row.deployment), *shown)
    return table


def slo_table(found: SearchSummary, *, narrow: bool = False) -> Table:
    """One row a deployment and KV bandwidth: the factor, the bounds that it makes, and how it compares.

    A `narrow` one leaves out the bounds.
    """
    bounded = [] if narrow else list(bounds_ms(found.slo))
    bounds = (f"{METRIC_NAMES[metric]}\nms" for metric in bounded)
    table = _table(["KV", "SLO\nfactor", "95 %\ninterval", *bounds, *SLO_HEADINGS])
    for row, advantage in zip(found.slo_scale, found.advantages, strict=True):
        table.add_row(
            _folded(row.deployment),
            bandwidth_text(row.kv_bandwidth_bps),
            rate_text(row.factor),
            interval_text(row.low, row.high),
            *(ms_text(row.bounds_ms.get(metric)) for metric in bounded),
            NOTHING if row.deciding_metric is None else METRIC_NAMES[row.deciding_metric],
            percent_text(row.mean_as_stated),
            advantage_text(advantage),
        )
    return table


def live_table(points: Sequence[LivePoint]) -> Table:
    """Simulated against live attainment, with the same seed."""
    table = _table(["KV", "req/s", "SLO\nfactor", "simulated", "live"])
    for point in points:
        table.add_row(
            _folded(point.deployment),
            bandwidth_text(point.kv_bandwidth_bps),
            rate_text(point.rate_per_s),
            rate_text(point.slo_factor),
            percent_text(point.simulated),
            Text("withheld", style="magenta") if point.withheld else Text(percent_text(point.live)),
        )
    return table


def remarks(rows: Sequence[Row], advantages: Sequence[Advantage | None]) -> list[str]:
    """A sentence for each thing that bounds a row or that its reader must know, naming all the rows it goes for."""
    owners: dict[str, list[str]] = {}
    for row, advantage in zip(rows, advantages, strict=True):
        bounds = _bounds(row) if isinstance(row, Goodput) else _unheld(row)
        for sentence in (*bounds, *row.notes, *_undecided(advantage)):
            owners.setdefault(sentence, []).append(_name(row))
    return [f"{', '.join(names)}: {sentence}" for sentence, names in owners.items()]


def live_lines(points: Iterable[LivePoint]) -> list[str]:
    """Why a live attainment is not shown, and which nodes shared a device in a run."""
    return [
        f"{point.deployment} at {rate_text(point.rate_per_s)} req/s: {line}"
        for point in points
        for line in (*([f"withheld: {point.withheld}"] if point.withheld else []), *sharing_lines(point.device))
    ]


def rate_text(value: float | None) -> str:
    """Four significant digits at most, or a dash."""
    return NOTHING if value is None else f"{value:.4g}"


def interval_text(low: float | None, high: float | None) -> str:
    """`4.5 to 6` in three digits, a dash for a missing end."""
    ends = [NOTHING if end is None else f"{end:.3g}" for end in (low, high)]
    return NOTHING if low is None and high is None else " to ".join(ends)


def advantage_text(advantage: Advantage | None) -> str:
    """`1.32x`, `≥ 1.32x`, `≤ 1.32x`, or a dash."""
    if advantage is None:
        return NOTHING
    sign = {None: "", "at least": "≥ ", "at most": "≤ "}[advantage.bound]
    return f"{sign}{advantage.value:.2f}x"


def _bounds(row: Goodput) -> Iterable[str]:
    """What bounds a goodput; KV memory has its sentence among the notes."""
    lowest = row.trials[0]
    if row.rate_per_s is None:
        yield (
            f"no rate passes: {rate_text(lowest.rate_per_s)}/s is the lowest tried, with attainment "
            f"{percent_text(lowest.mean)}"
        )
    elif row.bounded_by == "high":
        yield f"passes at {rate_text(row.rate_per_s)}/s, the end of the range (--high); its goodput may be higher"
    elif row.bounded_by == "load generator":
        yield f"passes at {rate_text(row.rate_per_s)}/s, the most that can be sent; its goodput may be higher"
    failing = next((trial for trial in row.trials if trial.rate_per_s == row.next_rate_per_s), None)
    if failing is not None and failing.failure is not None:
        yield f"at {rate_text(failing.rate_per_s)}/s requests failed, the first because: {failing.failure}"


def _unheld(row: SloScale) -> Iterable[str]:
    if row.factor is None:
        yield f"no SLO holds, however loose: {row.failed} of {row.requests} requests did not complete"


def _undecided(advantage: Advantage | None) -> Iterable[str]:
    """That the seeds do not tell a row from the best colocated one; nothing where there is no interval at all."""
    if advantage is None or (advantage.low is None and advantage.high is None):
        return
    if (advantage.low or 0.0) <= 1.0 <= (advantage.high or math.inf):
        yield f"its interval overlaps that of {advantage.baseline}; more --seeds or a longer --duration tell more"


def _bought(value: float | None, more: str) -> str:
    return NOTHING if value is None else f"{more}{figure_text(value)}"


def _at_least(row: Goodput) -> str:
    return "≥ " if row.rate_per_s is not None and row.next_rate_per_s is None else ""


def _ends(row: Row) -> tuple[float | None, float | None]:
    return (row.low_per_s, row.high_per_s) if isinstance(row, Goodput) else (row.low, row.high)


def _seeds(row: Row) -> int:
    """How many runs each of its attainments is the mean of."""
    return len((row.trials[0] if isinstance(row, Goodput) else row).attainment)


def _name(row: Row) -> str:
    if row.kv_bandwidth_bps is None:
        return row.deployment
    return f"{row.deployment} at {bandwidth_text(row.kv_bandwidth_bps)}"


def _table(headings: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("deployment", overflow="fold", min_width=NAME_WIDTH)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _folded(name: str) -> Text:
    """A deployment's name on lines that break at its hyphens."""
    return Text("\n".join(textwrap.wrap(name, NAME_WIDTH)))
