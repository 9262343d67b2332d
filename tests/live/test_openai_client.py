"""The endpoint by OpenAI's own client, as most programs will speak to it; it is slow to import, so only where used."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emulator.core.records import read_records
from emulator.core.vocabulary import count
from tests.live.endpoint import Up, up

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from openai.types import Completion
    from openai.types.chat import ChatCompletionMessageParam

pytestmark = pytest.mark.live

PROMPT = "ba bada good day"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "good day"}]},
]
TOKENS = 12


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("up")) as it:
        yield it


def _url(served: Up) -> str:
    return f"http://127.0.0.1:{served.port}/v1"


def _error(name: str) -> type[Exception]:
    import openai

    error: type[Exception] = getattr(openai, name)
    return error


@pytest.fixture
def client(served: Up) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=_url(served), api_key="any", max_retries=0, timeout=30) as it:
        yield it


def test_a_completion_and_its_stream_are_the_same(client: OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=TOKENS)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (count(PROMPT), TOKENS)
    assert whole.usage.total_tokens == count(PROMPT) + TOKENS
    chunks = list(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=TOKENS, stream=True))
    assert len(chunks) == TOKENS
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (TOKENS - 1) + ["length"]
    assert {chunk.usage for chunk in chunks} == {None}
    assert count(whole.choices[0].text) == TOKENS


def test_a_chat_and_its_stream_are_the_same(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=TOKENS)
    message = whole.choices[0].message
    assert (message.role, whole.choices[0].finish_reason) == ("assistant", "length")
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == count("system: be brief\nuser: good day\nassistant:")
    assert whole.usage.completion_tokens == TOKENS
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=TOKENS, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (TOKENS - 1)
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_usage_comes_last_if_it_is_asked_for(client: OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=TOKENS, stream=True, stream_options={"include_usage": True}
    )
    assert len(chunks) == TOKENS
    assert {chunk.usage for chunk in chunks} == {None}
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == TOKENS


def test_usage_comes_with_every_chunk_if_that_is_asked_for(client: OpenAI) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    stream = client.completions.create(
        model="tiny", prompt=[5] * 40, max_tokens=TOKENS, stream=True, extra_body=options
    )
    counted = [
        (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) for chunk in stream if chunk.usage is not None
    ]
    assert counted == [(40, n) for n in range(1, TOKENS + 1)] + [(40, TOKENS)]


def test_a_stop_is_a_stop(client: OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=TOKENS)
    text = whole.choices[0].text
    cut = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=TOKENS, stop=text[12:17])
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (text[:12], "stop")


def test_its_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "pd-emulator"
    with pytest.raises(_error("NotFoundError")):
        client.models.retrieve("other/one")


@pytest.mark.parametrize(
    ("kind", "body", "code", "param"),
    [
        ("NotFoundError", {"model": "other"}, "model_not_found", "model"),
        ("BadRequestError", {"max_tokens": 5_000}, "context_length_exceeded", "prompt"),
        ("BadRequestError", {"n": 2}, None, "n"),
        ("BadRequestError", {"temperature": 3.0}, None, "temperature"),
        ("APIStatusError", {"prompt": "x" * 2_000_000}, None, None),
    ],
    ids=["model", "too long", "several", "temperature", "too large"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_its_exceptions(
    client: OpenAI,
    *,
    kind: str,
    body: dict[str, Any],
    code: str | None,
    param: str | None,
    stream: bool,
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "stream": stream} | body
    with pytest.raises(_error(kind)) as caught:
        client.completions.create(**asked)
    error: Any = caught.value
    assert (error.code, error.param) == (code, param)


def test_what_is_not_there_is_not_found(client: OpenAI) -> None:
    with pytest.raises(_error("NotFoundError"), match="there is no /v1/embeddings"):
        client.embeddings.create(model="tiny", input="a")


async def test_many_at_once_are_all_answered(served: Up) -> None:
    from openai import AsyncOpenAI

    async def one(client: AsyncOpenAI, n: int) -> tuple[int, int]:
        stream = await client.completions.create(model="tiny", prompt=[5] * n, max_tokens=n, stream=True)
        chunks: list[Completion] = [chunk async for chunk in stream]
        return n, len(chunks)

    async with AsyncOpenAI(base_url=_url(served), api_key="any", max_retries=0, timeout=60) as client:
        found = await asyncio.gather(*(one(client, n) for n in range(1, 41)))
    assert all(chunks == n for n, chunks in found)


def test_a_key_is_shown_and_a_wrong_one_refused_and_the_end_told_in_the_stream(tmp_path: Path) -> None:
    from openai import OpenAI

    with up(tmp_path, "--api-key", "secret") as it:
        with (
            OpenAI(base_url=_url(it), api_key="wrong", max_retries=0) as wrong,
            pytest.raises(_error("AuthenticationError")),
        ):
            wrong.models.list()
        with OpenAI(base_url=_url(it), api_key="secret", max_retries=0, timeout=30) as client:
            with client.completions.create(model="tiny", prompt=PROMPT, max_tokens=100, stream=True) as left:
                next(iter(left))
            stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=900, stream=True)
            next(stream)
            it.process.send_signal(signal.SIGTERM)
            with pytest.raises(_error("APIError"), match="the endpoint is shutting down"):
                list(stream)
        assert it.process.wait(30) == 0
        records = read_records((it.run_folder / "records.jsonl").read_bytes())
    assert [(record.outcome, record.reason) for record in records[:1]] == [("failed", "aborted")]
    assert [record.outcome for record in records[1:]] == ["unfinished"]
