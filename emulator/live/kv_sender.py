"""The emulated card's egress: one thread that gives KV bytes to one socket per destination, frame by frame.

    send() ──▶ FIFO per destination ──▶ round robin ──▶ slot of the card ──▶ PUSH socket ──▶ network

Only a destination whose socket has room gets a slot, so a full one never holds up the others, and a card that
was blocked begins anew instead of catching up in a burst beyond its rate. Frames are references to buffers that
were filled once with random bytes, so sending costs no copy and no link can compress them.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from emulator.core.errors import ConfigError
from emulator.core.pacing import MAX_FRAME_BYTES, Nic, frame_bytes_for
from emulator.live.kv_frames import (
    FRAMES_PER_MESSAGE,
    KvSenderStats,
    full_speed,
    pack_header,
    queued_messages,
    socket_buffer_bytes,
)
from emulator.live.timers import pause_until, sharpen_timers

PAYLOAD_BYTES = 16 * 1024 * 1024
"""Random bytes that the frames are cut from."""
_JOIN_S = 5.0
# plain ints: arithmetic on the enumerations costs as much as a system call
_POLLOUT = int(zmq.POLLOUT)
_EVENTS = int(zmq.EVENTS)
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Part:
    ticket: int
    nbytes: int
    offset: int
    number: int
    queued_s: float
    sent: int = 0
    cancelled: bool = False


class _Destination:
    """A receiver's endpoint: its socket and the parts that wait for it."""

    __slots__ = ("blocked", "parts", "send", "socket", "unblocked_s")

    def __init__(self, push: zmq.Socket[bytes]) -> None:
        self.socket = push
        # the extension's own method: the class's wrapper and the look-up cost as much as sending a frame
        self.send: Callable[..., object] = super(zmq.Socket, push).send
        self.parts: deque[_Part] = deque()
        self.blocked = False
        self.unblocked_s = 0.0


