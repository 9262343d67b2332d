"""OpenAI's answers as bytes: one document, or server-sent events as the strictest clients want them.

Events are separated by LF alone, without comments: the role comes with the first token, one token is in each chunk, the
finish reason in the chunk of the last one; then a chunk with the usage and no choices, if it was asked for, and
`[DONE]`. All chunks but that one have a null usage then, or the usage so far (`continuous_usage_stats`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from emulator.core.api_error import ApiError
from emulator.core.completion_request import Generation

DONE = b"data: [DONE]\n\n"


class Reply:
    """The answer to one request, token by token. The texts of tokens need no escaping, so chunks are put together."""

    def __init__(self, generation: Generation, reply_id: str, model: str, created_unix_s: int) -> None:
        self.generation = generation
        self.sent = 0
        self._head = {"id": reply_id, "object": "", "created": created_unix_s, "model": model}
        chat = generation.chat
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = msgspec.json.encode(self._head | {"object": kind})[:-1].decode()
        opening = '"delta":{"content":"' if chat else '"text":"'
        self._before = f'data: {head},"choices":[{{"index":0,{opening}'
        self._before_first = (
            self._before.replace('{"content"', '{"role":"assistant","content"') if chat else self._before
        )
        self._after = '"},' if chat else '",'

    @property
    def complete(self) -> bool:
        """Whether every token has been told."""
        return self.sent == self.generation.max_tokens

    def tokens(self, n: int) -> bytes:
        """The next `n` tokens as chunks, and whatever follows the last of all."""
        chunks = [self._chunk(index) for index in range(self.sent, min(self.sent + n, self.generation.max_tokens))]
        self.sent += len(chunks)
        data = "".join(chunks).encode()
        return data + self._end() if self.complete and chunks else data

    def count(self, n: int) -> None:
        """`n` more tokens are there, of an answer that is not streamed."""
        self.sent = min(self.sent + n, self.generation.max_tokens)

    def _chunk(self, index: int) -> str:
        generation = self.generation
        last = index + 1 == generation.max_tokens
        reason = f'"{generation.finish_reason}"' if last else "null"
        before = self._before if index else self._before_first
        return (
            f'{before}{generation.text(index)}{self._after}"logprobs":null,"finish_reason":{reason}}}]'
            f"{self._usage_field(index + 1)}}}\n\n"
        )

    def _usage_field(self, tokens: int) -> str:
        if self.generation.continuous_usage:
            return f',"usage":{msgspec.json.encode(self.usage(tokens)).decode()}'
        return ',"usage":null' if self.generation.include_usage else ""

    def _end(self) -> bytes:
        if not self.generation.include_usage:
            return DONE
        kind = "chat.completion.chunk" if self.generation.chat else "text_completion"
        last = self._head | {"object": kind, "choices": [], "usage": self.usage(self.sent)}
        return b"data: " + msgspec.json.encode(last) + b"\n\n" + DONE

    def usage(self, tokens: int) -> dict[str, int]:
        """The usage after so many tokens."""
        prompt = self.generation.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def document(self) -> bytes:
        """The whole answer in one."""
        generation = self.generation
        text = generation.whole_text(self.sent)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": generation.finish_reason}
        if generation.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if generation.chat else "text_completion"
        return msgspec.json.encode(self._head | {"object": kind, "choices": [choice], "usage": self.usage(self.sent)})


def error_event(error: ApiError) -> bytes:
    """What a stream ends with that cannot go on: clients raise it."""
    return b"data: " + error.body() + b"\n\n" + DONE
