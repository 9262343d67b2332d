"""What the endpoint answers beside completions: its model, and text as tokens and back."""

from __future__ import annotations

from typing import Any

import msgspec

from emulator.core import vocabulary
from emulator.core.completion_fields import DetokenizeBody, TokenizeBody
from emulator.core.completion_request import chat_prompt, one_prompt, prompt_length

MIN_BODY_BYTES = 1024 * 1024
MAX_BODY_BYTES = 8 * 1024 * 1024
BODY_BYTES_PER_TOKEN = 16


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


def tokenize(body: TokenizeBody, context_tokens: int) -> bytes:
    """The tokens of a text, and how many there are."""
    chat = body.messages is not None
    prompt = chat_prompt(body.messages, context_tokens) if chat else one_prompt(body.prompt)
    tokens = vocabulary.encode(prompt, context_tokens) if isinstance(prompt, str) else prompt
    prompt_length(tokens, context_tokens, "messages" if chat else "prompt")
    return msgspec.json.encode({"count": len(tokens), "max_model_len": context_tokens, "tokens": tokens})


def detokenize(body: DetokenizeBody, context_tokens: int) -> bytes:
    """The text of some tokens."""
    prompt_length(body.tokens, context_tokens, "tokens")
    return msgspec.json.encode({"prompt": vocabulary.decode(body.tokens)})
