"""The endpoint from the outside: `pdemu up` with clients that keep the rules, and with clients that break them."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from emulator.core.vocabulary import encode
from tests.http_client import HttpClient, ask, connected
from tests.live.endpoint import BODIES, Up, chat_body, check_refusal, completion_body, up
from tests.sse import read_stream

pytestmark = pytest.mark.live

REFUSED_S = 0.1


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("up")) as it:
        yield it


@pytest.fixture
async def client(served: Up) -> AsyncIterator[HttpClient]:
    async with connected(served.port) as it:
        yield it


# --- what clients get -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_keeps_every_rule_and_a_document_says_the_same(client: HttpClient, path: str) -> None:
    chat = "chat" in path
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await client.ask("POST", path, BODIES[path](**options))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    seen = read_stream(answer.body, chat=chat, usage=True)
    assert seen.chunks == len(encode(seen.text)) == 12
    assert seen.usage is not None
    assert seen.usage["completion_tokens"] == 12
    whole = (await client.ask("POST", path, BODIES[path]())).json()
    text = whole["choices"][0]["message"]["content"] if chat else whole["choices"][0]["text"]
    assert text == seen.text
    assert whole["usage"] == seen.usage


@pytest.mark.alone
async def test_the_head_of_a_stream_comes_before_its_first_token(client: HttpClient) -> None:
    """The prompt of 900 tokens alone is computed for 47 ms."""
    start_s = time.monotonic()
    client.send("POST", "/v1/completions", completion_body(prompt=[5] * 900, stream=True))
    status, _ = await client.head()
    head_s = time.monotonic()
    first = await client.piece()
    assert status == 200
    assert first.startswith(b"data: ")
    assert time.monotonic() - start_s >= 0.047
    assert head_s - start_s < 0.047
    while await client.piece():
        pass


async def test_tokens_come_one_by_one_as_they_are_made(client: HttpClient) -> None:
    answer = await client.ask("POST", "/v1/completions", completion_body(stream=True))
    times = answer.piece_times_s
    assert len(times) == 12
    assert times[-1] - times[0] >= 10 * 0.008, "11 steps of 8 ms and more lie between them, the first one shortened"


async def test_a_stop_ends_a_stream_early_and_the_request_with_it(client: HttpClient) -> None:
    text = (await client.ask("POST", "/v1/completions", completion_body())).json()["choices"][0]["text"]
    answer = await client.ask("POST", "/v1/completions", completion_body(stream=True, stop=[text[12:17]]))
    seen = read_stream(answer.body, chat=False)
    assert (seen.text, seen.finish_reason, seen.chunks) == (text[:12], "stop", 4)


async def test_the_standard_librarys_client_reads_a_stream_as_well(served: Up) -> None:
    def fetch() -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
        body = msgspec.json.encode(chat_body(stream=True))
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        data = answer.read()
        connection.close()
        return data

    assert read_stream(await asyncio.to_thread(fetch), chat=True).chunks == 12


async def test_its_model_and_its_tokens(client: HttpClient) -> None:
    models = (await client.ask("GET", "/v1/models")).json()
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("tiny", 1024)]
    assert (await client.ask("GET", "/v1/models/tiny")).json() == models["data"][0]
    assert (await client.ask("GET", "/health")).status == 200
    tokens = (await client.ask("POST", "/tokenize", {"prompt": "ba bada"})).json()
    assert tokens["count"] == 2
    assert (await client.ask("POST", "/detokenize", {"tokens": tokens["tokens"]})).json() == {"prompt": "ba bada"}


async def test_requests_that_are_sent_one_after_the_other_are_answered_in_turn(client: HttpClient) -> None:
    for n in (3, 5):
        client.send("POST", "/v1/completions", completion_body(stream=True, max_tokens=n))
    client.send("GET", "/health")
    assert [read_stream((await client.answer()).body, chat=False).chunks for _ in range(2)] == [3, 5]
    assert (await client.answer()).status == 200


async def test_http_1_0_gets_a_stream_that_ends_with_the_connection(client: HttpClient) -> None:
    body = b'{"prompt": "ba", "max_tokens": 3, "stream": true}'
    client.writer.write(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    status, headers = await client.head()
    assert status == 200
    assert "transfer-encoding" not in headers
    assert read_stream(await client.reader.read(), chat=False).chunks == 3


# --- what is refused ------------------------------------------------------------------------------------------------


MALFORMED: list[tuple[str, str, object, int]] = [
    ("POST", "/v1/completions", b"{", 400),
    ("POST", "/v1/completions", b"", 400),
    ("POST", "/v1/completions", b"[" * 100_000, 400),
    ("POST", "/v1/completions", {"prompt": 5}, 400),
    ("POST", "/v1/completions", {"prompt": "ba", "max_tokens": -1}, 400),
    ("POST", "/v1/completions", {"prompt": "ba", "max_tokens": "many"}, 400),
    ("POST", "/v1/completions", {"prompt": [3, -4]}, 400),
    ("POST", "/v1/completions", {"prompt": "x" * 900_000}, 400),
    ("POST", "/v1/completions", {"prompt": [1] * 400_000}, 400),
    ("POST", "/v1/completions", {"prompt": "ba", "seed": "abc"}, 400),
    ("POST", "/v1/completions", {"prompt": "ba", "model": "other"}, 404),
    ("POST", "/v1/completions", b"x" * 10_000_000, 413),
    ("POST", "/v1/chat/completions", {"messages": "hi"}, 400),
    ("POST", "/v1/chat/completions", {"messages": []}, 400),
    ("GET", "/v1/completions", None, 405),
    ("POST", "/v1/nonsense", {}, 404),
    ("GET", "/", None, 404),
    ("GET", "/v1/models/other", None, 404),
]


async def refusals(port: int) -> tuple[float, float]:
    """Malformed requests beside a stream: the longest time that one took, and the stream's largest gap, seconds."""
    async with connected(port) as reading:
        reading.send("POST", "/v1/completions", completion_body(max_tokens=150, stream=True))
        streaming = asyncio.create_task(reading.answer())
        took_s = []
        for method, path, body, status in MALFORMED:
            start_s = time.monotonic()
            check_refusal(await ask(port, method, path, body), status)
            took_s.append(time.monotonic() - start_s)
        async with connected(port) as rude:
            rude.writer.write(b"nonsense\r\n\r\n")
            assert (await rude.answer()).status == 400, "what is no HTTP is refused before anybody knows of an API"
        stream = await streaming
    assert read_stream(stream.body, chat=False).chunks == 150
    return max(took_s), max(np.diff(stream.piece_times_s))


