"""KV memory of every node of a run over time: what is used, set aside for KV on its way, and held until it is fetched.

Backpressure shows here first: held KV climbs on prefill nodes when decode nodes have no blocks to reserve.
"""

from __future__ import annotations

import itertools
from html import escape

import numpy as np
import plotly.graph_objects as go

from emulator.core.kv_memory import used_over_time
from emulator.core.metrics import Floats
from emulator.core.run_summary import RunResult
from emulator.report.charts import base_layout

MOST_POINTS = 2_000
"""Points of a line; beyond a page's width nobody sees more."""
MOST_IN_ALL = 60_000
"""Points of a chart, shared by its lines: some 20 bytes each in the page."""

NODE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
DASHES = {"used": "solid", "reserved": "dot", "held": "dash"}


def memory_chart(result: RunResult) -> go.Figure | None:
    """Lines of each node as shares of its blocks, one that is 0 throughout left out; None for a run without any."""
    blocks = result.summary.kv_memory.blocks
    lines = [
        (node, what, at_s, 100 * counts / blocks[node])
        for node in sorted({row.node for row in result.memory} & blocks.keys())
        for what, at_s, counts in _lines(result, node)
        if counts.any()
    ]
    if not lines:
        return None
    nodes = sorted({node for node, *_ in lines})
    figure = go.Figure(layout=base_layout(380))
    for node, what, at_s, percent in lines:
        x, y = thinned(at_s, percent, min(MOST_POINTS, MOST_IN_ALL // len(lines)))
        figure.add_scatter(
            x=x.round(4).tolist(),
            y=y.round(2).tolist(),
            mode="lines",
            name=f"{escape(node)} {what}",
            line={
                "color": NODE_COLOURS[nodes.index(node) % len(NODE_COLOURS)],
                "dash": DASHES[what],
                "width": 1.5,
                "shape": "hv",
            },
        )
    figure.update_xaxes(title="model time (s)")
    figure.update_yaxes(title="share of the node's KV blocks (%)", rangemode="tozero")
    return figure


def thinned(at_s: Floats, values: Floats, most: int) -> tuple[Floats, Floats]:
    """At most `most` of the points, first and last among them, and of each stretch its lowest and its highest."""
    if len(at_s) <= most:
        return at_s, values
    kept = {0, len(at_s) - 1}
    edges = np.linspace(0, len(at_s), max(1, (most - 2) // 2) + 1).astype(np.int64).tolist()
    for start, end in itertools.pairwise(edges):
        stretch = values[start:end]
        kept |= {start + int(stretch.argmin()), start + int(stretch.argmax())}
    rows = sorted(kept)
    return at_s[rows], values[rows]


def _lines(result: RunResult, node: str) -> list[tuple[str, Floats, Floats]]:
    """What each line of a node shows, its instants and its blocks; every one begins with an empty memory at 0 s."""
    rows = [row for row in result.memory if row.node == node]
    at_s = np.array([row.at_s for row in rows])
    found = {
        "used": used_over_time(rows, [step for step in result.steps if step.node == node]),
        "reserved": (at_s, np.array([row.reserved_blocks for row in rows], dtype=np.float64)),
        "held": (at_s, np.array([row.held_blocks for row in rows], dtype=np.float64)),
    }
    return [(what, np.append(0.0, instants), np.append(0.0, counts)) for what, (instants, counts) in found.items()]
