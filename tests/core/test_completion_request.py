"""Requests to the endpoint: what they ask for, and how impossible ones are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core import api
from emulator.core.api_error import ApiError
from emulator.core.completion_fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body
from emulator.core.completion_request import Generation, chat, completion
from emulator.core.vocabulary import SIZE, count, encode, start_of, written

CONTEXT = 1_000
USER = [{"role": "user", "content": "hi"}]


def as_sent(body: object) -> bytes:
    return body if isinstance(body, bytes) else msgspec.json.encode(body)


def asked(body: object, *, context: int = CONTEXT) -> Generation:
    return completion(read_body(as_sent(body), CompletionBody, context), model="m", context_tokens=context)


def asked_in_chat(body: object) -> Generation:
    return chat(read_body(as_sent(body), ChatBody, CONTEXT), model="m", context_tokens=CONTEXT)


def tokenized(body: object) -> Any:
    return msgspec.json.decode(api.tokenize(read_body(as_sent(body), TokenizeBody, CONTEXT), CONTEXT))


def detokenized(body: object) -> Any:
    return msgspec.json.decode(api.detokenize(read_body(as_sent(body), DetokenizeBody, CONTEXT), CONTEXT))


def refused(body: object, *, in_chat: bool = False) -> ApiError:
    with pytest.raises(ApiError) as caught:
        (asked_in_chat if in_chat else asked)(body)
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
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [1]]}, "prompt"),
        ({"prompt": [[1], 1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1.5, 2]}, "prompt[0]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"prompt": [[2, -1]]}, "prompt[0][1]"),
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
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": 5}, "stop"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"stream": "yes"}, "stream"),
        ({"seed": "abc"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"top_k": "x"}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 7}, "min_p"),
        ({"repetition_penalty": -3}, "repetition_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"length_penalty": "x"}, "length_penalty"),
        ({"user": 7}, "user"),
        ({"logit_bias": 5}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1_025)}}, "logit_bias"),
        ({"stop_token_ids": [5] * 1_025}, "stop_token_ids"),
        ({"response_format": 5}, "response_format"),
        ({"response_format": {"type": "x"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]"),
        ({"bad_words": [1]}, "bad_words[0]"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"priority": "high"}, "priority"),
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


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
        ({"tool_choice": 9}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"functions": 5}, "functions"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"metadata": 5}, "metadata"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {f"{n}": "x" for n in range(17)}}, "metadata"),
        ({"parallel_tool_calls": "x"}, "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"verbosity": 1}, "verbosity"),
        ({"store": "x"}, "store"),
    ],
)
def test_what_is_impossible_in_a_chat_is_refused_with_its_parameter(change: dict[str, Any], param: str) -> None:
    error = refused({"messages": USER} | change, in_chat=True)
    assert (error.status, error.param) == (400, param)


def test_possible_values_of_every_field_are_taken() -> None:
    both = {
        "seed": -1,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"50256": -100},
        "user": "me",
        "logprobs": False,
        "stop_token_ids": [],
        "stop": None,
        "best_of": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    }
    tools = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "top_logprobs": 0,
        "reasoning_effort": "minimal",
    }
    assert asked({"prompt": "ba"} | both) == asked({"prompt": "ba"})
    assert asked_in_chat({"messages": USER} | both | tools) == asked_in_chat({"messages": USER})
    assert asked_in_chat({"messages": USER, "tool_choice": "none"}) == asked_in_chat({"messages": USER})


@pytest.mark.parametrize(
    ("body", "in_chat", "most"),
    [
        ({"prompt": [1] * 70_000}, False, 67_536),
        ({"prompt": "ba", "nonsense": [1] * 70_000}, False, 67_536),
        ({"messages": USER * 17_000}, True, 33_268),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 17_000}]}, True, 33_268),
    ],
)
def test_a_body_of_more_than_a_context_could_use_is_refused_unread(body: object, in_chat: bool, most: int) -> None:
    error = refused(body, in_chat=in_chat)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert f"at most {most} are taken" in error.message


def test_more_messages_than_a_context_could_hold_are_refused_uncounted() -> None:
    error = refused({"messages": USER * 251}, in_chat=True)
    assert (error.param, error.code) == ("messages", "context_length_exceeded")
    assert refused({"messages": USER * 8_193}, in_chat=True).param == "messages"


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


@given(st.integers(0, 34_000), st.integers(1, 40_000), st.integers(0, 6_500))
def test_a_stop_is_found_wherever_it_first_is_in_a_long_output(at: int, length: int, least: int) -> None:
    """The words begin again after 6,400 of them."""
    body = {"prompt": "ba", "max_tokens": 15_000, "min_tokens": least}
    whole = asked(body, context=20_000)
    text = whole.whole_text(15_000)
    found = asked(body | {"stop": text[at : at + length]}, context=20_000)
    first = text.find(text[at : at + length], start_of(least))
    assert found.text_end == (None if first < 0 else first)


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


@given(st.integers(0, SIZE), st.integers(0, 100))
def test_a_stop_token_counts_where_it_is_first_written_within_the_output(token: int, least: int) -> None:
    body = {"prompt": "ba", "max_tokens": 100, "min_tokens": least, "include_stop_str_in_output": True}
    whole = asked(body)
    found = asked(body | {"stop_token_ids": [token, SIZE + 5]})
    place = next((index for index in range(least, 100) if written(whole.seed, index) == token), None)
    assert found.max_tokens == (100 if place is None else place + 1)
    assert found.finish_reason == ("length" if place is None else "stop")


def test_the_text_of_an_answer_is_that_of_its_tokens() -> None:
    whole = asked({"prompt": "ba", "max_tokens": 900, "stop": "never", "min_tokens": 3})
    stopped = asked({"prompt": "ba", "max_tokens": 900, "stop": whole.whole_text(900)[40:47]})
    for answer in (whole, stopped):
        assert answer.whole_text(answer.max_tokens) == "".join(map(answer.text, range(answer.max_tokens)))


def test_text_becomes_tokens_and_text_again() -> None:
    answer = tokenized({"prompt": "ba baba é"})
    assert answer["count"] == len(answer["tokens"]) == 5
    assert answer["max_model_len"] == CONTEXT
    back = detokenized({"tokens": answer["tokens"]})
    assert back == {"prompt": "ba baba é"}


def test_a_conversation_has_as_many_tokens_as_a_chat_counts() -> None:
    answer = tokenized({"messages": USER})
    assert answer["count"] == asked_in_chat({"messages": USER}).prompt_tokens


@pytest.mark.parametrize("tokens", [[-1], [10**6], ["a"], None, [1] * (CONTEXT + 1)])
def test_what_are_no_tokens_has_no_text(tokens: Any) -> None:
    with pytest.raises(ApiError) as caught:
        detokenized({"tokens": tokens})
    assert caught.value.status == 400


@pytest.mark.parametrize(("context", "nbytes"), [(1_000, 2**20), (131_072, 2**21), (10_000_000, 2**23)])
def test_a_body_may_hold_a_whole_context_within_bounds(context: int, nbytes: int) -> None:
    assert api.max_body_bytes(context) == nbytes
