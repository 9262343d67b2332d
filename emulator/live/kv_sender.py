"""The emulated card's egress: one thread that gives KV bytes to one socket per destination, frame by frame.

    send() ──▶ lane per destination ──▶ round robin ──▶ slot of the card ──▶ PUSH socket ──▶ network

The lane (`core.kv_lanes`) says which parts are on the way, from when on their bytes may go, and whether they go part
by part or frame by frame in turn. Only a destination whose socket has room gets a slot, so a full one never holds up
the others, and a card that was blocked begins anew instead of catching up in a burst beyond its rate. Each part says
where its bytes come from; by default frames are references to buffers that were filled once with random bytes, so that
sending costs no copy and no link can compress them.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from emulator.core.deployments import TransferOrder
from emulator.core.pacing import MAX_FRAME_BYTES, Nic, frame_bytes_for
from emulator.live.kv_destination import Destination, SentPart, connected
from emulator.live.kv_frames import FRAMES_PER_MESSAGE, KvSenderStats, full_speed, pack_header
from emulator.live.kv_payload import Payload
from emulator.live.kv_places import KvSource
from emulator.live.timers import pause_until, sharpen_timers

_JOIN_S = 5.0
_POLLABLE_S = 1e-3
# plain ints: arithmetic on the enumerations costs as much as a system call
_POLLOUT = int(zmq.POLLOUT)
_EVENTS = int(zmq.EVENTS)
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

_log = logging.getLogger(__name__)


class KvSender:
    """One node's KV egress at `egress_bytes_per_s` payload bytes per second (None: as fast as it goes).

    `frame_bytes` defaults to what suits the rate. Where the link is `shaped_elsewhere`, by the kernel, this rate is
    None; give the frames that suit that rate (`frame_bytes_for`), so that little is queued unseen. `max_in_flight` and
    `order` are those of every destination's lane. With `verify` each message carries its CRC-32, which the receiver
    must expect too. `clock_offset_s`, which may be set before the first send, is added to the stamps: they are instants
    of a clock that the receiver knows too. `on_begin` is told of each ticket whose first byte leaves, with its seconds
    in the queue, and `on_error` of every error; both on the thread, and without the latter errors are logged. All
    methods may be called from any thread, and all but close() return at once.
    Raises ValueError for a rate or a frame size that cannot be.
    """

    def __init__(
        self,
        *,
        egress_bytes_per_s: float | None,
        frame_bytes: int | None = None,
        shaped_elsewhere: bool = False,
        max_in_flight: int = 1,
        order: TransferOrder = "fifo",
        verify: bool = False,
        on_begin: Callable[[int, float], None] = lambda _ticket, _waited_s: None,
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
        self._max_in_flight = max_in_flight
        self._order: TransferOrder = order
        self._on_begin, self._on_error = on_begin, on_error
        self._payload = Payload(self.frame_bytes, self._message_bytes, verify=verify)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ended = False
        self._destinations: dict[str, Destination] = {}
        self._ring: list[Destination] = []
        self._turn = 0
        self._positions: dict[int, tuple[int, int]] = {}
        self._bytes = self._frames = self._parts = self._waiting_bytes = 0
        self._blocked_s = self._max_late_s = 0.0
        self._due_s = math.inf  # before that instant no lane lets more flow by itself
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

    def send(
        self,
        endpoint: str,
        ticket: int,
        nbytes: int,
        *,
        message_s: float = 0.0,
        pair_bytes_per_s: float | None = None,
        source: KvSource | None = None,
    ) -> None:
        """Queue the next `nbytes` of the transfer `ticket` for a receiver's endpoint: a message that costs `message_s`.

        They are those of `source`, random ones without it. The parts of one ticket go out in the order of their calls
        as one sequence of bytes. The next message's cost begins when this one is through: when its last byte has left
        this card, and no sooner than a link that carries `pair_bytes_per_s` lets it. What queues for a receiver that
        others keep busy is not seen from here.
        Raises ValueError unless nbytes is positive and the cost 0 s or more, ConfigError for an endpoint that is not an
        address and RuntimeError after close().
        """
        if nbytes <= 0:
            raise ValueError(f"a part has at least one byte, not {nbytes}")
        if not 0 <= message_s < math.inf:
            raise ValueError(f"a message costs 0 s or more, not {message_s}")
        with self._lock:
            destination = self._destination(endpoint)
            offset, number = self._positions.get(ticket, (0, 0))
            self._positions[ticket] = (offset + nbytes, number + 1)
            now_s = time.monotonic()
            part = SentPart(
                ticket,
                message_s,
                ticket,
                nbytes,
                offset,
                number,
                pair_bytes_per_s,
                now_s,
                self._payload if source is None else source,
            )
            self._waiting_bytes += nbytes
            if destination.lane.add(part, now_s):
                self._flow(destination, now_s)
                self._wake()

    def cancel(self, ticket: int) -> None:
        """Forget the transfer: what has not left yet stays, and so does the memory of its position.

        Idempotent; call it for acknowledged transfers too, so that nothing is remembered of them.
        """
        with self._lock:
            self._positions.pop(ticket, None)
            for destination in self._ring:
                parts = destination.lane.of(ticket)
                if not parts:
                    continue
                now_s = time.monotonic()
                for part in reversed(parts):  # the one on the way last: none of them takes its place
                    part.cancelled = True
                    self._waiting_bytes -= part.nbytes - part.sent
                    destination.lane.remove(part, now_s)
                self._flow(destination, now_s)
                self._wake()

    def stats(self) -> KvSenderStats:
        """Counts up to now."""
        with self._lock:
            return KvSenderStats(
                bytes=self._bytes,
                frames=self._frames,
                parts=self._parts,
                waiting_bytes=self._waiting_bytes,
                waiting_transfers=sum(part.begins for d in self._ring for part in d.lane),
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

    def _destination(self, endpoint: str) -> Destination:
        if self._ended or self._stop.is_set():
            raise RuntimeError("the KV sender is closed")
        known = self._destinations.get(endpoint)
        if known is not None:
            return known
        push = connected(self._context, endpoint, self.frame_bytes, unlimited=self._unlimited)
        destination = Destination(push, self._max_in_flight, self._order)
        self._destinations[endpoint] = destination
        self._ring.append(destination)
        return destination

    def _flow(self, destination: Destination, now_s: float) -> None:
        """Let flow what may, and know when more will."""
        destination.lane.flow(now_s)
        self._due_s = min(self._due_s, destination.lane.next_due_s())

    def _wake(self) -> None:
        if self._asleep:
            self._asleep = False
            self._wake_write.send(b"\0")

    # --- the link's thread ---

    def _run(self) -> None:
        sharpen_timers()
        try:
            while not self._stop.is_set():
                if self._due_s < math.inf and time.monotonic() >= self._due_s:
                    self._flow_due()
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

    def _flow_due(self) -> None:
        """Let flow what is due by now."""
        with self._lock:
            now_s = time.monotonic()
            self._due_s = math.inf
            for destination in self._ring:
                self._flow(destination, now_s)

    def _next_destination(self) -> Destination | None:
        """The next in turn that has bytes to send and, as far as can be told, room for a frame.

        An unshaped sender only asks a socket that refused before: trying is cheaper than asking.
        """
        ring = self._ring
        count = len(ring)
        for step in range(count):
            index = (self._turn + step) % count
            destination = ring[index]
            if not destination.flowing:
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
        """Sleep until a destination with bytes has room, a message is due, or something is sent or closed."""
        with self._lock:
            if self._stop.is_set():
                return
            self._asleep = True
            watched: list[tuple[Any, int]] = [(d.socket, zmq.POLLOUT) for d in self._ring if d.flowing]
            due_s = self._due_s
        began_s = time.monotonic()
        left_s = due_s - began_s
        if left_s >= _POLLABLE_S:
            timeout_ms = -1 if left_s == math.inf else int(left_s * 1e3)
            zmq.zmq_poll([*watched, (self._wake_read.fileno(), zmq.POLLIN)], timeout_ms)
        elif left_s > 0:  # more precisely, and for so short a time deaf to destinations that get room
            select.select([self._wake_read], [], [], left_s)
        with self._lock:
            if not self._asleep:
                self._wake_read.recv(64)
            self._asleep = False
            if watched:
                self._blocked_s += time.monotonic() - began_s

    def _carry_frame(self, destination: Destination) -> None:
        """Reserve the card for the destination's next frame, wait for the end of its slot, and send it."""
        with self._lock:
            if not destination.flowing:
                return
            part = destination.flowing[0]
            nbytes = min(self._message_bytes, part.nbytes - part.sent)
            if not self._shaped:
                now_s = time.monotonic()
                self._push(destination, part, nbytes, now_s, now_s)
                return
            start_s, end_s = self._nic.reserve(nbytes, max(part.ready_s, destination.unblocked_s))
        pause_until(end_s, self._stop)
        with self._lock:
            if part.cancelled or self._stop.is_set():
                return
            self._max_late_s = max(self._max_late_s, time.monotonic() - end_s)
            self._push(destination, part, nbytes, start_s, end_s)

    def _push(self, destination: Destination, part: SentPart, nbytes: int, start_s: float, end_s: float) -> None:
        """Hand one message to the socket and count it, or mark the destination as blocked."""
        sent = part.sent
        bodies, crc = part.source.draw(part.offset + sent, nbytes)
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
        if part.begins:
            self._on_begin(part.ticket, start_s - part.queued_s)
        part.sent = sent = sent + nbytes
        self._bytes += nbytes
        self._frames += len(bodies)
        self._waiting_bytes -= nbytes
        if sent == part.nbytes:
            self._parts += 1
            destination.lane.remove(part, destination.through_s(part, end_s))
            self._flow(destination, end_s)
        elif len(destination.flowing) > 1:
            destination.flowing.remove(part)
            destination.flowing.append(part)
