"""A break-even search in a terminal: who turns where, the chunk budgets tried, and what each finding says in words."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from emulator.core.break_even import BreakEvenSummary, LiveCheck, PairBreakEven, TriedBudget
from emulator.core.verdict_text import METRIC_NAMES
from emulator.report.table import OUTCOME_STYLES, bandwidth_text, ms_text, percent_text

BEST_IS = "Best: the highest SLO attainment, then request goodput, then lowest mean TTFT."


def render(found: BreakEvenSummary) -> RenderableType:
    """Everything a terminal shows of a search; for a rich Console."""
    parts: list[RenderableType] = [_pairs(found), *_budgets(found.budgets)]
    for pair in found.pairs:
        parts += ["", Text(_name(pair), style="bold"), Padding(Text(pair.text), (0, 0, 0, 2))]
        parts += [Padding(_live_line(check), (0, 0, 0, 2)) for check in pair.live or ()]
    return Group(*parts)


def _pairs(found: BreakEvenSummary) -> Table:
    title = f"Break-even of {found.topology}, {bandwidth_text(found.low_bps)} to {bandwidth_text(found.high_bps)}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for heading in ("deployment", "against", "below", "turns between", "above"):
        table.add_column(heading, overflow="fold")
    for pair in found.pairs:
        first = True
        for below, between, above in _turns(pair):
            names = (pair.deployment, _baseline(pair)) if first else ("", "")
            table.add_row(*names, _styled(below), between, _styled(above))
            first = False
    return table


def _turns(pair: PairBreakEven) -> list[tuple[str, str, str]]:
    if not pair.changes:
        return [(pair.tried[0].outcome, "none", pair.tried[-1].outcome)]
    return [
        (change.below, f"{bandwidth_text(change.low_bps)} and {bandwidth_text(change.high_bps)}", change.above)
        for change in pair.changes
    ]


def _styled(outcome: str) -> Text:
    return Text(outcome, style=OUTCOME_STYLES[outcome])


def _baseline(pair: PairBreakEven) -> str:
    return pair.baseline if pair.chunk_budget is None else f"best chunk budget ({pair.chunk_budget} tokens)"


def _name(pair: PairBreakEven) -> str:
    return f"{pair.deployment} against {_baseline(pair)}"


def _budgets(tried: Sequence[TriedBudget]) -> list[RenderableType]:
    """A table of the budgets on each number of GPUs, the best one marked, and a note where it is the last one tried."""
    parts: list[RenderableType] = []
    for gpus in sorted({budget.gpus for budget in tried}):
        budgets = [budget for budget in tried if budget.gpus == gpus]
        table = Table(
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            title=f"Chunk budgets on {gpus} colocated GPUs (latencies in ms)",
            title_justify="left",
        )
        for heading in ("tokens a step", "SLO met", "good req/s", "TTFT mean", "TTFT p99", "TPOT p99", "ITL p99", ""):
            table.add_column(heading, justify="right", no_wrap=True)
        for budget in budgets:
            table.add_row(
                str(budget.max_num_batched_tokens),
                percent_text(budget.slo_attainment),
                f"{budget.request_goodput:.2f}",
                ms_text(budget.ttft_ms.mean),
                ms_text(budget.ttft_ms.p99),
                ms_text(budget.tpot_ms.p99),
                ms_text(budget.itl_ms.p99),
                "best" if budget.best else "",
            )
        parts += ["", table, BEST_IS, *_edge(budgets)]
    return parts


def _edge(budgets: Sequence[TriedBudget]) -> list[str]:
    ordered = sorted(budgets, key=lambda budget: budget.max_num_batched_tokens)
    for budget, which, further in ((ordered[0], "smallest", "smaller"), (ordered[-1], "largest", "larger")):
        if budget.best and len(ordered) > 1:
            return [f"The best is the {which} that was tried; a {further} one may be better still (--chunk-budgets)."]
    return []


def _live_line(check: LiveCheck) -> Text:
    at = f"Live at {bandwidth_text(check.kv_bandwidth_bps)}: "
    if check.outcome is None:
        return Text(f"{at}nothing is concluded, because {check.reason} (--scale auto may do)", style="magenta")
    metric = "" if check.deciding_metric is None else f" ({METRIC_NAMES[check.deciding_metric]})"
    agrees = "as simulated" if check.as_expected else f"but simulated it is {check.expected}"
    stamps = "".join(f"; {stamp}" for stamp in check.stamps)
    return Text(f"{at}{check.outcome}{metric}, {agrees}{stamps}", style="" if check.as_expected else "yellow")
