"""HTTP/1.1 on sockets: connections that read requests, hand each to a handler, and write what it answers.

    bytes ──▶ RequestReader ──▶ handler(Exchange) ──▶ Exchange.answer | .begin, .write …, .end ──▶ bytes

No task and no thread per connection: whatever a client causes ends with its connection, and `Exchange.left` is called
when that is gone before the answer is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable
from typing import Literal, cast

from emulator.core import http1
from emulator.core.api_error import ApiError
from emulator.core.errors import ConfigError
from emulator.core.http1 import BadRequestError, HttpRequest, RequestReader

JSON = "application/json"
BACKLOG = 4096
HEAD_S = 60.0
IDLE_S = 75.0
LINGER_S = 2.0
MAX_PIPELINED_BYTES = 256 * 1024
MAX_UNREAD_BYTES = 8 * 1024 * 1024
"""A client that leaves so much of its answer unread is not waited for."""

_log = logging.getLogger(__name__)

Handler = Callable[["Exchange"], None]


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there; raises ConfigError when it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"--http {host}:{port}: cannot listen there ({error.strerror}); give a free port, or 0 for any"
        ) from None
    return listening


class Exchange:
    """One request and its answer, which is given in one or begun, written piece by piece and ended.

    Whatever is written after the client has gone is dropped.
    """

    def __init__(self, request: HttpRequest, connection: Connection) -> None:
        self.request = request
        self.left: Callable[[], None] | None = None
        self._connection: Connection | None = connection
        self._chunked = True

    def answer(self, status: int, body: bytes, content_type: str = JSON, more: dict[str, str] | None = None) -> None:
        """The whole answer."""
        if self._connection is None:
            return
        if self.request.method == "HEAD":
            body = b""
        start = http1.head(status, content_type, len(body), keep_alive=self.request.keep_alive, more=more or {})
        self._connection.write(start + body)
        self._over()

    def refuse(self, error: ApiError, more: dict[str, str] | None = None) -> None:
        """The answer to a request that is not served."""
        self.answer(error.status, error.body(), more=more)

    def begin(self, content_type: str, more: dict[str, str]) -> None:
        """The answer's head, at once. HTTP/1.0 knows no chunks: there the answer ends with the connection."""
        if self._connection is None:
            return
        self._chunked = not self.request.http_1_0
        if not self._chunked:
            self.request.keep_alive = False
        length: Literal["chunks", "to the end"] = "chunks" if self._chunked else "to the end"
        self._connection.write(http1.head(200, content_type, length, keep_alive=self.request.keep_alive, more=more))

    def write(self, data: bytes, *, last: bool = False) -> None:
        """A piece of an answer that was begun; the `last` one ends it."""
        if self._connection is None:
            return
        piece = http1.chunk(data) if self._chunked else data
        self._connection.write(piece + http1.LAST_CHUNK if last and self._chunked else piece)
        if last:
            self._over()

    def _over(self) -> None:
        connection, self._connection, self.left = self._connection, None, None
        if connection is not None:
            connection.answered(self)

    def gone(self) -> None:
        """The client has left before the end."""
        left, self.left, self._connection = self.left, None, None
        if left is not None:
            left()


class Connection(asyncio.Protocol):
    """One client's connection: one exchange at a time, in the order of its requests."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._reader = RequestReader(server.max_body_bytes)
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle | None = None
        self._lingering = False

    # --- asyncio ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is here."""
        self._transport = cast("asyncio.Transport", transport)
        self._server.connections.add(self)
        self._within(HEAD_S)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._lingering:
            return
        self._reader.feed(data)
        if self._exchange is not None:
            if self._reader.buffered > MAX_PIPELINED_BYTES:
                self._transport.abort()
            return
        self._proceed()

    def eof_received(self) -> bool:
        """The client has closed its side: it has left."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whoever ended it."""
        del exc
        self._server.lost(self)
        self._within(None)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.gone()

    # --- exchanges --------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send, unless the client does not read."""
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self._transport.abort()

    def answered(self, exchange: Exchange) -> None:
        """The answer is complete; go on with the next request."""
        self._exchange = None
        if not exchange.request.keep_alive or self._server.closing:
            self._transport.close()
            return
        self._within(IDLE_S)
        if self._reader.buffered:
            asyncio.get_running_loop().call_soon(self._proceed)

    def close_when_idle(self) -> None:
        """Close now, unless an answer is under way."""
        if self._exchange is None:
            self._transport.close()

    def _proceed(self) -> None:
        """Serve the next request that has come."""
        if self._exchange is not None or self._transport.is_closing():
            return
        try:
            request = self._reader.next_request()
        except BadRequestError as error:
            self._refuse(ApiError(error.status, error.message))
            return
        if request is None:
            if self._reader.expects_continue:
                self._reader.expects_continue = False
                self._transport.write(http1.CONTINUE)
            return
        self._within(None)
        self._exchange = exchange = Exchange(request, self)
        try:
            self._server.handler(exchange)
        except ApiError as error:
            exchange.refuse(error)
        except Exception:
            _log.exception("%s %s", request.method, request.path)
            exchange.refuse(ApiError(500, "the endpoint failed; its log says how"))

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no request, and end the connection: when the client has stopped sending, or in a moment.

        A socket that is closed with bytes unread would take the answer back.
        """
        body = error.body()
        self._transport.write(http1.head(error.status, JSON, len(body), keep_alive=False) + body)
        self._lingering = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._within(LINGER_S)

    def _within(self, limit_s: float | None) -> None:
        """The client has so long for what comes next; None: for ever."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if limit_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(limit_s, self._transport.abort)


class HttpServer:
    """Accepts connections on a listening socket until it is closed."""

    def __init__(self, handler: Handler, max_body_bytes: int) -> None:
        self.handler = handler
        self.max_body_bytes = max_body_bytes
        self.connections: set[Connection] = set()
        self.closing = False
        self._server: asyncio.Server | None = None
        self._empty = asyncio.Event()

    async def open(self, listening: socket.socket) -> None:
        """Begin to accept, as many connections as the system lets this process have."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self), sock=listening, backlog=BACKLOG
        )

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if self.closing and not self.connections:
            self._empty.set()

    async def closed(self, limit_s: float) -> None:
        """Once closed: wait until the last connection is gone, but not for ever."""
        if self.connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), limit_s)

    def close(self) -> None:
        """Accept no more, and close every connection that no answer is under way on."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close_when_idle()
