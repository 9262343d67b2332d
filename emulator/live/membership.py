"""The place of a run's own client: it joins, begins the run, speaks and listens, ends it and collects the reports.

A client that only sends load to a cluster beside it, and leaves it running, is `live.router_client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from emulator.core.errors import ConfigError, DeadlineError, FidelityError
from emulator.core.message_codec import decode_to_client
from emulator.core.messages import (
    Abort,
    Assembled,
    Begin,
    ClusterLoad,
    EndRecord,
    Finished,
    Hello,
    NodeBack,
    NodeLost,
    ReadLoad,
    Report,
    Stop,
    Submit,
    Tokens,
)
from emulator.core.probe import Probe
from emulator.core.records import Record, numbered
from emulator.core.run_summary import EndedBy
from emulator.core.workload import LoadPlan
from emulator.live.clock import ModelClock
from emulator.live.control import PeerSocket
from emulator.live.cpu_time import CpuTime
from emulator.live.loop_lag import LoopLag
from emulator.live.reports import GuestReport, NodeReport, ReportCollector, RouterReport, RunReport
from emulator.live.router import NAME as ROUTER
from emulator.live.router import RUN_CLIENT
from emulator.live.status import Assignment

START_DELAY_S = 0.25
REPORTS_S = 20.0
# A timer of an event loop may ring this much early.
TIMER_S = 0.002

Heard = Tokens | Finished | ClusterLoad | NodeLost | NodeBack | EndRecord


class Membership:
    """The client of a run. What the router says of requests, nodes and the record goes to `heard`, with its instant.

    `done` is for whoever drives the run: it has nothing left to do. It is set, too, when this cannot go on.
    """

    def __init__(self, task: Assignment, heard: Callable[[Heard, float], None]) -> None:
        self.run = task.run
        self.clock = ModelClock(task.run.scale.time)
        self.done = asyncio.Event()
        self._secret = task.secret
        self._heard = heard
        self._lag = LoopLag(asyncio.get_running_loop())
        self._cpu = CpuTime()
        self._control = PeerSocket(task.router_endpoint, RUN_CLIENT, task.router_public_key, insecure=task.insecure)
        self._receiving: asyncio.Task[None]
        self._reports = ReportCollector()
        self._probes: tuple[Probe, ...] = ()
        self._assembled = asyncio.Event()
        self._reported = asyncio.Event()
        self._began_s: float | None = None
        self.failure: Exception | None = None

    async def join(self, timeout_s: float) -> None:
        """Join the cluster and wait until it is complete, its KV links probed.

        Raises DeadlineError after `timeout_s` wall seconds, FidelityError for a link that is not what was asked for,
        ConfigError for a run that another client has begun.
        """
        self.clock.offset = await self._control.join(Hello(RUN_CLIENT, "client", self._secret), timeout_s)
        self._receiving = asyncio.create_task(self._receive())
        self._receiving.add_done_callback(self._task_ended)
        await self._within(timeout_s, self._assembled, "the cluster was not complete")
        problems = [problem for probe in self._probes if (problem := probe.problem())]
        if problems and not self.run.force:
            raise FidelityError(f"{self.run.label}: {problems[0]}; --force runs it all the same, marked UNSHAPED")

    def begin(self) -> None:
        """Begin the run: model time starts in a moment, for everybody."""
        self._lag.start()
        t0_s = self.clock.on_router(time.monotonic() + START_DELAY_S)
        self.clock.begin(t0_s)
        self._began_s = t0_s
        self._cpu.start()
        self.send(Begin(t0_s))

    async def begun(self) -> None:
        """Wait for the start of model time."""
        await asyncio.sleep(self.clock.to_wall_s(0.0) - time.monotonic() + TIMER_S)

    def send(self, message: Submit | Abort | ReadLoad | Begin | Stop) -> None:
        """To the router, without waiting; if it does not keep up, this has failed."""
        if not self._control.send(message):
            self._fail(DeadlineError("client: the router does not keep up"))

    async def end(self) -> None:
        """End the run, and wait for the reports of the router and of every node that it has not lost.

        Raises DeadlineError, or why this could not go on.
        """
        self.send(Stop())
        await self._within(REPORTS_S, self._reported, "reports were missing")
        lost = self._reports.get(ROUTER, RouterReport).lost_nodes
        if missing := [name for name in self._missing() if name not in lost]:
            raise DeadlineError(f"client: no report from {', '.join(missing)}")

    async def leave(self) -> None:
        """Be gone, whatever happened."""
        self._receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._receiving
        self._lag.stop()
        self._control.close()

    def report(self, records: Sequence[Record], load: LoadPlan | None = None, ended_by: EndedBy = "load") -> RunReport:
        """The whole run, once it has ended; `load` is what came, if nobody had planned it.

        It has the requests of guests too: the cluster's nodes worked for them as well.
        """
        return RunReport(
            records=(*records, *self.guests_records()),
            probes=self._probes,
            loop_lag_s=tuple(lag / self.run.scale.time for lag in self._lag.samples_s),
            client_cpu_s=self._cpu.seconds,
            clock_uncertainty_s=self.clock.offset.uncertainty_s / self.run.scale.time,
            router=self._reports.get(ROUTER, RouterReport),
            nodes=tuple(
                self._reports.get(node.name, NodeReport) for node in self.run.nodes if node.name not in self._missing()
            ),
            load=load,
            ended_by=ended_by,
        )

    def guests_records(self) -> list[Record]:
        """Records of the requests of other clients: their own, or what the router saw of those that are gone.

        An id that came before, as of a guest that was killed and started anew, has a number behind it.
        """
        guests = self._reports.others(self._members)
        records = [record for name in guests for record in self._reports.get(name, GuestReport).records]
        return numbered([*records, *self._reports.get(ROUTER, RouterReport).abandoned])

    @property
    def _members(self) -> list[str]:
        return [ROUTER, *(node.name for node in self.run.nodes)]

    async def until_done(self, deadline_s: float) -> bool:
        """Wait until a model instant for `done`; whether it came."""
        left_s = self.clock.to_wall_s(deadline_s) - time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.done.wait(), max(0.0, left_s))
        return self.done.is_set()

    async def _receive(self) -> None:
        while True:
            message = decode_to_client(await self._control.receive())
            match message:
                case NodeLost(name=name) if not self._assembled.is_set():
                    self._fail(DeadlineError(f"{name} fell silent before the run; is its process or network stopped?"))
                case Tokens() | Finished() | ClusterLoad() | NodeLost() | NodeBack():
                    self._heard(message, self.clock.now_s())
                case EndRecord():
                    self._lag.stop()
                    self._cpu.stop()
                    self._heard(message, self.clock.now_s())
                case Begin(t0_s=t0_s) if t0_s != self._began_s:
                    self._begun_by_another()
                case Assembled(probes=probes, t0_s=t0_s):
                    if t0_s not in (None, self._began_s):
                        self._begun_by_another()
                    self._probes = tuple(Probe.of(seen, self.run) for seen in probes)
                    self._assembled.set()
                case Report():
                    self._reports.add(message)
                    if not self._reports.missing([ROUTER]):  # which is the last to report
                        self._reported.set()

    def _missing(self) -> list[str]:
        """Nodes without a report."""
        return self._reports.missing([node.name for node in self.run.nodes])

    async def _within(self, limit_s: float, event: asyncio.Event, what: str) -> None:
        """Wait for an event of the cluster; raises DeadlineError after `limit_s` wall seconds."""
        try:
            await asyncio.wait_for(event.wait(), limit_s)
        except TimeoutError:
            raise DeadlineError(f"client: {what} after {limit_s:g} s") from None
        if self.failure is not None:
            raise self.failure

    def _begun_by_another(self) -> None:
        self._fail(ConfigError(f"{self.run.label}: another client has begun this run; start the cluster anew"))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.failure is None and isinstance(error, Exception):
            self.failure = error
        for event in (self.done, self._assembled, self._reported):
            event.set()
