"""Requests to the endpoint: what they ask for, and how impossible ones are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core import api
from emulator.core.api_error import ApiError
from emulator.core.completion_request import Generation, chat, completion, start_of
from emulator.core.vocabulary import count, encode

CONTEXT = 1_000
USER = [{"role": "user", "content": "hi"}]


def asked(body: object, *, context: int = CONTEXT) -> Generation:
    return completion(msgspec.json.encode(body), model="m", context_tokens=context)


def asked_in_chat(body: object) -> Generation:
    return chat(msgspec.json.encode(body), model="m", context_tokens=CONTEXT)


def refused(body: object, *, in_chat: bool = False) -> ApiError:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    with pytest.raises(ApiError) as caught:
        (chat if in_chat else completion)(data, model="m", context_tokens=CONTEXT)
    error = msgspec.json.decode(caught.value.body())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return caught.value


@pytest.mark.parametrize("prompt", ["ba ba", ["ba ba"], [5, 6], [[5, 6]]])
def test_a_prompt_is_a_text_or_ids_alone_or_in_a_list_of_one(prompt: Any) -> None:
    assert asked({"prompt": prompt}).prompt_tokens == 2


def test_a_completion_has_16_tokens_unless_it_says_otherwise() -> None:
    assert asked({"prompt": "ba"}).max_tokens == 16
    assert asked({"prompt": "ba", "max_tokens": None}).max_tokens == 16
    assert asked({"prompt": "ba", "max_tokens": 7}).max_tokens == 7


def test_a_chat_fills_the_context_unless_it_says_otherwise() -> None:
    prompt = count("user: hi\nassistant:")
    assert asked_in_chat({"messages": USER}).max_tokens == CONTEXT - prompt
    assert asked_in_chat({"messages": USER, "max_tokens": 7}).max_tokens == 7
    assert asked_in_chat({"messages": USER, "max_tokens": 7, "max_completion_tokens": 9}).max_tokens == 9


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    whole = asked_in_chat({"messages": USER})
    assert asked_in_chat({"messages": [{"role": "user", "content": parts}]}) == whole


def test_fields_that_only_choose_words_change_nothing() -> None:
    extra = {"temperature": 0.5, "top_k": 3, "seed": 9, "user": "me", "ignore_eos": True, "nonsense": {"a": [1]}}
    assert asked({"prompt": "ba"} | extra) == asked({"prompt": "ba"})


def test_usage_is_told_as_asked() -> None:
    body = {"prompt": "ba", "stream": True}
    assert not asked(body).include_usage
    assert asked(body | {"stream_options": {"include_usage": True}}).include_usage
    both = asked(body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    assert both.include_usage
    assert both.continuous_usage


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5, 2]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [1] * (CONTEXT + 1)}, "prompt"),
        ({"prompt": "x" * (CONTEXT + 1)}, "prompt"),
        ({"prompt": "x" * 1_000_000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": 7.5}, "max_tokens"),
        ({"max_tokens": CONTEXT}, "prompt"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 5}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": 5}, "stop"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_what_is_impossible_is_refused_with_its_parameter(change: dict[str, Any], param: str) -> None:
    error = refused({"prompt": "ba"} | change)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        [{"role": "", "content": "hi"}],
        [{"content": "hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        "hi",
    ],
)
def test_a_conversation_is_messages_of_text(messages: Any) -> None:
    error = refused({"messages": messages}, in_chat=True)
    assert error.status == 400
    assert (error.param or "").startswith("messages")


def test_max_completion_tokens_must_be_above_0() -> None:
    assert refused({"messages": USER, "max_completion_tokens": 0}, in_chat=True).param == "max_completion_tokens"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"nonsense", b"\xff\xfe", b"[1]", b'"x"', b'{"prompt": "\xff"}', b"[" * 50_000]
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    assert refused(data).status == 400


def test_too_long_a_request_is_told_as_openai_tells_it() -> None:
    error = refused({"prompt": "ba ba", "max_tokens": CONTEXT})
    assert error.code == "context_length_exceeded"
    assert error.message == (
        "This model's maximum context length is 1000 tokens. However, you requested 1002 tokens (2 in the prompt, 1000 "
        "in the completion)."
    )


def test_another_model_is_not_found() -> None:
    error = refused({"prompt": "ba", "model": "other"})
    assert (error.status, error.code) == (404, "model_not_found")
    assert asked({"prompt": "ba", "model": "m"}) == asked({"prompt": "ba"})


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 45), st.booleans())
def test_a_stop_ends_the_output_with_the_token_that_completes_it(at: int, length: int, least: int, keep: bool) -> None:
    whole = asked({"prompt": "ba", "max_tokens": 50})
    text = whole.whole_text(50)
    string = text[at : at + length]
    body = {"prompt": "ba", "max_tokens": 50, "stop": [string, "NEVER"], "min_tokens": least}
    found = asked(body | {"include_stop_str_in_output": keep})
    first = text.find(string, start_of(least))
    if first < 0:
        assert found == whole
        return
    end = first + len(string)
    assert found.finish_reason == "stop"
    assert found.whole_text(found.max_tokens) == text[: end if keep else first]
    assert start_of(found.max_tokens) >= end > start_of(found.max_tokens - 1)
    assert found.max_tokens > least or least == 0


def test_a_stop_that_is_never_written_changes_nothing() -> None:
    assert asked({"prompt": "ba", "stop": "\n\n"}) == asked({"prompt": "ba"})


def test_the_earliest_of_several_stops_counts() -> None:
    text = asked({"prompt": "ba"}).whole_text(16)
    found = asked({"prompt": "ba", "stop": [text[30:33], text[8:11]]})
    assert found.whole_text(found.max_tokens) == text[:8]


def test_a_stop_token_ends_the_output_and_is_left_out() -> None:
    whole = asked({"prompt": "ba"})
    tokens = encode(whole.whole_text(16))
    found = asked({"prompt": "ba", "stop_token_ids": [tokens[5]]})
    assert (found.max_tokens, found.finish_reason) == (6, "stop")
    assert encode(found.whole_text(6)) == tokens[:5]


def test_text_becomes_tokens_and_text_again() -> None:
    answer = msgspec.json.decode(api.tokenize(msgspec.json.encode({"prompt": "ba baba é"}), CONTEXT))
    assert answer["count"] == len(answer["tokens"]) == 5
    assert answer["max_model_len"] == CONTEXT
    back = msgspec.json.decode(api.detokenize(msgspec.json.encode({"tokens": answer["tokens"]}), CONTEXT))
    assert back == {"prompt": "ba baba é"}


def test_a_conversation_has_as_many_tokens_as_a_chat_counts() -> None:
    answer = msgspec.json.decode(api.tokenize(msgspec.json.encode({"messages": USER}), CONTEXT))
    assert answer["count"] == asked_in_chat({"messages": USER}).prompt_tokens


@pytest.mark.parametrize("tokens", [[-1], [10**6], ["a"], None, [1] * (CONTEXT + 1)])
def test_what_are_no_tokens_has_no_text(tokens: Any) -> None:
    with pytest.raises(ApiError) as caught:
        api.detokenize(msgspec.json.encode({"tokens": tokens}), CONTEXT)
    assert caught.value.status == 400


@pytest.mark.parametrize(("context", "nbytes"), [(1_000, 2**20), (131_072, 2**21), (10_000_000, 2**23)])
def test_a_body_may_hold_a_whole_context_within_bounds(context: int, nbytes: int) -> None:
    assert api.max_body_bytes(context) == nbytes
