"""The client's process: the load generator on the control network, and the only place where latency is taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from emulator.core.load import LoadGenerator
from emulator.core.messages import Abort, Finished, Submit, Tokens
from emulator.core.recorder import Recorder
from emulator.live.alarm import Alarm
from emulator.live.membership import Heard, Membership
from emulator.live.reports import RunReport
from emulator.live.status import Assignment

SETTLE_S = 0.5


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come, for a display."""

    now_s: float
    sent: int
    ended: int


class ClientProcess:
    """Sends each request at its scheduled instant and notes what comes back; then ends the run."""

    def __init__(self, task: Assignment) -> None:
        self._load = task.run.load
        self._generator = LoadGenerator(self._load)
        self._recorder = Recorder()
        self._cluster = Membership(task, self._heard)
        self._clock = self._cluster.clock
        self._alarm = Alarm(asyncio.get_running_loop(), self._due, "schedule")
        self._sent = self._ended_requests = 0

    async def join(self, timeout_s: float) -> None:
        """Join the cluster and wait until it is complete, as `Membership.join` does."""
        await self._cluster.join(timeout_s)

    async def drive(self, report_progress: Callable[[Progress], None]) -> RunReport:
        """Run the whole load, cut it at the drain deadline, stop the cluster and collect its reports."""
        telling = asyncio.create_task(self._tell(report_progress))
        try:
            self._cluster.begin()
            self._rearm()
            await self._cluster.until_done(self._load.duration_s + self._load.drain_s)
            await self._cut()
            await self._cluster.end()
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await telling
            self._alarm.close()
            await self._cluster.leave()
        return self._cluster.report(self._recorder.records())

    # --- sending ----------------------------------------------------------------------------------------------

    def _rearm(self) -> None:
        due_s = self._generator.next_due_s()
        if due_s is not None:
            self._alarm.arm(self._clock.to_wall_s(due_s))

    def _due(self, _woke_s: float) -> None:
        for request in self._generator.due(self._clock.now_s()):
            self._sent += 1
            self._recorder.sent(request, self._clock.now_s())
            self._cluster.send(Submit(request.request_id, request.prompt_tokens, request.max_tokens))
        self._rearm()

    # --- receiving --------------------------------------------------------------------------------------------

    def _heard(self, message: Heard, now_s: float) -> None:
        match message:
            case Tokens():
                self._recorder.tokens(message, now_s)
            case Finished():
                self._recorder.finished(message, now_s)
                self._ended_requests += 1
                self._generator.finished(message.request_id, now_s)
                self._rearm()
                if self._generator.exhausted() and not self._generator.outstanding:
                    self._cluster.done.set()

    async def _cut(self) -> None:
        """Abort what has not ended by the deadline."""
        unfinished = list(self._generator.outstanding)
        if not unfinished or self._cluster.failure is not None:
            return
        self._recorder.cut(self._clock.now_s())
        for request_id in unfinished:
            self._cluster.send(Abort(request_id))
        await self._cluster.until_done(self._clock.now_s() + SETTLE_S)

    # --- the rest ---------------------------------------------------------------------------------------------

    async def _tell(self, report_progress: Callable[[Progress], None]) -> None:
        while True:
            await asyncio.sleep(0.5)
            now_s = max(0.0, self._clock.now_s())
            report_progress(Progress(now_s=now_s, sent=self._sent, ended=self._ended_requests))
