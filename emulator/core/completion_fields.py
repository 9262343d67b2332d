"""The fields of OpenAI's requests, and of vLLM's beside them: types and bounds, checked as the JSON is decoded.

Null is as good as left out, and fields that neither knows are let be. Sources: OpenAI's API reference (completions,
chat), vLLM's `entrypoints/openai/protocol.py` and `sampling_params.py`. Where the two differ the wider bound counts.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

import msgspec

from emulator.core.api_error import TOO_LONG, invalid
from emulator.core.vocabulary import SIZE

VALUES_PER_TOKEN, MORE_VALUES = 2, 65_536
KEYS_PER_TOKEN, MORE_KEYS = 0.5, 32_768
"""A body may have so many for each token of the context, and so many besides: more would take too long to decode.

They are counted by commas, and by quotes with a colon after them, which in a text are tokens of their own.
"""
MOST_MESSAGES = 8_192
MOST_STOPS = 64
MOST_METADATA = 16
MOST_TOKENS_NAMED = 1_024
"""So many tokens may be named by a field of a request, beside its prompt."""
LARGEST_TOKEN_ID = 2**31 - 1

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_TOKEN_ID)]
OwnTokenId = Annotated[int, msgspec.Meta(ge=0, lt=SIZE)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Anything = dict[str, msgspec.Raw]

T = TypeVar("T", bound=msgspec.Struct)

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<param>[^`]*)`$")


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream tells beside its tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True):
    """A shape that an answer is to have."""

    name: str
    schema: Anything | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """A form that an answer is to have."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both kinds of requests."""

    model: str | None = None
    max_tokens: Positive | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=MOST_TOKENS_NAMED)] | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: bool | int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # What only chooses words.
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    length_penalty: float | None = None
    use_beam_search: bool | None = None
    seed: Int64 | None = None
    logit_bias: Annotated[dict[str, Bias], msgspec.Meta(max_length=MOST_TOKENS_NAMED)] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Anything | None = None

    # What changes nothing at all.
    user: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    kv_transfer_params: Anything | None = None
    vllm_xargs: Anything | None = None


class CompletionBody(_Body, frozen=True, kw_only=True):
    """Of `/v1/completions`."""

    prompt: str | list[TokenId | str | list[TokenId]] | None = None
    suffix: str | None = None


class ContentPart(msgspec.Struct, frozen=True, gc=False):
    """A part of a message."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, gc=False):
    """A message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    """A function by its name."""

    name: str


class Function(msgspec.Struct, frozen=True):
    """A function that a model may call."""

    name: str
    description: str | None = None
    parameters: Anything | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool that a model may call."""

    type: Literal["function", "custom"]
    function: Function | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    """The tool that a model has to call."""

    type: Literal["function", "custom", "allowed_tools"]
    function: NamedFunction | None = None


class ChatBody(_Body, frozen=True, kw_only=True):
    """Of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)] | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    modalities: list[Literal["text"]] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    functions: list[Function] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=MOST_METADATA)] | None = None
    prediction: Anything | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Anything | None = None
    documents: list[Anything] | None = None


class TokenizeBody(msgspec.Struct, frozen=True):
    """Of `/tokenize`: a text, or a conversation."""

    prompt: str | list[TokenId | str | list[TokenId]] | None = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """Of `/detokenize`."""

    tokens: list[OwnTokenId]


def read_body(data: bytes, kind: type[T], context_tokens: int) -> T:
    """A request's body; raises ApiError for what is no JSON object, has fields of other types, or too many values."""
    _check_size("values", data.count(b",") + 1, VALUES_PER_TOKEN * context_tokens + MORE_VALUES, context_tokens)
    _check_size("keys", data.count(b'":'), int(KEYS_PER_TOKEN * context_tokens) + MORE_KEYS, context_tokens)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        what = str(error)[: place.start() if place else None]
        param = place["param"].replace("[...]", "") if place else None
        raise invalid(f"{param or 'body'}: {what[:1].lower()}{what[1:]}", param or None) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from None


def _check_size(what: str, found: int, most: int, context_tokens: int) -> None:
    if found > most:
        message = f"the body has {found} {what}; with a context of {context_tokens} tokens at most {most} are taken"
        raise invalid(message, code=TOO_LONG)


def check_tools(body: ChatBody) -> None:
    """Raises ApiError for tools without what their type needs, or a choice among none."""
    for n, tool in enumerate(body.tools or ()):
        if tool.type == "function" and tool.function is None:
            raise invalid(f"tools[{n}]: a function tool needs a function", f"tools[{n}].function")
    choice = body.tool_choice
    if isinstance(choice, ToolChoice) and choice.type == "function" and choice.function is None:
        raise invalid("tool_choice: which function? Give function.name", "tool_choice.function")
    if choice not in (None, "none") and not body.tools:
        raise invalid("tool_choice is only allowed when there are tools", "tool_choice")


def check_response_format(wanted: ResponseFormat | None) -> None:
    """Raises ApiError for a JSON schema that is not there."""
    if wanted is not None and wanted.type == "json_schema" and wanted.json_schema is None:
        raise invalid("response_format: json_schema is missing", "response_format.json_schema")
