"""The emulated card's ingress: one thread that takes KV frames in, checks their tickets and stores them.

    PULL socket ──▶ gate of the card ──▶ ticket, order, size ──▶ stored ──▶ delay ──▶ delivered ──▶ on_complete

Frames cut through: one occupies the ingress from the moment it began on the sender's wire, so a lone sender at
the same rate is not slowed, while two share the rate. Until its slot has ended no further frame is read, and
ZeroMQ and TCP carry that pressure back to the senders. Each ticket says where its bytes go; by default the received
buffers are the KV blocks' storage: nothing is copied, and they live until release().
"""

from __future__ import annotations

import errno
import heapq
import logging
import math
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import zmq

from emulator.core.errors import ConfigError, RunError
from emulator.core.pacing import MAX_FRAME_BYTES, Nic, frame_bytes_for
from emulator.live.kv_frames import (
    Arrival,
    FrameHeader,
    KvReceiverStats,
    Part,
    full_speed,
    parse_header,
    queued_messages,
    socket_buffer_bytes,
)
from emulator.live.kv_places import KeptFrames, KvSink
from emulator.live.timers import pause_until, sharpen_timers

_Drop = Literal["no_ticket", "beyond_reserved", "out_of_sequence", "malformed", "bad_checksum"]
_IDLE_MS = 100
_POLLABLE_S = 2e-3
_JOIN_S = 5.0
_NOBLOCK = int(zmq.NOBLOCK)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Span:
    """A Part while it arrives."""

    start_s: float
    end_s: float
    nbytes: int


@dataclass(slots=True)
class _Transfer:
    """A live ticket: how much has come in, and how much of it has been delivered."""

    nbytes: int
    sink: KvSink
    accepted: int = 0
    part: int = -1
    retained: int = 0
    delivered: int = 0
    due_s: float = -math.inf
    parts: list[_Span] = field(default_factory=list)


@dataclass(slots=True, order=True)
class _Held:
    """An accepted frame that is still on its way, in model terms, until `due_s`."""

    due_s: float
    order: int
    header: FrameHeader = field(compare=False)
    transfer: _Transfer = field(compare=False)


