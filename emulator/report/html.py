"""A comparison as a page: the verdict on top, then the table and the figures that show why.

The page opens offline: the plotting library is written beside it once, not fetched. Everything that comes from a
topology or a record is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from emulator.core.compare_summary import CompareSummary, Verdict
from emulator.core.quantities import BitsPerSecond
from emulator.core.run_summary import Distribution, RunResult, RunSummary
from emulator.core.upkeep import COST_BASIS
from emulator.report.charts import attainment_chart, breakdown_chart, latency_chart
from emulator.report.device_lines import device_lines
from emulator.report.memory_chart import memory_chart
from emulator.report.parity_table import parity_html
from emulator.report.table import (
    COST_HEADINGS,
    NO_VERDICT,
    NOTHING,
    bandwidth_text,
    cost_cells,
    expectation_lines,
    ms_text,
    notes,
    percent_text,
    run_name,
    warnings,
    withheld_lines,
)
from emulator.report.timeline import timeline_chart, timeline_window

PLOTLY_FILE = "plotly.min.js"

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1240px; margin: 2rem auto;
       padding: 0 1.5rem; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 0.5rem; }
p.note { color: #555; margin: 0.2rem 0 0.6rem; max-width: 62rem; }
.verdict { border-left: 6px solid #999; background: #f7f7f7; padding: 0.6rem 1rem; margin: 0.6rem 0; }
.verdict.helps { border-color: #009E73; } .verdict.hurts { border-color: #D55E00; }
.verdict.withheld { border-color: #CC79A7; }
.verdict b { display: block; } .warning { color: #8a3b00; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 0.3rem 0.45rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #444; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
"""

HEADINGS = (
    "deployment",
    "KV bandwidth",
    "GPUs",
    "completed / sent",
    "SLO met",
    "goodput<br>(req/s)",
    "TTFT (ms)<br>p50 / p99",
    "TPOT (ms)<br>p50 / p99",
    "ITL (ms)<br>p99 / max",
    "transfer (ms)<br>p50 / p99",
    "notes",
)

COST_NOTE = (
    "Requests that completed, and requests that met every SLO (good), for each dollar and each kJ of the time in which "
    "they were due. Every node holds all weights, so two nodes hold them twice; KV room is what is left for KV."
)


def write_report(directory: Path, compare: CompareSummary, results: Sequence[RunResult]) -> Path:
    """Write report.html, and the plotting library beside it unless it is there; returns the page's path."""
    library = directory / PLOTLY_FILE
    source = get_plotlyjs().encode()
    if not library.exists() or library.stat().st_size != len(source):
        library.write_bytes(source)
    page = directory / "report.html"
    page.write_text(render_html(compare, results), encoding="utf-8")
    return page


def render_html(compare: CompareSummary, results: Sequence[RunResult]) -> str:
    """The page's text; it expects plotly.min.js beside it."""
    title = escape(f"{compare.topology}: prefill/decode disaggregation")
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{STYLE}</style>",
            f'<script src="{PLOTLY_FILE}" charset="utf-8"></script></head><body>',
            f"<h1>{escape(compare.topology)}</h1>",
            f'<p class="note">{_setting(compare)}</p>',
            "<h2>Verdict</h2>",
            *_verdicts(compare),
            *_expectations(compare),
            "<h2>Comparison</h2>",
            _table(HEADINGS, map(_cells, compare.runs)),
            *(f'<p class="warning">{escape(warning)}</p>' for run in compare.runs for warning in warnings(run)),
            *(f'<p class="note">{escape(line)}.</p>' for line in device_lines(compare.runs)),
            *_costs(compare.runs),
            *parity_html(compare.parity),
            *_figures(compare, results),
            "</body></html>",
        )
    )


