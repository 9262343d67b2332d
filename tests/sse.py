"""Server-sent events as the strictest of OpenAI's clients read them, and what a completion's chunks must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True)
class Streamed:
    """A stream that kept every rule."""

    text: str
    chunks: int
    finish_reason: str
    usage: dict[str, int] | None
    running_usage: tuple[dict[str, int] | None, ...]


def events_of(data: bytes) -> list[Any]:
    """The payload of each event before `[DONE]`; asserts the framing."""
    assert b"\r" not in data, "LF only"
    assert data.endswith(b"\n\n")
    events = data[:-2].split(b"\n\n")
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events), "one data line an event"
    payloads = [event.removeprefix(b"data: ") for event in events]
    assert payloads.count(b"[DONE]") == 1
    assert payloads[-1] == b"[DONE]"
    return [msgspec.json.decode(payload) for payload in payloads[:-1]]


def read_stream(data: bytes, *, chat: bool, usage: bool = False) -> Streamed:
    """What a whole stream says; asserts that every chunk is as it must be."""
    events = events_of(data)
    assert not any("error" in event for event in events)
    last_usage = None
    if usage:
        assert events[-1]["choices"] == []
        last_usage = events.pop()["usage"]
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    assert events[0]["object"] == ("chat.completion.chunk" if chat else "text_completion")
    texts = []
    for number, event in enumerate(events):
        assert ("usage" in event) == usage
        (choice,) = event["choices"]
        assert choice["index"] == 0
        assert choice["logprobs"] is None
        assert (choice["finish_reason"] is not None) == (number == len(events) - 1)
        if chat:
            assert ("role" in choice["delta"]) == (number == 0), "the role comes with the first token, and only there"
            assert choice["delta"].get("role", "assistant") == "assistant"
        texts.append(choice["delta"]["content"] if chat else choice["text"])
    return Streamed(
        text="".join(texts),
        chunks=len(events),
        finish_reason=events[-1]["choices"][0]["finish_reason"],
        usage=last_usage,
        running_usage=tuple(event.get("usage") for event in events),
    )
