"""A node's process: its engine between the control network, the device and the KV network."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from emulator.core.effects import (
    CancelTransmit,
    CloseTicket,
    Effect,
    OpenTicket,
    RecordMemory,
    RecordStep,
    Reply,
    RunStep,
    Transmit,
)
from emulator.core.engine import Engine
from emulator.core.errors import DeadlineError
from emulator.core.message_codec import decode_to_node
from emulator.core.messages import Begin, EndRecord, Hello, Message, OpenProbe, ProbeDone, SendProbe, Stop
from emulator.core.records import MemoryRecord, StepRecord
from emulator.core.run_spec import NodeSpec
from emulator.core.scaling import Scaling
from emulator.core.step_shape import StepShape
from emulator.live.clock import ModelClock
from emulator.live.control import PeerSocket
from emulator.live.cpu_time import CpuTime
from emulator.live.device import DeviceStep
from emulator.live.devices import open_device
from emulator.live.kv_end import KvEnd
from emulator.live.loop_lag import LoopLag
from emulator.live.nic import EmulatedNic
from emulator.live.reports import NodeReport, pieces
from emulator.live.status import Assignment

if TYPE_CHECKING:
    from emulator.live.metrics_server import MetricsServer
    from emulator.live.node_metrics import NodeMetrics

TICK_S = 1.0
REPORT_LINGER_S = 5.0


class NodeProcess:
    """Carries out what the engine of one node decides; its KV crosses `nic`, if any crosses a network."""

    def __init__(self, task: Assignment, node: NodeSpec, nic: EmulatedNic | None) -> None:
        self._task, self._run, self._node, self._nic = task, task.run, node, nic
        self._secret = task.secret
        self._scale_time = task.run.scale.time
        self._clock = ModelClock(self._scale_time)
        self._lag = LoopLag(asyncio.get_running_loop())
        self._control = PeerSocket(task.router_endpoint, node.name, task.router_public_key, insecure=task.insecure)
        self._scaling = Scaling(task.run.scale)
        self._cpu = CpuTime()
        self._steps: list[StepRecord] = []
        self._memory: list[MemoryRecord] = []
        self._recording = True
        self._metrics: NodeMetrics | None = None
        self._failure: Exception | None = None
        self._ended = asyncio.Event()

    async def open(self, waiting: Callable[[str], None] = lambda _: None) -> None:
        """Open the device and what depends on it, before anything else; `waiting` is told what that waits for.

        Raises what `open_device` raises.
        """
        task, node = self._task, self._node
        self._device = await open_device(
            task,
            node,
            step_done=self._step_done,
            step_progress=self._step_progress,
            failed=self._fail,
            waiting=waiting,
        )
        self._kv = KvEnd(
            task,
            node,
            self._nic,
            self._clock,
            arrived=self._kv_arrived,
            probed=self._probed,
            failed=self._fail,
            store=self._device.store,
        )
        new_ticket = partial(secrets.randbits, 63)
        self._engine = Engine(
            node, new_ticket=new_ticket, kv_endpoint=self._kv.endpoint, name_blocks=self._run.device.computes
        )

    @property
    def kv_endpoint(self) -> str:
        """Where KV for this node goes; empty when it takes none."""
        return self._kv.endpoint

    def expose(self, server: MetricsServer) -> None:
        """Have a server show this node's metrics."""
        from emulator.live.node_metrics import NodeMetrics  # noqa: PLC0415 - slow to import, and few runs have metrics

        self._metrics = NodeMetrics(self._run, self._engine, self._kv)
        server.exposition = self._metrics.families.exposition

    async def join(self, timeout_s: float) -> None:
        """Introduce this node to the router.

        Raises DeadlineError without an answer in `timeout_s` wall seconds, ConfigError for a link that another host's
        clock does not allow.
        """
        hello = Hello(self._node.name, self._node.role, self._secret, self._node.kv_blocks)
        self._clock.offset = await self._control.join(hello, timeout_s)
        self._kv.compare_clocks()

    async def serve(self) -> None:
        """Work until the router says stop; then everything is closed, and the report sent."""
        self._lag.start()
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._tick())]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        try:
            await self._ended.wait()
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
            report = self._close()
            if self._failure is None:
                for piece in pieces(self._node.name, report):
                    self._control.send(piece)
            self._control.close(linger_s=0.0 if self._failure else REPORT_LINGER_S)
        if self._failure is not None:
            raise self._failure
        self._engine.check_integrity()

    # --- inputs -----------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            message = decode_to_node(await self._control.receive())
            match message:
                case Begin(t0_s=t0_s):
                    self._clock.begin(t0_s)
                    self._cpu.start()
                case EndRecord():
                    self._end_record()
                case Stop():
                    self._ended.set()
                    return
                case OpenProbe():
                    self._control.send(self._kv.open_probe(message))
                case SendProbe():
                    await self._kv.send_probe(message)
                case _:
                    self._apply(self._engine.handle(message, self._clock.now_s()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S * self._scale_time)
            if self._clock.t0_s is not None:
                self._apply(self._engine.tick(self._clock.now_s()))
            else:
                self._tell(self._engine.load)

    def _step_done(self, woke_s: float, slipped_s: float) -> None:
        self._apply(self._engine.step_done(self._clock.to_model_s(woke_s), slipped_s / self._scale_time))

    def _step_progress(self, groups: int) -> None:
        self._apply(self._engine.step_progress(groups))

    def _kv_arrived(self, ticket: int, nbytes: int, start_s: float, end_s: float) -> None:
        self._apply(self._engine.kv_arrived(ticket, nbytes, start_s, end_s, self._clock.now_s()))

    def _probed(self, seen: ProbeDone) -> None:
        self._control.send(seen)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None and isinstance(error, Exception):
            self._failure = error
        self._ended.set()

    # --- effects ----------------------------------------------------------------------------------------------

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply(message=message):
                    self._tell(message)
                case RunStep():
                    self._device.run(self._device_step(effect))
                case RecordStep() | RecordMemory():
                    self._record(effect)
                case Transmit():
                    self._kv.transmit(effect)
                case CancelTransmit():
                    self._kv.cancel(effect)
                case OpenTicket():
                    self._kv.open(effect)
                case CloseTicket():
                    self._kv.shut(effect)

    def _tell(self, message: Message) -> None:
        if self._metrics is not None:
            self._metrics.told(message)
        if not self._control.send(message):
            self._fail(DeadlineError(f"{self._node.name}: the router does not keep up"))

    def _device_step(self, effect: RunStep) -> DeviceStep:
        wall_s = self._clock.to_wall_s
        chunks = effect.shape.chunks if self._device.store is not None else ()
        prefill_s = self._node.cost.step_s(StepShape(chunks, 0, 0)) if chunks else 0.0
        return DeviceStep(
            deadline_s=wall_s(effect.end_s),
            progress_at_s=[wall_s(at_s) for at_s in effect.progress_s()],
            shape=effect.shape,
            start_s=wall_s(effect.start_s),
            prefill_s=self._scaling.wall_s(prefill_s),
            progress=effect.progress,
            writes=effect.writes,
        )

    def _record(self, effect: RecordStep | RecordMemory) -> None:
        if not self._recording:
            return
        if isinstance(effect, RecordStep):
            self._steps.append(effect.record)
        else:
            self._memory.extend(effect.rows)

    def _end_record(self) -> None:
        """What happens from now on is not reported. Idempotent."""
        self._apply(self._engine.cut())
        self._recording = False
        self._lag.stop()
        self._cpu.stop()
        self._kv.end_record()

    def _close(self) -> NodeReport:
        self._end_record()
        kv = self._kv.close()
        self._device.close()  # after the KV network, which uses its memory
        return NodeReport(
            name=self._node.name,
            steps=tuple(self._steps),
            memory=tuple(self._memory),
            kv=kv,
            loop_lag_s=tuple(lag / self._scale_time for lag in self._lag.samples_s),
            preemptions=self._engine.scheduler.num_preemptions,
            cpu_s=self._cpu.seconds,
            clock_uncertainty_s=self._clock.offset.uncertainty_s / self._scale_time,
            device=self._device.description,
            device_id=self._device.device_id,
        )
