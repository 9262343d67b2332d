"""A load test in a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from emulator.core.bench.measures import Measures
from emulator.report import bench_table
from tests.core.made_exchanges import TWO, document, exchange, sent_late


def _rendered(found: dict[str, Any]) -> str:
    console = Console(width=110, highlight=False, file=io.StringIO())
    console.print(bench_table.render(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_says_from_where_latency_counts() -> None:
    text = _rendered(document(TWO))
    rows = [line.split() for line in text.splitlines()]
    ttft = [row for row in rows if row[:1] == ["TTFT"]]
    assert [row[1:5] for row in ttft] == [["the", "send", "100.00", "100.00"], ["the", "schedule", "350.00", "350.00"]]
    assert "2 of 2 requests completed, in 2.00 s" in text
    assert "prompts not as long as asked for: 1; 198 tokens in all, asked for were 200" in text


def test_the_table_marks_what_is_not_faithful() -> None:
    late = document(sent_late([n * 0.01 for n in range(100)]))
    assert "fidelity failed: the generator could not keep its schedule" in _rendered(late)
    assert "fidelity ok" in _rendered(document(sent_late([0.0] * 30)))


def test_the_table_of_nothing_is_a_table() -> None:
    text = _rendered(document([exchange(reason="HTTP 500")], measures=Measures()))
    assert "0 of 1 requests completed, 1 failed (1 HTTP 500)" in text
