from __future__ import annotations

import msgspec
import numpy as np

from emulator.core.records import MemoryRecord
from emulator.core.run_summary import RunResult
from emulator.lab.simulated import simulated_result
from emulator.report.html import render_html
from emulator.report.memory_chart import MOST_IN_ALL, MOST_POINTS, memory_chart, thinned
from tests.builders import load_plan, pair, request, run_spec
from tests.report.made_compare import made_compare, made_results


def _result(rows: list[MemoryRecord], blocks: dict[str, int]) -> RunResult:
    """A made run with these rows of memory."""
    made = made_results()[3]
    memory = msgspec.structs.replace(made.summary.kv_memory, blocks=blocks)
    summary = msgspec.structs.replace(made.summary, kv_memory=memory)
    return RunResult(summary, made.records, made.steps, rows)


def test_each_node_has_the_lines_that_are_not_nothing_as_shares_of_its_blocks() -> None:
    run = run_spec(pair(decode_blocks=70), load_plan([request()]), payload_bytes_per_s=1e6)
    figure = memory_chart(simulated_result(run))
    assert figure is not None
    assert [line.name for line in figure.data] == [
        "decode-0 used",
        "decode-0 reserved",
        "prefill-0 used",
        "prefill-0 held",
    ]
    reserved, held = figure.data[1], figure.data[3]
    assert (list(reserved.x), list(reserved.y)) == ([0.0, 0.0, 0.2], [0.0, 10.0, 0.0])
    assert (list(held.x), list(held.y)) == ([0.0, 0.1, 0.2], [0.0, 0.7, 0.0])
    assert {line.line.shape for line in figure.data} == {"hv"}


def test_thinning_keeps_the_ends_and_every_peak() -> None:
    at_s = np.arange(100_000.0)
    values = np.zeros(100_000)
    values[[31_415, 92_653]] = 70.0, 95.0
    values[-1] = 5.0
    x, y = thinned(at_s, values, MOST_POINTS)
    assert len(x) <= MOST_POINTS
    assert {(0.0, 0.0), (31_415.0, 70.0), (92_653.0, 95.0), (99_999.0, 5.0)} <= set(zip(x, y, strict=True))
    assert thinned(at_s[:10], values[:10], 10)[0].tolist() == at_s[:10].tolist()


def test_many_nodes_share_the_points_of_a_chart() -> None:
    nodes = [f"decode-{n}" for n in range(64)]
    rows = [MemoryRecord(node, float(s), 1 + s % 7) for s in range(3_000) for node in nodes]
    figure = memory_chart(_result(rows, dict.fromkeys(nodes, 10)))
    assert figure is not None
    assert len(figure.data) == 64
    assert sum(len(line.x) for line in figure.data) <= MOST_IN_ALL


def test_the_page_has_a_chart_for_each_run_that_has_rows_and_none_for_older_ones() -> None:
    results = made_results()
    assert 'id="memory-' not in render_html(made_compare(results), results)
    results[3] = _result([MemoryRecord("decode-<0>", 1.0, 5, 5)], {"decode-<0>": 10})
    page = render_html(made_compare(results), results)
    assert page.count('id="memory-') == 1
    assert "KV memory over time: 1p1d at 5Gbps" in page
    assert "decode-<0>" not in page


def test_rows_without_known_blocks_make_no_chart() -> None:
    assert memory_chart(_result([MemoryRecord("decode-0", 1.0, 5, 5)], {})) is None
