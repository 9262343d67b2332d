"""Every published format is written and read back exactly; what cannot be read exactly is refused in one line."""

from __future__ import annotations

import json
import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.errors import ConfigError
from emulator.core.trace import Trace, TraceRow
from emulator.core.trace_formats.values import time_ns, tokens
from emulator.core.trace_selection import read_trace
from emulator.core.traffic import TimeUnit, TraceFormat, TraceOptions
from tests.core.trace_writers import START, WRITERS, Row, date, number
from tests.examples import examples

FILE = "trace.txt"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
MOONCAKE = '{"timestamp": 0, "input_length": 10, "output_length": 5}'
DEEP = '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": ' + "[" * 100_000 + "]" * 100_000 + "}"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"


def _read(*lines: str, form: TraceFormat | None = None, unit: TimeUnit | None = None, sort: bool = False) -> Trace:
    return read_trace("\n".join(lines), FILE, TraceOptions(format=form, time_unit=unit, sort=sort))


def _request(**keys: object) -> str:
    """A line of Mooncake's with some keys other than 1."""
    return json.dumps({"timestamp": 1, "input_length": 1, "output_length": 1} | keys)


def _refusal(*lines: str, form: TraceFormat | None = None, unit: TimeUnit | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        _read(*lines, form=form, unit=unit)
    message = str(caught.value)
    assert "\n" not in message
    return message


def _fault(text: str, unit: TimeUnit | None) -> str:
    try:
        read_trace(text, FILE, TraceOptions(time_unit=unit))
    except ConfigError as error:
        return str(error)
    return ""


def _expected(rows: list[Row]) -> tuple[TraceRow, ...]:
    return tuple(TraceRow((t - rows[0][0]) / 1e9, prompt, output) for t, prompt, output in rows)


# --- written and read back --------------------------------------------------------------------------------------


def _rows(resolution_ns: int) -> st.SearchStrategy[list[Row]]:
    """Rows in order of time, some at one instant, gaps from the resolution up to a month."""
    gaps = st.one_of(st.just(0), st.integers(1, 5), st.integers(0, 30 * 86_400 * 10**9 // resolution_ns))
    lengths = st.integers(1, 10**9 - 1)
    row = st.tuples(gaps, lengths, lengths)

    def timed(drawn: list[Row]) -> list[Row]:
        rows, at = [], 0
        for gap, prompt, output in drawn:
            at += gap * resolution_ns
            rows.append((at, prompt, output))
        return rows

    return st.lists(row, min_size=1, max_size=12).map(timed)


@pytest.mark.parametrize("writer", WRITERS)
@examples(50)
@given(data=st.data())
def test_what_is_written_is_read_back_exactly(writer: str, data: st.DataObject) -> None:
    written = WRITERS[writer]
    rows = data.draw(_rows(written.resolution_ns))
    newline = data.draw(st.sampled_from(["\n", "\r\n"]))
    lines = written.lines(rows)
    for at in sorted(data.draw(st.lists(st.integers(0, len(lines)), max_size=2)), reverse=True):
        lines.insert(at, data.draw(st.sampled_from(["", "  "])))
    text = data.draw(st.sampled_from(["", "\ufeff"])) + newline.join(lines) + data.draw(st.sampled_from(["", newline]))
    given_format = data.draw(st.sampled_from([None, written.name]))
    trace = read_trace(text, FILE, TraceOptions(format=given_format))
    assert trace.rows == _expected(rows)
    assert trace.timed
    assert trace.reading is not None
    assert (trace.reading.format, trace.reading.rows_read, trace.reading.dropped) == (written.name, len(rows), {})


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**15),
            st.integers(0, 9),
            st.sampled_from(["", "Z", "+00:00", "+05:30", "-08:00", "+14:00"]),
            st.sampled_from([" ", "T"]),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_dates_of_any_zone_and_precision_are_the_instants_that_they_name(
    drawn: list[tuple[int, int, str, str]],
) -> None:
    times = [(ns - ns % 10 ** (9 - digits), digits, zone, separator) for ns, digits, zone, separator in drawn]
    times.sort()
    lines = [f"{date(ns, digits=digits, zone=zone, separator=sep)},7,8" for ns, digits, zone, sep in times]
    trace = _read(AZURE, *lines)
    assert trace.rows == _expected([(ns, 7, 8) for ns, *_ in times])


@given(st.integers(0, 10**17), st.sampled_from(["s", "ms", "us", "ns"]))
def test_numbers_are_exact_in_every_unit(ns: int, unit: TimeUnit) -> None:
    scale = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[unit]
    text = number(ns, scale)
    assert time_ns(text, unit) == ns
    assert time_ns(Decimal(text), unit) == ns
    assert time_ns(ns, "ns") == ns


@examples(50)
@given(st.text(max_size=40), st.sampled_from(["s", "ms", "us", "ns", None]))
def test_no_text_is_more_than_refused(text: str, unit: TimeUnit | None) -> None:
    assert (time_ns(text, unit) or 0) >= 0
    assert (tokens(text) or 0) >= 0
    for head in ("", AZURE + "\n", MOONCAKE + "\n"):
        assert "\n" not in _fault(head + text, unit)


def test_epoch_seconds_with_a_float_of_pandas_are_rounded_to_the_nanosecond() -> None:
    trace = _read(VIDUR, "1715299200.009930134,5,6", "1715299200.01733517646789,7,8")
    assert [row.time_s for row in trace.rows] == [0.0, 0.007405042]


# --- formats told apart -----------------------------------------------------------------------------------------


def test_columns_go_by_name_in_any_order_and_letter_case() -> None:
    trace = _read("pd_ratio,NUM_DECODE_TOKENS, num_prefill_tokens ,arrived_at", '0.5,8,"12",1.5', "x,9,13,2.25")
    assert trace.rows == (TraceRow(0.0, 12, 8), TraceRow(0.75, 13, 9))
    assert trace.reading is not None
    assert trace.reading.ignored == ("pd_ratio",)


@pytest.mark.parametrize(
    ("line", "expected", "seconds"),
    [
        ('{"timestamp": %s, "input_length": 1, "output_length": 1}', "mooncake", 0.002),
        ('{"timestamp": %s, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "mooncake", 0.002),
        ('{"timestamp": "%s", "input_length": 1, "output_length": 1}', "ragpulse", 2.0),
        ('{"timestamp": %s, "input_length": 1, "output_length": 1, "hash_ids": {"a": [1]}}', "ragpulse", 2.0),
        ('{"chat_id": 1, "timestamp": %s, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "bailian", 2.0),
        ('{"timestamp": %s, "requests": [{"prompt_length": 1, "output_length": 1}]}', "aibrix", 0.002),
    ],
)
def test_formats_with_like_keys_are_told_apart_with_their_units(line: str, expected: str, seconds: float) -> None:
    trace = _read(line % 3, line % 5)
    assert trace.reading is not None
    assert trace.reading.format == expected
    assert not trace.reading.time_unit_given
    assert trace.span_s == seconds


def test_a_unit_that_is_given_goes_before_the_formats() -> None:
    lines = [_request(timestamp=n) for n in (3, 5)]
    trace = _read(*lines, unit="s")
    assert trace.span_s == 2.0
    assert trace.reading is not None
    assert (trace.reading.time_unit, trace.reading.time_unit_given) == ("s", True)
    assert _read(AZURE, "1000,5,6", "3000,5,6", unit="ms").span_s == 2.0


def test_lengths_alone_are_a_trace_without_times() -> None:
    for lines in (
        ("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio", "5,6,11,0.8", "7,8,15,0.9"),
        ('{"input_length": 5, "output_length": 6}', '{"input_length": 7, "output_length": 8}'),
    ):
        trace = _read(*lines)
        assert not trace.timed
        assert trace.rows == (TraceRow(0.0, 5, 6), TraceRow(0.0, 7, 8))
        assert trace.reading is not None
        assert trace.reading.time_unit is None


def test_rows_that_lack_a_length_or_a_time_are_counted() -> None:
    trace = _read(
        MOONCAKE,
        '{"session_id": "a", "delay": 50, "input_length": 10, "output_length": 5}',
        '{"timestamp": 9, "text_input": "hello", "output_length": 5}',
        '{"timestamp": 9, "input_length": 10, "output_length": null}',
        '{"timestamp": 10, "input_length": 11, "output_length": 6}',
    )
    assert [row.prompt_tokens for row in trace.rows] == [10, 11]
    assert trace.reading is not None
    assert (trace.reading.rows_read, trace.reading.dropped) == (5, {"no_time": 1, "no_length": 2})


def test_an_instant_may_hold_no_request() -> None:
    request = '{"prompt_length": 3, "output_length": 4}'
    trace = _read(
        '{"timestamp": 0, "requests": []}',
        f'{{"timestamp": 1000, "requests": [{request}, {request}]}}',
        f'{{"timestamp": 2000, "requests": [{request}]}}',
    )
    assert [row.time_s for row in trace.rows] == [0.0, 0.0, 1.0]
    assert "there is no request in it; give a file" in _refusal('{"timestamp": 0, "requests": []}')


# --- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "where", "what"),
    [
        (["time,prompt,output", "1,2,3"], "line 1", f"expected azure: {AZURE}; burstgpt: "),
        (['{"ts": 1, "prompt": "hello"}'], "line 1", "mooncake: timestamp,input_length,output_length"),
        (["[", MOONCAKE, "]"], "line 1", "a JSON array; expected one JSON object a line"),
        (["{", '"timestamp": 0}'], "line 1", "expected one JSON object a line"),
        ([MOONCAKE, '{"timestamp": 1, "input_length"'], "line 2", "expected one JSON object a line"),
        ([MOONCAKE, "[1, 2]"], "line 2", "expected one JSON object a line"),
        ([MOONCAKE, DEEP], "line 2", "nested too deeply; expected one JSON object a line"),
        ([DEEP], "line 1", "nested too deeply; expected one JSON object a line"),
        (['{"timestamp": 0, "requests": []}', DEEP], "line 2", "nested too deeply"),
        ([MOONCAKE, MOONCAKE + MOONCAKE], "line 2", "expected one JSON object a line"),
        ([MOONCAKE, _request(timestamp=-1)], "line 2", "timestamp -1 is not a time"),
        ([MOONCAKE, _request(input_length=-1)], "line 2", "input_length -1 is not a number of tokens"),
        ([MOONCAKE, _request(input_length=1.5)], "line 2", "input_length 1.5 is not"),
        ([MOONCAKE, _request(input_length=True)], "line 2", "input_length True is not"),
        ([MOONCAKE, _request(output_length=[2])], "line 2", "output_length [2] is not"),
        ([MOONCAKE, _request(timestamp="noon")], "line 2", "timestamp 'noon' is not a time"),
        ([MOONCAKE, '{"timestamp": 1e999, "input_length": 1, "output_length": 1}'], "line 2", "is not a time"),
        ([VIDUR, "2024-05-10 00:00:00,1,1"], "line 2", "expected a number in s; dates go without --trace-time-unit"),
        ([VIDUR, "nan,1,1"], "line 2", "arrived_at 'nan' is not a time; expected a number of 0 or more, in s"),
        ([VIDUR, "1,1,1000000000"], "line 2", "num_decode_tokens '1000000000' is not a number of tokens"),
        ([VIDUR + ",arrived_at", "1,1,1,1"], "line 1", "arrived_at is there 2 times"),
        (["num_decode_tokens,arrived_at", "1,1"], "line 1", "column num_prefill_tokens is missing"),
        (["Model,Request tokens,Response tokens", "GPT-4,1,1"], "line 1", "column Timestamp is missing"),
        ([AZURE, "1000,5,6"], "line 2", "or numbers and --trace-time-unit"),
        (["0,22.46,173.81,Weibull,0.0575,0.000573"], "line 1", "it holds no requests, so there is nothing to replay"),
        (["start,rate,cv,pattern,shape,scale", "0,1,1,Gamma,1,1"], "line 1", "it holds no requests"),
        (["0,0,,,,", "600,1.5,2,Gamma,1,1"], "line 1", "it holds no requests"),
        (["0,0,5", "600,1.5,2"], "line 1", "no header"),
        (
            ['{"0": {"input_tokens": "{100: 1.0}", "output_tokens": "{5: 1.0}"}, "600": {}}'],
            "line 1",
            "windows of time with distributions of lengths, as in ServeGen's data: it holds no requests",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_line_and_what_would_be_right(
    lines: list[str], where: str, what: str
) -> None:
    message = _refusal(*lines)
    assert message.startswith(f"{FILE}: {where}: ")
    assert what in message


def test_a_format_that_is_given_is_held_to() -> None:
    assert "line 1: column TIMESTAMP is missing" in _refusal(VIDUR, "1,1,1", form="azure")
    assert "line 1: JSON is malformed" in _refusal(AZURE, form="mooncake")


def test_a_unit_for_a_file_without_times_is_refused() -> None:
    message = _refusal("num_prefill_tokens,num_decode_tokens", "5,6", unit="ms")
    assert message == f"{FILE}: has no arrived_at, so it has no times: leave --trace-time-unit (time_unit) out"


# --- speed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", WRITERS)
def test_twenty_thousand_rows_take_less_than_a_second(writer: str) -> None:
    written = WRITERS[writer]
    rows = [(n * 10**9, n + 1, n % 999 + 1) for n in range(20_000)]
    text = "\r\n".join(written.lines(rows))
    start = time.process_time()
    trace = read_trace(text, FILE, TraceOptions())
    assert time.process_time() - start < 1.0
    assert trace.rows == _expected(rows)


def test_the_writers_start_where_dates_say() -> None:
    assert date(0, digits=7) == START.strftime("%Y-%m-%d %H:%M:%S") + ".0000000"
    assert date(90_000_000_100, digits=7, zone="-08:00") == "2024-05-09 16:01:30.0000001-08:00"
