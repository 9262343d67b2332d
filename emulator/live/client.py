"""The client's process: the load generator on the control network, and the only place where latency is taken."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec

from emulator.core.deploy import RunSpec
from emulator.core.errors import DeadlineError
from emulator.core.load import LoadGenerator
from emulator.core.messages import Abort, Begin, Finished, Hello, Stop, Submit, Tokens, decode_to_client
from emulator.core.recorder import Recorder
from emulator.core.records import Record
from emulator.live.alarm import Alarm
from emulator.live.clock import ModelClock
from emulator.live.control import PeerSocket
from emulator.live.loop_lag import LoopLag

NAME = "client"
START_DELAY_S = 0.25
SETTLE_S = 0.5


class ClientReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the client's process hands over when it ends. Times in model seconds."""

    records: tuple[Record, ...]
    loop_lag_s: tuple[float, ...]
    schedule_delay_s: tuple[float, ...]
    saturated: bool


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come, for a display."""

    now_s: float
    sent: int
    ended: int


class ClientProcess:
    """Sends each request at its scheduled instant and notes what comes back; then ends the run."""

    def __init__(self, run: RunSpec, router_endpoint: str, secret: str) -> None:
        self._secret = secret
        self._run = run
        self._clock = ModelClock(run.scale.time)
        self._generator = LoadGenerator(run.load)
        self._recorder = Recorder()
        self._lag = LoopLag(asyncio.get_running_loop())
        self._control = PeerSocket(router_endpoint, NAME)
        self._alarm = Alarm(asyncio.get_running_loop(), self._due, "schedule")
        self._sent = self._ended_requests = 0
        self._idle = asyncio.Event()
        self._failure: Exception | None = None

    async def join(self, timeout_s: float) -> None:
        """Introduce the client to the router; raises DeadlineError without an answer in `timeout_s` wall seconds."""
        await self._control.join(Hello(NAME, "client", self._secret), timeout_s)

    async def drive(self, report_progress: Callable[[Progress], None]) -> ClientReport:
        """Run the whole load, cut it at the drain deadline, and stop the cluster."""
        self._lag.start()
        receiving = asyncio.create_task(self._receive())
        receiving.add_done_callback(self._task_ended)
        telling = asyncio.create_task(self._tell(report_progress))
        try:
            t0_s = time.monotonic() + START_DELAY_S
            self._clock.begin(t0_s)
            self._send(Begin(t0_s))
            self._rearm()
            deadline_s = self._run.load.duration_s + self._run.load.drain_s
            await self._until(deadline_s, self._idle)
            saturated = await self._cut()
            self._send(Stop())
        finally:
            for task in (receiving, telling):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
            self._alarm.close()
            self._lag.stop()
            self._control.close()
        if self._failure is not None:
            raise self._failure
        records = tuple(self._recorder.records())
        return ClientReport(
            records=records,
            loop_lag_s=tuple(lag / self._run.scale.time for lag in self._lag.samples_s),
            schedule_delay_s=tuple(r.sent_s - r.scheduled_s for r in records if r.sent_s is not None),
            saturated=saturated,
        )

    # --- sending ----------------------------------------------------------------------------------------------

    def _rearm(self) -> None:
        due_s = self._generator.next_due_s()
        if due_s is not None:
            self._alarm.arm(self._clock.to_wall_s(due_s))

    def _due(self, _woke_s: float) -> None:
        for request in self._generator.due(self._clock.now_s()):
            self._sent += 1
            self._send(Submit(request.request_id, request.prompt_tokens, request.max_tokens))
            self._recorder.sent(request, self._clock.now_s())
        self._rearm()

    def _send(self, message: Submit | Abort | Begin | Stop) -> None:
        if not self._control.send(message):
            self._fail(DeadlineError("client: the router does not keep up"))

    # --- receiving --------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            message = decode_to_client(await self._control.receive())
            now_s = self._clock.now_s()
            match message:
                case Tokens():
                    self._recorder.tokens(message, now_s)
                case Finished():
                    self._recorder.finished(message, now_s)
                    self._ended_requests += 1
                    self._generator.finished(message.request_id, now_s)
                    self._rearm()
                    if self._generator.exhausted() and not self._generator.outstanding:
                        self._idle.set()

    async def _until(self, deadline_s: float, event: asyncio.Event) -> bool:
        """Wait for an event until a model instant; whether it came."""
        left_s = self._clock.to_wall_s(deadline_s) - time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), max(0.0, left_s))
        return event.is_set()

    async def _cut(self) -> bool:
        """Abort what has not ended by the deadline; True when there was any."""
        unfinished = list(self._generator.outstanding)
        if not unfinished or self._failure is not None:
            return False
        self._recorder.cut(self._clock.now_s())
        for request_id in unfinished:
            self._send(Abort(request_id))
        await self._until(self._clock.now_s() + SETTLE_S, self._idle)
        return True

    # --- the rest ---------------------------------------------------------------------------------------------

    async def _tell(self, report_progress: Callable[[Progress], None]) -> None:
        while True:
            await asyncio.sleep(0.5)
            now_s = max(0.0, self._clock.now_s())
            report_progress(Progress(now_s=now_s, sent=self._sent, ended=self._ended_requests))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None and isinstance(error, Exception):
            self._failure = error
        self._idle.set()
