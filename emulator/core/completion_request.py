"""OpenAI's completion requests, read and checked: what is to be generated, or an `ApiError` that says what is wrong.

Fields that change which words a model writes (temperature, seed, tools, response_format …) are accepted and change
nothing here, since the words are made up; impossible values of them are refused, and so is what would change the shape
of the answer and is not emulated (several choices, log probabilities, echo).

Nothing but `max_tokens` or a stop ends an output. The words are known beforehand, so a stop is found before the request
is sent: the emulated model generates exactly the tokens up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from emulator.core import vocabulary
from emulator.core.api_error import TOO_LONG, ApiError, invalid
from emulator.core.chat_template import prompt_of

DEFAULT_MAX_TOKENS = 16
MOST_STOPS = 64
LARGEST_TOKEN_ID = 2**31 - 1
FinishReason = Literal["length", "stop"]

T = TypeVar("T", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream tells beside its tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both kinds of requests; null is as good as left out, and unknown fields are let be."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | int | None = None


class CompletionBody(_Body, frozen=True, kw_only=True):
    """Of `/v1/completions`."""

    prompt: Any = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """A message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None


class ChatBody(_Body, frozen=True, kw_only=True):
    """Of `/v1/chat/completions`."""

    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None


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
        return "".join(map(self.text, range(tokens)))


def start_of(index: int) -> int:
    """Characters before the token at a place: a syllable has 2, a word 5."""
    return 0 if index == 0 else 2 + 5 * (index - 1)


def completion(data: bytes, *, model: str, context_tokens: int) -> Generation:
    """A request to `/v1/completions`."""
    body = read_body(data, CompletionBody)
    _check(body, model)
    if body.best_of is not None and body.best_of != 1:
        raise invalid("best_of: only 1 is emulated", "best_of")
    if body.echo or body.suffix:
        raise invalid("echo and suffix are not emulated: leave them out", "echo" if body.echo else "suffix")
    prompt = one_prompt(body.prompt, context_tokens)
    return _generation(body, prompt, body.max_tokens or DEFAULT_MAX_TOKENS, context_tokens, chat=False)


def chat(data: bytes, *, model: str, context_tokens: int) -> Generation:
    """A request to `/v1/chat/completions`."""
    body = read_body(data, ChatBody)
    _check(body, model)
    if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
        raise invalid("max_completion_tokens must be at least 1", "max_completion_tokens")
    prompt = chat_prompt(body.messages)
    return _generation(body, prompt, body.max_completion_tokens or body.max_tokens, context_tokens, chat=True)


def read_body(data: bytes, kind: type[T]) -> T:
    """A request's body; raises ApiError for what is no JSON object or has fields of other types."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        param = where.rstrip("`").lstrip(".") or None
        raise invalid(f"{param or 'body'}: {what}", param) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from None


# --- prompts --------------------------------------------------------------------------------------------------------


def one_prompt(prompt: Any, context_tokens: int) -> str | Sequence[int]:
    """A text or token ids, alone or as the only one of a list."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) != 1:
            raise invalid(f"prompt: {len(prompt)} prompts in one request; only one is emulated", "prompt")
        prompt = prompt[0]
    if not isinstance(prompt, str | list):
        raise invalid("prompt: must be a text or a list of token ids", "prompt")
    if not prompt:
        raise invalid("prompt: must have at least 1 token", "prompt")
    if isinstance(prompt, list):
        check_token_ids(prompt, "prompt", context_tokens)
    return prompt


def check_token_ids(tokens: list[Any], param: str, context_tokens: int) -> None:
    """Raises ApiError unless they are ids; of any vocabulary, as only their number matters."""
    if len(tokens) > context_tokens:
        raise _too_long(len(tokens), 0, context_tokens, param)
    for token in tokens:
        if type(token) is not int:
            raise invalid(f"{param}: token ids must be whole numbers, and {token!r:.40} is none", param)
        if not 0 <= token <= LARGEST_TOKEN_ID:
            raise invalid(f"{param}: there is no token {token}", param)


