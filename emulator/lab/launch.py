"""Launching: the processes of one run on this machine, from first start to last exit, at whichever site.

Every process gets its assignment on standard input and reports on standard output. The input pipe stays open for as
long as this process lives, and a child whose pipe closes ends itself, so that even SIGKILL leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from emulator.core.errors import ConfigError, DeadlineError, RunError
from emulator.core.listen import Listen
from emulator.core.probe import Prober
from emulator.core.record_limits import RecordLimits
from emulator.core.run_spec import RunSpec
from emulator.core.workload import LoadPlan
from emulator.lab.cpu import CpuSampler
from emulator.lab.sites import CLIENT, LOOPBACK, ROUTER, Address, Site
from emulator.live.allocator import NODE_ALLOCATOR_ENV
from emulator.live.control import CurveKeys
from emulator.live.devices import open_limit_s
from emulator.live.reports import RunReport
from emulator.live.status import (
    Assignment,
    Done,
    Failed,
    HttpService,
    Interim,
    Lost,
    Ready,
    RecordEnded,
    Status,
    Underway,
    Waiting,
)

READY_S = 60.0
PROBE_S = 8.0
FINISH_S = 15.0
STOP_S = 3.0
NEWS_S = 1.0  # after which the end of a lost node's process, if it has ended, is known here too
_LINE_BYTES = 1 << 20
NO_LOAD = LoadPlan((), (), 0.0, 0.0)


def ready_limit_s(run: RunSpec) -> float:
    """How long a run's cluster may take to be ready: to start, to warm its memory, to open its devices and to probe
    every pair's link."""
    return READY_S + open_limit_s(run) + PROBE_S * len(Prober.of(run).pairs)


def finish_limit_s(run: RunSpec) -> float:
    """How long a run may take from then on, in wall seconds."""
    return (run.load.duration_s + run.load.drain_s) * run.scale.time + FINISH_S


@dataclass(frozen=True, slots=True)
class LiveResult:
    """The report of a run, and the busiest core's share of each second."""

    report: RunReport
    cpu_busy: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """URLs of a service's endpoint and, by name, of the `metrics` of router and nodes; and the router's address."""

    http: str
    router: str
    metrics: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """An endpoint in the place of a load, which serves until `stop` is set. Where no node is left for a phase it is set
    from here, and `on_down` told why.

    `on_ready` is told where it is. Router and nodes serve their own metrics from the address `metrics` on, one after
    the other, if there is one. `on_news` hears in a sentence of a node that is lost, and of the end of the record.
    Other clients that know the `secret` may join; without one nobody does. So much is recorded as `record` allows.
    """

    http: HttpService
    stop: asyncio.Event
    on_ready: Callable[[Addresses], None]
    on_news: Callable[[str], None]
    on_down: Callable[[str], None]
    metrics: Listen | None = None
    secret: str = ""
    record: RecordLimits = field(default_factory=RecordLimits)

    def metrics_of(self, n: int) -> Listen | None:
        """Where the n-th process after the router serves its own metrics."""
        return self.metrics.following(n) if self.metrics is not None else None


class Launcher(Protocol):
    """Whatever runs one `RunSpec`."""

    async def launch(self) -> LiveResult:
        """Run it from first start to last exit; what was started is gone afterwards, whatever happened.

        Raises ConfigError for what the user can mend, DeadlineError or RunError for a run that broke down.
        """


