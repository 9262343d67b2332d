"""The router's process: its state machine on the control network."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from emulator.core.effects import Send
from emulator.core.errors import ProtocolError
from emulator.core.message_codec import decode_to_router
from emulator.core.messages import (
    Assembled,
    Begin,
    ClockReading,
    EndRecord,
    Finished,
    Hello,
    NodeBack,
    NodeLost,
    ProbeDone,
    ProbeOpened,
    ReadClock,
    Report,
    Stop,
    Submit,
    Tokens,
    ToRouter,
    Welcome,
)
from emulator.core.probe import Probe, Prober, ProbeSend
from emulator.core.record_limits import RecordCount
from emulator.core.router import Router
from emulator.live.clock import ModelClock
from emulator.live.control import CurveKeys, RouterSocket
from emulator.live.cpu_time import CpuTime
from emulator.live.guests import GuestRecords
from emulator.live.loop_lag import LoopLag
from emulator.live.reports import RouterReport, pieces
from emulator.live.status import Assignment, RecordEnded

if TYPE_CHECKING:
    from emulator.live.metrics_server import MetricsServer
    from emulator.live.serving_metrics import ServingMetrics

NAME = "router"
RUN_CLIENT = "client"
"""What the client calls itself whose run it is; all others are its guests."""
TICK_S = 0.5
REPORT_S = 10.0
MOST_WARNINGS = 20
REPORT_LINGER_S = 5.0
SILENT_S = 10.0
"""Wall seconds without a word after which a node is lost that the run has not begun with."""

_log = logging.getLogger(__name__)


class RouterProcess:
    """Receives, lets the router decide, sends; `tell` hears of the end of the record where that is limited."""

    def __init__(self, task: Assignment, tell: Callable[[RecordEnded], None] = lambda _: None) -> None:
        self._run = run = task.run
        self._secret = task.secret
        self._router = Router(run.router)
        self._clock = ModelClock(run.scale.time)
        keys = CurveKeys(task.router_public_key, task.router_secret_key) if task.router_secret_key else None
        address = f"tcp://{task.control_address}:{run.router.control_port or '*'}"
        self._socket = RouterSocket(address, keys, insecure=task.insecure)
        self._lag = LoopLag(asyncio.get_running_loop())
        self._peers: set[str] = set()
        self._clients: set[str] = set()
        self._guests = GuestRecords()
        self._record = RecordCount(task.record) if task.record is not None else None
        self._tell = tell
        self._heard_wall_s: dict[str, float] = {}
        self._unreported: set[str] = set()
        self._reported: set[str] = set()
        self._leaving = False
        self._prober: Prober | None = None
        self._cpu = CpuTime()
        self._ignored = 0
        self._told_away: tuple[str, ...] = ()
        self._metrics: ServingMetrics | None = None

    @property
    def endpoint(self) -> str:
        """Where peers connect."""
        return self._socket.endpoint

    def expose(self, server: MetricsServer) -> None:
        """Have a server show the cluster's metrics."""
        from emulator.live.serving_metrics import ServingMetrics  # noqa: PLC0415 - slow to import, and seldom needed

        self._metrics = ServingMetrics(
            self._run,
            loads=lambda: {node.name: node.load for node in self._router.loads},
            lost=lambda: self._router.away,
        )
        server.exposition = self._metrics.families.exposition

    async def serve(self) -> None:
        """Work until a client says stop and every other peer that is not lost has reported to it; then report too."""
        self._lag.start()
        ticking = asyncio.create_task(self._tick())
        try:
            while not self._leaving or self._unreported:
                peer, data = await self._receive()
                self._step(peer, data)
        except TimeoutError:
            _log.warning("no report from %s", ", ".join(sorted(self._unreported)))
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            self._lag.stop()
            self._guests.cut(self._clock.now_s())
            for piece in pieces(NAME, self._report()):
                self._to_clients(piece)
            self._socket.close(linger_s=REPORT_LINGER_S)

    async def _receive(self) -> tuple[str, bytes]:
        """The next message; raises TimeoutError when nodes that were told to stop do not report."""
        limit_s = REPORT_S if self._leaving else None
        return await asyncio.wait_for(self._socket.receive(), limit_s)

    def _report(self) -> RouterReport:
        return RouterReport(
            loop_lag_s=tuple(lag / self._run.scale.time for lag in self._lag.samples_s),
            ignored_messages=self._ignored + self._router.ignored,
            unended_requests=self._router.live_requests,
            lost_nodes=tuple(dict.fromkeys(self._router.lost_nodes)),
            abandoned=self._guests.records(),
            cpu_s=self._cpu.seconds,
        )

    def _step(self, peer: str, data: bytes) -> None:
        try:
            message = decode_to_router(data)
        except ProtocolError as error:
            self._ignored += 1
            if self._ignored <= MOST_WARNINGS:
                _log.warning("from %r: %s", peer, error)
            return
        if isinstance(message, Hello):
            self._join(peer, message)
            return
        if peer not in self._peers:
            self._ignored += 1
            return
        self._heard_wall_s[peer] = time.monotonic()
        if isinstance(message, ReadClock):
            self._socket.send(peer, ClockReading(message.sent_s, time.monotonic()))
        elif isinstance(message, ProbeOpened | ProbeDone) and self._prober is not None:
            self._probe(self._prober.handle(message))
            self._prepare()
        elif isinstance(message, Report):
            self._pass_on(peer, message)
        elif isinstance(message, Begin | Stop):
            if peer in self._clients:
                self._announce(peer, message)
        else:
            self._decide(peer, message, self._clock.now_s())

    def _decide(self, peer: str, message: ToRouter, now_s: float) -> None:
        if isinstance(message, Submit) and self._metrics is not None:
            self._metrics.submitted(message.request_id, message.prompt_tokens, now_s)
        if isinstance(message, Submit) and peer in self._clients:
            if self._record is not None:
                self._end_record(self._record.request(peer))
            if peer != RUN_CLIENT:
                self._guests.heard(peer, message, now_s)
        self._send(self._router.handle(peer, message, now_s))

    def _join(self, peer: str, hello: Hello) -> None:
        genuine = hmac.compare_digest(hello.secret.encode(), self._secret.encode())
        late = hello.role != "client" and (self._clock.t0_s is not None or peer in self._router.away)
        if hello.name != peer or not genuine or peer in self._peers or late:
            self._ignored += 1
            return
        block_size = next((n.block_size for n in self._run.nodes if n.name == peer), 1)
        self._router.join(hello, block_size, self._clock.now_s())
        self._peers.add(peer)
        if hello.role == "client":
            self._clients.add(peer)
        self._socket.send(peer, Welcome())
        self._heard_wall_s[peer] = time.monotonic()
        if peer in self._clients:
            for name in self._told_away:
                self._socket.send(peer, NodeLost(name))
            if self._record is not None and self._record.over:
                self._socket.send(peer, EndRecord())
        if self._peers >= {node.name for node in self._run.nodes}:
            self._prepare()

    def _prepare(self) -> None:
        """All nodes are here: have their links probed, once, then tell the clients."""
        if self._prober is None:
            self._prober = Prober.of(self._run)
            self._probe(self._prober.start())
        if self._prober.finished:
            self._to_clients(self._assembled(self._prober))

    def _assembled(self, prober: Prober) -> Assembled:
        problems = (Probe.of(seen, self._run).problem() for seen in prober.done if not self._run.force)
        return Assembled(
            probes=tuple(prober.done),
            t0_s=self._clock.t0_s,
            label=self._run.label,
            model=self._run.model,
            scale_time=self._run.scale.time,
            problem=next((problem for problem in problems if problem), ""),
        )

    def _probe(self, sends: list[ProbeSend]) -> None:
        for send in sends:
            self._socket.send(send.node, send.message)

    def _announce(self, said_by: str, message: Begin | Stop) -> None:
        match message:
            case Begin(t0_s=t0_s):
                if self._clock.t0_s is not None:
                    return
                self._clock.begin(t0_s)
                self._cpu.start()
            case Stop():
                self._leaving = True
                self._unreported = self._peers - self._reported - {said_by, *self._router.away}
        self._send([Send(peer, message) for peer in sorted(self._peers)])

    def _end_record(self, limit: str) -> None:
        """Record no more of anything, at any process, once there is more than a limit allows.

        A client has heard of nothing by then that nodes have not recorded.
        """
        if not limit or self._record is None:
            return
        self._lag.stop()
        self._cpu.stop()
        self._guests.cut(self._clock.now_s())
        self._send([Send(peer, EndRecord(self._record.requests_of(peer))) for peer in sorted(self._peers)])
        self._tell(RecordEnded(self._record.requests, limit))

    def _pass_on(self, peer: str, report: Report) -> None:
        if report.name != peer:
            self._ignored += 1
            return
        self._to_clients(report)
        if report.last:
            self._guests.handed_in(peer)
            self._router.dismiss(peer)
            self._reported.add(peer)
            self._unreported.discard(peer)

    def _to_clients(self, message: Assembled | NodeLost | NodeBack | Report) -> None:
        said_by = message.name if isinstance(message, Report) else ""
        for client in self._clients - {said_by}:
            self._socket.send(client, message)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S * self._run.scale.time)
            if self._clock.t0_s is not None:
                self._send(self._router.tick(self._clock.now_s()))
            else:
                self._lose_silent(time.monotonic() - SILENT_S)

    def _lose_silent(self, since_s: float) -> None:
        """Nodes speak before the run begins too: lose those that have not since an instant of the monotonic clock."""
        for node in self._run.nodes:
            if self._heard_wall_s.get(node.name, math.inf) < since_s:
                self._heard_wall_s[node.name] = math.inf
                self._send(self._router.lost(node.name))

    def _send(self, sends: list[Send]) -> None:
        for send in sends:
            if send.peer != RUN_CLIENT and isinstance(send.message, Tokens | Finished):
                self._guests.told(send.peer, send.message, self._clock.now_s())
            if self._metrics is not None:
                self._count(self._metrics, send)
            if not self._socket.send(send.peer, send.message) and send.peer in self._peers:
                self._peers.discard(send.peer)
                self._unreported.discard(send.peer)
                self._send(self._router.lost(send.peer))
        if self._record is not None:
            messages = (send.message for send in sends)
            tokens = sum(count.n for said in messages if isinstance(said, Tokens) for count in said.tokens)
            self._end_record(self._record.tokens(tokens))
        told, self._told_away = self._told_away, self._router.away
        for name in self._told_away:
            if name not in told:
                self._to_clients(NodeLost(name))
        for name in told:
            if name not in self._told_away:
                self._to_clients(NodeBack(name))

    def _count(self, metrics: ServingMetrics, send: Send) -> None:
        match send.message:
            case Tokens():
                metrics.tokens(send.message, self._clock.now_s())
            case Finished():
                metrics.finished(send.message)
