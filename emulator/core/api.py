"""What the endpoint answers beside completions: its model, and text as tokens and back."""

from __future__ import annotations

from typing import Any

import msgspec

from emulator.core import vocabulary
from emulator.core.api_error import invalid
from emulator.core.completion_request import (
    ChatMessage,
    chat_prompt,
    check_token_ids,
    one_prompt,
    prompt_length,
    read_body,
)

MIN_BODY_BYTES = 1024 * 1024
MAX_BODY_BYTES = 8 * 1024 * 1024
BODY_BYTES_PER_TOKEN = 16


class TokenizeBody(msgspec.Struct, frozen=True):
    """Of `/tokenize`: a text, or a conversation."""

    prompt: Any = None
    messages: list[ChatMessage] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """Of `/detokenize`."""

    tokens: list[int]


def max_body_bytes(context_tokens: int) -> int:
    """What a request may have: enough for a whole context of token ids or words, within bounds."""
    return min(max(MIN_BODY_BYTES, BODY_BYTES_PER_TOKEN * context_tokens), MAX_BODY_BYTES)


def model_card(model: str, context_tokens: int) -> dict[str, Any]:
    """A model as `/v1/models` lists it."""
    return {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "pd-emulator",
        "root": model,
        "parent": None,
        "max_model_len": context_tokens,
    }


def tokenize(data: bytes, context_tokens: int) -> bytes:
    """The tokens of a text, and how many there are."""
    body = read_body(data, TokenizeBody)
    prompt = chat_prompt(body.messages) if body.messages is not None else one_prompt(body.prompt, context_tokens)
    prompt_length(prompt, context_tokens, "prompt")
    tokens = vocabulary.encode(prompt) if isinstance(prompt, str) else list(prompt)
    return msgspec.json.encode({"count": len(tokens), "max_model_len": context_tokens, "tokens": tokens})


def detokenize(data: bytes, context_tokens: int) -> bytes:
    """The text of some tokens."""
    body = read_body(data, DetokenizeBody)
    check_token_ids(body.tokens, "tokens", context_tokens)
    try:
        return msgspec.json.encode({"prompt": vocabulary.decode(body.tokens)})
    except ValueError as error:
        raise invalid(f"tokens: {error}", "tokens") from None
