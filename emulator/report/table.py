"""The answer in a terminal: the comparison, where the time to first token goes, what it costs, and the verdict.

Built to be read at 100 columns: numbers never wrap, names may, and what needs a sentence stands below the table.
On anything but a terminal rich prints the same without colour.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from emulator.core.compare_summary import CompareSummary, Verdict, Withheld
from emulator.core.metrics import PARTS, Part
from emulator.core.quantities import BitsPerSecond
from emulator.core.run_summary import RunSummary
from emulator.core.upkeep import COST_BASIS, per_kj
from emulator.report.device_lines import device_lines, sharing_lines

NOTHING = "-"
OUTCOME_STYLES = {"helps": "bold green", "hurts": "bold red", "no difference": "bold yellow"}
NO_VERDICT = "No verdict: it takes a disaggregated and a colocated deployment."
NAME_WIDTH = 14
HEADINGS = (
    "KV",
    "done\n/sent",
    "SLO\nmet",
    "good\nreq/s",
    "TTFT\np50/p99",
    "TPOT\np50/p99",
    "ITL\np99/max",
    "wire\np50",
)
LEFT_OUT_WHEN_NARROW = ("good\nreq/s", "TPOT\np50/p99", "wire\np50")
WIDE = 100
BYTES_PER_GB = 1e9
PART_NAMES = {
    "queue": "queue",
    "prefill": "prefill",
    "orchestration": "orchestration",
    "wire": "link",
    "decode_wait": "decode memory",
    "decode": "decode",
}
BROKEN_HEADINGS = {"orchestration": "orches-\ntration", "decode_wait": "decode\nmemory"}
COST_HEADINGS = (
    "KV",
    "USD/h",
    "watts",
    "weights\nGB",
    "KV room\nGB",
    "per dollar\ndone/good",
    "per kJ\ndone/good",
)
COSTS_LEFT_OUT_WHEN_NARROW = ("watts", "KV room\nGB")


def render(compare: CompareSummary, *, judged: bool = True, width: int = WIDE) -> RenderableType:
    """What a terminal of `width` columns shows of a comparison, or of runs not `judged`; for a rich Console."""
    parts: list[RenderableType] = [comparison_table(compare.runs, narrow=width < WIDE)]
    parts += [Padding(Text(note, style="yellow"), (0, 1)) for run in compare.runs for note in warnings(run)]
    parts += [Padding(Text(line), (0, 1)) for line in device_lines(compare.runs)]
    parts += ["", breakdown_table(compare.runs), "", cost_table(compare.runs, narrow=width < WIDE)]
    if judged:
        parts += ["", verdict_lines(compare)]
    return Group(*parts)


def comparison_table(runs: Sequence[RunSummary], *, narrow: bool = False) -> Table:
    """One row a run: what was sent and completed, how much met the SLO, and the latencies in milliseconds.

    A `narrow` one leaves out goodput, TPOT and transfers, which the summary has, so that the notes keep their place.
    """
    table = run_grid("Comparison (latencies in ms)")
    shown = [heading for heading in HEADINGS if not (narrow and heading in LEFT_OUT_WHEN_NARROW)]
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    with_notes = any(notes(run) for run in runs)
    if with_notes:
        table.add_column("notes", overflow="fold", min_width=9)
    for run in runs:
        values = (
            bandwidth_text(run.kv_bandwidth_bps),
            f"{run.completed}/{run.requests}",
            percent_text(run.slo_attainment),
            f"{run.request_goodput:.2f}",
            _pair(run.ttft_ms.p50, run.ttft_ms.p99),
            _pair(run.tpot_ms.p50, run.tpot_ms.p99),
            _pair(run.itl_ms.p99, run.itl_ms.max),
            ms_text(run.kv.transfer_ms.p50),
        )
        cells = [value for heading, value in zip(HEADINGS, values, strict=True) if heading in shown]
        table.add_row(
            folded(run.deployment), *cells, *([Text("\n".join(notes(run)), style="yellow")] if with_notes else [])
        )
    return table


def breakdown_table(runs: Sequence[RunSummary]) -> Table:
    """Where TTFT goes on average over completed requests; each row adds up to its mean."""
    table = run_grid("Mean TTFT, by part (ms)")
    shown = shown_parts(runs)
    for heading in ("KV", *(BROKEN_HEADINGS.get(part, PART_NAMES[part]) for part in shown), "TTFT"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        parts = (getattr(run.ttft_breakdown_ms, part) for part in shown)
        table.add_row(
            folded(run.deployment),
            bandwidth_text(run.kv_bandwidth_bps),
            *(ms_text(part) for part in parts),
            ms_text(run.ttft_ms.mean),
        )
    return table


def cost_table(runs: Sequence[RunSummary], *, narrow: bool = False) -> Table:
    """What each run's deployment costs and holds, and the requests that a dollar and a kJ of it bought.

    A `narrow` one leaves out watts and KV memory, which the summary has.
    """
    table = run_grid(f"Costs ({COST_BASIS})")
    shown = [heading for heading in COST_HEADINGS if not (narrow and heading in COSTS_LEFT_OUT_WHEN_NARROW)]
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        cells = zip(COST_HEADINGS, cost_cells(run), strict=True)
        table.add_row(folded(run.deployment), *(cell for heading, cell in cells if heading in shown))
    return table


def cost_cells(run: RunSummary) -> tuple[str, ...]:
    """The cells under COST_HEADINGS; weights as `2 x 16.1` where two nodes hold a model of 16.1 GB."""
    costs = run.costs
    copies = costs.weight_copies
    weights = costs.weight_bytes / copies if costs.weight_bytes and copies else None
    return (
        bandwidth_text(run.kv_bandwidth_bps),
        NOTHING if costs.usd_per_h is None else f"{costs.usd_per_h:,.2f}",
        NOTHING if costs.watts is None else f"{costs.watts:,.0f}",
        NOTHING if weights is None else f"{copies} x {figure_text(weights / BYTES_PER_GB)}",
        NOTHING if costs.kv_capacity_bytes is None else figure_text(costs.kv_capacity_bytes / BYTES_PER_GB),
        _bought(costs.requests_per_usd, costs.goodput_requests_per_usd),
        _bought(per_kj(costs.requests_per_joule), per_kj(costs.goodput_requests_per_joule)),
    )


def shown_parts(runs: Sequence[RunSummary]) -> list[Part]:
    """The parts of TTFT that are shown: decode only where a decode node has made first tokens."""
    return [part for part in PARTS if part != "decode" or any(run.ttft_breakdown_ms.decode for run in runs)]


def verdict_lines(compare: CompareSummary) -> Group:
    """The verdicts, those against the best baseline first, then what is withheld and why."""
    lines: list[Text] = []
    for heading, best in (("Verdict against the best baseline", True), ("Against the other baselines", False)):
        found = [verdict for verdict in compare.verdict if verdict.best_baseline is best]
        if found:
            lines += [Text(heading, style="bold"), *(_verdict_line(verdict) for verdict in found)]
    if compare.withheld:
        lines += [Text("Withheld", style="bold magenta"), *map(Text, withheld_lines(compare.withheld))]
    if not lines:
        lines.append(Text(NO_VERDICT))
    if compare.expectations:
        lines += [Text("Expected", style="bold"), *map(Text, expectation_lines(compare))]
    return Group(*lines)


def expectation_lines(compare: CompareSummary) -> list[str]:
    """What the topology expects, each with whether it holds and what was measured."""
    words = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}
    return [f"{e.sentence.rstrip('.')}: {words[e.holds]}; {e.measured}." for e in compare.expectations]


def withheld_lines(withheld: Sequence[Withheld]) -> list[str]:
    """One sentence for each reason, naming all the baselines that it goes for."""
    baselines: dict[tuple[str, float | None, str], list[str]] = {}
    for left in withheld:
        baselines.setdefault((left.deployment, left.kv_bandwidth_bps, left.reason), []).append(left.baseline)
    return [
        f"{name}{'' if bps is None else f' at {bandwidth_text(bps)}'} against {', '.join(others)}: {reason}"
        for (name, bps, reason), others in baselines.items()
    ]


def _verdict_line(verdict: Verdict) -> Text:
    line = Text(verdict.text)
    verb = {"no difference": "makes no difference"}.get(verdict.outcome, verdict.outcome)
    start = verdict.text.find(f" {verb} ") + 1
    line.stylize(OUTCOME_STYLES[verdict.outcome], start, start + len(verb))
    return line


def run_grid(title: str) -> Table:
    """An empty table of runs, its first column the deployment."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    table.add_column("deployment", overflow="fold", min_width=NAME_WIDTH)
    return table


