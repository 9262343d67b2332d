"""OpenAI's completion requests, read and checked: what is to be generated, or an `ApiError` that says what is wrong.

Fields that change which words a model writes (temperature, seed, tools, response_format …) are accepted and change
nothing here, since the words are made up; impossible values of them are refused, and so is what would change the shape
of the answer and is not emulated (several choices, log probabilities, echo).

Nothing but `max_tokens` or a stop ends an output. The words are known beforehand, so a stop is found before the request
is sent: the emulated model generates exactly the tokens up to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from emulator.core import vocabulary
from emulator.core.api_error import TOO_LONG, ApiError, invalid
from emulator.core.chat_template import prompt_of
from emulator.core.completion_fields import (
    MOST_STOPS,
    ChatBody,
    ChatMessage,
    CompletionBody,
    StreamOptions,
    check_response_format,
    check_tools,
)
from emulator.core.vocabulary import first_written, start_of, written_span

DEFAULT_MAX_TOKENS = 16
LEAST_TOKENS_A_MESSAGE = 4
"""By the template: a role, a colon, a space or a word after it, a line feed."""
BEGINNING_CHARS = 16
"""More than two words: a stop that begins with so many has one place among all words."""
FinishReason = Literal["length", "stop"]
Prompt = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a request asks for. `max_tokens` are generated exactly; `text_end` cuts the text before a stop string."""

    chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    prompt_tokens: int
    max_tokens: int
    seed: int
    finish_reason: FinishReason = "length"
    text_end: int | None = None

    def text(self, index: int) -> str:
        """The text of the token at a place, as far as it is told."""
        whole = vocabulary.written_text(self.seed, index)
        return whole if self.text_end is None else whole[: max(0, self.text_end - start_of(index))]

    def whole_text(self, tokens: int) -> str:
        """The text of so many tokens."""
        end = start_of(tokens)
        return written_span(self.seed, 0, end if self.text_end is None else min(end, self.text_end))


def completion(body: CompletionBody, *, model: str, context_tokens: int) -> Generation:
    """A request to `/v1/completions`."""
    _check(body, model)
    if body.suffix:
        raise invalid("suffix: not emulated; leave it out", "suffix")
    prompt = one_prompt(body.prompt)
    return _generation(body, prompt, body.max_tokens or DEFAULT_MAX_TOKENS, context_tokens, chat=False)


def chat(body: ChatBody, *, model: str, context_tokens: int) -> Generation:
    """A request to `/v1/chat/completions`."""
    _check(body, model)
    if body.top_logprobs:
        raise invalid("top_logprobs: not emulated, since no probabilities are", "top_logprobs")
    check_tools(body)
    prompt = chat_prompt(body.messages, context_tokens)
    return _generation(body, prompt, body.max_completion_tokens or body.max_tokens, context_tokens, chat=True)


# --- prompts --------------------------------------------------------------------------------------------------------


