"""What a client notes of its requests, and what it no longer notes after the cut."""

from __future__ import annotations

import pytest

from emulator.core.effects import TokenRun
from emulator.core.messages import Finished, FinishReason, TokenCount, Tokens
from emulator.core.recorder import END, Recorder
from emulator.core.records import Outcome, Record, RequestTimes, TimeRun
from tests.builders import request

TIMES = RequestTimes(
    queued_s=0.1,
    admitted_s=0.15,
    prefill_start_s=0.2,
    prefill_end_s=0.3,
    kv_ready_s=0.4,
    kv_start_s=0.5,
    kv_end_s=0.6,
    streamed_s=0.7,
    kv_bytes=1_000,
)


def _tokens(request_id: str, n: int = 1) -> Tokens:
    return Tokens((TokenCount(request_id, n),))


def _recorder(*request_ids: str) -> Recorder:
    """A recorder that has sent these requests 1 ms behind their schedule."""
    recorder = Recorder()
    for request_id in request_ids:
        recorder.sent(request(request_id, at_s=1.0), 1.001)
    return recorder


def _only(recorder: Recorder) -> Record:
    (record,) = recorder.records()
    return record


def test_a_request_is_unfinished_until_it_ends() -> None:
    record = _only(_recorder("a"))
    assert (record.outcome, record.scheduled_s, record.sent_s) == ("unfinished", 1.0, 1.001)
    assert (record.first_token_s, record.finish_s, record.output_tokens) == (None, None, 0)


def test_every_token_has_its_instant() -> None:
    recorder = _recorder("a")
    recorder.tokens(_tokens("a"), 2.0)
    recorder.tokens(_tokens("a", 2), 2.5)
    recorder.finished(Finished("a", "length", "", "p", "d", TIMES), 2.5)
    record = _only(recorder)
    assert record.token_times_s == [2.0, 2.5, 2.5]
    assert (record.first_token_s, record.finish_s, record.output_tokens) == (2.0, 2.5, 3)
    assert (record.outcome, record.reason) == ("completed", "")
    assert (record.prefill_node, record.decode_node, record.kv_bytes) == ("p", "d", 1_000)
    said = (
        "queued_s", "admitted_s", "prefill_start_s", "prefill_end_s", "kv_ready_s", "kv_start_s", "kv_end_s",
        "streamed_s",
    )  # fmt: skip
    assert [getattr(record, name) for name in said] == [0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]


@pytest.mark.parametrize(
    ("reason", "detail", "outcome", "shown"),
    [
        ("length", "", "completed", ""),
        ("stop", "", "completed", ""),
        ("aborted", "", "failed", "aborted"),
        ("error", "node was lost", "failed", "node was lost"),
        ("error", "", "failed", "error"),
    ],
)
def test_an_ending_says_whether_and_why_it_failed(
    reason: FinishReason, detail: str, outcome: Outcome, shown: str
) -> None:
    recorder = _recorder("a")
    recorder.finished(Finished("a", reason, detail), 2.0)
    record = _only(recorder)
    assert (record.outcome, record.reason) == (outcome, shown)


def test_a_run_of_tokens_is_kept_as_it_comes() -> None:
    recorder = _recorder("a")
    runs: list[float | TimeRun] = [TimeRun(2.0, 0.5, 0.0, 3), 3.5]
    recorder.token_run(TokenRun("a", runs, 4))
    recorder.token_run(TokenRun("nobody", runs, 4))
    record = _only(recorder)
    assert (record.first_token_s, record.output_tokens, record.token_times_s) == (2.0, 4, runs)
    assert record.times().tolist() == [2.0, 2.5, 3.0, 3.5]
    recorder.cut(9.0)
    recorder.token_run(TokenRun("a", [10.0], 1))
    assert (record.output_tokens, recorder.strays) == (4, 5)


def test_words_about_unknown_or_ended_requests_are_strays() -> None:
    recorder = _recorder("a")
    recorder.finished(Finished("a", "length"), 2.0)
    recorder.tokens(_tokens("a", 2), 3.0)
    recorder.tokens(_tokens("nobody"), 3.0)
    recorder.finished(Finished("a", "error", "again"), 3.0)
    recorder.finished(Finished("nobody", "length"), 3.0)
    record = _only(recorder)
    assert recorder.strays == 5
    assert (record.outcome, record.finish_s, record.output_tokens) == ("completed", 2.0, 0)


def test_after_the_cut_a_request_stays_unfinished_and_only_its_places_and_times_are_noted() -> None:
    recorder = _recorder("a", "done")
    recorder.tokens(_tokens("a"), 2.0)
    recorder.finished(Finished("done", "length"), 2.0)
    recorder.cut(5.0)
    recorder.tokens(_tokens("a"), 5.001)
    recorder.finished(Finished("a", "length", "", "p", "d", TIMES), 5.002)
    unfinished, done = recorder.records()
    assert (unfinished.outcome, unfinished.finish_s, unfinished.output_tokens) == ("unfinished", None, 1)
    assert unfinished.reason == "not finished at 5.000 s, the drain deadline"
    assert (unfinished.prefill_node, unfinished.decode_node, unfinished.kv_bytes) == ("p", "d", 1_000)
    assert (done.outcome, done.reason) == ("completed", "")
    assert recorder.strays == 1


def test_of_a_record_that_has_ended_only_the_first_requests_are_kept() -> None:
    recorder = _recorder("a", "b", "c")
    recorder.cut(5.0, END, keep=2)
    recorder.tokens(_tokens("c"), 5.5)
    assert [(r.request_id, r.reason) for r in recorder.records()] == [
        ("a", "not finished at 5.000 s, the end of the record"),
        ("b", "not finished at 5.000 s, the end of the record"),
    ]


def test_a_request_has_ended_with_its_last_token_however_late_that_is_told() -> None:
    recorder = _recorder("a", "failed")
    recorder.tokens(Tokens((TokenCount("a", 1), TokenCount("failed", 1))), 2.0)
    recorder.finished(Finished("a", "length"), 2.5)
    recorder.finished(Finished("failed", "error"), 2.5)
    assert [record.finish_s for record in recorder.records()] == [2.0, 2.5]


def test_records_come_in_the_order_of_sending() -> None:
    assert [record.request_id for record in _recorder("b", "a", "c").records()] == ["b", "a", "c"]
