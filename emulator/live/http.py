"""The OpenAI endpoint's process: in the place of the load generator, it submits what HTTP clients ask for.

    HTTP client ──▶ HttpServer ──▶ core: read, check, count ──▶ Submit ──▶ router
                ◀── chunks ◀────── core: Reply ◀────────────── Tokens, Finished ◀──

Every request leaves a record as those of a load generator do: it was scheduled, and sent, when it came; until enough is
recorded. A client that leaves before its answer is complete has its request aborted. Streams are in wall time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

from emulator.core import api, completion_request
from emulator.core.api_error import ApiError, not_served
from emulator.core.completion_fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body
from emulator.core.completion_reply import Reply, error_event
from emulator.core.completion_request import Generation
from emulator.core.messages import (
    Abort,
    ClusterLoad,
    EndRecord,
    Finished,
    Heartbeat,
    NodeBack,
    NodeLost,
    ReadLoad,
    Submit,
    Tokens,
)
from emulator.core.recorder import END, Recorder
from emulator.core.refusal import run_refusal
from emulator.core.run_summary import EndedBy
from emulator.core.workload import LoadPlan, PlannedRequest
from emulator.live.http_server import Exchange, HttpServer, Routes
from emulator.live.membership import Heard, Membership
from emulator.live.reports import RunReport
from emulator.live.serving_metrics import ServingMetrics
from emulator.live.status import Assignment, Lost

T = TypeVar("T", bound=msgspec.Struct)

STREAM = "http"
SETTLE_S = 0.5
LOAD_S = 1.0
EVENT_STREAM = "text/event-stream; charset=utf-8"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(slots=True)
class _Live:
    """A request that has not ended in the cluster. `exchange` is None once its client has all of it, or has left."""

    request: PlannedRequest
    reply: Reply
    exchange: Exchange | None


class HttpProcess:
    """Serves until it is told to stop; then ends the run, and returns its report. `tell` hears of lost nodes."""

    def __init__(self, task: Assignment, listening: socket.socket, tell: Callable[[Lost], None]) -> None:
        assert task.http is not None, "an endpoint needs to know what it serves"
        self._run, self._http, self._listening = task.run, task.http, listening
        self._context_tokens = min(node.max_model_len for node in self._run.nodes)
        self._tell = tell
        self._recorder = Recorder()
        self._record_end_s: float | None = None
        self._loads: dict[str, Heartbeat] = {}
        self._lost: set[str] = set()
        self._metrics = ServingMetrics(self._run, lambda: self._loads, lambda: self._lost)
        self._cluster = Membership(task, self._heard)
        self._live: dict[str, _Live] = {}
        self._idle = asyncio.Event()
        self._came: list[PlannedRequest] = []
        self._numbers = itertools.count()
        self._nonce = secrets.token_hex(6)
        self._scrapes: list[Exchange] = []
        routes: Routes = {
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._scrape),
            "/v1/models": ("GET", self._models),
            "/v1/models/{model:.+}": ("GET", self._model),
            "/v1/completions": ("POST", self._completion),
            "/v1/chat/completions": ("POST", self._chat),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
        }
        self._server = HttpServer(routes, api.max_body_bytes(self._context_tokens), self._authorize)

    @property
    def endpoint(self) -> str:
        """Where it listens, as a URL."""
        host, port = self._listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def join(self, timeout_s: float) -> None:
        """Join the cluster, begin the run, and when it has begun, begin to serve."""
        await self._cluster.join(timeout_s)
        self._cluster.begin()
        await self._cluster.begun()
        await self._server.open(self._listening)

    async def serve(self) -> RunReport:
        """Serve until SIGTERM, or until the cluster is gone."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._cluster.done.set)
        try:
            await self._cluster.done.wait()
            ended_by: EndedBy = "stop" if self._record_end_s is None else "limit"
            if self._record_end_s is None:
                self._end_record(self._cluster.clock.now_s(), len(self._came))
            assert self._record_end_s is not None
            await self._server.stop_accepting()
            await self._cut()
            await self._cluster.end()
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            await self._server.close()
            await self._cluster.leave()
        guests = [
            PlannedRequest(r.request_id, r.stream, r.scheduled_s, r.prompt_tokens, r.max_tokens)
            for r in self._cluster.guests_records()
        ]
        came = sorted([*self._came, *guests], key=lambda request: request.scheduled_s)
        load = LoadPlan(tuple(came), (), duration_s=max(self._record_end_s, 1e-3), drain_s=SETTLE_S)
        return self._cluster.report(self._recorder.records(), load, ended_by)

    async def _cut(self) -> None:
        """End every answer that is under way, and free what its request holds."""
        self._answer_scrapes()
        self._idle.clear()
        for live in list(self._live.values()):
            self._fail(live, ApiError(503, "the endpoint is shutting down"))
            self._cluster.send(Abort(live.request.request_id))
        if self._live:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), SETTLE_S)

    def _end_record(self, now_s: float, requests: int) -> None:
        """Record no more, and of what came only so many."""
        self._record_end_s = now_s
        self._recorder.cut(now_s, END, keep=requests)
        del self._came[requests:]

    # --- requests ---------------------------------------------------------------------------------------------

    def _authorize(self, request: web.Request) -> None:
        key, given = self._http.api_key, request.headers.get("Authorization", "")
        if not key or request.path == "/health":
            return
        if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {key}".encode()):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _completion(self, exchange: Exchange) -> None:
        body = await self._body(exchange, CompletionBody)
        generation = completion_request.completion(body, model=self._run.model, context_tokens=self._context_tokens)
        self._generate(exchange, generation, "cmpl")

    async def _chat(self, exchange: Exchange) -> None:
        body = await self._body(exchange, ChatBody)
        generation = completion_request.chat(body, model=self._run.model, context_tokens=self._context_tokens)
        self._generate(exchange, generation, "chatcmpl")

    async def _body(self, exchange: Exchange, kind: type[T]) -> T:
        """A large one takes milliseconds to decode, and again to be counted; streams go on between the two."""
        body = read_body(exchange.body, kind, self._context_tokens)
        await asyncio.sleep(0)
        return body

    def _generate(self, exchange: Exchange, generation: Generation, kind: str) -> None:
        if self._server.closing:
            raise ApiError(503, "the endpoint is shutting down")
        if refusal := run_refusal(self._run, generation.prompt_tokens, generation.max_tokens):
            raise not_served("impossible", refusal)
        now_s = self._cluster.clock.now_s()
        number = next(self._numbers)
        request = PlannedRequest(f"{STREAM}-{number}", STREAM, now_s, generation.prompt_tokens, generation.max_tokens)
        reply = Reply(generation, f"{kind}-{self._nonce}-{number}", self._run.model, int(time.time()))
        live = _Live(request, reply, exchange)
        self._live[request.request_id] = live
        self._metrics.submitted(request.request_id, request.prompt_tokens, now_s)
        if self._record_end_s is None:
            self._came.append(request)
            self._recorder.sent(request, now_s)
        exchange.left = lambda: self._left(live)
        self._cluster.send(Submit(request.request_id, request.prompt_tokens, request.max_tokens))
        if generation.stream:
            exchange.begin(EVENT_STREAM, STREAM_HEADERS)

    def _left(self, live: _Live) -> None:
        """The client is gone: nobody wants the request any more."""
        live.exchange = None
        self._cluster.send(Abort(live.request.request_id))

    # --- the cluster ------------------------------------------------------------------------------------------

    def _heard(self, message: Heard, now_s: float) -> None:
        match message:
            case Tokens():
                self._recorder.tokens(message, now_s)
                self._metrics.tokens(message, now_s)
                for count in message.tokens:
                    live = self._live.get(count.request_id)
                    if live is not None:
                        self._tokens(live, count.n)
            case Finished():
                self._recorder.finished(message, now_s)
                live = self._live.pop(message.request_id, None)
                if live is not None:
                    self._finished(live, message)
                if not self._live:
                    self._idle.set()
            case EndRecord(requests=requests):
                self._end_record(now_s, requests)
            case NodeLost() | NodeBack():
                self._lost ^= {message.name}
                self._tell(Lost(message.name, back=isinstance(message, NodeBack)))
            case ClusterLoad(nodes=nodes):
                self._loads = {node.name: node.load for node in nodes}
                self._answer_scrapes()

    def _tokens(self, live: _Live, n: int) -> None:
        exchange, reply = live.exchange, live.reply
        if exchange is None:
            return
        if reply.generation.stream:
            chunks = reply.tokens(n)
            if reply.complete:
                live.exchange = None
            if chunks:
                exchange.write(chunks, last=reply.complete)
            return
        reply.count(n)
        if reply.complete:
            live.exchange = None
            exchange.answer(200, reply.document())

    def _finished(self, live: _Live, message: Finished) -> None:
        self._metrics.finished(message, stop=live.reply.generation.finish_reason == "stop")
        self._fail(live, not_served(message.cause, message.detail or message.reason))

    def _fail(self, live: _Live, error: ApiError) -> None:
        """Whoever still waits for an answer gets this one."""
        exchange, live.exchange = live.exchange, None
        if exchange is None:
            return
        if live.reply.generation.stream:
            exchange.write(error_event(error), last=True)
        else:
            exchange.refuse(error)

    # --- the rest ---------------------------------------------------------------------------------------------

    def _health(self, exchange: Exchange) -> None:
        """200 while there is a node for each phase, be they fewer than there were."""
        serves = self._run.serves_without(self._lost)
        status = "down" if not serves else "degraded" if self._lost else "ok"
        told = {"status": status, "lost_nodes": sorted(self._lost)}
        exchange.answer(200 if serves else 503, msgspec.json.encode(told))

    def _models(self, exchange: Exchange) -> None:
        card = api.model_card(self._run.model, self._context_tokens)
        exchange.answer(200, msgspec.json.encode({"object": "list", "data": [card]}))

    def _model(self, exchange: Exchange) -> None:
        completion_request.check_model(exchange.request.match_info["model"], self._run.model)
        exchange.answer(200, msgspec.json.encode(api.model_card(self._run.model, self._context_tokens)))

    async def _tokenize(self, exchange: Exchange) -> None:
        body = await self._body(exchange, TokenizeBody)
        exchange.answer(200, api.tokenize(body, self._context_tokens))

    async def _detokenize(self, exchange: Exchange) -> None:
        body = await self._body(exchange, DetokenizeBody)
        exchange.answer(200, api.detokenize(body, self._context_tokens))

    def _scrape(self, exchange: Exchange) -> None:
        """Ask for the nodes' load first; without an answer in time, tell what was known before."""
        self._scrapes.append(exchange)
        exchange.left = lambda: self._scrapes.remove(exchange)
        if len(self._scrapes) == 1:
            self._cluster.send(ReadLoad())
            asyncio.get_running_loop().call_later(LOAD_S, self._answer_scrapes)

    def _answer_scrapes(self) -> None:
        scrapes, self._scrapes = self._scrapes, []
        if not scrapes:
            return
        text, content_type = self._metrics.families.exposition()
        for exchange in scrapes:
            exchange.answer(200, text, content_type)
