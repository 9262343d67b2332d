"""Simulations in which requests are aborted, nodes lost and messages late; and what none of that may leave behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from functools import partial

from hypothesis import strategies as st

from emulator.core.effects import Send
from emulator.core.messages import Abort, ToRouter
from emulator.core.run_spec import RunSpec
from emulator.simulate import CLIENT, Simulated, Simulation

INSTANTS = st.integers(0, 800).map(lambda n: n * 0.001)
ABORTS = st.lists(st.tuples(INSTANTS, st.integers(0, 20)), max_size=8)
"""When, and which of the outstanding requests."""
LOSSES = st.lists(st.tuples(INSTANTS, st.integers(0, 5), st.booleans()), max_size=4)
"""When, which node, and whether it dies."""
DELAYS_S = st.lists(st.sampled_from([0.0, 0.0005, 0.004, 0.02, 0.1]), min_size=1, max_size=12)


def run_disturbed(
    simulation: Simulation, aborts: Iterable[tuple[float, int]], losses: Iterable[tuple[float, int, bool]] = ()
) -> Simulated:
    """Run while requests are aborted and nodes lost."""
    for at_s, choice in aborts:
        simulation._at(at_s, partial(abort, simulation, choice))
    for at_s, choice, dies in losses:
        simulation._at(at_s, partial(lose, simulation, choice, dies))
    return simulation.run()


def abort(simulation: Simulation, choice: int) -> None:
    """The client gives up one of its outstanding requests."""
    outstanding = list(simulation.generator.outstanding)
    if outstanding:
        simulation._to_router(CLIENT, Abort(outstanding[choice % len(outstanding)]))


def lose(simulation: Simulation, choice: int, dies: bool) -> None:
    """The router loses a node; either it dies, or it goes on without being listened to."""
    names = list(simulation.nodes)
    if names:
        name = names[choice % len(names)]
        if dies:
            del simulation.nodes[name]
        simulation._route(simulation.router.lost(name))


class SlowControl(Simulation):
    """Control messages take their time, each another one, in order between any two peers: as over real sockets."""

    def __init__(self, run: RunSpec, delays_s: Iterable[float]) -> None:
        self._delays_s = itertools.cycle(delays_s)
        self._last_s: dict[tuple[str, str], float] = {}
        super().__init__(run, after_event=Simulation.check_integrity)

    def settle(self) -> None:
        """Let every message that is under way arrive."""
        until_s = self.now_s + 5.0
        while (instant := self._next_s()) is not None and instant <= until_s:
            self._advance_to(instant)

    def _to_router(self, peer: str, message: ToRouter) -> None:
        self._later((peer, "router"), partial(super()._to_router, peer, message))

    def _route(self, sends: Iterable[Send]) -> None:
        for send in sends:
            self._later(("router", send.peer), partial(self._deliver, send))

    def _later(self, way: tuple[str, str], event: Callable[[], None]) -> None:
        self._last_s[way] = max(self.now_s + next(self._delays_s), self._last_s.get(way, 0.0))
        self._at(self._last_s[way], event)


def assert_nothing_is_held(simulation: Simulation, *, lost: Collection[str] = ()) -> None:
    assert simulation.router.live_requests == 0, "the router still has requests"
    for name, node in simulation.nodes.items():
        if name in lost:
            continue
        engine = node.engine
        assert not engine.pool.owners(), f"{name} still holds blocks"
        assert engine.pool.used_blocks == engine.pool.retired_blocks, f"{name} has lost blocks"
        assert engine.idle or engine.device.running is not None, f"{name} is idle and does not know it"
        assert not len(engine.outgoing), f"{name} still holds KV to send"
        assert not engine.incoming.request_ids(), f"{name} still waits for KV"
        assert not [*engine.scheduler.running, *engine.scheduler.waiting, *engine.scheduler.arrived]
        tickets = [ticket for ticket in simulation.kv.tickets.values() if ticket.node == name]
        assert not tickets, f"{name} expects or keeps KV that nobody wants"


def lost(simulation: Simulation) -> set[str]:
    """Nodes that live on and that the router does not listen to."""
    return {name for name in simulation.nodes if name not in simulation.router._nodes}
