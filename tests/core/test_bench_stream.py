"""What an OpenAI-compatible server may stream, and what is made of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.bench.exchange import Seen
from emulator.core.bench.stream import OpenAiStream, error_body_text


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    return {"object": "text_completion", "choices": [{"index": 0, "text": piece, "finish_reason": finish}]}


def delta(finish: str | None = None, **of: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": of, "finish_reason": finish}]}


def usage(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}} | more


def read(*events: dict[str, Any] | bytes, done: bool = True, keep_text: bool = False) -> Seen:
    """A stream of one event a second, the first at 1 s, ended in an orderly way."""
    seen = Seen()
    stream = OpenAiStream(seen, keep_text=keep_text)
    rows = [event if isinstance(event, bytes) else msgspec.json.encode(event) for event in events]
    for n, row in enumerate([*rows, b"[DONE]"] if done else rows, 1):
        stream.feed(b"data: " + row + b"\n\n", float(n))
    stream.end(99.0)
    return seen


def test_a_completion_is_timed_by_its_text() -> None:
    seen = read(text("a"), text("b"), text("c", "length"), usage(7, 3), keep_text=True)
    assert seen.token_times_s == [1.0, 2.0, 3.0]
    assert (seen.prompt_tokens, seen.output_tokens, seen.finish_reason, seen.reason) == (7, 3, "length", "")
    assert "".join(seen.text) == "abc"
    assert (seen.counts.token_chunks, seen.counts.usage_chunks) == (3, 1)


def test_text_is_kept_only_where_it_is_wanted() -> None:
    assert read(text("a", "stop")).text == []


def test_the_role_and_the_end_are_no_tokens() -> None:
    seen = read(delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta("stop"))
    assert seen.token_times_s == [2.0, 3.0]
    assert (seen.counts.role_chunks, seen.counts.finish_chunks, seen.counts.token_chunks) == (1, 1, 2)


def test_a_role_that_comes_with_the_first_token_counts() -> None:
    seen = read(delta(role="assistant", content="a"), delta("length", content="b"))
    assert seen.token_times_s == [1.0, 2.0]
    assert seen.counts.role_chunks == 0


def test_empty_chunks_are_no_tokens() -> None:
    empty = [text(""), delta(content=""), delta(content=None), {"choices": []}, {"choices": None}, {}]
    seen = read(*empty, text("a", "stop"))
    assert seen.token_times_s == [7.0]
    assert seen.counts.empty_chunks == len(empty)


def test_reasoning_and_tool_calls_are_output() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": ""}}
    seen = read(delta(reasoning_content="a"), delta(reasoning="b"), delta(tool_calls=[call]), delta("tool_calls"))
    assert seen.token_times_s == [1.0, 2.0, 3.0]
    assert seen.reason == ""


def test_a_chunk_may_hold_many_tokens_and_usage_come_with_each() -> None:
    seen = read(text("a b ") | usage(5, 2, choices=text("a b ")["choices"]), text("c", "stop"), usage(5, 3))
    assert seen.token_times_s == [1.0, 2.0]
    assert seen.output_tokens == 3


def test_usage_with_the_last_token_is_taken() -> None:
    seen = read(text("a", "length") | {"usage": {"prompt_tokens": 4, "completion_tokens": 1}})
    assert (seen.prompt_tokens, seen.output_tokens, seen.counts.usage_chunks) == (4, 1, 0)


def test_no_usage_is_no_count() -> None:
    assert read(text("a", "stop") | {"usage": None}).output_tokens is None


def test_a_stream_may_end_without_done_but_not_without_a_reason() -> None:
    ended = read(text("a"), text("b", "length"), done=False)
    assert (ended.reason, ended.counts.without_done) == ("", 1)
    cut = read(text("a"), text("b"), done=False)
    assert cut.reason == "stream ended early"
    assert "2 chunks" in cut.message


def test_done_is_the_end_whatever_follows() -> None:
    seen = read(text("a", "stop"), b"[DONE]", b"not json", text("b"), done=False)
    assert (seen.reason, seen.token_times_s, seen.counts.without_done) == ("", [1.0], 0)


def test_an_answer_without_output_has_failed() -> None:
    assert read(delta(role="assistant"), delta("stop")).reason == "no output"
    assert read(done=False).reason == "stream ended early"


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "out of memory", "type": "server_error", "code": 500}},
        {"error": "out of memory"},
        {"object": "error", "message": "out of memory", "code": 500},
    ],
)
def test_an_error_in_the_middle_ends_it(error: dict[str, Any]) -> None:
    seen = read(text("a"), error, text("b", "stop"))
    assert (seen.reason, seen.message) == ("error in the stream", "out of memory")
    assert seen.token_times_s == [1.0]


DEEP = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    "garbage", [b"{", b"[1]", b'{"choices": 3}', b'{"choices": [{"text": "\xff"}]}', b"\xff", DEEP]
)
def test_what_is_no_chunk_is_a_failure(garbage: bytes) -> None:
    seen = read(text("a"), garbage, text("b", "stop"))
    assert seen.reason == "malformed chunk"
    assert seen.token_times_s == [1.0]


def test_the_body_of_an_error_may_be_anything() -> None:
    assert error_body_text(DEEP).startswith('{"x": [[[')


def test_characters_may_come_in_two_reads_and_events_in_one() -> None:
    seen = Seen()
    stream = OpenAiStream(seen, keep_text=True)
    whole = b"".join(b"data: " + msgspec.json.encode(text(piece)) + b"\r\n\r\n" for piece in ("é", "字"))
    at = whole.index("é".encode()) + 1
    stream.feed(whole[:at], 1.0)
    assert seen.token_times_s == []
    stream.feed(whole[at:], 2.0)
    assert seen.token_times_s == [2.0, 2.0]
    assert "".join(seen.text) == "é字"


@given(cuts=st.lists(st.integers(0, 900), max_size=60), ending=st.sampled_from([b"\n", b"\r\n"]))
def test_a_stream_is_the_same_however_it_is_cut(cuts: list[int], ending: bytes) -> None:
    chunks = [
        delta(role="assistant", content=""),
        delta(content="é"),
        delta(content="字 x"),
        delta("stop"),
        usage(3, 2),
    ]
    rows = [b": ping", b"", *(row for chunk in chunks for row in (b"data: " + msgspec.json.encode(chunk), b""))]
    whole = ending.join([*rows, b"data: [DONE]", b"", b""])
    seen = Seen()
    stream = OpenAiStream(seen, keep_text=True)
    ends = sorted({min(cut, len(whole)) for cut in cuts} | {len(whole)})
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        stream.feed(whole[start:end], float(end))
    stream.end(9999.0)
    assert (seen.reason, seen.finish_reason, "".join(seen.text)) == ("", "stop", "é字 x")
    assert (seen.counts.token_chunks, seen.counts.role_chunks, seen.counts.finish_chunks) == (2, 1, 1)
    assert (seen.prompt_tokens, seen.output_tokens, seen.counts.comments) == (3, 2, 1)


def test_comment_lines_are_counted() -> None:
    seen = Seen()
    stream = OpenAiStream(seen)
    stream.feed(b": keep-alive\n\n: keep-alive\n\ndata: " + msgspec.json.encode(text("a", "stop")) + b"\n\n", 1.0)
    stream.end(2.0)
    assert (seen.counts.comments, seen.counts.empty_chunks, seen.reason) == (2, 0, "")


def test_the_body_of_a_refusal_is_told_in_one_line() -> None:
    assert error_body_text(b'{"error": {"message": "no such\\nmodel"}}') == "no such model"
    assert error_body_text(b'{"object": "error", "message": "too long"}') == "too long"
    assert error_body_text(b'{"detail": "x"}') == "{'detail': 'x'}"
    assert error_body_text(b"<html>502\n</html>\xff") == "<html>502 </html>\N{REPLACEMENT CHARACTER}"
    assert len(error_body_text(b"x" * 5000)) <= 300
