"""The HTTP server by itself: what happens to connections whose clients do not do their part, and in the end."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from emulator.core.api_error import ApiError
from emulator.core.errors import ConfigError
from emulator.live.http_server import CLOSE_S, MAX_UNREAD_BYTES, Exchange, HttpServer
from emulator.live.listening import listening_socket
from emulator.live.status import HttpService
from tests.http_client import ask, connected

pytestmark = pytest.mark.live


@asynccontextmanager
async def serving(handler: Callable[[Exchange], None]) -> AsyncIterator[tuple[HttpServer, int]]:
    """A server with this handler at every path, and its port."""
    listening = listening_socket(HttpService())
    server = HttpServer({"/{path:.*}": ("GET", handler)}, max_body_bytes=1_000)
    await server.open(listening)
    try:
        yield server, listening.getsockname()[1]
    finally:
        await server.close()
        assert not server.connections


async def test_a_client_that_does_not_read_is_dropped_and_the_handler_told() -> None:
    left, written = asyncio.Event(), 0

    def handler(exchange: Exchange) -> None:
        exchange.left = left.set
        exchange.begin("text/plain", {})
        asyncio.get_running_loop().call_soon(go_on, exchange)

    def go_on(exchange: Exchange) -> None:
        nonlocal written
        if not left.is_set():
            written += 1 << 18
            exchange.write(b"x" * (1 << 18))
            asyncio.get_running_loop().call_soon(go_on, exchange)

    async with serving(handler) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(left.wait(), 10)
        assert MAX_UNREAD_BYTES < written < 4 * MAX_UNREAD_BYTES
        writer.transport.abort()
        del reader


async def test_the_handler_is_told_of_a_client_that_leaves_and_of_no_other() -> None:
    left: list[str] = []

    def handler(exchange: Exchange) -> None:
        path = exchange.request.path
        exchange.left = lambda: left.append(path)
        if path == "/answered":
            exchange.answer(200, b"{}")

    async with serving(handler) as (server, port):
        assert (await ask(port, "GET", "/answered")).body == b"{}"
        async with connected(port) as client:
            client.send("GET", "/waiting")
            await client.writer.drain()
            await asyncio.sleep(0.05)
            assert left == []
        while server.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert left == ["/waiting"]


async def test_an_error_of_the_handler_is_answered_and_the_connection_kept(caplog: pytest.LogCaptureFixture) -> None:
    def handler(exchange: Exchange) -> None:
        if exchange.request.path == "/refused":
            raise ApiError(404, "no such thing")
        raise RuntimeError("a mistake")

    async with serving(handler) as (_, port), connected(port) as client:
        for path, status, message in (("/refused", 404, "no such thing"), ("/x", 500, "the endpoint failed")):
            answer = await client.ask("GET", path)
            assert answer.status == status
            assert message in answer.json()["error"]["message"]
    assert "a mistake" in caplog.text


async def test_closing_lets_an_answer_end_and_no_new_one_begin() -> None:
    waiting: list[Exchange] = []
    async with serving(waiting.append) as (server, port), connected(port) as busy, connected(port) as idle:
        busy.send("GET", "/")
        while not waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await server.stop_accepting()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        closing = asyncio.create_task(server.close())
        await asyncio.sleep(0.05)
        waiting[0].answer(200, b"{}")
        assert (await busy.answer()).status == 200
        assert await busy.reader.read() == b""
        assert await idle.reader.read() == b""
        await closing


async def test_closing_waits_for_no_answer_for_ever() -> None:
    left: list[str] = []

    def handler(exchange: Exchange) -> None:
        exchange.left = lambda: left.append("left")

    async with serving(handler) as (server, port), connected(port) as client:
        client.send("GET", "/")
        while not server.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        start_s = asyncio.get_running_loop().time()
        await server.close()
        assert CLOSE_S / 4 < asyncio.get_running_loop().time() - start_s < 2 * CLOSE_S
        assert left == ["left"]
        assert await client.reader.read() == b""


async def test_a_body_beyond_the_limit_is_refused_and_the_next_request_served() -> None:
    def handler(exchange: Exchange) -> None:
        exchange.answer(200, b"%d" % len(exchange.body))

    async with serving(handler) as (_, port), connected(port) as client:
        answer = await client.ask("GET", "/", b"x" * 1_001)
        assert answer.status == 413
        assert "1000 bytes" in answer.json()["error"]["message"]
        assert (await client.ask("GET", "/", b"x" * 1_000)).body == b"1000"


async def test_a_packed_body_is_refused_and_never_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(*_: object, **__: object) -> None:
        raise AssertionError("a body is unpacked")

    monkeypatch.setattr("aiohttp.http_parser.DeflateBuffer.__init__", unpack)
    async with serving(lambda exchange: exchange.answer(200, exchange.body)) as (_, port), connected(port) as client:
        answer = await client.ask("GET", "/", gzip.compress(b"a" * 1_000_000), {"content-encoding": "GZIP"})
        assert answer.status == 415
        assert "send the body as it is" in answer.json()["error"]["message"]
        assert (await client.ask("GET", "/", b"x", {"content-encoding": "identity"})).body == b"x"


async def test_a_body_that_takes_long_to_come_is_refused_before_it_is_there() -> None:
    async with serving(lambda exchange: exchange.answer(200, b"{}")) as (_, port), connected(port) as client:
        client.writer.write(b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n" + b"x" * 200_000)
        assert (await client.answer()).status == 413


async def test_what_is_no_http_is_told_so_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Exchange) -> None:
        raise RuntimeError("a mistake")

    with caplog.at_level(logging.DEBUG):
        async with serving(fail) as (_, port):
            for data in (b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\na b: c\r\n\r\n"):
                async with connected(port) as client:
                    client.writer.write(data)
                    assert (await client.head())[0] == 400
            assert "Traceback" not in caplog.text
            assert (await ask(port, "GET", "/")).status == 500
    assert "a mistake" in caplog.text


def test_a_taken_port_is_refused_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--http 127.0.0.1:{port}: cannot listen there"):
            listening_socket(HttpService(port=port))


@pytest.mark.parametrize("module", ["emulator.live.process", "emulator.cli.main"])
def test_processes_that_serve_nothing_do_without_the_library(module: str) -> None:
    """It takes a fourth of a second to import, and every process of a run would."""
    code = f"import sys, {module}; sys.exit('aiohttp' in sys.modules or 'prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
