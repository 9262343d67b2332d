"""Azure traces as they are published: every way in which their rows are written, and every way to be wrong."""

from __future__ import annotations

import time

import pytest

from emulator.core.errors import ConfigError
from emulator.core.trace import Trace, TraceRow
from emulator.core.trace_selection import read_trace
from emulator.core.traffic import TraceOptions

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
GOOD = "2023-11-16 18:17:03.9799600,4808,10"


def _read(*lines: str, newline: str = "\n") -> Trace:
    return read_trace(newline.join(lines), "trace.csv", TraceOptions())


def _error(*lines: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _read(*lines)
    message = str(caught.value)
    assert "\n" not in message, "an error is one line"
    return message


def test_2023_rows_with_seven_digits_crlf_and_no_final_newline() -> None:
    trace = _read(
        HEADER,
        "2023-11-16 19:14:18.9267280,1527,6",
        "2023-11-16 19:14:19.5275060,1527,14",
        "2023-11-16 19:14:19.9280161,549,173",
        newline="\r\n",
    )
    assert trace.rows == (TraceRow(0.0, 1527, 6), TraceRow(0.600778, 1527, 14), TraceRow(1.0012881, 549, 173))


def test_2024_rows_with_a_zone_and_one_without_a_fraction() -> None:
    trace = _read(
        HEADER,
        "2024-05-10 00:00:00.009930+00:00,2162,5",
        "2024-05-10 00:00:01+00:00,2399,6",
        "2024-05-10T00:00:01.5Z,76,15",
        "2024-05-10 02:00:02+02:00,76,15",
        "",
    )
    assert [row.time_s for row in trace.rows] == [0.0, 0.99007, 1.49007, 1.99007]


def test_gaps_of_two_microseconds_survive_a_week() -> None:
    trace = _read(
        HEADER,
        "2024-05-10 00:00:00.000000+00:00,1,1",
        "2024-05-16 23:59:59.928444+00:00,378,56",
        "2024-05-16 23:59:59.928446+00:00,491,1",
    )
    assert trace.rows[1].time_s == 604799.928444
    assert trace.rows[2].time_s - trace.rows[1].time_s == pytest.approx(2e-6, rel=1e-3)


def test_columns_go_by_name_in_any_order_and_others_are_ignored() -> None:
    trace = _read(
        "\ufeffGeneratedTokens,Model,TIMESTAMP, ContextTokens",
        '10,"a, b",2023-11-16 18:17:03.9799600,4808',
        "",
        '8,,2023-11-16 18:17:04.0319600,"3180"',
    )
    assert trace.rows == (TraceRow(0.0, 4808, 10), TraceRow(0.052, 3180, 8))


def test_several_requests_may_come_at_one_instant() -> None:
    assert [row.time_s for row in _read(HEADER, GOOD, GOOD, GOOD).rows] == [0.0, 0.0, 0.0]


def test_rate_is_the_inverse_of_the_mean_gap() -> None:
    trace = Trace((TraceRow(0.0, 1, 1), TraceRow(1.0, 1, 1), TraceRow(4.0, 1, 1)))
    assert trace.span_s == 4.0
    assert trace.rate_per_s == 0.5
    assert Trace((TraceRow(0.0, 1, 1), TraceRow(0.0, 1, 1))).rate_per_s is None


@pytest.mark.parametrize(
    ("lines", "where", "what"),
    [
        ([""], "line 1", "empty"),
        (["", " ", ""], "line 1", "empty"),
        (["", GOOD], "line 2", "no header"),
        (["time,prompt,output", "1,2,3"], "line 1", "no header"),
        ([HEADER], "line 2", "no row"),
        (["TIMESTAMP,GeneratedTokens", "2023-11-16 18:17:03,10"], "line 1", "ContextTokens is missing"),
        ([HEADER + ",TIMESTAMP", GOOD + ",1"], "line 1", "TIMESTAMP is there 2 times"),
        ([HEADER, GOOD, "16/11/2023 18:17,1,1"], "line 3", "TIMESTAMP '16/11/2023 18:17' is not a time"),
        ([HEADER, "2023-02-29 18:17:03,1,1"], "line 2", "is not a time"),
        ([HEADER, "2023-11-16 18:17:03.1234567891,1,1"], "line 2", "is not a time"),
        ([HEADER, "2023-11-16 18:17:03,-1,1"], "line 2", "ContextTokens '-1'"),
        ([HEADER, "2023-11-16 18:17:03,1,-0"], "line 2", "GeneratedTokens '-0'"),
        ([HEADER, "2023-11-16 18:17:03,1.5,1"], "line 2", "ContextTokens '1.5'"),
        ([HEADER, "2023-11-16 18:17:03,1_0,1"], "line 2", "ContextTokens '1_0'"),
        ([HEADER, "2023-11-16 18:17:03,1," + "9" * 5000], "line 2", "GeneratedTokens '999"),
        ([HEADER, GOOD, "", ",,"], "line 4", "TIMESTAMP ''"),
        ([HEADER, GOOD, "2023-11-16 18:17:05,1"], "line 3", "2 columns where the header has 3"),
        ([HEADER, GOOD, "2023-11-16 18:17:05,1,738,1"], "line 3", "4 columns where the header has 3"),
        ([HEADER, GOOD, '"2023-11-16 18:17:05,1,1'], "line 3", "not CSV"),
        ([HEADER, GOOD, "", "2023-11-16 18:17:03.9799599,1,1"], "line 4", "its time is 1e-07 s before that of line 2"),
        (
            [HEADER, GOOD, "2023-11-16 18:17:05,1,1", "2023-11-16 18:17:04,1,1"],
            "line 4",
            "its time is 1 s before that of line 3",
        ),
    ],
)
def test_an_error_names_the_file_the_line_and_the_fault(lines: list[str], where: str, what: str) -> None:
    message = _error(*lines)
    assert message.startswith(f"trace.csv: {where}: ")
    assert what in message
    assert len(message) < 600


def test_errors_say_what_would_be_right() -> None:
    assert HEADER in _error("")
    assert "2023-11-16 18:17:03.9799600" in _error(HEADER, "noon,1,1")
    assert "a whole number of at most 9 digits" in _error(HEADER, "2023-11-16 18:17:03,many,1")
    assert "in order of time" in _error(HEADER, GOOD, "2022-11-16 18:17:03,1,1")


def test_twenty_thousand_rows_take_less_than_a_second() -> None:
    rows = [
        f"2023-11-16 1{n // 3600}:{n // 60 % 60:02d}:{n % 60:02d}.{n:05d}00,{n + 1},{n % 999 + 1}" for n in range(20000)
    ]
    text = "\r\n".join([HEADER, *rows])
    start = time.process_time()
    trace = read_trace(text, "trace.csv", TraceOptions())
    assert time.process_time() - start < 1.0
    assert trace.rows[-1] == TraceRow(19999.19999, 20000, 20)
