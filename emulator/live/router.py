"""The router's process: its state machine on the control network."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging

import msgspec

from emulator.core.deploy import RunSpec
from emulator.core.errors import ProtocolError
from emulator.core.messages import Begin, Hello, Stop, Welcome, decode_to_router
from emulator.core.router import Router, Send
from emulator.live.clock import ModelClock
from emulator.live.control import RouterSocket
from emulator.live.loop_lag import LoopLag

TICK_S = 0.5

_log = logging.getLogger(__name__)


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the router's process hands over when it ends; lag in model seconds."""

    loop_lag_s: list[float]
    ignored_messages: int
    unended_requests: int


class RouterProcess:
    """Receives, lets the router decide, sends."""

    def __init__(self, run: RunSpec, secret: str) -> None:
        self._run = run
        self._secret = secret
        self._router = Router(run.router)
        self._clock = ModelClock(run.scale.time)
        self._socket = RouterSocket(f"tcp://127.0.0.1:{run.router.control_port or '*'}")
        self._lag = LoopLag(asyncio.get_running_loop())
        self._peers: set[str] = set()
        self._ignored = 0

    @property
    def endpoint(self) -> str:
        """Where peers connect."""
        return self._socket.endpoint

    async def serve(self) -> RouterReport:
        """Work until a client says stop; every peer is told."""
        self._lag.start()
        ticking = asyncio.create_task(self._tick())
        try:
            while not self._step(*await self._socket.receive()):
                pass
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            self._lag.stop()
            self._socket.close()
        return RouterReport(
            loop_lag_s=[lag / self._run.scale.time for lag in self._lag.samples_s],
            ignored_messages=self._ignored + self._router.ignored,
            unended_requests=self._router.live_requests,
        )

    def _step(self, peer: str, data: bytes) -> bool:
        """Handle one message; True when the run is over."""
        try:
            message = decode_to_router(data)
        except ProtocolError as error:
            self._ignored += 1
            _log.warning("from %s: %s", peer, error)
            return False
        if isinstance(message, Hello):
            self._join(peer, message)
        elif peer not in self._peers:
            self._ignored += 1
        elif isinstance(message, Begin | Stop):
            return self._announce(message)
        else:
            self._send(self._router.handle(peer, message, self._clock.now_s()))
        return False

    def _join(self, peer: str, hello: Hello) -> None:
        genuine = hmac.compare_digest(hello.secret.encode(), self._secret.encode())
        if hello.name != peer or not genuine or peer in self._peers:
            self._ignored += 1
            return
        block_size = next((n.block_size for n in self._run.nodes if n.name == peer), 1)
        self._router.join(hello, block_size, self._clock.now_s())
        self._peers.add(peer)
        self._socket.send(peer, Welcome())

    def _announce(self, message: Begin | Stop) -> bool:
        if isinstance(message, Begin):
            self._clock.begin(message.t0_monotonic_s)
        for peer in self._peers:
            self._socket.send(peer, message)
        return isinstance(message, Stop)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S * self._run.scale.time)
            if self._clock.t0_s is not None:
                self._send(self._router.tick(self._clock.now_s()))

    def _send(self, sends: list[Send]) -> None:
        for send in sends:
            if not self._socket.send(send.peer, send.message) and send.peer in self._peers:
                self._peers.discard(send.peer)
                self._send(self._router.lost(send.peer))
