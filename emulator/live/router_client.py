"""Requests to the router of an emulated cluster, on its control network: the driver of `pdemu bench --url tcp://…`.

It joins beside whatever client the cluster has, begins the run if nobody has, and leaves it running. A prompt is the
number of its tokens, and tokens are counted by the router's own messages. Seconds are the run's model seconds. In the
end, or the cluster's if that comes first, it hands in its records, which belong to the run as any others do: there a
request counts from when it was due or, if the number of open ones was limited, had a place.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from emulator.core.bench.exchange import Exchange, Seen
from emulator.core.bench.prompts import PromptFit
from emulator.core.bench.stream import NO_OUTPUT
from emulator.core.bench.target import RouterTarget
from emulator.core.errors import ConfigError, DeadlineError, FidelityError, NotReadyError, ProtocolError
from emulator.core.message_codec import decode_to_client
from emulator.core.messages import (
    Abort,
    Assembled,
    Begin,
    EndRecord,
    Finished,
    Hello,
    ReadLoad,
    Stop,
    Submit,
    ToClient,
    Tokens,
)
from emulator.core.recorder import END, Recorder
from emulator.core.workload import PlannedRequest
from emulator.live.clock import ModelClock
from emulator.live.control import PeerSocket
from emulator.live.membership import START_DELAY_S, TIMER_S
from emulator.live.reports import GuestReport, pieces

ASK_S = 1.0
SILENT_S = 10.0
"""Wall seconds: how often the router is asked something, and after how long without a word it is taken for gone."""
SETTLE_S, REPORT_LINGER_S = 0.5, 5.0
ENDED_WELL = ("length", "stop")

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that has not ended."""

    seen: Seen
    now_s: Callable[[], float]
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class RouterClient:
    """One client of a cluster; `async with` takes it into it and out of it.

    Unless it has a schedule to keep (`scheduled`), its requests count from their send.
    """

    def __init__(self, target: RouterTarget, *, scheduled: bool = True) -> None:
        self._target = target
        self._scheduled = scheduled
        self._name = f"bench-{secrets.token_hex(6)}"
        self._clock = ModelClock(1.0)
        self._control: PeerSocket
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[str, _Waiting] = {}
        self._open: set[str] = set()
        self._settled = asyncio.Event()
        self._cluster: asyncio.Future[Assembled]
        self._began: asyncio.Future[float]
        self._heard_s = 0.0
        self._gone = ""
        self._recorder = Recorder()
        self._recording = True
        self._handed_in = False
        self.model = ""
        self.label = ""
        self.scale_time: float | None = None

    @property
    def prompt_fit(self) -> PromptFit:
        """How prompts come to their lengths: they are numbers."""
        return "exact"

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._cluster, self._began = loop.create_future(), loop.create_future()
        target = self._target
        self._control = PeerSocket(target.endpoint, self._name, target.public_key, insecure=target.insecure)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for future in (self._cluster, self._began):
            future.cancel()
        self._control.close(linger_s=REPORT_LINGER_S if self._handed_in else 0.0)

    async def _leave(self) -> None:
        """Wait a moment for what was aborted, and hand in the records."""
        if self._open and not self._gone:
            self._settled.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), SETTLE_S)
        self._hand_in()

    def _hand_in(self) -> None:
        if self._clock.t0_s is None or self._handed_in:
            return
        self._handed_in = True
        self._recorder.cut(self._clock.now_s(), END)
        for piece in pieces(self._name, GuestReport(records=tuple(self._recorder.records()))):
            self._control.send(piece)

    # --- before the run -------------------------------------------------------------------------------------------

    async def prepare(self, model: str | None) -> None:
        """Join the cluster, wait until it is complete, and begin its run unless somebody has.

        Raises NotReadyError for a router that does not answer or a cluster that is not complete in time, FidelityError
        for a link that is not what was asked for, ConfigError for another model.
        """
        deadline_s = time.monotonic() + self._target.ready_s
        found = await self._join(deadline_s)
        self.model, self.label, self.scale_time = found.model, found.label, found.scale_time
        self._clock.scale_time = found.scale_time
        if model is not None and model != found.model:
            raise ConfigError(f"--model {model}: the cluster at {self._target.endpoint} serves {found.model}")
        if found.problem:
            raise FidelityError(f"{found.label}: {found.problem}")
        t0_s = found.t0_s
        if t0_s is None:
            self._send(Begin(self._clock.on_router(time.monotonic() + START_DELAY_S)))
            t0_s = await self._in_time(self._began, deadline_s, "has not begun its run")
        self._clock.begin(t0_s)
        await asyncio.sleep(max(0.0, self._clock.to_wall_s(0.0) - time.monotonic() + TIMER_S))

    async def _join(self, deadline_s: float) -> Assembled:
        target = self._target
        try:
            self._clock.offset = await self._control.join(Hello(self._name, "client", target.secret), target.ready_s)
        except DeadlineError:
            raise NotReadyError(
                f"--url {target.endpoint}: no router that takes this client answered within {target.ready_s:g} s; see "
                "that one listens there, and that PDEMU_SECRET and PDEMU_ROUTER_PUBLIC_KEY are the cluster's"
            ) from None
        self._heard_s = time.monotonic()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        return await self._in_time(self._cluster, deadline_s, "is not complete: nodes are missing, or links on probe")

    async def _in_time(self, future: asyncio.Future[T], deadline_s: float, what: str) -> T:
        try:
            async with asyncio.timeout(max(0.1, deadline_s - time.monotonic())):
                return await asyncio.shield(future)
        except TimeoutError:
            raise NotReadyError(
                f"--url {self._target.endpoint}: the cluster {what} after {self._target.ready_s:g} s; give "
                "--ready-check-timeout-sec to wait longer"
            ) from None

    async def warm_up(self, request: PlannedRequest, n: int, now_s: Callable[[], float]) -> None:
        """A request that is not counted, the n-th."""
        await self._perform(f"{self._target.request_id_prefix}warmup-{n}", Exchange(n, request, now_s()), now_s)

    # --- the run --------------------------------------------------------------------------------------------------

    async def perform(self, exchange: Exchange, now_s: Callable[[], float]) -> None:
        """Send one request and count its tokens to the end (`live.bench.RequestDriver`)."""
        await self._perform(f"{self._target.request_id_prefix}{exchange.number}", exchange, now_s)

    async def _perform(self, request_id: str, exchange: Exchange, now_s: Callable[[], float]) -> None:
        request, seen = exchange.request, exchange.seen
        seen.prompt_tokens = request.prompt_tokens
        waiting = self._waiting[request_id] = _Waiting(seen, now_s)
        exchange.sent_s = now_s()
        if self._gone:
            seen.fail(self._gone)
        else:
            sent_s = self._clock.now_s()
            delay_s = exchange.sent_s - exchange.due_s if self._scheduled else 0.0
            planned = (request_id, request.stream, sent_s - delay_s, request.prompt_tokens, request.max_tokens)
            if self._recording:
                self._recorder.sent(PlannedRequest(*planned), sent_s)
            self._open.add(request_id)
            self._send(Submit(request_id, request.prompt_tokens, request.max_tokens))
        try:
            if not seen.reason:
                async with asyncio.timeout(self._target.timeout_s * self._clock.scale_time):
                    await waiting.ended.wait()
        except TimeoutError:
            seen.fail("timeout")
        finally:
            del self._waiting[request_id]
            if not waiting.ended.is_set():
                self._send(Abort(request_id))
        seen.output_tokens = len(seen.token_times_s)
        if not seen.token_times_s:
            seen.fail(NO_OUTPUT, f"finish_reason {seen.finish_reason}")

    def _send(self, message: Submit | Abort | Begin | ReadLoad) -> None:
        if not self._gone and not self._control.send(message):
            self._lost("the router does not keep up")

    def _lost(self, why: str) -> None:
        """Nothing more will come: whatever waits has failed, and whatever follows does."""
        self._gone = self._gone or why
        for waiting in self._waiting.values():
            waiting.seen.fail(self._gone)
            waiting.ended.set()

    async def _receive(self) -> None:
        while True:
            data = await self._control.receive()
            self._heard_s = time.monotonic()
            try:
                self._take(decode_to_client(data))
            except ProtocolError as error:
                self._lost(f"the router does not speak as this client does: {error}")

    def _take(self, message: ToClient) -> None:
        match message:
            case Tokens() | Finished():
                self._hear(message)
            case Assembled():
                if not self._cluster.done():
                    self._cluster.set_result(message)
            case Begin(t0_s=t0_s):
                if not self._began.done():
                    self._began.set_result(t0_s)
            case EndRecord(requests=requests):
                self._recording = False
                self._recorder.cut(self._clock.now_s(), END, keep=requests)
            case Stop():
                self._lost("the cluster has stopped")
                self._hand_in()

    def _hear(self, message: Tokens | Finished) -> None:
        """What the router says of requests; those that nobody waits for any more are let be."""
        now_s = self._clock.now_s()
        if isinstance(message, Tokens):
            self._recorder.tokens(message, now_s)
            for count in message.tokens:
                if (waiting := self._waiting.get(count.request_id)) is not None:
                    waiting.seen.token_times_s.extend([waiting.now_s()] * count.n)
                    waiting.seen.counts.token_chunks += 1
            return
        self._recorder.finished(message, now_s)
        self._open.discard(message.request_id)
        if not self._open:
            self._settled.set()
        if (waiting := self._waiting.get(message.request_id)) is not None:
            waiting.seen.finish_reason = message.reason
            if message.reason not in ENDED_WELL:
                waiting.seen.fail(f"{message.reason} in the cluster", message.detail)
            waiting.ended.set()

    async def _watch(self) -> None:
        """Ask the router something now and then, and see that it answers."""
        with contextlib.suppress(asyncio.CancelledError):
            while not self._gone:
                await asyncio.sleep(ASK_S)
                self._send(ReadLoad())
                if time.monotonic() - self._heard_s > SILENT_S:
                    self._lost("the router is silent")
