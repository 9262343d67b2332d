"""Records: instants in rows, times laid over times, and JSON lines that are read back strictly."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.records import (
    Record,
    RequestTimes,
    StepRecord,
    TimeRun,
    expand_all,
    expand_steps,
    expand_times,
    numbered,
    read_records,
    read_steps,
    write_rows,
)
from tests.core.made_records import made_record
from tests.examples import examples

STEP = StepRecord(
    node="decode-0",
    kind="mixed",
    start_s=1.0,
    end_s=1.0303,
    planned_s=0.03,
    prefill_tokens=512,
    decode_batch=7,
    requests=8,
)


@pytest.mark.parametrize(
    ("times", "instants"),
    [
        ([], []),
        ([0.5], [0.5]),
        ([1.0, 2.0], [1.0, 2.0]),
        ([TimeRun(1.0, 0.25, 0.0, 3)], [1.0, 1.25, 1.5]),
        ([TimeRun(1.0, 0.25, 0.25, 4)], [1.0, 1.25, 1.75, 2.5]),
        ([TimeRun(1.0, 9.0, 9.0, 1)], [1.0]),
        ([TimeRun(1.0, 9.0, 9.0, 0)], []),
        ([0.5, TimeRun(1.0, 0.5, 0.0, 2), 3.0, 4.0], [0.5, 1.0, 1.5, 3.0, 4.0]),
    ],
)
def test_rows_of_instants_expand_in_order(times: list[float | TimeRun], instants: list[float]) -> None:
    expanded = expand_times(times)
    assert expanded.dtype == np.float64
    assert expanded.tolist() == instants


@examples(100)
@given(st.floats(0, 100), st.floats(0, 1), st.floats(0, 0.1), st.integers(0, 50))
def test_a_row_is_its_gaps_added_up(t0_s: float, first_step_s: float, delta_s: float, n: int) -> None:
    gaps = [first_step_s + j * delta_s for j in range(max(0, n - 1))]
    expected = np.cumsum([t0_s, *gaps])[:n]
    assert expand_times([TimeRun(t0_s, first_step_s, delta_s, n)]) == pytest.approx(expected)


def test_many_lists_expand_as_one_by_one() -> None:
    rows: list[list[float | TimeRun]] = [[], [0.5, TimeRun(1.0, 0.5, 0.25, 3)], [], [2.0], [TimeRun(3.0, 1.0, 0.0, 2)]]
    instants, sizes = expand_all(rows)
    assert sizes.tolist() == [0, 4, 0, 1, 2]
    assert instants.tolist() == [instant for row in rows for instant in expand_times(row).tolist()]
    assert [part.tolist() for part in expand_all([[], []])] == [[], [0, 0]]


def test_a_row_of_steps_stands_for_each_of_them() -> None:
    row = msgspec.structs.replace(STEP, end_s=1.0 + 0.03 + 0.031 + 0.032, steps=3, delta_s=0.001)
    steps = list(expand_steps([STEP, row]))
    assert steps[0] is STEP
    assert [s.start_s for s in steps[1:]] == pytest.approx([1.0, 1.03, 1.061])
    assert [s.end_s for s in steps[1:]] == pytest.approx([1.03, 1.061, 1.093])
    assert [s.planned_s for s in steps[1:]] == pytest.approx([0.03, 0.031, 0.032])
    assert row.lateness_s == pytest.approx(0.0, abs=1e-12)
    assert {(s.steps, s.delta_s, s.decode_batch) for s in steps} == {(1, 0.0, 7)}


def test_later_times_are_laid_over_earlier_ones_and_unknown_ones_change_nothing() -> None:
    early = RequestTimes(queued_s=0.0, prefill_start_s=1.0, kv_bytes=5)
    late = RequestTimes(prefill_start_s=2.0, kv_end_s=3.0)
    assert early.merged(late) == RequestTimes(queued_s=0.0, prefill_start_s=2.0, kv_end_s=3.0, kv_bytes=5)
    assert early.merged(RequestTimes()) == early
    assert RequestTimes().merged(early) == early


def test_lateness_is_what_a_step_took_beyond_its_plan() -> None:
    assert STEP.lateness_s == pytest.approx(0.0003)


def test_rows_survive_json_lines() -> None:
    records = [made_record("a", wire_ms=5.0), made_record("b", outcome="failed")]
    records[0].token_times_s = [0.5, TimeRun(1.0, 0.25, 0.0, 3)]
    assert read_records(write_rows(records)) == records
    assert read_steps(write_rows([STEP, STEP])) == [STEP, STEP]
    assert read_records(b"") == []


@pytest.mark.parametrize(
    "change",
    [
        {"surprise": 1},
        {"outcome": "fine"},
        {"prompt_tokens": "many"},
        {"token_times_s": [{"t0_s": 1.0}]},
        {"token_times_s": ["now"]},
        {"kv_bytes": None},
    ],
    ids=str,
)
def test_a_row_that_is_not_a_record_is_refused(change: dict[str, object]) -> None:
    row = msgspec.to_builtins(made_record()) | change
    with pytest.raises(msgspec.ValidationError):
        read_records(msgspec.json.encode(row))


def test_a_record_says_at_least_what_the_run_directory_promises() -> None:
    promised = (
        "request_id scheduled_s sent_s prompt_tokens max_tokens output_tokens first_token_s finish_s token_times_s "
        "prefill_node decode_node kv_bytes kv_start_s kv_end_s outcome reason"
    )
    assert set(promised.split()) <= set(Record.__struct_fields__)
    promised = "node kind start_s end_s planned_s prefill_tokens decode_batch requests"
    assert set(promised.split()) <= set(StepRecord.__struct_fields__)


def test_an_id_that_comes_again_is_numbered() -> None:
    records = [made_record(request_id) for request_id in ("a", "b", "a", "a")]
    assert [record.request_id for record in numbered(records)] == ["a", "b", "a#2", "a#3"]
    assert numbered(records)[:2] == records[:2]