def folded(name: str) -> Text:
    """A deployment's name on lines that break at its hyphens."""
    return Text("\n".join(textwrap.wrap(name, NAME_WIDTH)))


def notes(run: RunSummary) -> list[str]:
    """One word for each thing a reader must know before trusting a row, and how much was prefilled locally."""
    found = []
    if run.saturated:
        found.append("saturated")
    if run.failed:
        found.append(f"{run.failed} failed")
    if not run.fidelity.ok:
        found.append("fidelity")
    if run.device.stamps():
        found.append(f"shared {run.device.hardware}")
    if run.kv.local_prefills:
        found.append(f"{100 * run.kv.local_prefills / run.completed:.0f}% local")
    return found


def warnings(run: RunSummary) -> list[str]:
    """A sentence for each thing that makes a row less than it seems."""
    name = run_name(run)
    found = []
    if run.saturated:
        found.append(f"{name}: saturated, {run.unfinished} of {run.requests} requests unfinished at the drain deadline")
    elif run.unfinished:
        when = "it was stopped" if run.ended_by == "stop" else "its record ended"
        found.append(f"{name}: {run.unfinished} of {run.requests} requests unfinished when {when}")
    if run.failed:
        found.append(f"{name}: {run.failed} of {run.requests} requests failed, the first because: {run.failure}")
    if not run.fidelity.ok:
        reasons = "; ".join(run.fidelity.reasons) or "no reason was recorded"
        cure = run.fidelity.suggested_scale_time
        found.append(f"{name}: fidelity: {reasons}" + (f" (scale.time = {cure:g} would do)" if cure else ""))
    found += [f"{name}: {line}" for line in sharing_lines(run.device)]
    return found


