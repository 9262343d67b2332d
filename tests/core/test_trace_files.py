"""The real traces beside the repository, where they are: their golden statistics, and rows that break naive readers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emulator.core.trace import Trace
from emulator.core.trace_selection import read_trace
from emulator.core.trace_summary import Lengths, summarize_trace
from emulator.core.traffic import TraceOptions

TRACES = Path(__file__).parents[3] / "shared" / "traces"
NASTY = TRACES / "nasty"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the public traces are not in {TRACES}")


def _read(path: Path) -> Trace:
    return read_trace(path.read_bytes().decode(), path.name, TraceOptions())


def _golden() -> list[list[str]]:
    """The rows of the table of these files: file, rows, seconds, CV, prompt, output."""
    if not TRACES.is_dir():
        return []
    lines = (TRACES / "SOURCES.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if len(row) == 6 and row[0].endswith((".csv", ".jsonl"))]


def _agrees(value: float, text: str) -> bool:
    """Whether a value is what was written, at the digits that it was written with."""
    return f"{value:.{len(text.partition('.')[2])}f}" == text


def _check_lengths(found: Lengths, text: str) -> None:
    """`min/p50/mean/p90/p99/max`."""
    values = (found.min, found.p50, found.mean, found.p90, found.p99, found.max)
    for value, golden in zip(values, text.split("/"), strict=True):
        assert _agrees(value, golden), (value, golden)


@pytest.mark.parametrize("row", _golden(), ids=lambda row: row[0])
def test_a_file_has_its_golden_statistics(row: list[str]) -> None:
    file, rows, seconds, cv, prompt, output = row
    trace = _read(TRACES / file)
    found = summarize_trace(trace)
    assert (found.reading.rows_read, found.reading.rows_used, found.reading.dropped) == (int(rows), int(rows), {})
    if seconds == "none":
        assert (found.duration_s, found.rate_per_s, found.inter_arrival_cv) == (None, None, None)
        assert not trace.timed
    else:
        assert found.duration_s is not None
        assert found.inter_arrival_cv is not None
        assert _agrees(found.duration_s, seconds)
        assert _agrees(found.inter_arrival_cv, cv)
    _check_lengths(found.prompt_tokens, prompt)
    _check_lengths(found.output_tokens, output)


def test_every_file_has_golden_statistics_here() -> None:
    found = {path.name for path in TRACES.iterdir() if path.suffix in (".csv", ".jsonl")}
    assert {row[0] for row in _golden()} >= found


def test_rows_of_2024_span_their_week() -> None:
    trace = _read(NASTY / "azure_2024_0_rows_shown_in_notebook.csv")
    assert len(trace.rows) == 10
    assert trace.span_s == 604_799.919571
    assert (trace.rows[0].prompt_tokens, trace.rows[-1].output_tokens) == (2162, 8)


def test_72_requests_of_one_second_keep_their_microseconds() -> None:
    trace = _read(NASTY / "azure_code_72_in_1s.csv")
    assert len(trace.rows) == 72
    assert trace.span_s < 1.0
    assert trace.rows[1].time_s == 0.002026


def test_a_last_row_without_a_newline_counts() -> None:
    trace = _read(NASTY / "azure_code_crlf_no_final_newline.csv")
    assert [row.output_tokens for row in trace.rows] == [6, 14, 6, 173]


def test_a_gap_of_two_microseconds_is_kept() -> None:
    trace = _read(NASTY / "azure_conv_2us_gap_and_len_extremes.csv")
    assert [row.prompt_tokens for row in trace.rows] == [2, 2, 2, 14050, 4122, 2285]
    assert round((trace.rows[5].time_s - trace.rows[4].time_s) * 1e9) == 2000


def test_28_requests_of_one_instant_have_no_rate() -> None:
    found = summarize_trace(_read(NASTY / "mooncake_conv_28_same_timestamp.jsonl"))
    assert (found.reading.rows_used, found.duration_s) == (28, 0.0)
    assert (found.rate_per_s, found.inter_arrival_cv) == (None, None)


def test_single_token_outputs_and_giant_prompts_are_read_as_they_are() -> None:
    trace = _read(NASTY / "mooncake_conv_out1_126k_and_full_prefix_hit.jsonl")
    assert [row.output_tokens for row in trace.rows] == [1, 587, 1, 654, 1, 332]
    assert max(row.prompt_tokens for row in trace.rows) == 126_195
    assert trace.span_s == 3297.0


def test_every_nasty_file_is_looked_at() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for path in NASTY.iterdir():
        assert re.search(re.escape(path.name), text), path.name