class KvSender:
    """One node's KV egress at `egress_bytes_per_s` payload bytes per second (None: as fast as it goes).

    `frame_bytes` defaults to what suits the rate. Where the link is `shaped_elsewhere`, by the kernel, this rate is
    None; give the frames that suit that rate (`frame_bytes_for`), so that little is queued unseen. With `verify` each
    message carries its CRC-32, which the receiver must expect too. `clock_offset_s`, which may be set before the first
    send, is added to the stamps: they are instants of a clock that the receiver knows too. `on_error` is given every
    error of the thread, on that thread; without it they are logged. All methods may be called from any thread, and all
    but close() return at once.
    Raises ValueError for a rate or a frame size that cannot be.
    """

    def __init__(
        self,
        *,
        egress_bytes_per_s: float | None,
        frame_bytes: int | None = None,
        shaped_elsewhere: bool = False,
        verify: bool = False,
        on_error: Callable[[Exception], None] | None = None,
        name: str = "kv-sender",
    ) -> None:
        self.frame_bytes = frame_bytes_for(egress_bytes_per_s) if frame_bytes is None else frame_bytes
        if not 0 < self.frame_bytes <= MAX_FRAME_BYTES:
            raise ValueError(f"frame_bytes must be from 1 to {MAX_FRAME_BYTES}, not {self.frame_bytes}")
        self._nic = Nic(egress_bytes_per_s)
        self._shaped = egress_bytes_per_s is not None
        self._unlimited = full_speed(egress_bytes_per_s, self.frame_bytes) and not shaped_elsewhere
        self._message_bytes = self.frame_bytes * (FRAMES_PER_MESSAGE if self._unlimited else 1)
        self.clock_offset_s = 0.0
        self._verify = verify
        self._on_error = on_error
        self._fill_frames()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ended = False
        self._destinations: dict[str, _Destination] = {}
        self._ring: list[_Destination] = []
        self._turn = 0
        self._positions: dict[int, tuple[int, int]] = {}
        self._bytes = self._frames = self._parts = self._waiting_bytes = 0
        self._blocked_s = self._max_late_s = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._asleep = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # --- any thread ---

    def connect(self, endpoint: str) -> None:
        """Open the connection to a receiver's endpoint ahead of the first send; repeating it does nothing.

        Raises ConfigError for an endpoint that is not an address, RuntimeError after close().
        """
        with self._lock:
            self._destination(endpoint)

    def send(self, endpoint: str, ticket: int, nbytes: int) -> None:
        """Queue the next `nbytes` of the transfer `ticket` for a receiver's endpoint.

        The parts of one ticket go out in the order of their calls as one sequence of bytes.
        Raises ValueError unless nbytes is positive, ConfigError for an endpoint that is not an address and
        RuntimeError after close().
        """
        if nbytes <= 0:
            raise ValueError(f"a part has at least one byte, not {nbytes}")
        with self._lock:
            destination = self._destination(endpoint)
            offset, number = self._positions.get(ticket, (0, 0))
            self._positions[ticket] = (offset + nbytes, number + 1)
            destination.parts.append(_Part(ticket, nbytes, offset, number, time.monotonic()))
            self._waiting_bytes += nbytes
            self._wake()

    def cancel(self, ticket: int) -> None:
        """Forget the transfer: what has not left yet stays, and so does the memory of its position.

        Idempotent; call it for acknowledged transfers too, so that nothing is remembered of them.
        """
        with self._lock:
            self._positions.pop(ticket, None)
            for destination in self._ring:
                for part in destination.parts:
                    if part.ticket == ticket:
                        part.cancelled = True
                        self._waiting_bytes -= part.nbytes - part.sent
                if any(part.cancelled for part in destination.parts):
                    destination.parts = deque(part for part in destination.parts if not part.cancelled)

    def stats(self) -> KvSenderStats:
        """Counts up to now."""
        with self._lock:
            return KvSenderStats(
                bytes=self._bytes,
                frames=self._frames,
                parts=self._parts,
                waiting_bytes=self._waiting_bytes,
                blocked_s=self._blocked_s,
                max_late_s=self._max_late_s,
            )

    def close(self) -> None:
        """End the thread and its sockets; what has not reached the network is lost. Idempotent.

        Returns within 5 s, mostly within a few ms; called on the link's own thread it does not wait.
        """
        with self._lock:
            self._stop.set()
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                self._report(RuntimeError(f"the thread {self._thread.name} did not end within {_JOIN_S} s"))

    # --- under the lock ---

    def _destination(self, endpoint: str) -> _Destination:
        if self._ended or self._stop.is_set():
            raise RuntimeError("the KV sender is closed")
        known = self._destinations.get(endpoint)
        if known is not None:
            return known
        push = self._context.socket(zmq.PUSH)
        push.linger = 0
        push.sndhwm = queued_messages(self.frame_bytes, unlimited=self._unlimited, sending=True)
        push.sndbuf = socket_buffer_bytes(self.frame_bytes)
        push.immediate = True
        push.reconnect_ivl = 50
        try:
            push.connect(endpoint)
        except zmq.ZMQError as error:
            push.close()
            raise ConfigError(f"cannot send KV to {endpoint!r}: {error}; it must read tcp://HOST:PORT") from error
        destination = _Destination(push)
        self._destinations[endpoint] = destination
        self._ring.append(destination)
        return destination

    def _wake(self) -> None:
        if self._asleep:
            self._asleep = False
            self._wake_write.send(b"\0")

    # --- the link's thread ---

    def _fill_frames(self) -> None:
        count = max(PAYLOAD_BYTES, 2 * self._message_bytes) // self.frame_bytes
        self._pool = [zmq.Frame(os.urandom(self.frame_bytes), copy=True) for _ in range(count)]
        self._drawn = 0

    def _run(self) -> None:
        sharpen_timers()
        try:
            while not self._stop.is_set():
                destination = self._next_destination()
                if destination is None:
                    self._wait()
                else:
                    self._carry_frame(destination)
        except Exception as error:
            self._report(error)
        finally:
            with self._lock:
                self._ended = True
                self._asleep = False
                for destination in self._ring:
                    destination.socket.close(linger=0)
                self._wake_read.close()
                self._wake_write.close()
            self._context.term()

    def _report(self, error: Exception) -> None:
        if self._on_error is None:
            _log.error("KV sender: %s", error, exc_info=error)
        else:
            self._on_error(error)

    def _next_destination(self) -> _Destination | None:
        """The next in turn that has bytes to send and, as far as can be told, room for a frame.

        An unshaped sender only asks a socket that refused before: trying is cheaper than asking.
        """
        ring = self._ring
        count = len(ring)
        for step in range(count):
            index = (self._turn + step) % count
            destination = ring[index]
            if not destination.parts:
                continue
            if self._shaped or destination.blocked:
                if not int(destination.socket.getsockopt(_EVENTS)) & _POLLOUT:
                    destination.blocked = True
                    continue
                if destination.blocked:
                    destination.blocked = False
                    destination.unblocked_s = time.monotonic()
            self._turn = index + 1
            return destination
        return None

    def _wait(self) -> None:
        """Sleep until a destination with bytes has room, or until something is sent or closed."""
        with self._lock:
            if self._stop.is_set():
                return
            self._asleep = True
            watched: list[tuple[Any, int]] = [(d.socket, zmq.POLLOUT) for d in self._ring if d.parts]
        began_s = time.monotonic()
        zmq.zmq_poll([*watched, (self._wake_read.fileno(), zmq.POLLIN)], -1)
        with self._lock:
            if not self._asleep:
                self._wake_read.recv(64)
            self._asleep = False
            if watched:
                self._blocked_s += time.monotonic() - began_s

    def _carry_frame(self, destination: _Destination) -> None:
        """Reserve the card for the destination's next frame, wait for the end of its slot, and send it."""
        with self._lock:
            if not destination.parts:
                return
            part = destination.parts[0]
            nbytes = min(self._message_bytes, part.nbytes - part.sent)
            if not self._shaped:
                now_s = time.monotonic()
                self._push(destination, part, nbytes, now_s, now_s)
                return
            start_s, end_s = self._nic.reserve(nbytes, max(part.queued_s, destination.unblocked_s))
        pause_until(end_s, self._stop)
        with self._lock:
            if part.cancelled or self._stop.is_set():
                return
            self._max_late_s = max(self._max_late_s, time.monotonic() - end_s)
            self._push(destination, part, nbytes, start_s, end_s)

    def _push(self, destination: _Destination, part: _Part, nbytes: int, start_s: float, end_s: float) -> None:
        """Hand one message to the socket and count it, or mark the destination as blocked."""
        bodies, crc = self._draw(nbytes)
        sent = part.sent
        ahead_s = self.clock_offset_s
        header = pack_header(
            part.ticket, part.offset + sent, part.number, start_s + ahead_s, end_s + ahead_s, nbytes, crc
        )
        send = destination.send
        try:
            send(header, _NOBLOCK_MORE)
            for body in bodies[:-1]:
                send(body, _NOBLOCK_MORE)
            send(bodies[-1], _NOBLOCK)
        except zmq.Again:
            destination.blocked = True
            return
        part.sent = sent = sent + nbytes
        self._bytes += nbytes
        self._frames += len(bodies)
        self._waiting_bytes -= nbytes
        if sent == part.nbytes:
            self._parts += 1
            destination.parts.popleft()

    def _draw(self, nbytes: int) -> tuple[list[Any], int]:
        """Random buffers of `nbytes` in all, the next ones in turn, and their checksum (0 without verify)."""
        whole, rest = divmod(nbytes, self.frame_bytes)
        first = self._drawn
        if first + whole >= len(self._pool):
            first = 0
        self._drawn = first + whole
        bodies: list[Any] = list(self._pool[first : first + whole])
        if rest:
            bodies.append(self._pool[first + whole].buffer[:rest])
        crc = 0
        if self._verify:
            for body in bodies:
                crc = zlib.crc32(memoryview(body), crc)
        return bodies, crc
