"""The figures of the HTML report, one function each, from what a comparison left behind.

Colours follow Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers can tell apart; baselines
are grey and dashed besides, and the bandwidths of one deployment run from light to dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from emulator.core.compare_summary import CompareSummary
from emulator.core.metrics import Floats, Measurements, Metric, bounds_ms, measure
from emulator.core.quantities import BitsPerSecond
from emulator.core.run_summary import RunResult, RunSummary
from emulator.core.specs import Slo
from emulator.report.table import PART_NAMES, run_name, shown_parts

PART_COLOURS = {
    "queue": "#999999",
    "prefill": "#E69F00",
    "orchestration": "#56B4E9",
    "wire": "#009E73",
    "decode_wait": "#CC79A7",
    "decode": "#0072B2",
}
BASELINE_STYLES = (("#000000", "dash"), ("#777777", "dot"), ("#444444", "dashdot"), ("#999999", "longdash"))
DEPLOYMENT_SCALES = (
    ("#9ecae1", "#0072B2", "#08306b"),
    ("#fdbe85", "#D55E00", "#7f2704"),
    ("#a1d9b5", "#009E73", "#00441b"),
)
TARGET_COLOUR = "#D55E00"
CDF_POINTS = 400
PANELS = ((1, 1), (1, 2), (2, 1), (2, 2))
BOUNDED_PANELS: dict[Metric, tuple[int, int]] = {"ttft_ms": (1, 1), "tpot_ms": (1, 2), "itl_p99_ms": (2, 2)}

Style = tuple[str, str]


def base_layout(height: int, **options: object) -> dict[str, object]:
    """The layout that all figures share: light, quiet, and sized to be read."""
    return {
        "template": "plotly_white",
        "height": height,
        "margin": {"l": 70, "r": 30, "t": 40, "b": 60},
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.18, "x": 0},
        **options,
    }


def run_styles(runs: Sequence[RunSummary]) -> list[Style]:
    """A (colour, dash) for each run, in their order."""
    baselines = [run for run in runs if not run.disaggregated]
    names = list(dict.fromkeys(run.deployment for run in runs if run.disaggregated))
    styles = []
    for run in runs:
        if not run.disaggregated:
            styles.append(BASELINE_STYLES[baselines.index(run) % len(BASELINE_STYLES)])
            continue
        swept = sorted(r.kv_bandwidth_bps or 0.0 for r in runs if r.deployment == run.deployment)
        place = 0.5 if len(swept) == 1 else swept.index(run.kv_bandwidth_bps or 0.0) / (len(swept) - 1)
        scale = DEPLOYMENT_SCALES[names.index(run.deployment) % len(DEPLOYMENT_SCALES)]
        styles.append((sample_colorscale(list(scale), [place])[0], "solid"))
    return styles


def attainment_chart(compare: CompareSummary) -> go.Figure:
    """SLO attainment against KV bandwidth; a baseline, which has none, is a line across."""
    figure = go.Figure(layout=base_layout(420))
    swept = sorted({run.kv_bandwidth_bps for run in compare.runs if run.kv_bandwidth_bps is not None})
    ends = [swept[0] / 1.3, swept[-1] * 1.3] if swept else [1e9, 1e10]
    styles = run_styles(compare.runs)
    for run, (colour, dash) in zip(compare.runs, styles, strict=True):
        if not run.disaggregated:
            share = _percent(run)
            line = {"color": colour, "dash": dash, "width": 2}
            figure.add_scatter(x=ends, y=[share, share], mode="lines", name=escape(run.deployment), line=line)
    for index, name in enumerate(dict.fromkeys(run.deployment for run in compare.runs if run.disaggregated)):
        runs = sorted(
            (run for run in compare.runs if run.deployment == name), key=lambda run: run.kv_bandwidth_bps or 0.0
        )
        figure.add_scatter(
            x=[run.kv_bandwidth_bps for run in runs],
            y=[_percent(run) for run in runs],
            mode="lines+markers",
            name=escape(name),
            line={"color": DEPLOYMENT_SCALES[index % len(DEPLOYMENT_SCALES)][1], "width": 3},
            marker={"size": 10},
        )
    target = 100 * compare.slo.target
    figure.add_hline(y=target, line={"color": TARGET_COLOUR, "width": 1}, annotation_text=f"target {target:g}%")
    ticks = {"tickvals": swept, "ticktext": [str(BitsPerSecond(bps)) for bps in swept]}
    figure.update_xaxes(type="log", title="KV bandwidth (log scale)", range=np.log10(ends).tolist(), **ticks)
    figure.update_yaxes(title="requests meeting every SLO (%)", range=[-2, 104])
    return figure


def breakdown_chart(runs: Sequence[RunSummary]) -> go.Figure:
    """Mean TTFT of completed requests by part, a bar a run."""
    figure = go.Figure(layout=base_layout(150 + 34 * len(runs), barmode="relative"))
    names = [escape(run_name(run)) for run in runs]
    for part in shown_parts(runs):
        values = [getattr(run.ttft_breakdown_ms, part) for run in runs]
        figure.add_bar(
            x=values,
            y=names,
            orientation="h",
            name=PART_NAMES[part],
            marker={"color": PART_COLOURS[part]},
            hovertemplate="%{y}<br>" + PART_NAMES[part] + " %{x:.2f} ms<extra></extra>",
        )
    figure.update_layout(legend={"y": 1.02, "yanchor": "bottom", "traceorder": "normal"}, margin={"l": 220})
    figure.update_xaxes(title="mean TTFT (ms)")
    figure.update_yaxes(autorange="reversed")
    return figure


def latency_chart(results: Sequence[RunResult], slo: Slo) -> go.Figure:
    """Cumulative distributions of TTFT, TPOT and ITL over completed requests, the bounds as vertical lines."""
    titles = ("TTFT", "TPOT", "ITL, all gaps between tokens", "ITL p99 within a request")
    figure = go.Figure(layout=base_layout(720))
    make_subplots(rows=2, cols=2, subplot_titles=titles, vertical_spacing=0.16, horizontal_spacing=0.09, figure=figure)
    styles = run_styles([result.summary for result in results])
    for result, (colour, dash) in zip(results, styles, strict=True):
        name = escape(run_name(result.summary))
        for panel, (values, (row, col)) in enumerate(zip(_panels(measure(result.records)), PANELS, strict=True)):
            x, y = cumulative(values)
            figure.add_scatter(
                x=x,
                y=y,
                mode="lines",
                name=name,
                legendgroup=name,
                showlegend=panel == 0,
                line={"color": colour, "dash": dash, "width": 2, "shape": "hv"},
                row=row,
                col=col,
            )
    for metric, (row, col) in BOUNDED_PANELS.items():
        if (bound := bounds_ms(slo).get(metric)) is not None:
            figure.add_vline(x=bound, line={"color": TARGET_COLOUR, "width": 1}, row=row, col=col)
            label = {"text": f"SLO {bound:g} ms", "xanchor": "left", "showarrow": False}
            figure.add_annotation(x=np.log10(bound), y=6, **label, row=row, col=col)  # log axes want the exponent
    figure.update_xaxes(type="log", title="ms (log scale)", title_standoff=4, dtick="D2", tickformat=",~g")
    figure.update_xaxes(dtick="D1", row=1, col=2)
    figure.update_yaxes(title="share at or below (%)", range=[0, 101])
    figure.update_layout(legend={"y": -0.1})
    return figure


def cumulative(values: Floats) -> tuple[list[float], list[float]]:
    """Points (value, percent at or below) of a distribution, thinned to CDF_POINTS with both ends kept."""
    known = np.sort(values[~np.isnan(values)])
    if not known.size:
        return [], []
    rows = np.unique(np.linspace(0, known.size - 1, min(CDF_POINTS, known.size)).astype(np.int64))
    return known[rows].round(3).tolist(), (100 * (rows + 1) / known.size).round(3).tolist()


def _panels(measured: Measurements) -> tuple[Floats, Floats, Floats, Floats]:
    latency = measured.latency_ms
    return latency["ttft_ms"], latency["tpot_ms"], measured.gaps_ms, latency["itl_p99_ms"]


def _percent(run: RunSummary) -> float | None:
    return None if run.slo_attainment is None else 100 * run.slo_attainment
