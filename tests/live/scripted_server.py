"""An OpenAI-compatible server that misbehaves as it is told, down to the bytes: written on plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

Body = dict[str, Any]
Answer = Callable[["Request"], "AsyncIterator[bytes]"]
"""The pieces of an answer's body, each sent as it is given; ABORT cuts the connection."""
Count = Callable[[str], int]

ABORT = b"\x00abort"


@dataclass
class Request:
    """What was asked."""

    path: str
    headers: dict[str, str]
    body: Body
    counts: Count = lambda text: len(text.split())

    @property
    def max_tokens(self) -> int:
        found = self.body.get("max_tokens") or self.body.get("max_completion_tokens")
        assert isinstance(found, int)
        return found

    @property
    def prompt_tokens(self) -> int:
        """One for each word, two for each message of a chat; one for each id. Or as `counts` a text."""
        if "messages" in self.body:
            return 2 + sum(self.counts(message["content"]) for message in self.body["messages"])
        prompt = self.body["prompt"]
        return len(prompt) if isinstance(prompt, list) else self.counts(prompt)


def event(chunk: Body | bytes) -> bytes:
    """One event of a stream."""
    return b"data: " + (chunk if isinstance(chunk, bytes) else msgspec.json.encode(chunk)) + b"\n\n"


def text_chunk(text: str, finish: str | None = None) -> Body:
    """A chunk of a completion."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage_chunk(request: Request, completion_tokens: int) -> Body:
    """The chunk that counts."""
    return {"choices": [], "usage": {"prompt_tokens": request.prompt_tokens, "completion_tokens": completion_tokens}}


async def well_behaved(request: Request, *, token_s: float = 0.0) -> AsyncIterator[bytes]:
    """One chunk a token, usage, `[DONE]`."""
    for n in range(request.max_tokens):
        await asyncio.sleep(token_s)
        yield event(text_chunk(" a", "length" if n == request.max_tokens - 1 else None))
    yield event(usage_chunk(request, request.max_tokens)) + event(b"[DONE]")


@dataclass
class ScriptedServer:
    """Answers `POST`s by `answer`; `status` and `content_type` are those of its answers to them.

    A text has as many tokens as it `counts`, and with `tokenizes` it says so at `/tokenize`, which is not among the
    `requests`. Headers of all requests are in `heard`.
    """

    answer: Answer = well_behaved
    status: int = 200
    content_type: str = "text/event-stream"
    models: tuple[str, ...] = ("scripted",)
    headers: str = ""
    counts: Count = lambda text: len(text.split())
    tokenizes: bool = False
    heard: list[dict[str, str]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ScriptedServer]:
        """Serve on the running loop."""
        handlers: set[asyncio.Task[None]] = set()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            handlers.add(task)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._connection(reader, writer)
            handlers.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in list(handlers):
                task.cancel()
            await asyncio.gather(*handlers, return_exceptions=True)

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[ScriptedServer]:
        """Serve on a loop in a thread of its own, for clients that bring their own loop."""
        ready, stop = threading.Event(), asyncio.Event()
        loop: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            async with self.running():
                loop.append(asyncio.get_running_loop())
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="scripted-server")
        thread.start()
        assert ready.wait(10)
        try:
            yield self
        finally:
            loop[0].call_soon_threadsafe(stop.set)
            thread.join(10)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            data = await reader.readexactly(int(headers.get("content-length", 0)))
            self.heard.append(headers)
            if path == "/tokenize":
                count = self.counts(msgspec.json.decode(data)["prompt"])
                body = msgspec.json.encode({"count": count, "tokens": list(range(count))})
                status = 200 if self.tokenizes else 404
                writer.write(_head(status, "application/json", f"Content-Length: {len(body)}\r\n") + body)
                continue
            if method == "GET":
                body = msgspec.json.encode({"object": "list", "data": [{"id": model} for model in self.models]})
                writer.write(_head(200, "application/json", f"Content-Length: {len(body)}\r\n") + body)
                continue
            request = Request(path, headers, msgspec.json.decode(data), self.counts)
            self.requests.append(request)
            writer.write(_head(self.status, self.content_type, self.headers + "Transfer-Encoding: chunked\r\n"))
            async for piece in self.answer(request):
                if piece == ABORT:
                    await asyncio.sleep(0.1)  # a reset throws away what has not been read
                    writer.transport.abort()
                    return
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()


def _head(status: int, content_type: str, more: str) -> bytes:
    return f"HTTP/1.1 {status} Scripted\r\nContent-Type: {content_type}\r\n{more}\r\n".encode()