def run_name(run: RunSummary) -> str:
    """`1p1d at 5Gbps`, or the deployment alone when it uses no KV network."""
    return run.deployment if not run.disaggregated else f"{run.deployment} at {bandwidth_text(run.kv_bandwidth_bps)}"


def bandwidth_text(bandwidth_bps: float | None) -> str:
    """`5Gbps`, or a dash when no KV network is used."""
    return NOTHING if bandwidth_bps is None else str(BitsPerSecond(bandwidth_bps))


def percent_text(share: float | None) -> str:
    """`97.5%`, or a dash."""
    return NOTHING if share is None else f"{100 * share:.1f}%"


def ms_text(value: float | None) -> str:
    """Milliseconds to three figures and no more than a hundredth: `1.23`, `12.3`, `123`, `1234`; or a dash."""
    if value is None:
        return NOTHING
    size = abs(value)
    return f"{value:z.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"


def figure_text(value: float | None) -> str:
    """Three digits, and all before the point: `0.125`, `12.5`, `1,250`; or a dash."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def _pair(first: float | None, second: float | None) -> str:
    return NOTHING if first is None and second is None else f"{ms_text(first)}/{ms_text(second)}"


def _bought(done: float | None, good: float | None) -> str:
    return NOTHING if done is None and good is None else f"{figure_text(done)}/{figure_text(good)}"
