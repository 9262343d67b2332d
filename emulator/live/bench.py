"""A load test on a real clock: sends each request of a plan when it is due, by whatever driver, and times it.

The schedule is that of `core.load`, woken to the instant by a thread that sleeps (`live.alarm`). What a request is on
the wire is the driver's business: `live.http_client` speaks to OpenAI-compatible servers, `live.router_client` to the
router of an emulated cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

from emulator.core.bench.exchange import Exchange
from emulator.core.bench.gate import Gate
from emulator.core.bench.prompts import PromptFit
from emulator.core.bench.result import Observed
from emulator.core.errors import NotReadyError
from emulator.core.load import LoadGenerator
from emulator.core.workload import LoadPlan, PlannedRequest
from emulator.live.alarm import Alarm
from emulator.live.client import Progress
from emulator.live.clock import ModelClock
from emulator.live.loop_lag import LoopLag

START_DELAY_S = 0.1
TELL_S = 0.5
RETRY_S = 1.0
# A thread that wakes to a deadline waits at most this long for a thread that runs Python code.
SWITCH_INTERVAL_S = 2e-4


class RequestDriver(Protocol):
    """A way to send a request and to follow its answer."""

    async def perform(self, exchange: Exchange, now_s: Callable[[], float]) -> None:
        """Send `exchange.request`, note `sent_s` at that instant and what comes back in `seen`; return at its end.

        What goes wrong with the request is `seen.fail(…)`; an exception ends the whole load test.
        """


class Server(RequestDriver, Protocol):
    """A driver with what it is connected to; `async with` opens and closes the connection.

    `scale_time` is by how much its time is stretched, where it says so: plan and result are then in its model seconds.
    """

    model: str
    scale_time: float | None

    @property
    def prompt_fit(self) -> PromptFit:
        """How prompts come to their lengths."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def prepare(self, model: str | None) -> None:
        """Reach it, and learn what it serves. Raises NotReadyError where that may come right in a while."""

    async def warm_up(self, request: PlannedRequest, n: int, now_s: Callable[[], float]) -> None:
        """The n-th request that is not counted."""


async def prepare(server: Server, model: str | None, limit_s: float) -> None:
    """Prepare a server that may not be ready yet, for which it has `limit_s` wall seconds."""
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            return await server.prepare(model)
        except NotReadyError:
            if time.monotonic() + RETRY_S > deadline_s:
                raise
        await asyncio.sleep(RETRY_S)


class LoadTest:
    """One run of a plan; create it on the running event loop. Each of its seconds lasts `scale_time` wall seconds."""

    def __init__(
        self,
        plan: LoadPlan,
        driver: RequestDriver,
        *,
        max_concurrency: int | None = None,
        scale_time: float | None = None,
    ) -> None:
        self._driver = driver
        self._generator = LoadGenerator(plan)
        self._gate: Gate[Exchange] = Gate(max_concurrency)
        self._clock = ModelClock(scale_time or 1.0)
        self._exchanges: list[Exchange] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._ended = 0
        self._failure: BaseException | None = None
        self._interrupted = False

    async def run(self, report_progress: Callable[[Progress], None]) -> Observed:
        """Send everything and wait for every answer, or until `stop`."""
        loop = asyncio.get_running_loop()
        lag = LoopLag(loop)
        alarm = self._alarm = Alarm(loop, self._due, "schedule")
        telling = asyncio.create_task(self._tell(report_progress))
        lag.start()
        try:
            began_unix_s = time.time() + START_DELAY_S
            self._clock.begin(time.monotonic() + START_DELAY_S)
            self._rearm()
            await self._over.wait()
            duration_s = max(0.0, self._clock.now_s())
        finally:
            alarm.close()
            lag.stop()
            await self._cancel(telling)
        if self._failure is not None:
            raise self._failure
        ends = [exchange.end_s for exchange in self._exchanges if exchange.end_s is not None]
        if not self._interrupted:
            duration_s = max(ends, default=duration_s)
        lag_s = tuple(sample / self._clock.scale_time for sample in lag.samples_s)
        return Observed(tuple(self._exchanges), lag_s, duration_s, self._interrupted, began_unix_s)

    def stop(self) -> None:
        """End the run as it stands; what has not ended is unfinished."""
        self._interrupted = True
        self._over.set()

    def _rearm(self) -> None:
        due_s = self._generator.next_due_s()
        if due_s is not None:
            self._alarm.arm(self._clock.to_wall_s(due_s))

    def _due(self, _woke_s: float) -> None:
        for request in self._generator.due(self._clock.now_s()):
            exchange = self._exchange(request)
            if self._gate.arrive(exchange):
                self._start(exchange)
        self._rearm()

    def _exchange(self, request: PlannedRequest) -> Exchange:
        exchange = Exchange(len(self._exchanges), request, request.scheduled_s)
        self._exchanges.append(exchange)
        return exchange

    def _start(self, exchange: Exchange) -> None:
        task = asyncio.create_task(self._perform(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    async def _perform(self, exchange: Exchange) -> None:
        await self._driver.perform(exchange, self._clock.now_s)
        exchange.end_s = self._clock.now_s()
        self._ended += 1
        self._generator.finished(exchange.request.request_id, exchange.end_s)
        following = self._gate.leave()
        if following is not None:
            following.due_s = exchange.end_s
            self._start(following)
        self._rearm()
        if self._generator.over():
            self._over.set()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._over.set()

    async def _cancel(self, telling: asyncio.Task[None]) -> None:
        tasks = [telling, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell(self, report_progress: Callable[[Progress], None]) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            now_s = max(0.0, self._clock.now_s())
            report_progress(Progress(now_s=now_s, sent=len(self._exchanges), ended=self._ended))


@contextlib.contextmanager
def stopped_by_interrupt(test: LoadTest) -> Iterator[None]:
    """While it is entered, Ctrl-C ends the load test and not the program, so that there is a result."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, test.stop)
    except (NotImplementedError, RuntimeError, ValueError):  # not on this system, or not the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextlib.contextmanager
def tuned() -> Iterator[None]:
    """An interpreter fit to keep a schedule: short turns of threads, and no collection of what is there already."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval_s)
