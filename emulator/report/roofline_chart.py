"""The roofline of a model on a GPU as a page of its own, which opens offline."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go

from emulator.report.charts import base_layout
from emulator.report.profile_table import Profiled, Step

COLOURS = {
    "compute": "#D55E00",
    "memory": "#0072B2",
    "communication": "#CC79A7",
    "overhead": "#E69F00",
    None: "#777777",
}
SYMBOLS = {"prefill": "circle", "decode": "diamond"}


def write_roofline(found: Profiled, path: Path) -> None:
    """Write the page; the plotting library stands in it."""
    roofline_chart(found).write_html(path, include_plotlyjs=True, full_html=True)


def roofline_chart(found: Profiled) -> go.Figure:
    """Every step under the roof of one GPU, coloured by what bounds it."""
    shown = [step for step in found.steps if step.tflops is not None and step.flops_per_byte is not None]
    intensities = [step.flops_per_byte for step in shown if step.flops_per_byte is not None]
    ridge = found.roof.peak_tflops * 1e3 / found.roof.memory_gb_per_s
    xs = sorted([min([*intensities, ridge]) / 2, ridge, max([*intensities, ridge]) * 2])
    figure = go.Figure(layout=base_layout(640, title=f"{found.model} on {found.tp} x {found.gpu}: {found.source}"))
    figure.add_scatter(
        x=xs, y=[found.roof.tflops(x) for x in xs], mode="lines", name="datasheet", line={"color": "#222"}
    )
    for phase in ("prefill", "decode"):
        for bound in dict.fromkeys(step.bound for step in shown if step.phase == phase):
            steps = [step for step in shown if (step.phase, step.bound) == (phase, bound)]
            figure.add_scatter(
                x=[step.flops_per_byte for step in steps],
                y=[step.tflops for step in steps],
                mode="markers",
                name=f"{phase}, bound by {bound or 'unknown'}",
                marker={"symbol": SYMBOLS[phase], "size": 10, "color": COLOURS[bound]},
                text=[_text(step) for step in steps],
                hovertemplate="%{text}<extra></extra>",
            )
    figure.update_xaxes(type="log", title="FLOPs per byte of memory traffic")
    figure.update_yaxes(type="log", title="TFLOP/s of one GPU")
    return figure


def _text(step: Step) -> str:
    return f"{step.phase} {step.batch} x {step.tokens:,} tokens: {step.ms:.2f} ms, {step.tflops or 0:.1f} TFLOP/s"
