"""Which rows of a trace are used: every one that is not is counted, with the reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.errors import ConfigError
from emulator.core.trace import DropReason, Trace, TraceReading
from emulator.core.trace_selection import DROPPED, read_trace
from emulator.core.traffic import MaxContext, TraceOptions

HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def _text(*rows: tuple[float, int, int]) -> str:
    lines = (f"{time},ChatGPT,{prompt},{output},{prompt + output},API log" for time, prompt, output in rows)
    return "\n".join((HEADER, *lines))


def _read(text: str, context_tokens: int | None = None, **options: object) -> tuple[Trace, TraceReading]:
    trace = read_trace(text, "t.csv", TraceOptions(**options), context_tokens)  # type: ignore[arg-type]
    assert trace.reading is not None
    return trace, trace.reading


def _times(trace: Trace) -> list[float]:
    return [row.time_s for row in trace.rows]


def _refusal(text: str, context_tokens: int | None = None, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        _read(text, context_tokens, **options)
    return str(caught.value)


def test_failed_rows_and_empty_prompts_are_dropped_and_counted() -> None:
    trace, reading = _read(_text((5, 10, 4), (6, 0, 0), (7, 9, 0), (8, 0, 3), (9, 11, 5)))
    assert [(row.time_s, row.prompt_tokens) for row in trace.rows] == [(0.0, 10), (4.0, 11)]
    assert (reading.rows_read, reading.rows_used) == (5, 2)
    assert reading.dropped == {"no_output_tokens": 2, "no_prompt_tokens": 1}


def test_the_first_request_that_is_used_is_at_0() -> None:
    trace, _ = _read(_text((5, 0, 0), (6, 1, 1), (8, 1, 1)))
    assert _times(trace) == [0.0, 2.0]


@pytest.mark.parametrize(
    ("span", "prompts"),
    [
        ("0:10", [1, 2]),
        (":10", [1, 2]),
        ("10:", [3, 4]),
        ("10s:20s", [3]),
        ("0.5:20000ms", [2, 3]),
        ("10 : 1min", [3, 4]),
        ("0:0.001", [1]),
    ],
)
def test_a_slice_is_time_after_the_first_row_its_end_left_out(span: str, prompts: list[int]) -> None:
    trace, reading = _read(_text((100, 1, 1), (109.999999999, 2, 1), (110, 3, 1), (120, 4, 1)), slice=span)
    assert [row.prompt_tokens for row in trace.rows] == prompts
    assert trace.rows[0].time_s == 0.0
    assert reading.dropped == {"outside_slice": 4 - len(prompts)}


@pytest.mark.parametrize("span", ["", ":", "5", "5:5", "9:3", "a:b", "1:2:3", "-1:5", "5min", "1e400s:"])
def test_a_span_that_is_none_is_refused(span: str) -> None:
    with pytest.raises(ValueError, match="is not a span of time"):
        TraceOptions(slice=span)


def test_a_limit_takes_the_first_requests_that_can_be_used() -> None:
    rows = [(n, 0 if n == 1 else n + 1, 1) for n in range(6)]
    trace, reading = _read(_text(*rows), limit=3)
    assert [row.prompt_tokens for row in trace.rows] == [1, 3, 4]
    assert reading.dropped == {"no_prompt_tokens": 1, "beyond_limit": 2}
    assert _read(_text(*rows), limit=99)[1].dropped == {"no_prompt_tokens": 1}


def test_what_exceeds_the_context_fails_or_is_dropped_or_is_cut() -> None:
    text = _text((0, 60, 40), (1, 61, 40), (2, 10, 500), (3, 500, 500))
    left, reading = _read(text, 100)
    assert (len(left.rows), reading.over_context, reading.truncated, reading.dropped) == (4, 3, 0, {})
    assert (left.rows[3].prompt_tokens, left.rows[3].output_tokens) == (500, 500)
    dropped, reading = _read(text, 100, max_context="drop")
    assert [row.prompt_tokens for row in dropped.rows] == [60]
    assert (reading.over_context, reading.dropped) == (0, {"over_context": 3})
    cut, reading = _read(text, 100, max_context="truncate")
    assert [(row.prompt_tokens, row.output_tokens) for row in cut.rows] == [(60, 40), (60, 40), (1, 99), (1, 99)]
    assert (reading.truncated, reading.over_context, reading.dropped) == (3, 0, {})


def test_only_requests_that_are_used_count_as_cut_or_too_long() -> None:
    text = _text((0, 60, 41), (1, 60, 42), (2, 60, 43))
    assert _read(text, 100, limit=2)[1].over_context == 2
    assert _read(text, 100, limit=2, max_context="truncate")[1].truncated == 2
    assert _read(text, 102, limit=1, max_context="drop")[1].dropped == {"over_context": 1, "beyond_limit": 1}


def test_a_context_that_is_not_known_changes_nothing_and_cannot_be_asked_for() -> None:
    text = _text((0, 10**6, 1))
    reading = _read(text)[1]
    assert (reading.over_context, reading.context_tokens) == (0, None)
    for wanted in ("drop", "truncate"):
        assert f"--max-context {wanted}" in _refusal(text, max_context=wanted)


def test_time_that_goes_back_is_refused_or_sorted_and_counted() -> None:
    text = _text((604_790, 1, 1), (604_799, 2, 1), (3, 3, 1), (8, 4, 1), (7, 5, 1), (7, 6, 1))
    message = _refusal(text)
    assert message.startswith("t.csv: line 4: its time is 604796 s before that of line 3: rows must be in order")
    assert "--trace-sort (sort = true)" in message
    trace, reading = _read(text, sort=True)
    assert [row.prompt_tokens for row in trace.rows] == [3, 5, 6, 4, 1, 2], "rows of one instant keep their order"
    assert _times(trace) == [0.0, 4.0, 4.0, 5.0, 604_787.0, 604_796.0]
    assert reading.steps_back == 2
    assert _read(_text((1, 1, 1), (1, 1, 1)), sort=True)[1].steps_back == 0


def test_a_slice_counts_from_the_earliest_row_once_sorted() -> None:
    trace, _ = _read(_text((50, 1, 1), (10, 2, 1), (20, 3, 1)), sort=True, slice="5:30")
    assert [row.prompt_tokens for row in trace.rows] == [3]


def test_without_a_request_left_the_refusal_says_what_became_of_all() -> None:
    message = _refusal(_text((0, 0, 0), (1, 5, 0), (9, 5, 5)), slice=":5")
    assert message.startswith("t.csv: no request is left of 3 rows: 1 outside the slice, 2 failed (0 output tokens)")


def test_a_slice_of_a_file_without_times_is_refused() -> None:
    message = _refusal("num_prefill_tokens,num_decode_tokens\n5,6", slice=":5")
    assert message == "t.csv: has lengths and no times: leave --slice (slice) out, or use --limit (limit)"


_ROWS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=30)


@given(
    rows=_ROWS,
    span=st.one_of(st.none(), st.tuples(st.integers(0, 50), st.integers(51, 100))),
    limit=st.one_of(st.none(), st.integers(1, 10)),
    max_context=st.sampled_from(["fail", "drop", "truncate"]),
    context=st.integers(2, 120),
)
def test_every_row_is_used_or_counted_and_none_is_changed_uncounted(
    rows: list[tuple[int, int, int]],
    span: tuple[int, int] | None,
    limit: int | None,
    max_context: MaxContext,
    context: int,
) -> None:
    text = _text(*rows)
    slice_text = None if span is None else f"{span[0]}:{span[1]}"
    options = TraceOptions(sort=True, slice=slice_text, limit=limit, max_context=max_context)
    try:
        trace = read_trace(text, "t.csv", options, context)
    except ConfigError:  # a refusal of a file without a request left is tested above
        return
    reading = trace.reading
    assert reading is not None
    assert reading.rows_read == len(rows) == reading.rows_used + sum(reading.dropped.values())
    assert reading.rows_used == len(trace.rows)
    assert all(row.prompt_tokens >= 1 and row.output_tokens >= 1 for row in trace.rows)
    assert _times(trace) == sorted(_times(trace))
    assert trace.rows[0].time_s == 0.0
    over = sum(row.prompt_tokens + row.output_tokens > context for row in trace.rows)
    assert over == reading.over_context
    given_lengths = sorted((prompt, output) for _, prompt, output in rows)
    changed = [row for row in trace.rows if (row.prompt_tokens, row.output_tokens) not in given_lengths]
    assert len(changed) <= reading.truncated
    assert all(reason in DROPPED for reason in reading.dropped)


def test_every_reason_has_its_words() -> None:
    assert set(DROPPED) == set(DropReason.__args__)  # type: ignore[attr-defined]