def chat_prompt(messages: list[ChatMessage] | None) -> str:
    """The prompt of a conversation by the one template."""
    if not messages:
        raise invalid("messages: must have at least 1 message", "messages")
    return prompt_of((message.role, _content(message)) for message in messages)


def _content(message: ChatMessage) -> str:
    if not message.role:
        raise invalid("messages: every message needs a role", "messages")
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise invalid(f"messages: content parts must be text; {part.type:.40} is not emulated", "messages")
    return "".join(part.text or "" for part in message.content)


def prompt_length(prompt: str | Sequence[int], context_tokens: int, param: str) -> int:
    """Tokens of a prompt; one that cannot fit is refused without being counted."""
    if not isinstance(prompt, str):
        return len(prompt)
    least = len(prompt) // vocabulary.LONGEST_TOKEN_BYTES
    if least > context_tokens:
        raise _too_long(least, 0, context_tokens, param)
    return vocabulary.count(prompt)


# --- limits ---------------------------------------------------------------------------------------------------------


def check_model(asked: str, model: str) -> None:
    """Raises ApiError unless it is the one that is served."""
    if asked != model:
        message = f"The model `{asked:.100}` does not exist; this is `{model}`"
        raise ApiError(404, message, param="model", code="model_not_found")


def _check(body: _Body, model: str) -> None:
    if body.model is not None:
        check_model(body.model, model)
    if body.n is not None and body.n != 1:
        raise invalid("n: only 1 is emulated", "n")
    if body.logprobs:
        raise invalid("logprobs: not emulated, since no probabilities are", "logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    if body.max_tokens is not None and body.max_tokens < 1:
        raise invalid("max_tokens must be at least 1", "max_tokens")
    if body.min_tokens is not None and body.min_tokens < 0:
        raise invalid("min_tokens must be at least 0", "min_tokens")
    bounds = (
        ("temperature", body.temperature, 0, 2),
        ("top_p", body.top_p, 0, 1),
        ("presence_penalty", body.presence_penalty, -2, 2),
        ("frequency_penalty", body.frequency_penalty, -2, 2),
    )
    for name, value, low, high in bounds:
        if value is not None and not low <= value <= high:
            raise invalid(f"{name} must be between {low} and {high}", name)


def _too_long(prompt: int, output: int, context_tokens: int, param: str) -> ApiError:
    return invalid(
        f"This model's maximum context length is {context_tokens} tokens. However, you requested "
        f"{prompt + output} tokens ({prompt} in the {param}, {output} in the completion).",
        param,
        TOO_LONG,
    )


def _generation(
    body: _Body, prompt: str | Sequence[int], max_tokens: int | None, context_tokens: int, *, chat: bool
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


def stopped(whole: Generation, body: _Body) -> Generation:
    """The generation up to the first stop after `min_tokens`, if there is one."""
    strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
    ids = set(body.stop_token_ids or ())
    if len(strings) > MOST_STOPS or not all(strings):
        raise invalid(f"stop: at most {MOST_STOPS} texts, none of them empty", "stop")
    least = body.min_tokens or 0
    ends: list[tuple[int, int]] = []  # tokens, characters
    if strings:
        text = whole.whole_text(whole.max_tokens)
        for string in strings:
            at = text.find(string, start_of(least))
            if at >= 0:
                end = at + len(string)
                ends.append((1 if end <= 2 else 1 + -(-(end - 2) // 5), end if body.include_stop_str_in_output else at))
    if ids:
        places = range(least, whole.max_tokens)
        first = next((i for i in places if vocabulary.written(whole.seed, i) in ids), None)
        if first is not None:
            ends.append((first + 1, start_of(first + 1 if body.include_stop_str_in_output else first)))
    if not ends:
        return whole
    tokens, text_end = min(ends)
    return Generation(
        chat=whole.chat,
        stream=whole.stream,
        include_usage=whole.include_usage,
        continuous_usage=whole.continuous_usage,
        prompt_tokens=whole.prompt_tokens,
        max_tokens=tokens,
        seed=whole.seed,
        finish_reason="stop",
        text_end=text_end,
    )
