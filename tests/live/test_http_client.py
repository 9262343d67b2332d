"""The HTTP driver against a server that misbehaves in every way that servers do."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator

import pytest

from emulator.core.bench.arrivals import Pace
from emulator.core.bench.exchange import Exchange
from emulator.core.bench.measures import Measures
from emulator.core.bench.plan import lengths_plan
from emulator.core.bench.prompts import Calibration
from emulator.core.bench.result import Asked, fold
from emulator.core.bench.target import Target
from emulator.core.errors import ConfigError
from emulator.core.workload import PlannedRequest
from emulator.live.bench import LoadTest
from emulator.live.http_client import OpenAiClient
from tests.live.scripted_server import (
    ABORT,
    Answer,
    Body,
    Request,
    ScriptedServer,
    event,
    text_chunk,
    usage_chunk,
    well_behaved,
)

pytestmark = pytest.mark.live


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def _target(server: ScriptedServer, endpoint: str = COMPLETIONS, **more: object) -> Target:
    return Target(base_url=server.url, endpoint=endpoint, keep_text=True, **more)  # type: ignore[arg-type]


async def _one(answer: Answer, *, endpoint: str = COMPLETIONS, timeout_s: float = 20.0, **how: object) -> Exchange:
    """One request of 50 and 4 tokens to a server that answers so."""
    server = ScriptedServer(answer, **how)  # type: ignore[arg-type]
    async with server.running(), OpenAiClient(_target(server, endpoint, timeout_s=timeout_s), seed=0) as client:
        client.model = "scripted"
        exchange = Exchange(0, PlannedRequest("r", "bench", 0.0, 50, 4), 0.0)
        await client.perform(exchange, time.monotonic)
        exchange.end_s = time.monotonic()
    return exchange


def _answer(*pieces: bytes) -> Answer:
    async def answer(_: Request) -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return answer


def _delta(**of: object) -> Body:
    return {"choices": [{"index": 0, "delta": of, "finish_reason": None}]}


TEXT = event(text_chunk(" a"))
LAST = event(text_chunk(" b", "length"))
DONE = event(b"[DONE]")


async def test_a_completion_is_streamed_and_timed() -> None:
    async def answer(request: Request) -> AsyncIterator[bytes]:
        async for piece in well_behaved(request, token_s=0.05):
            yield piece

    found = await _one(answer)
    times = found.seen.token_times_s
    assert found.outcome == "completed"
    assert len(times) == found.output_tokens == 4
    assert found.sent_s is not None
    assert times[0] - found.sent_s >= 0.05
    assert all(later - earlier >= 0.04 for earlier, later in itertools.pairwise(times))
    assert "".join(found.seen.text) == " a" * 4


async def test_a_chat_has_a_role_first() -> None:
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    chunks = [_delta(role="assistant", content=""), _delta(content="a"), _delta(content="b"), last]
    found = await _one(_answer(*map(event, chunks), DONE), endpoint=CHAT)
    assert (found.outcome, found.output_tokens, found.seen.counts.role_chunks) == ("completed", 2, 1)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([b": hello\n\n", TEXT, b": ping\n\n", LAST, DONE], id="comments"),
        pytest.param([(TEXT + LAST + DONE).replace(b"\n", b"\r\n")], id="crlf"),
        pytest.param([bytes([byte]) for byte in TEXT + LAST + DONE], id="byte by byte"),
        pytest.param([TEXT + LAST + DONE], id="all in one"),
        pytest.param([event(text_chunk("")), TEXT, event({"choices": []}), LAST, DONE], id="empty chunks"),
        pytest.param([TEXT.replace(b'"choices"', b'\ndata: "choices"'), LAST, DONE], id="data of several lines"),
        pytest.param([TEXT, LAST], id="no done"),
        pytest.param([TEXT, LAST, DONE.rstrip(b"\n")], id="no blank line at the end"),
        pytest.param([TEXT, LAST, DONE, ABORT], id="cut after done"),
    ],
)
async def test_what_is_odd_but_whole_is_completed(pieces: list[bytes]) -> None:
    found = await _one(_answer(*pieces))
    assert (found.seen.reason, found.outcome) == ("", "completed")
    assert "".join(found.seen.text) == " a b"


async def test_the_servers_count_stands_beside_that_of_chunks() -> None:
    async def answer(request: Request) -> AsyncIterator[bytes]:
        yield event(text_chunk(" a b c")) + LAST + event(usage_chunk(request, 4)) + DONE

    found = await _one(answer)
    assert (found.output_tokens, len(found.seen.token_times_s), found.prompt_tokens) == (4, 2, 50)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        pytest.param(
            [TEXT, event({"error": {"message": "boom", "code": 500}}), LAST, DONE], "error in the stream", id="error"
        ),
        pytest.param([TEXT, event(b"{oops"), LAST, DONE], "malformed chunk", id="no json"),
        pytest.param([TEXT], "stream ended early", id="ended early"),
        pytest.param([], "stream ended early", id="nothing"),
        pytest.param([event(text_chunk("", "stop")), DONE], "no output", id="no output"),
        pytest.param([TEXT, ABORT], None, id="cut"),
    ],
)
async def test_what_is_broken_is_a_failure_by_its_reason(pieces: list[bytes], reason: str | None) -> None:
    found = await _one(_answer(*pieces))
    assert found.outcome == "failed"
    if reason is None:
        assert found.seen.reason in ("connection cut", "connection reset", "server disconnected")
    else:
        assert found.seen.reason == reason


async def test_a_refusal_is_a_failure_by_its_status() -> None:
    found = await _one(_answer(b'{"error": {"message": "slow down"}}'), status=429, content_type="application/json")
    assert (found.seen.reason, found.seen.message) == ("HTTP 429", "slow down")


async def test_no_redirect_is_followed() -> None:
    found = await _one(_answer(), status=307, headers="Location: /v1/elsewhere\r\n")
    assert found.seen.reason == "HTTP 307"


async def test_an_answer_that_is_no_stream_is_a_failure() -> None:
    found = await _one(_answer(b'{"choices": []}'), content_type="application/json")
    assert found.seen.reason == "not an event stream"


async def test_a_silent_server_is_left_in_time() -> None:
    async def answer(_: Request) -> AsyncIterator[bytes]:
        yield TEXT
        await asyncio.sleep(30)
        yield LAST

    found = await _one(answer, timeout_s=0.5)
    assert found.seen.reason == "timeout"
    assert found.end_s is not None
    assert found.sent_s is not None
    assert found.end_s - found.sent_s < 10


async def test_the_run_is_prepared_by_models_and_two_short_requests() -> None:
    server = ScriptedServer(models=("first", "second"))
    async with server.running(), OpenAiClient(_target(server, CHAT, api_key="secret"), seed=0) as client:
        await client.prepare(None)
    assert client.model == "first"
    assert client.calibration == Calibration(2.0, 1.0)
    assert [request.max_tokens for request in server.requests] == [1, 1]
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer secret"}


async def test_a_server_that_does_not_count_leaves_a_word_a_token() -> None:
    server = ScriptedServer(_answer(LAST, DONE))
    async with server.running(), OpenAiClient(_target(server), seed=0) as client:
        await client.prepare("m")
        assert client.calibration is None


async def test_prompts_as_token_ids_have_their_exact_length() -> None:
    server = ScriptedServer()
    async with server.running(), OpenAiClient(_target(server, token_ids=True), seed=0) as client:
        await client.prepare(None)
        await client.perform(Exchange(0, PlannedRequest("r", "bench", 0.0, 777, 1), 0.0), time.monotonic)
    assert len(server.requests[-1].body["prompt"]) == 777


@pytest.mark.parametrize(
    ("server", "model", "expected"),
    [
        (ScriptedServer(models=()), None, "names no model"),
        (
            ScriptedServer(_answer(b'{"error": {"message": "no such model"}}'), status=404),
            "m",
            "HTTP 404: no such model",
        ),
    ],
    ids=["no model", "refused"],
)
async def test_a_server_that_cannot_be_used_is_refused(
    server: ScriptedServer, model: str | None, expected: str
) -> None:
    async with server.running(), OpenAiClient(_target(server), seed=0) as client:
        with pytest.raises(ConfigError, match=expected):
            await client.prepare(model)


async def test_a_server_that_is_not_there_is_refused() -> None:
    server = ScriptedServer()
    async with server.running():
        pass
    async with OpenAiClient(_target(server), seed=0) as client:
        with pytest.raises(ConfigError, match="cannot be reached"):
            await client.prepare(None)


async def test_against_a_server_that_serves_one_at_a_time() -> None:
    """Twenty requests a second to a server that manages ten, one open at a time: only the schedule shows the queue."""

    async def slow(request: Request) -> AsyncIterator[bytes]:
        async for piece in well_behaved(request, token_s=0.025):
            yield piece

    server = ScriptedServer(slow)
    async with server.running(), OpenAiClient(_target(server), seed=0) as client:
        await client.prepare(None)
        pace = Pace(20.0)
        test = LoadTest(lengths_plan(50, 4, 30, pace, 0), client, max_concurrency=1)
        found = fold(await test.run(lambda _: None), Asked({}, pace, Measures(), 1))
    assert (found["completed"], found["tokens"]["input_mismatches"], found["tokens"]["output_mismatches"]) == (30, 0, 0)
    assert found["median_e2el_ms"] < 300
    assert found["median_e2el_ms_from_schedule"] > 2 * found["median_e2el_ms"]


async def test_many_at_once_are_all_open_together() -> None:
    """As many connections as requests: a limit below would queue them where no clock sees it."""
    open_now, most = 0, 0

    async def answer(request: Request) -> AsyncIterator[bytes]:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.5)
        open_now -= 1
        async for piece in well_behaved(request):
            yield piece

    server = ScriptedServer(answer)
    async with server.running(), OpenAiClient(_target(server), seed=0) as client:
        client.model = "scripted"
        observed = await LoadTest(lengths_plan(10, 2, 150, Pace(), 0), client).run(lambda _: None)
    assert {e.outcome for e in observed.exchanges} == {"completed"}
    assert most > 100
