"""The control network: small typed messages between the router and its peers over ZeroMQ.

The router binds one ROUTER socket; each node and client connects a DEALER socket whose routing id is its name. A
send never waits: a peer whose queue is full or whose connection is gone is reported as lost instead.

On loopback messages travel in the clear. Anywhere else CURVE encrypts them and proves the router to its peers, who
prove themselves by the run's secret in their first message.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import deque
from typing import NamedTuple

import zmq

from emulator.core.clock_offset import ClockOffset
from emulator.core.errors import ConfigError, DeadlineError, ProtocolError
from emulator.core.message_codec import MAX_MESSAGE_BYTES, decode_to_node, encode
from emulator.core.messages import ClockReading, Hello, Message, ReadClock, Welcome

_QUEUE_MESSAGES = 20_000
_CLOCK_READINGS = 8


class CurveKeys(NamedTuple):
    """A router's CURVE key pair, in Z85 text."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> CurveKeys:
        """A fresh pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode("ascii"), secret.decode("ascii"))


def require_loopback(address: str) -> None:
    """Raises ConfigError unless the host of a `tcp://host:port` address is a loopback address."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise ConfigError(
            f"control address {address}: without a key only loopback addresses are allowed, such as 127.0.0.1; give "
            "the router's CURVE keys, or --insecure for a network that nobody else reaches"
        )


class RouterSocket:
    """The router's end. `endpoint` is the address with its real port; raises ConfigError if the port is taken.

    An address that is not loopback needs `keys`, or to be `insecure` on purpose.
    """

    def __init__(self, address: str, keys: CurveKeys | None = None, *, insecure: bool = False) -> None:
        if keys is None and not insecure:
            require_loopback(address)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode("ascii"))
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"control port: cannot listen on {address} ({error.strerror}); "
                "free it, or set control_port = 0 for any free one"
            ) from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._mail = _Mail(self._socket)

    async def receive(self) -> tuple[str, bytes]:
        """The next message: who sent it, and its payload (empty when it is not of one part)."""
        frames = await self._mail.receive()
        name = frames[0].decode("ascii", errors="replace")
        return name, frames[1] if len(frames) == 2 else b""

    def send(self, peer: str, message: Message) -> bool:
        """Queue a message for a peer; False when it is gone or does not keep up."""
        return self._mail.send([peer.encode("ascii", errors="replace"), encode(message)])

    def close(self, linger_s: float = 0.5) -> None:
        """Close, giving queued messages `linger_s` wall seconds to leave."""
        self._mail.close()
        self._context.destroy(linger=int(linger_s * 1e3))


class PeerSocket:
    """The end of a node or client named `name`.

    `router_key` is the router's public key, needed beyond loopback unless the connection is `insecure` on purpose.
    """

    def __init__(self, endpoint: str, name: str, router_key: str = "", *, insecure: bool = False) -> None:
        if not router_key and not insecure:
            require_loopback(endpoint)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.ROUTING_ID, name.encode("ascii"))
        if router_key:
            public, secret = zmq.curve_keypair()
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, router_key.encode("ascii"))
        self._socket.connect(endpoint)
        self._mail = _Mail(self._socket)
        self._early: deque[bytes] = deque()

    async def join(self, hello: Hello, timeout_s: float) -> ClockOffset:
        """Say hello, wait for the router's welcome and compare clocks: how far the router's is from this one.

        Raises DeadlineError after `timeout_s` wall seconds.
        """
        self.send(hello)
        try:
            async with asyncio.timeout(timeout_s):
                if not isinstance(decode_to_node(await self.receive()), Welcome):
                    raise ProtocolError(f"{hello.name}: the router's first message was not a welcome")
                return await self._compare_clocks()
        except TimeoutError:
            raise DeadlineError(f"{hello.name}: the router did not answer within {timeout_s:g} s") from None

    async def receive(self) -> bytes:
        """The next message's payload (empty when it is not of one part)."""
        return self._early.popleft() if self._early else await self._next()

    async def _next(self) -> bytes:
        frames = await self._mail.receive()
        return frames[0] if len(frames) == 1 else b""

    async def _compare_clocks(self) -> ClockOffset:
        offset = ClockOffset()
        for _ in range(_CLOCK_READINGS):
            self.send(ReadClock(time.monotonic()))
            while (reading := _as_clock_reading(data := await self._next())) is None:
                self._early.append(data)
            offset.add(reading.sent_s, reading.router_s, time.monotonic())
        return offset

    def send(self, message: Message) -> bool:
        """Queue a message for the router; False when it does not keep up."""
        return self._mail.send([encode(message)])

    def close(self, linger_s: float = 0.5) -> None:
        """Close, giving queued messages `linger_s` wall seconds to leave."""
        self._mail.close()
        self._context.destroy(linger=int(linger_s * 1e3))


def _as_clock_reading(data: bytes) -> ClockReading | None:
    """The message, if it is a reading of the router's clock and not one of those that may come between."""
    try:
        message = decode_to_node(data)
    except ProtocolError:
        return None
    return message if isinstance(message, ClockReading) else None


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


class _Mail:
    """A socket's messages on the running event loop, without a future for every send.

    The socket's descriptor tells only of changes, and any call may use one up, so after each send it is asked again.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._messages: deque[list[bytes]] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._take_in)
        self._loop.call_soon(self._take_in)

    async def receive(self) -> list[bytes]:
        """The next message's parts."""
        while not self._messages:
            self._waiting = self._loop.create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return self._messages.popleft()

    def send(self, frames: list[bytes]) -> bool:
        """Send without waiting; whether it was taken."""
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
            return True
        except zmq.ZMQError:
            return False
        finally:
            if self._readable():
                self._loop.call_soon(self._take_in)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)

    def _readable(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _take_in(self) -> None:
        while not self._closed and self._readable():
            self._messages.append(self._socket.recv_multipart(zmq.NOBLOCK))
        if self._messages and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
