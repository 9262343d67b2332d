"""A client of the endpoint that takes nothing for granted: plain sockets, every byte of the answer at hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

LIMIT_S = 30.0


class Answer(NamedTuple):
    """An answer: status, headers (names in small letters), the whole body, and when its pieces came (monotonic)."""

    status: int
    headers: dict[str, str]
    body: bytes
    piece_times_s: tuple[float, ...]

    def json(self) -> Any:
        """The body as JSON."""
        assert self.headers["content-type"] == "application/json"
        return msgspec.json.decode(self.body)


class HttpClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> None:
        """Send a request; a body that is no bytes as JSON."""
        data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
        lines += [f"content-length: {len(data)}", *(f"{k}: {v}" for k, v in (headers or {}).items())]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """The next answer's status and headers."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        version, status, _ = lines[0].split(" ", 2)
        assert version in ("HTTP/1.1", "HTTP/1.0")
        pairs = (line.split(": ", 1) for line in lines[1:-2])
        return int(status), {name.lower(): value for name, value in pairs}

    async def piece(self) -> bytes:
        """The next piece of a body in chunks; nothing at its end."""
        nbytes = int((await self.reader.readuntil(b"\r\n"))[:-2], 16)
        data = await self.reader.readexactly(nbytes + 2)
        assert data[-2:] == b"\r\n"
        return data[:-2]

    async def answer(self) -> Answer:
        """The next answer, all of it."""
        async with asyncio.timeout(LIMIT_S):
            status, headers = await self.head()
            if "transfer-encoding" not in headers:
                return Answer(status, headers, await self.reader.readexactly(int(headers["content-length"])), ())
            pieces: list[bytes] = []
            times: list[float] = []
            while data := await self.piece():
                pieces.append(data)
                times.append(time.monotonic())
            return Answer(status, headers, b"".join(pieces), tuple(times))

    async def ask(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Answer:
        """Send a request and read its answer."""
        self.send(method, path, body, headers)
        return await self.answer()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[HttpClient]:
    """A connection to this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        yield HttpClient(reader, writer)
    finally:
        writer.close()


async def ask(port: int, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Answer:
    """One request on a connection of its own."""
    async with connected(port) as client:
        return await client.ask(method, path, body, headers)
