"""The client's process: the load generator on the control network, and the only place where latency is taken."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec

from emulator.core.errors import DeadlineError, FidelityError
from emulator.core.load import LoadGenerator
from emulator.core.message_codec import decode_to_client
from emulator.core.messages import Abort, Assembled, Begin, Finished, Hello, Report, Stop, Submit, Tokens
from emulator.core.probe import Probe
from emulator.core.recorder import Recorder
from emulator.live.alarm import Alarm
from emulator.live.clock import ModelClock
from emulator.live.control import PeerSocket
from emulator.live.cpu_time import CpuTime
from emulator.live.loop_lag import LoopLag
from emulator.live.reports import NodeReport, ReportCollector, RouterReport, RunReport
from emulator.live.router import NAME as ROUTER
from emulator.live.status import Assignment

NAME = "client"
START_DELAY_S = 0.25
SETTLE_S = 0.5
REPORTS_S = 20.0


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come, for a display."""

    now_s: float
    sent: int
    ended: int


class ClientProcess:
    """Sends each request at its scheduled instant and notes what comes back; then ends the run."""

    def __init__(self, task: Assignment) -> None:
        self._secret = task.secret
        self._run = run = task.run
        self._clock = ModelClock(run.scale.time)
        self._generator = LoadGenerator(run.load)
        self._recorder = Recorder()
        self._lag = LoopLag(asyncio.get_running_loop())
        self._control = PeerSocket(task.router_endpoint, NAME, task.router_public_key, insecure=task.insecure)
        self._alarm = Alarm(asyncio.get_running_loop(), self._due, "schedule")
        self._sent = self._ended_requests = 0
        self._receiving: asyncio.Task[None]
        self._reports = ReportCollector()
        self._probes: tuple[Probe, ...] = ()
        self._assembled = asyncio.Event()
        self._idle = asyncio.Event()
        self._reported = asyncio.Event()
        self._failure: Exception | None = None

    async def join(self, timeout_s: float) -> None:
        """Join the cluster and wait until it is complete, its KV links probed.

        Raises DeadlineError after `timeout_s` wall seconds, FidelityError for a link that is not what was asked for.
        """
        self._clock.offset = await self._control.join(Hello(NAME, "client", self._secret), timeout_s)
        self._receiving = asyncio.create_task(self._receive())
        self._receiving.add_done_callback(self._task_ended)
        await self._within(timeout_s, self._assembled, "the cluster was not complete")
        problems = [problem for probe in self._probes if (problem := probe.problem())]
        if problems and not self._run.force:
            raise FidelityError(f"{self._run.label}: {problems[0]}; --force runs it all the same, marked UNSHAPED")

    async def drive(self, report_progress: Callable[[Progress], None]) -> RunReport:
        """Run the whole load, cut it at the drain deadline, stop the cluster and collect its reports."""
        self._lag.start()
        cpu = CpuTime()
        telling = asyncio.create_task(self._tell(report_progress))
        try:
            t0_s = self._clock.on_router(time.monotonic() + START_DELAY_S)
            self._clock.begin(t0_s)
            cpu.start()
            self._send(Begin(t0_s))
            self._rearm()
            deadline_s = self._run.load.duration_s + self._run.load.drain_s
            await self._until(deadline_s, self._idle)
            await self._cut()
            self._send(Stop())
            await self._within(REPORTS_S, self._reported, "reports were missing")
        finally:
            for task in (self._receiving, telling):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
            self._alarm.close()
            self._lag.stop()
            self._control.close()
        if self._failure is not None:
            raise self._failure
        return RunReport(
            records=tuple(self._recorder.records()),
            probes=self._probes,
            loop_lag_s=tuple(lag / self._run.scale.time for lag in self._lag.samples_s),
            client_cpu_s=cpu.seconds,
            clock_uncertainty_s=self._clock.offset.uncertainty_s / self._run.scale.time,
            router=self._reports.get(ROUTER, RouterReport),
            nodes=tuple(self._reports.get(node.name, NodeReport) for node in self._run.nodes),
        )

    # --- sending ----------------------------------------------------------------------------------------------

    def _rearm(self) -> None:
        due_s = self._generator.next_due_s()
        if due_s is not None:
            self._alarm.arm(self._clock.to_wall_s(due_s))

    def _due(self, _woke_s: float) -> None:
        for request in self._generator.due(self._clock.now_s()):
            self._sent += 1
            self._recorder.sent(request, self._clock.now_s())
            self._send(Submit(request.request_id, request.prompt_tokens, request.max_tokens))
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
                case Assembled(probes=probes):
                    self._probes = tuple(Probe.of(seen, self._run) for seen in probes)
                    self._assembled.set()
                case Report():
                    self._reports.add(message)
                    if not self._reports.missing([ROUTER, *(node.name for node in self._run.nodes)]):
                        self._reported.set()

    async def _until(self, deadline_s: float, event: asyncio.Event) -> bool:
        """Wait for an event until a model instant; whether it came."""
        left_s = self._clock.to_wall_s(deadline_s) - time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), max(0.0, left_s))
        return event.is_set()

    async def _within(self, limit_s: float, event: asyncio.Event, what: str) -> None:
        """Wait for an event of the cluster; raises DeadlineError after `limit_s` wall seconds."""
        try:
            await asyncio.wait_for(event.wait(), limit_s)
        except TimeoutError:
            raise DeadlineError(f"client: {what} after {limit_s:g} s") from None
        if self._failure is not None:
            raise self._failure

    async def _cut(self) -> None:
        """Abort what has not ended by the deadline."""
        unfinished = list(self._generator.outstanding)
        if not unfinished or self._failure is not None:
            return
        self._recorder.cut(self._clock.now_s())
        for request_id in unfinished:
            self._send(Abort(request_id))
        await self._until(self._clock.now_s() + SETTLE_S, self._idle)

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
        for event in (self._idle, self._assembled, self._reported):
            event.set()
