"""HTTP on sockets, by aiohttp: a request goes to a handler that returns soon, and is answered whenever it can be.

    request ──▶ handler(Exchange) ──▶ Exchange.answer | .begin, .write … ──▶ response

Handlers do not wait for the answer: whoever hears of a token writes it, and the task that aiohttp keeps for every
request sends what was written. They are coroutines only where it takes some time to read what is asked.
`Exchange.left` is called when the client is gone before its answer is complete, written to or not.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from emulator.core.api_error import ApiError
from emulator.live.listening import BACKLOG

JSON = "application/json"
IDLE_S = 75.0
BODY_S = 60.0
CLOSE_S = 2.0
MAX_UNREAD_BYTES = 8 * 1024 * 1024
"""A client that leaves so much of its answer unread is not waited for."""

_log = logging.getLogger(__name__)
_aiohttp_log = _log.getChild("aiohttp")
# Who sends what is no HTTP is told so; the log is for what goes wrong here.
_aiohttp_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))

Handler = Callable[["Exchange"], Awaitable[None] | None]
Routes = Mapping[str, tuple[str, Handler]]
"""What is at a path: the one method that is taken there, and who serves it."""

_Coroutine = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Exchange:
    """One request and its answer, which is given in one or begun, written piece by piece and ended.

    Whatever is written after the client has gone is dropped.
    """

    def __init__(self, request: web.Request, body: bytes) -> None:
        self.request, self.body = request, body
        self.left: Callable[[], None] | None = None
        self._response: web.StreamResponse | None = None
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._over = False
        self._told = asyncio.Event()

    def answer(self, status: int, body: bytes, content_type: str = JSON) -> None:
        """The whole answer."""
        if not self._over:
            self._response = _response(status, body, content_type)
            self._end()

    def refuse(self, error: ApiError) -> None:
        """The answer to a request that is not served."""
        self.answer(error.status, error.body())

    def begin(self, content_type: str, more: Mapping[str, str]) -> None:
        """The answer's head, at once."""
        if not self._over:
            self._response = web.StreamResponse(headers={"Content-Type": content_type, **more})
            self._told.set()

    def write(self, data: bytes, *, last: bool = False) -> None:
        """A piece of an answer that was begun; the `last` one ends it."""
        if self._over:
            return
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if last:
            self._end()
            return
        self._told.set()
        transport = self.request.transport
        if transport is not None and self._unsent_bytes + transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            transport.abort()

    def _end(self) -> None:
        self._over, self.left = True, None
        self._told.set()

    # --- for the task that sends --------------------------------------------------------------------------------

    async def respond(self) -> web.StreamResponse:
        """Send the answer as it comes to be; return when all of it is there."""
        while self._response is None:
            await self._more()
        response = self._response
        if isinstance(response, web.Response):
            return response
        await response.prepare(self.request)
        while not (self._over and len(self._unsent) <= 1):
            if self._unsent:
                await response.write(self._next_piece())
            else:
                await self._more()
        await response.write_eof(self._next_piece())
        return response

    def _next_piece(self) -> bytes:
        piece = self._unsent.popleft() if self._unsent else b""
        self._unsent_bytes -= len(piece)
        return piece

    async def _more(self) -> None:
        self._told.clear()
        await self._told.wait()

    def gone(self) -> None:
        """The client has left before the end."""
        left, self.left, self._over = self.left, None, True
        if left is not None:
            left()


class HttpServer:
    """Serves routes on a listening socket until it is closed. `authorize` raises ApiError for who may not use it."""

    def __init__(
        self,
        routes: Routes,
        max_body_bytes: int,
        authorize: Callable[[web.Request], None] = lambda _: None,
    ) -> None:
        self._routes, self._authorize = routes, authorize
        self.closing = False
        app = web.Application(client_max_size=max_body_bytes, middlewares=[self._refusing])
        for path, (method, handler) in routes.items():
            app.router.add_route(method, path, _serving(handler))
        # aiohttp waits so long twice: for handlers to end, and for those that it has cancelled.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=_aiohttp_log,
            # A small body may be a very large one when it is unpacked, and aiohttp reads on after a refusal.
            auto_decompress=False,
            keepalive_timeout=IDLE_S,
            shutdown_timeout=CLOSE_S / 2,
        )

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return 0 if self._runner.server is None else len(self._runner.server.connections)

    async def open(self, listening: socket.socket) -> None:
        """Begin to accept, as many connections as the system lets this process have."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        await self._runner.setup()
        await web.SockSite(self._runner, listening, backlog=BACKLOG).start()

    async def stop_accepting(self) -> None:
        """Accept no more; answers that are under way go on."""
        self.closing = True
        for site in self._runner.sites:
            await site.stop()

    async def close(self) -> None:
        """Close every connection: an idle one now, others when their answer has ended, or by force."""
        self.closing = True
        await self._runner.cleanup()

    @web.middleware
    async def _refusing(self, request: web.Request, handler: _Coroutine) -> web.StreamResponse:
        """Every refusal in OpenAI's form, whoever refuses."""
        try:
            self._authorize(request)
            encoding = request.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise ApiError(415, f"Content-Encoding {encoding:.40} is not taken: send the body as it is")
            return await handler(request)
        except ApiError as error:
            return _refusal(error)
        except web.RequestPayloadError as error:
            return _refusal(ApiError(400, f"the body cannot be read: {error}"))
        except web.HTTPException as error:
            return self._refused_by_aiohttp(request, error)

    def _refused_by_aiohttp(self, request: web.Request, error: web.HTTPException) -> web.Response:
        match error:
            case web.HTTPNotFound():
                there = ", ".join(self._routes)
                return _refusal(ApiError(404, f"there is no {request.path:.200}; there are {there}"))
            case web.HTTPMethodNotAllowed(allowed_methods=allowed):
                allow = ", ".join(sorted(allowed))
                refused = ApiError(405, f"{request.path} takes {allow}, not {request.method:.20}")
                return _refusal(refused, {"Allow": allow})
            case web.HTTPRequestEntityTooLarge():
                return _refusal(ApiError(413, f"the body must be at most {request.client_max_size} bytes"))
            case _:
                return _refusal(ApiError(error.status, error.reason))


def _serving(handler: Handler) -> _Coroutine:
    """A handler as a coroutine that lasts until the answer is sent, and is cancelled if nobody waits for it."""

    async def serve(request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_S:g} s") from None
        exchange = Exchange(request, body)
        try:
            reading = handler(exchange)
            if reading is not None:
                await reading
        except ApiError as error:
            exchange.refuse(error)
        except Exception:
            _log.exception("%s %s", request.method, request.path)
            exchange.refuse(ApiError(500, "the endpoint failed; its log says how"))
        try:
            return await exchange.respond()
        except BaseException:
            exchange.gone()
            raise

    return serve


def _refusal(error: ApiError, more: Mapping[str, str] | None = None) -> web.Response:
    return _response(error.status, error.body(), JSON, more)


def _response(status: int, body: bytes, content_type: str, more: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=body, headers={"Content-Type": content_type, **(more or {})})