@dataclass(slots=True)
class Child:
    """One process of a run."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    ready: asyncio.Future[Ready]
    done: asyncio.Future[None]
    reading: asyncio.Task[None] | None = None


@dataclass(slots=True)
class ProcessLauncher:
    """Runs one `RunSpec` at `site`, its files in `folder`; `on_progress` is told how far the client is.

    Each node that keeps KV may keep `host_memory_bytes` of it and is expected to keep `expected_kv_bytes`. With a
    `service` the client serves others' requests, instead of the run's load.
    """

    run: RunSpec
    site: Site
    folder: Path
    host_memory_bytes: int
    expected_kv_bytes: int
    kernel_shaping: bool
    on_progress: Callable[[Interim], None]
    service: Service | None = None
    children: list[Child] = field(default_factory=list)
    _serving: bool = field(default=False, init=False)
    _lost: set[str] = field(default_factory=set, init=False)
    _silent: set[str] = field(default_factory=set, init=False)
    _cpu: CpuSampler = field(default_factory=CpuSampler, init=False)

    @property
    def _report(self) -> Path:
        return self.folder / "report.json"

    async def launch(self) -> LiveResult:
        """Start, wait for readiness, run, collect; whatever happens, no process outlives this call.

        Raises ConfigError for what the user can mend (a taken port), DeadlineError for a process that is not ready
        or not finished in time, RunError for one that died.
        """
        try:
            return await self._launch(await asyncio.to_thread(self.site.open))
        finally:
            await self._stop()
            await asyncio.to_thread(self.site.close)

    async def _launch(self, addresses: Mapping[str, Address]) -> LiveResult:
        keys = CurveKeys.new()
        beyond_loopback = any(address.control != LOOPBACK for address in addresses.values())
        common = Assignment(
            kind="node",
            name="",
            run=msgspec.structs.replace(self.run, load=NO_LOAD),
            secret=(self.service.secret if self.service is not None else "") or secrets.token_hex(16),
            report=str(self._report),
            router_public_key=keys.public if beyond_loopback else "",
            host_memory_bytes=self.host_memory_bytes,
            expected_kv_bytes=self.expected_kv_bytes,
            kernel_shaping=self.kernel_shaping,
            join_timeout_s=ready_limit_s(self.run),
        )

        async def start(name: str, **changes: Any) -> Child:
            address = addresses[name]
            place = {"netns": address.netns, "control_address": address.control, "kv_address": address.kv}
            return await self._start(msgspec.structs.replace(common, name=name, **place, **changes))

        def metrics(n: int) -> Listen | None:
            return self.service.metrics_of(n) if self.service is not None else None

        secret_key = keys.secret if beyond_loopback else ""
        record = self.service.record if self.service is not None else None
        router = await start(ROUTER, kind="router", router_secret_key=secret_key, metrics=metrics(0), record=record)
        await self._settle([router.ready], READY_S, "start")
        endpoint = router.ready.result().endpoint
        others = [
            await start(node.name, router_endpoint=endpoint, metrics=metrics(n))
            for n, node in enumerate(self.run.nodes, 1)
        ]
        http = self.service.http if self.service is not None else None
        client = await start(CLIENT, kind="client", run=self.run, router_endpoint=endpoint, http=http)
        await self._settle([child.ready for child in (*others, client)], ready_limit_s(self.run), "start")
        with self._cpu:
            if self.service is not None:
                await self._serve(self.service, client, endpoint)
            await self._settle([client.done], finish_limit_s(self.run), "finish")
        report = msgspec.json.decode(self._report.read_bytes(), type=RunReport)
        if self.service is not None:
            self._lost.update(report.router.lost_nodes)
        expected = [child for child in self.children if child.name not in self._lost]
        silent = [child for child in expected if child.name in report.router.lost_nodes]
        await self._settle([child.done for child in expected if child not in silent], FINISH_S, "finish")
        if silent:
            await self._settle_silent(silent)
        self._report.unlink()
        return LiveResult(report, tuple(self._cpu.busiest))

    async def _serve(self, service: Service, client: Child, router: str) -> None:
        """Let the endpoint serve until it is to stop, and tell it then."""
        told = {child.name: child.ready.result().metrics for child in self.children}
        metrics = {name: url for name, url in told.items() if url}
        self._serving = True
        service.on_ready(Addresses(http=client.ready.result().endpoint, router=router, metrics=metrics))
        stopped = asyncio.create_task(service.stop.wait())
        try:
            await self._settle([stopped], math.inf, "stop")
        finally:
            stopped.cancel()
        client.process.terminate()

    # --- processes --------------------------------------------------------------------------------------------

    async def _start(self, task: Assignment) -> Child:
        loop = asyncio.get_running_loop()
        log = self.folder / f"{task.name}.log"
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "emulator.live.process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **NODE_ALLOCATOR_ENV},
                start_new_session=True,
                limit=_LINE_BYTES,
            )
        self.site.note_process(process.pid)
        child = Child(task.name, process, log, loop.create_future(), loop.create_future())
        self.children.append(child)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        child.reading = asyncio.create_task(self._follow(child))
        return child

    async def _follow(self, child: Child) -> None:
        """Read a child's status lines to their end, and settle what waits for them."""
        assert child.process.stdout is not None
        error: Exception | None = None
        decoder = msgspec.json.Decoder(Status)
        async for line in child.process.stdout:
            error = self._heed(child, decoder.decode(line)) or error
        code = await child.process.wait()
        if error is None:
            how = f"signal {-code}" if code < 0 else f"status {code}"
            error = RunError(f"process {child.name} ended unexpectedly ({how}); see {child.log}")
        for future in (child.ready, child.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: nobody may be waiting for this one

    def _heed(self, child: Child, status: Status) -> Exception | None:
        """What a child tells; the error, where it is one."""
        match status:
            case Ready():
                child.ready.set_result(status)
            case Waiting(what=what):
                self.on_progress(status)
                self._tell(what)
            case Underway():
                self.on_progress(status)
            case RecordEnded(requests=requests, limit=limit):
                self._cpu.stop()
                self._tell(f"the record ends with {requests:,} requests, since more than {limit} came; serving goes on")
            case Lost(name=name, back=True):
                self._tell_silent(name)
                self._tell(f"{name} is back, and serves again")
            case Lost(name=name):
                self._silent.add(name)
                asyncio.get_running_loop().call_later(NEWS_S, self._tell_silent, name)
            case Done():
                child.done.set_result(None)
            case Failed(error=kind, message=message):
                return error_told(child.name, kind, message, f"see {child.log}")
        return None

    async def _settle(self, futures: Iterable[asyncio.Future[Any]], limit_s: float, what: str) -> None:
        """Wait until all are done; the first failure of any process ends the wait, unless the service goes on."""
        pending = set(futures)
        watched = pending | {child.done for child in self.children if child.name not in self._lost}
        deadline = asyncio.get_running_loop().time() + limit_s
        while pending:
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            done, watched = await asyncio.wait(watched, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                if not self._spared(future):
                    future.result()
            pending -= done
            if not done:
                late = [c.name for c in self.children if c.ready in pending or c.done in pending]
                late = [name for name in late if name != CLIENT] or late  # which waits for all others
                names = ", ".join(late)
                raise DeadlineError(f"{names} did not {what} within {limit_s:g} s; see the logs in {self.folder}")

    async def _settle_silent(self, silent: Sequence[Child]) -> None:
        """Wait a moment for nodes that the router lost, which may be themselves again."""
        _, still = await asyncio.wait([child.done for child in silent], timeout=STOP_S)
        if still:
            names = ", ".join(child.name for child in silent if child.done in still)
            raise DeadlineError(
                f"{names}: silent for {self.run.router.node_lost_s:g} s, so lost by the router, and silent still; is "
                f"its process stopped? See the logs in {self.folder}"
            )

    def _spared(self, future: asyncio.Future[Any]) -> bool:
        """Whether this is the end of a node without which the service goes on."""
        error = future.exception()
        name = next((child.name for child in self.children if child.done is future), "")
        if self.service is None or not self._serving or error is None or name in ("", ROUTER, CLIENT):
            return False
        self._lost.add(name)
        if self.run.serves_without(self._lost):
            left = [node.name for node in self.run.nodes if node.name not in self._lost]
            self._tell(f"{error}; {', '.join(left)} serve on")
        elif not self.service.stop.is_set():
            self.service.on_down(str(error))
            self.service.stop.set()
        return True

    def _tell_silent(self, name: str) -> None:
        """The router has lost a node: say so, once, unless it was said that its process has ended."""
        news = name in self._silent
        self._silent.discard(name)
        if self.service is not None and news and name not in self._lost and not self.service.stop.is_set():
            self._tell(f"{name} is silent, so the router lost it; is its process stopped?")

    def _tell(self, news: str) -> None:
        if self.service is not None:
            self.service.on_news(news)

    async def _stop(self) -> None:
        """Close every leash, then end by force what has not gone after a moment."""
        for child in self.children:
            if child.process.stdin is not None:
                child.process.stdin.close()
        waits = [asyncio.create_task(child.process.wait()) for child in self.children]
        if waits:
            await asyncio.wait(waits, timeout=STOP_S)
        for child in self.children:
            if child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()
                await child.process.wait()
            if child.reading is not None:
                await asyncio.gather(child.reading, return_exceptions=True)  # Ctrl-C meanwhile still ends the command
        for wait in waits:
            await wait


def error_told(name: str, kind: str, message: str, see: str) -> Exception:
    """The error that process `name` told of; `see` says where more is written, for one that nobody expects."""
    if kind in ("ConfigError", "CapacityError", "FidelityError"):
        return ConfigError(message)
    if kind == "DeadlineError":
        return DeadlineError(message)
    return RunError(f"process {name} failed: {kind}: {message}; {see}")
