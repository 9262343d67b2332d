"""What an OpenAI-compatible server streams, read for the instants of its tokens.

A chunk is not a token: a first one may only announce the role, some carry nothing, the last may only say why it ends,
one of usage has no choices at all, and one with text may hold several tokens. Only text (or reasoning, or a tool call)
counts as output. How many tokens that was, the server's own count says where it gives one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from emulator.core.bench.exchange import Seen
from emulator.core.bench.redaction import NOTHING_HIDDEN, Redaction
from emulator.core.bench.sse import SseParser
from emulator.core.errors import ProtocolError

DONE = b"[DONE]"
STREAM_ERROR = "error in the stream"
MALFORMED = "malformed chunk"
ENDED_EARLY = "stream ended early"
NO_OUTPUT = "no output"
MESSAGE_CHARACTERS = 300


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def output(self) -> str | None:
        return self.content or self.reasoning_content or self.reasoning


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


class OpenAiStream:
    """Reads one answer into a `Seen`: bytes with the instant at which they came, then the end.

    What it tells of failures is `hidden` from secrets that the server repeats.
    """

    def __init__(self, seen: Seen, *, keep_text: bool = False, hidden: Redaction = NOTHING_HIDDEN) -> None:
        self._seen = seen
        self._keep_text = keep_text
        self._hidden = hidden
        self._events = SseParser()
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._done = False

    @property
    def over(self) -> bool:
        """Whether nothing that may still come changes anything: `[DONE]` came, or a failure."""
        return self._done or bool(self._seen.reason)

    def feed(self, data: bytes, now_s: float) -> None:
        """These bytes came at `now_s`."""
        try:
            events = self._events.feed(data)
        except ProtocolError as error:
            self._seen.fail(MALFORMED, str(error))
            return
        self._take(events, now_s)

    def end(self, now_s: float) -> None:
        """Nothing more comes: the server has ended the stream in an orderly way, or `over` holds."""
        self._take(self._events.end(), now_s)
        seen = self._seen
        seen.counts.comments = self._events.comments
        if seen.reason:
            return
        if not self._done and seen.finish_reason is None:
            seen.fail(
                ENDED_EARLY, f"after {len(seen.token_times_s)} chunks of output, without a finish_reason or [DONE]"
            )
        elif not seen.token_times_s:
            seen.fail(NO_OUTPUT, f"finish_reason {seen.finish_reason}")
        elif not self._done:
            seen.counts.without_done = 1

    def _take(self, events: list[bytes], now_s: float) -> None:
        for data in events:
            if self.over:
                return
            if data.strip() == DONE:
                self._done = True
                return
            try:
                chunk = self._decoder.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self._seen.fail(MALFORMED, f"{error}: {excerpt(data, self._hidden)}")
                return
            self._chunk(chunk, now_s)

    def _chunk(self, chunk: _Chunk, now_s: float) -> None:
        seen = self._seen
        if chunk.error is not None or chunk.object == "error":
            said = chunk.error if chunk.error is not None else chunk.message
            seen.fail(STREAM_ERROR, error_text(said, self._hidden))
            return
        if chunk.usage is not None:
            if chunk.usage.prompt_tokens is not None:
                seen.prompt_tokens = chunk.usage.prompt_tokens
            if chunk.usage.completion_tokens is not None:
                seen.output_tokens = chunk.usage.completion_tokens
        if not chunk.choices:
            if chunk.usage is not None:
                seen.counts.usage_chunks += 1
            else:
                seen.counts.empty_chunks += 1
            return
        self._choice(chunk.choices[0], now_s)

    def _choice(self, choice: _Choice, now_s: float) -> None:
        seen, delta = self._seen, choice.delta
        text = choice.text or (delta.output if delta is not None else None)
        if choice.finish_reason is not None:
            seen.finish_reason = choice.finish_reason
        if text or (delta is not None and delta.tool_calls):
            seen.counts.token_chunks += 1
            seen.token_times_s.append(now_s)
            if self._keep_text and text:
                seen.text.append(text)
        elif choice.finish_reason is not None:
            seen.counts.finish_chunks += 1
        elif delta is not None and delta.role is not None:
            seen.counts.role_chunks += 1
        else:
            seen.counts.empty_chunks += 1


def error_text(error: Any, hidden: Redaction = NOTHING_HIDDEN) -> str:
    """What an OpenAI error object, or what some servers send in its place, says."""
    if isinstance(error, dict) and isinstance(error.get("error"), dict | str):
        error = error["error"]
    if isinstance(error, dict):
        error = error.get("message") or error
    return one_line(str(error), hidden)


def error_body_text(body: bytes, hidden: Redaction = NOTHING_HIDDEN) -> str:
    """The same of the body of an answer that is no success: JSON, or whatever it is."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return excerpt(body, hidden)
    return error_text(found, hidden)


def excerpt(data: bytes, hidden: Redaction = NOTHING_HIDDEN) -> str:
    """The beginning of some bytes as one line of text."""
    return one_line(data.decode("utf-8", "replace"), hidden)


def one_line(text: str, hidden: Redaction = NOTHING_HIDDEN) -> str:
    """The beginning of a text as one line."""
    return " ".join(hidden(text).split())[:MESSAGE_CHARACTERS]
