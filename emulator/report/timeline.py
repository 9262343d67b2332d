"""What every node did when: the steps of all runs and their KV transfers on one time axis.

The runs saw the same arrivals, so a long prompt can be followed from lane to lane: where it stalls the streams of a
colocated node, and where it only occupies a prefill node and the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import plotly.graph_objects as go

from emulator.core.records import Record, StepRecord
from emulator.core.run_summary import RunResult
from emulator.report.charts import base_layout
from emulator.report.table import run_name

MOST_BARS = 6_000
"""More than this and a browser is slow to zoom; the window is then narrowed around the middle of the runs."""

FIRST_VIEW_S = 2.0
KIND_COLOURS = {"prefill": "#E69F00", "decode": "#56B4E9", "mixed": "#CC79A7", "KV transfer": "#009E73"}


@dataclass
class _Bars:
    """One kind of bar over all lanes; parallel lists, as the figure wants them."""

    lanes: list[str] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    length_s: list[float] = field(default_factory=list)
    about: list[str] = field(default_factory=list)

    def add(self, lane: str, start_s: float, end_s: float, about: str) -> None:
        self.lanes.append(lane)
        self.start_s.append(round(start_s, 6))
        self.length_s.append(round(end_s - start_s, 6))
        self.about.append(f"{about}<br>{start_s:.4f} s to {end_s:.4f} s ({1e3 * (end_s - start_s):.2f} ms)")


def timeline_window(results: Sequence[RunResult], most: int = MOST_BARS) -> tuple[float, float]:
    """The model seconds to draw: all of it, or as much of the middle as keeps within `most` bars."""
    spans = [(step.start_s, step.end_s) for result in results for step in result.steps]
    spans += [span for result in results for record in result.records if (span := _transfer_span(record))]
    if not spans:
        return 0.0, 0.0
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    middle, half = (first + last) / 2, (last - first) / 2
    while sum(_overlaps(start, end, middle - half, middle + half) for start, end in spans) > most:
        half *= 0.8
    return middle - half, middle + half


def timeline_chart(results: Sequence[RunResult], window: tuple[float, float]) -> go.Figure:
    """Steps and transfers within `window` (model seconds), a lane a node; opens on a short stretch in its middle."""
    bars = {kind: _Bars() for kind in KIND_COLOURS}
    lanes: list[str] = []
    for result in results:
        name = escape(run_name(result.summary))
        lanes += [f"{name} | {lane}" for lane in _lanes(result)]
        for step in result.steps:
            if _overlaps(step.start_s, step.end_s, *window):
                bars[step.kind].add(f"{name} | {escape(step.node)}", step.start_s, step.end_s, _about_step(step))
        for record in result.records:
            span = _transfer_span(record)
            if span and _overlaps(*span, *window):
                bars["KV transfer"].add(f"{name} | {_kv_lane(record)}", *span, _about_transfer(record))
    figure = go.Figure(layout=base_layout(140 + 26 * len(lanes), barmode="overlay", bargap=0.25))
    for kind, colour in KIND_COLOURS.items():
        found = bars[kind]
        if found.lanes:
            figure.add_bar(
                base=found.start_s,
                x=found.length_s,
                y=found.lanes,
                orientation="h",
                name=kind,
                marker={"color": colour, "line": {"color": "#333", "width": 0.4}},
                opacity=0.65 if kind == "KV transfer" else 1.0,
                customdata=found.about,
                hovertemplate="%{y}<br>%{customdata}<extra>" + kind + "</extra>",
            )
    middle, half = sum(window) / 2, min(FIRST_VIEW_S, window[1] - window[0]) / 2
    figure.update_xaxes(title="model time (s)", range=[middle - half, middle + half])
    figure.update_yaxes(
        categoryorder="array", categoryarray=lanes, range=[len(lanes) - 0.5, -0.5], tickfont={"size": 11}
    )
    figure.update_layout(margin={"l": 260}, legend={"y": 1.01, "yanchor": "bottom"}, dragmode="pan")
    return figure


def _lanes(result: RunResult) -> list[str]:
    """Prefill nodes, then what KV arrives where, then the nodes that decode."""
    nodes = sorted({step.node for step in result.steps})
    prefills = sorted({r.prefill_node for r in result.records if r.prefill_node and r.prefill_node != r.decode_node})
    links = sorted({_kv_lane(record) for record in result.records if _transfer_span(record)})
    first = [node for node in nodes if node in prefills]
    rest = [node for node in nodes if node not in prefills]
    return [*map(escape, first), *links, *map(escape, rest)]


def _kv_lane(record: Record) -> str:
    return f"KV to {escape(record.decode_node or 'nowhere')}"


def _transfer_span(record: Record) -> tuple[float, float] | None:
    if record.kv_start_s is None or record.kv_end_s is None:
        return None
    return record.kv_start_s, record.kv_end_s


def _overlaps(start_s: float, end_s: float, low_s: float, high_s: float) -> bool:
    return end_s >= low_s and start_s <= high_s


def _about_step(step: StepRecord) -> str:
    alike = f"{step.steps} steps, each of " if step.steps > 1 else ""
    return f"{alike}{step.prefill_tokens} prefill tokens, decode batch {step.decode_batch}"


def _about_transfer(record: Record) -> str:
    return f"request {escape(record.request_id)}: {record.kv_bytes / 1e6:.1f} MB"