@pytest.mark.alone
async def test_malformed_requests_are_refused_at_once_and_streams_do_not_notice(served: Up) -> None:
    """Whatever else this machine does is in these times as well, so the best of three rounds counts."""
    rounds = [await refusals(served.port) for _ in range(3)]
    assert min(took_s for took_s, _ in rounds) <= REFUSED_S
    assert min(gap_s for _, gap_s in rounds) <= REFUSED_S


async def test_a_packed_body_is_refused_in_the_same_form(client: HttpClient) -> None:
    check_refusal(await client.ask("POST", "/v1/completions", b"no gzip", {"content-encoding": "gzip"}), 415)


async def test_a_method_that_is_not_taken_is_told_the_one_that_is(client: HttpClient) -> None:
    assert (await client.ask("DELETE", "/v1/completions")).headers["allow"] == "POST"


async def test_a_request_after_a_refused_one_is_served_on_the_same_connection(client: HttpClient) -> None:
    check_refusal(await client.ask("POST", "/v1/completions", b"{"), 400)
    assert (await client.ask("POST", "/v1/completions", completion_body())).status == 200


async def test_a_key_is_needed_where_there_is_one(tmp_path: Path) -> None:
    with up(tmp_path, "--api-key", "secret", deployment="colocated") as it:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            for path in ("/v1/models", "/metrics"):
                answer = await ask(it.port, "GET", path, headers=headers)
                check_refusal(answer, 401)
        assert (await ask(it.port, "GET", "/health")).status == 200
        right = {"authorization": "Bearer secret"}
        assert (await ask(it.port, "GET", "/v1/models", headers=right)).status == 200
        answer = await ask(it.port, "POST", "/v1/completions", completion_body(stream=True), headers=right)
        assert read_stream(answer.body, chat=False).chunks == 12