def one_prompt(prompt: str | list[Any] | None) -> Prompt:
    """A text or token ids, alone or as the only one of a list; ids of any vocabulary, as only their number matters."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) != 1:
            raise invalid(f"prompt: {len(prompt)} prompts in one request; only one is emulated", "prompt")
        prompt = prompt[0]
    if not prompt:
        raise invalid("prompt: must have at least 1 token", "prompt")
    if isinstance(prompt, list) and msgspec.json.encode(prompt).translate(None, b"0123456789,") != b"[]":
        raise invalid("prompt: must be one text or one list of token ids, not both", "prompt")
    return prompt


def chat_prompt(messages: list[ChatMessage] | None, context_tokens: int) -> str:
    """The prompt of a conversation by the one template."""
    if not messages:
        raise invalid("messages: must have at least 1 message", "messages")
    if (least := LEAST_TOKENS_A_MESSAGE * len(messages)) > context_tokens:
        raise _too_long(least, 0, context_tokens, "messages")
    return prompt_of((message.role, _content(message)) for message in messages)


def _content(message: ChatMessage) -> str:
    if not message.role:
        raise invalid("messages: every message needs a role", "messages")
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise invalid(f"messages: content parts must be text; {part.type:.40} is not emulated", "messages")
    return "".join([part.text or "" for part in message.content])


def prompt_length(prompt: Prompt, context_tokens: int, param: str) -> int:
    """Tokens of a prompt; raises ApiError for more than the context, without counting all of them."""
    tokens = vocabulary.count(prompt, context_tokens) if isinstance(prompt, str) else len(prompt)
    if tokens > context_tokens:
        raise _too_long(tokens, 0, context_tokens, param)
    return tokens


# --- limits ---------------------------------------------------------------------------------------------------------


def check_model(asked: str, model: str) -> None:
    """Raises ApiError unless it is the one that is served."""
    if asked != model:
        message = f"The model `{asked:.100}` does not exist; this is `{model}`"
        raise ApiError(404, message, param="model", code="model_not_found")


def _check(body: CompletionBody | ChatBody, model: str) -> None:
    if body.model is not None:
        check_model(body.model, model)
    for name, value in (("n", body.n), ("best_of", body.best_of)):
        if value is not None and value != 1:
            raise invalid(f"{name}: only 1 is emulated", name)
    if body.logprobs is not None and body.logprobs is not False:
        raise invalid("logprobs: not emulated, since no probabilities are", "logprobs")
    if body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs: not emulated, since no probabilities are", "prompt_logprobs")
    if body.echo:
        raise invalid("echo: not emulated; leave it out", "echo")
    if body.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens: not emulated; send a shorter prompt", "truncate_prompt_tokens")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    if not all(key.isascii() and key.isdecimal() for key in body.logit_bias or ()):
        raise invalid("logit_bias: its keys must be token ids", "logit_bias")
    check_response_format(body.response_format)


def _too_long(prompt: int, output: int, context_tokens: int, param: str) -> ApiError:
    return invalid(
        f"This model's maximum context length is {context_tokens} tokens. However, you requested "
        f"{prompt + output} tokens ({prompt} in the {param}, {output} in the completion).",
        param,
        TOO_LONG,
    )


def _generation(
    body: CompletionBody | ChatBody, prompt: Prompt, max_tokens: int | None, context_tokens: int, *, chat: bool
) -> Generation:
    """Without `max_tokens` the output fills the context."""
    param = "messages" if chat else "prompt"
    prompt_tokens = prompt_length(prompt, context_tokens, param)
    wanted = max_tokens or max(1, context_tokens - prompt_tokens)
    if prompt_tokens + wanted > context_tokens:
        raise _too_long(prompt_tokens, wanted, context_tokens, param)
    least = body.min_tokens or 0
    if least > wanted:
        raise invalid(f"min_tokens {least} is above max_tokens {wanted}", "min_tokens")
    options = body.stream_options or StreamOptions()
    whole = Generation(
        chat=chat,
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        prompt_tokens=prompt_tokens,
        max_tokens=wanted,
        seed=vocabulary.seed_of(prompt),
    )
    return stopped(whole, body)


def stopped(whole: Generation, body: CompletionBody | ChatBody) -> Generation:
    """The generation up to the first stop after `min_tokens`, if there is one."""
    strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(strings) > MOST_STOPS or not all(strings):
        raise invalid(f"stop: at most {MOST_STOPS} texts, none of them empty", "stop")
    least, keep = body.min_tokens or 0, body.include_stop_str_in_output
    ends: list[tuple[int, int]] = []  # tokens, characters
    for at, end in _found(strings, whole, start_of(least)):
        ends.append((1 if end <= 2 else 1 + -(-(end - 2) // 5), end if keep else at))
    for token in set(body.stop_token_ids or ()):
        place = first_written(whole.seed, token, least)
        if place is not None and place < whole.max_tokens:
            ends.append((place + 1, start_of(place + 1 if keep else place)))
    if not ends:
        return whole
    tokens, text_end = min(ends)
    return replace(whole, max_tokens=tokens, finish_reason="stop", text_end=text_end)


def _found(strings: list[str], whole: Generation, start: int) -> Iterator[tuple[int, int]]:
    """Start and end of the first occurrence of each string from a character on, where there is one.

    The text repeats itself after all its words, so what is not found by then never is; and as each word comes but once
    until then, one place is left for a long string where its beginning is found.
    """
    last = start_of(whole.max_tokens)
    text = written_span(whole.seed, start, min(last, start + start_of(1 + vocabulary.WORDS) + BEGINNING_CHARS))
    for string in strings:
        at = start + text.find(string[:BEGINNING_CHARS])
        end = at + len(string)
        if start <= at and end <= last and written_span(whole.seed, at, end) == string:
            yield at, end
