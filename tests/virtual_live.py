"""The live processes of a run in one event loop under a virtual clock: real router, nodes and client, no waiting.

What touches the machine is exchanged: sockets for queues that carry the same encoded messages, threads that sleep for
timers of the loop, the KV network for its model. Messages take no time, so the run must be the simulator's.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from emulator.core.effects import CancelTransmit, CloseTicket, OpenTicket, Transmit
from emulator.core.message_codec import encode
from emulator.core.messages import Message, OpenProbe, ProbeDone, ProbeOpened, SendProbe
from emulator.core.modelled_kv import PartId, modelled_network
from emulator.core.run_spec import NodeSpec, RunSpec
from emulator.live import client, clock, control, device, membership, node, router
from emulator.live.client import ClientProcess
from emulator.live.clock import ModelClock
from emulator.live.node import NodeProcess
from emulator.live.reports import KvReport, RunReport
from emulator.live.router import RUN_CLIENT, RouterProcess
from emulator.live.status import Assignment

START_S = 1_000.0
JOIN_S = 10.0
AFTER_S = 1e-9
"""A clock that is read when a timer has rung shows no less than the timer's instant, whatever was rounded."""


class _JumpingSelector(selectors.DefaultSelector):
    """Where a loop would wait, its clock jumps."""

    now_s = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "every process waits for another one"
            self.now_s += max(0.0, timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


class _Wire:
    """The control network: one inbox for the router, one for each peer."""

    def __init__(self) -> None:
        self.router: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self.peers: dict[str, asyncio.Queue[bytes]] = {}

    def router_socket(self, *_: object, **__: object) -> Any:
        def send(peer: str, message: Message) -> bool:
            self.peers[peer].put_nowait(encode(message))
            return True

        return SimpleNamespace(endpoint="router", receive=self.router.get, send=send, close=lambda **_: None)

    def peer_socket(self, _: str, name: str, *__: object, **___: object) -> _PeerSocket:
        return _PeerSocket(self, name)


class _PeerSocket(control.PeerSocket):
    """A peer's end, which joins and compares clocks as the real one does."""

    def __init__(self, wire: _Wire, name: str) -> None:
        self._wire, self._name = wire, name
        self._early = deque()
        self._inbox = wire.peers[name] = asyncio.Queue()

    async def _next(self) -> bytes:
        return await self._inbox.get()

    def send(self, message: Message) -> bool:
        self._wire.router.put_nowait((self._name, encode(message)))
        return True

    def close(self, linger_s: float = 0.0) -> None:
        pass


class _Alarm:
    """Rings by a timer of the loop, at the very instants."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[float], None], _: str) -> None:
        self._loop, self._ring = loop, ring
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, *deadlines_s: float) -> None:
        self.close()
        if deadlines_s:
            at_s = max(deadlines_s[0], self._loop.time())
            self._timer = self._loop.call_at(at_s, self._due, at_s, deadlines_s[1:])

    def _due(self, at_s: float, later_s: tuple[float, ...]) -> None:
        self.arm(*later_s)
        self._ring(max(at_s, self._loop.time()))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _KvNetwork:
    """The modelled KV network with every node's end of it."""

    def __init__(self, run: RunSpec, loop: asyncio.AbstractEventLoop) -> None:
        assert run.link is not None
        self.link = run.link
        self._run = run
        self.receivers = run.kv_receivers
        self._network = modelled_network(run)
        self._loop = loop
        self._now_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._parts: dict[int, int] = {}
        self.ends: dict[str, _KvEnd] = {}

    def start(self, source: str, effect: Transmit) -> None:
        part = self._parts[effect.ticket] = self._parts.get(effect.ticket, -1) + 1
        self._network.start(
            PartId(effect.ticket, part),
            source,
            effect.endpoint,
            effect.nbytes,
            self._present(),
            request=effect.ticket,
            message_s=self._run.message_s(source, effect.destination, effect.nbytes),
        )
        self._arm()

    def cancel(self, ticket: int) -> None:
        for part in range(self._parts.pop(ticket, -1) + 1):
            self._network.cancel(PartId(ticket, part), self._present())
        self._arm()

    def _present(self) -> float:
        self._now_s = max(self._now_s, self._loop.time())
        return self._now_s

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = self._network.next_event_s()
        self._timer = None if due_s is None else self._loop.call_at(due_s, self._due, due_s)

    def _due(self, due_s: float) -> None:
        self._now_s = max(self._present(), due_s)
        deliveries = self._network.advance(self._now_s)
        self._arm()
        for delivery in deliveries:
            assert isinstance(delivery.transfer_id, PartId)
            for end in self.ends.values():
                end.delivered(*delivery.transfer_id, delivery.nbytes, delivery.start_s, delivery.end_s)


class _KvEnd:
    """A node's end of the modelled network, in place of its sockets."""

    def __init__(
        self,
        network: _KvNetwork | None,
        node: NodeSpec,
        clock: ModelClock,
        arrived: Callable[[int, int, float, float], None],
        probed: Callable[[ProbeDone], None],
    ) -> None:
        self._network, self._name, self._clock = network, node.name, clock
        self._arrived, self.probed = arrived, probed
        self._expected: dict[int, int] = {}
        self._totals: dict[int, int] = {}
        self._first_s: dict[int, float] = {}
        self.endpoint = node.name if network is not None and node.name in network.receivers else ""
        if network is not None:
            network.ends[node.name] = self

    def delivered(self, ticket: int, part: int, nbytes: int, start_s: float, end_s: float) -> None:
        if ticket not in self._expected:
            return
        if part == 0:
            self._first_s[ticket] = start_s
        self._expected[ticket] -= nbytes
        if not self._expected[ticket]:
            total = self._totals[ticket]
            model = self._clock.to_model_s
            self._arrived(ticket, total, model(self._first_s[ticket]), model(end_s))

    def transmit(self, effect: Transmit) -> None:
        assert self._network is not None
        self._network.start(self._name, effect)

    def cancel(self, effect: CancelTransmit) -> None:
        assert self._network is not None
        self._network.cancel(effect.ticket)

    def open(self, effect: OpenTicket) -> None:
        self._expected[effect.ticket] = self._totals[effect.ticket] = effect.nbytes

    def shut(self, effect: CloseTicket) -> None:
        self._expected.pop(effect.ticket, None)

    def open_probe(self, probe: OpenProbe) -> ProbeOpened:
        return ProbeOpened(self.endpoint, tuple(range(probe.pings + 1)))

    async def send_probe(self, probe: SendProbe) -> None:
        assert self._network is not None
        link = self._network.link
        seconds = probe.nbytes * 8 / link.pair_bps(self._name, probe.endpoint)
        self._network.ends[probe.endpoint].probed(ProbeDone(seconds, (link.delay_s,)))

    def compare_clocks(self) -> None:
        pass

    def end_record(self) -> None:
        pass

    def close(self) -> KvReport:
        return KvReport()


def run_live(run: RunSpec) -> RunReport:
    """The report of `run` by the live processes under a virtual clock."""
    loop = VirtualLoop()
    with pytest.MonkeyPatch.context() as patch:
        wire, kv = _Wire(), _KvNetwork(run, loop) if run.link is not None else None
        for module in (clock, control, membership, router):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: loop.time() + AFTER_S))
        for module in (membership, node, router):
            lag = SimpleNamespace(start=lambda: None, stop=lambda: None, samples_s=[])
            patch.setattr(module, "LoopLag", lambda _, lag=lag: lag)
        patch.setattr(router, "RouterSocket", wire.router_socket)
        patch.setattr(membership, "PeerSocket", wire.peer_socket)
        patch.setattr(node, "PeerSocket", wire.peer_socket)
        patch.setattr(client, "Alarm", _Alarm)
        patch.setattr(device, "Alarm", _Alarm)
        patch.setattr(
            node,
            "KvEnd",
            lambda _task, spec, _nic, clock, *, arrived, probed, failed, store: _KvEnd(
                kv, spec, clock, arrived, probed
            ),
        )
        try:
            return loop.run_until_complete(_live(run))
        finally:
            loop.close()


async def _live(run: RunSpec) -> RunReport:
    def task(kind: Any, name: str) -> Assignment:
        return Assignment(kind=kind, name=name, run=run, secret="shared")

    serving = [asyncio.create_task(RouterProcess(task("router", "router")).serve())]
    nodes = [NodeProcess(task("node", spec.name), spec, None) for spec in run.nodes]
    for process in nodes:
        await process.open()
        await process.join(JOIN_S)
        serving.append(asyncio.create_task(process.serve()))
    driver = ClientProcess(task("client", RUN_CLIENT))
    await driver.join(JOIN_S)
    report = await driver.drive(lambda _: None)
    await asyncio.gather(*serving)
    return report