def _setting(compare: CompareSummary) -> str:
    slo = compare.slo
    bounds = [("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms), ("E2EL", slo.e2el_ms), ("ITL p99", slo.itl_p99_ms)]
    wanted = ", ".join(f"{name} {bound:g} ms" for name, bound in bounds if bound is not None) or "none"
    parts = (
        f"SLO: {wanted}, for {100 * slo.target:g}% of requests",
        f"launcher {compare.launcher}, shaping {compare.shaping}",
        f"scale.time {compare.scale.time:g}, scale.bytes {compare.scale.bytes:g}",
        f"first token {_first_token(compare)}",
        f"seed {compare.seed}",
        *([] if compare.device == "virtual" else [f"device {compare.device}"]),
        "all times are model time",
    )
    return escape("; ".join(parts)) + "."


def _first_token(compare: CompareSummary) -> str:
    """Who streams first tokens; deployment by deployment where they differ."""
    if compare.first_token != "mixed":
        return compare.first_token or "where the prompt is computed"
    modes = {run.deployment: run.first_token for run in compare.runs if run.first_token is not None}
    return ", ".join(f"{mode} ({deployment})" for deployment, mode in modes.items())


def _verdicts(compare: CompareSummary) -> list[str]:
    ordered = sorted(compare.verdict, key=lambda verdict: not verdict.best_baseline)
    blocks = [_verdict(verdict) for verdict in ordered]
    blocks += [
        f'<div class="verdict withheld"><b>withheld</b>{escape(line)}</div>'
        for line in withheld_lines(compare.withheld)
    ]
    return blocks or [f'<div class="verdict">{NO_VERDICT}</div>']


def _expectations(compare: CompareSummary) -> list[str]:
    lines = [f"<li>{escape(line)}</li>" for line in expectation_lines(compare)]
    return ["<h2>Expected</h2>", "<ul>", *lines, "</ul>"] if lines else []


def _verdict(verdict: Verdict) -> str:
    best = ", the best baseline" if verdict.best_baseline else ""
    heading = f"{verdict.deployment} against {verdict.baseline}{best}: {verdict.outcome}"
    if verdict.break_even is not None:
        low, high = (BitsPerSecond(bps) for bps in (verdict.break_even.low_bps, verdict.break_even.high_bps))
        heading += f" (break-even between {low} and {high})"
    style = verdict.outcome.replace(" ", "-")
    return f'<div class="verdict {style}"><b>{escape(heading)}</b>{escape(verdict.text)}</div>'


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; headings are markup, cells are escaped."""
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(run: RunSummary) -> tuple[str, ...]:
    return (
        run.deployment,
        bandwidth_text(run.kv_bandwidth_bps),
        str(run.gpus),
        f"{run.completed} / {run.requests}",
        percent_text(run.slo_attainment),
        f"{run.request_goodput:.2f}",
        _two(run.ttft_ms, "p50", "p99"),
        _two(run.tpot_ms, "p50", "p99"),
        _two(run.itl_ms, "p99", "max"),
        _two(run.kv.transfer_ms, "p50", "p99"),
        ", ".join(notes(run)),
    )


def _costs(runs: Sequence[RunSummary]) -> list[str]:
    headings = [heading.replace("\n", "<br>") for heading in ("deployment", *COST_HEADINGS)]
    rows = [(run.deployment, *cost_cells(run)) for run in runs]
    note = f"{COST_NOTE} All are estimates: {COST_BASIS}."
    return ["<h2>Costs</h2>", f'<p class="note">{escape(note)}</p>', _table(headings, rows)]


def _two(values: Distribution, first: str, second: str) -> str:
    if values.mean is None:
        return NOTHING
    return f"{ms_text(getattr(values, first))} / {ms_text(getattr(values, second))}"


def _figures(compare: CompareSummary, results: Sequence[RunResult]) -> list[str]:
    blocks: list[str] = []
    if any(run.disaggregated for run in compare.runs):
        blocks += _figure(
            "attainment",
            "SLO attainment against KV bandwidth",
            "Share of all requests sent that met every bound. Failed and unfinished requests count as misses.",
            attainment_chart(compare),
        )
    blocks += _figure(
        "breakdown",
        "Where the time to first token goes",
        "Means over completed requests; the parts add up to the mean TTFT. Wire is the transfer after prefill, "
        "decode memory the wait for KV blocks at the decode node, decode the step in which that node computes the "
        "prompt's last token again, orchestration everything else.",
        breakdown_chart(compare.runs),
    )
    blocks += _figure(
        "latency",
        "Latency distributions",
        "Completed requests only; read them beside completed / sent. Click a name to hide it.",
        latency_chart(results, compare.slo),
    )
    low, high = window = timeline_window(results)
    if high > low:
        blocks += _figure(
            "timeline",
            "What each node did",
            f"Steps and KV transfers from {low:.2f} s to {high:.2f} s. Drag to move, scroll to zoom, point at a bar "
            "for its tokens and batch. A mixed step computes prefill chunks and decodes together.",
            timeline_chart(results, window),
        )
    return blocks + _memory_figures(results)


def _memory_figures(results: Sequence[RunResult]) -> list[str]:
    blocks: list[str] = []
    for n, result in enumerate(results):
        if (figure := memory_chart(result)) is not None:
            blocks += _figure(
                f"memory-{n}",
                f"KV memory over time: {run_name(result.summary)}",
                "Shares of each node's KV blocks: all that are used, those reserved for KV that has not arrived, and "
                "those that hold computed KV until it is fetched. What is used is drawn where prefills or hand-over "
                "change it, and each second.",
                figure,
            )
    return blocks


def _figure(name: str, heading: str, note: str, figure: go.Figure) -> list[str]:
    config = {"displaylogo": False, "responsive": True, "scrollZoom": name == "timeline"}
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)
    return [f"<h2>{escape(heading)}</h2>", f'<p class="note">{escape(note)}</p>', drawn]
