"""Answers as bytes, read by a client that forgives nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.api_error import ApiError
from emulator.core.completion_fields import ChatBody, CompletionBody, read_body
from emulator.core.completion_reply import Reply, error_event
from emulator.core.completion_request import Generation, chat, completion
from emulator.core.vocabulary import encode
from tests.sse import events_of, read_stream


def generation(*, in_chat: bool = False, **body: Any) -> Generation:
    if in_chat:
        data = msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}]} | body)
        return chat(read_body(data, ChatBody, 1_000), model="m", context_tokens=1_000)
    data = msgspec.json.encode({"prompt": "ba ba"} | body)
    return completion(read_body(data, CompletionBody, 1_000), model="m", context_tokens=1_000)


def reply(asked: Generation) -> Reply:
    return Reply(asked, "cmpl-1", 'a "model"', 1_700_000_000)


def streamed(asked: Generation, parts: list[int]) -> bytes:
    answer = reply(asked)
    data = b"".join(answer.tokens(n) for n in parts)
    assert answer.complete
    return data


@given(st.booleans(), st.lists(st.integers(1, 4), min_size=1, max_size=12), st.sampled_from(["", "usage", "both"]))
def test_one_token_a_chunk_however_they_come(in_chat: bool, parts: list[int], told: str) -> None:
    n = sum(parts)
    options = {"include_usage": bool(told), "continuous_usage_stats": told == "both"}
    asked = generation(in_chat=in_chat, max_tokens=n, stream=True, stream_options=options)
    seen = read_stream(streamed(asked, parts), chat=in_chat, usage=bool(told))
    assert seen.chunks == n == len(encode(seen.text))
    assert seen.text == asked.whole_text(n)
    assert seen.finish_reason == "length"
    whole = {"prompt_tokens": asked.prompt_tokens, "completion_tokens": n, "total_tokens": asked.prompt_tokens + n}
    assert seen.usage == (whole if told else None)
    if told == "both":
        assert [u["completion_tokens"] if u else None for u in seen.running_usage] == list(range(1, n + 1))
    else:
        assert set(seen.running_usage) == {None}


def test_more_tokens_than_were_asked_for_are_not_told() -> None:
    asked = generation(max_tokens=2, stream=True)
    answer = reply(asked)
    assert read_stream(answer.tokens(5), chat=False).chunks == 2
    assert answer.tokens(1) == b""


@pytest.mark.parametrize("in_chat", [False, True])
def test_a_stream_that_is_stopped_says_so_with_its_last_token(in_chat: bool) -> None:
    text = generation(in_chat=in_chat, max_tokens=9).whole_text(9)
    asked = generation(in_chat=in_chat, max_tokens=9, stream=True, stop=text[15:20])
    seen = read_stream(streamed(asked, [1] * asked.max_tokens), chat=in_chat)
    assert (seen.text, seen.finish_reason) == (text[:15], "stop")
    assert seen.chunks == asked.max_tokens


@pytest.mark.parametrize("in_chat", [False, True])
def test_a_document_says_the_same_as_a_stream(in_chat: bool) -> None:
    asked = generation(in_chat=in_chat, max_tokens=5)
    answer = reply(asked)
    answer.count(3)
    assert not answer.complete
    answer.count(2)
    assert answer.complete
    document = msgspec.json.decode(answer.document())
    (choice,) = document["choices"]
    text = choice["message"]["content"] if in_chat else choice["text"]
    assert text == asked.whole_text(5)
    assert choice["finish_reason"] == "length"
    assert document["model"] == 'a "model"'
    assert document["object"] == ("chat.completion" if in_chat else "text_completion")
    assert document["usage"]["completion_tokens"] == 5


def test_a_stream_that_breaks_ends_with_openais_error_object() -> None:
    (event,) = events_of(error_event(ApiError(500, "no decode node is left")))
    assert event == {
        "error": {"message": "no decode node is left", "type": "server_error", "param": None, "code": None}
    }