class KvReceiver:
    """One node's KV ingress at `ingress_bytes_per_s` payload bytes per second (None: as fast as it comes).

    `bind` is a ZeroMQ address, with port `*` for any free one; `endpoint` is the one bound. `frame_bytes`, if
    not the rate's own, is the senders'; queues are sized by it. Each frame is
    delivered no earlier than `delay_s`, ± up to `jitter_s` drawn uniformly by `seed`, after its end on the sender's
    wire and never before an earlier one of its ticket. Stored bytes never exceed
    `host_memory_bytes`. With `verify` a frame must carry its CRC-32. `on_complete` is called on the link's
    thread once per complete ticket, and `on_error` with every error there (without it they are logged);
    both must be cheap. On a link that is `shaped_elsewhere`, by the kernel, senders cannot know when a frame is on
    the wire: it counts from the arrival of the one before, if that is later than its stamp, and its delay from its
    own arrival. `clock_offset_s` is how far the clock of the stamps is ahead of this process's; it may be set before
    the first frame. Raises ConfigError if the address cannot be bound, ValueError for a rate that cannot be.
    """

    def __init__(
        self,
        bind: str,
        *,
        ingress_bytes_per_s: float | None,
        frame_bytes: int | None = None,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        seed: int = 0,
        shaped_elsewhere: bool = False,
        host_memory_bytes: int,
        verify: bool = False,
        on_complete: Callable[[Arrival], None],
        on_error: Callable[[Exception], None] | None = None,
        name: str = "kv-receiver",
    ) -> None:
        self._nic = Nic(ingress_bytes_per_s)
        self._shaped = ingress_bytes_per_s is not None
        self._shaped_elsewhere = shaped_elsewhere
        self._last_s = -math.inf
        self._gate_s = -math.inf
        self._delay_s = delay_s
        self._jitter_s = jitter_s
        self.clock_offset_s = 0.0
        self._random = np.random.default_rng(seed)
        self._host_memory_bytes = host_memory_bytes
        self._verify = verify
        self._on_complete = on_complete
        self._on_error = on_error
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._transfers: dict[int, _Transfer] = {}
        self._held: list[_Held] = []
        self._order = 0
        self._drops: Counter[_Drop] = Counter()
        self._bytes = self._frames = self._completed = self._broken_off = 0
        self._retained = self._peak_retained = self._unretained = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            size = frame_bytes_for(ingress_bytes_per_s) if frame_bytes is None else frame_bytes
            unlimited = full_speed(ingress_bytes_per_s, size) and not shaped_elsewhere
            self._pull = _bind(self._context, bind, size, unlimited=unlimited)
        except ConfigError:
            self._context.term()
            raise
        # the extension's own method: the class's wrapper and the look-up cost as much as receiving a frame
        self._recv: Callable[..., Any] = super(zmq.Socket, self._pull).recv
        self.endpoint: str = self._pull.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # --- any thread ---

    def open(self, ticket: int, nbytes: int, sink: KvSink | None = None) -> None:
        """Let exactly `nbytes` arrive under `ticket`, for `sink`; without it the frames themselves are kept.

        Raises ValueError if the ticket is open or nbytes is not positive.
        """
        if nbytes <= 0:
            raise ValueError(f"a transfer has at least one byte, not {nbytes}")
        with self._lock:
            if ticket in self._transfers:
                raise ValueError(f"ticket {ticket} is open already")
            self._transfers[ticket] = _Transfer(nbytes, KeptFrames() if sink is None else sink)

    def release(self, ticket: int) -> None:
        """End the ticket and drop the bytes stored under it, at whatever stage it is. Idempotent."""
        with self._lock:
            transfer = self._transfers.pop(ticket, None)
            if transfer is not None:
                self._broken_off += transfer.accepted > 0 and transfer.delivered < transfer.nbytes
                self._retained -= transfer.retained
                transfer.sink.drop()

    def stats(self) -> KvReceiverStats:
        """Counts up to now."""
        with self._lock:
            return KvReceiverStats(
                bytes=self._bytes,
                frames=self._frames,
                transfers=self._completed,
                no_ticket=self._drops["no_ticket"],
                beyond_reserved=self._drops["beyond_reserved"],
                out_of_sequence=self._drops["out_of_sequence"],
                malformed=self._drops["malformed"],
                bad_checksum=self._drops["bad_checksum"],
                retained_bytes=self._retained,
                peak_retained_bytes=self._peak_retained,
                unretained_bytes=self._unretained,
                broken_off=self._broken_off,
            )

    def close(self) -> None:
        """End the thread and its socket and drop everything stored. Idempotent.

        Returns within 5 s, mostly within 0.1 s; called on the link's own thread it does not wait.
        """
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                self._report(RuntimeError(f"the thread {self._thread.name} did not end within {_JOIN_S} s"))

    # --- the link's thread ---

    def _run(self) -> None:
        sharpen_timers()
        try:
            while not self._stop.is_set():
                self._step()
        except Exception as error:
            self._report(error)
        finally:
            with self._lock:
                self._transfers.clear()
                self._held.clear()
                self._retained = 0
            self._pull.close(linger=0)
            self._context.term()

    def _report(self, error: Exception) -> None:
        if self._on_error is None:
            _log.error("KV receiver: %s", error, exc_info=error)
        else:
            self._on_error(error)

    def _step(self) -> None:
        """Deliver what is due, then wait for the gate, for the next frame or for the next delivery."""
        now_s = time.monotonic()
        while self._held and self._held[0].due_s <= now_s:
            held = heapq.heappop(self._held)
            with self._lock:
                arrival = self._deliver(held.header, held.transfer, now_s)
            if arrival is not None:
                self._announce(arrival)
        due_s = self._held[0].due_s if self._held else math.inf
        if self._gate_s > now_s:
            pause_until(min(self._gate_s, due_s), self._stop)
            return
        left_s = due_s - now_s
        try:
            if left_s == math.inf:
                self._take_message(0)
            elif left_s <= _POLLABLE_S or self._pull.poll(min(int((left_s - _POLLABLE_S) * 1e3) + 1, _IDLE_MS)):
                self._take_message(_NOBLOCK)
        except zmq.Again:
            if left_s <= _POLLABLE_S:
                pause_until(due_s, self._stop)

    def _take_message(self, flags: int) -> None:
        """Read one message; raises zmq.Again if there is none (without NOBLOCK: for 100 ms)."""
        recv = self._recv
        first = frame = recv(flags, False)
        frames: list[zmq.Frame] = []
        nbytes = 0
        while frame.more:
            frame = recv(0, False)
            frames.append(frame)
            nbytes += len(frame)
        header = parse_header(first)
        if header is None or header.nbytes != nbytes or nbytes == 0:
            self._drop("malformed")
            return
        now_s = time.monotonic()
        if self.clock_offset_s:
            behind_s = self.clock_offset_s
            header = header._replace(start_s=header.start_s - behind_s, end_s=header.end_s - behind_s)
        if self._shaped_elsewhere:
            header = header._replace(start_s=min(max(header.start_s, self._last_s), now_s), end_s=now_s)
            self._last_s = now_s
        elif header.end_s > now_s:
            header = header._replace(start_s=min(header.start_s, now_s), end_s=now_s)
        self._take_frame(header, frames, now_s)

    def _take_frame(self, header: FrameHeader, frames: list[zmq.Frame], now_s: float) -> None:
        """Reserve the card for a frame, dropped or not, and store, hold or deliver it."""
        due_s = header.end_s + self._delay_s
        if self._shaped:
            self._gate_s = self._nic.reserve(header.nbytes, header.start_s).end_s
            due_s = max(due_s, self._gate_s)
        with self._lock:
            transfer = self._transfers.get(header.ticket)
            reason = self._refusal(transfer, header, frames)
            if reason is not None or transfer is None:
                self._drops[reason or "no_ticket"] += len(frames)
                return
            self._store(transfer, header, frames)
            if self._jitter_s:
                due_s += float(self._random.uniform(-self._jitter_s, self._jitter_s))
                transfer.due_s = due_s = max(due_s, transfer.due_s)
            if due_s > now_s:
                self._order += 1
                heapq.heappush(self._held, _Held(due_s, self._order, header, transfer))
                return
            arrival = self._deliver(header, transfer, now_s)
        if arrival is not None:
            self._announce(arrival)

    def _drop(self, reason: _Drop) -> None:
        with self._lock:
            self._drops[reason] += 1

    def _refusal(self, transfer: _Transfer | None, header: FrameHeader, frames: list[zmq.Frame]) -> _Drop | None:
        if transfer is None:
            return "no_ticket"
        if header.offset + header.nbytes > transfer.nbytes:
            return "beyond_reserved"
        if header.offset != transfer.accepted or header.part - transfer.part not in (0, 1) or header.part < 0:
            return "out_of_sequence"
        if self._verify:
            crc = 0
            for frame in frames:
                crc = zlib.crc32(frame.buffer, crc)
            if crc != header.crc:
                return "bad_checksum"
        return None

    def _store(self, transfer: _Transfer, header: FrameHeader, frames: list[zmq.Frame]) -> None:
        nbytes = header.nbytes
        transfer.accepted += nbytes
        transfer.part = header.part
        self._bytes += nbytes
        self._frames += len(frames)
        if self._retained + nbytes > self._host_memory_bytes:
            self._unretained += nbytes
            return
        transfer.sink.put(header.offset, frames)
        transfer.retained += nbytes
        self._retained += nbytes
        self._peak_retained = max(self._peak_retained, self._retained)

    def _deliver(self, header: FrameHeader, transfer: _Transfer, now_s: float) -> Arrival | None:
        """Count an accepted frame as arrived at `now_s`; the last one completes its transfer."""
        if self._transfers.get(header.ticket) is not transfer:
            return None
        nbytes = header.nbytes
        if header.part == len(transfer.parts):
            transfer.parts.append(_Span(header.start_s, now_s, nbytes))
        else:
            span = transfer.parts[-1]
            span.end_s = now_s
            span.nbytes += nbytes
        transfer.delivered += nbytes
        if transfer.delivered < transfer.nbytes:
            return None
        self._completed += 1
        parts = tuple(Part(span.start_s, span.end_s, span.nbytes) for span in transfer.parts)
        return Arrival(header.ticket, transfer.nbytes, parts[0].start_s, now_s, parts)

    def _announce(self, arrival: Arrival) -> None:
        """Tell of a complete transfer, or that its bytes are wrong; those of a ticket that ended meanwhile may be."""
        try:
            transfer = self._transfers.get(arrival.ticket)
            if transfer is not None:
                transfer.sink.check()
        except RunError as error:
            if self._transfers.get(arrival.ticket) is transfer:
                self._report(error)
            return
        try:
            self._on_complete(arrival)
        except Exception as error:
            self._report(error)


def _bind(
    context: zmq.Context[zmq.Socket[bytes]], address: str, frame_bytes: int, *, unlimited: bool
) -> zmq.Socket[bytes]:
    """The bound socket; it refuses, by ending the connection, parts that are longer than any frame."""
    pull = context.socket(zmq.PULL)
    pull.linger = 0
    pull.rcvhwm = queued_messages(frame_bytes, unlimited=unlimited, sending=False)
    pull.rcvbuf = socket_buffer_bytes(frame_bytes)
    pull.rcvtimeo = _IDLE_MS
    pull.maxmsgsize = MAX_FRAME_BYTES
    try:
        pull.bind(address)
    except zmq.ZMQError as error:
        pull.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"the KV address {address} is taken: stop the process that listens there, "
                "or choose another port (* takes any free one)"
            ) from error
        raise ConfigError(
            f"cannot bind the KV address {address!r}: {error}; it must read tcp://HOST:PORT of this machine"
        ) from error
    return pull
