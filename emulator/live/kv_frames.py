"""What travels on the KV network: messages of a header and the bytes of one frame, or of a few when unshaped.

The header is a part of its own, and so is each frame, so that the bytes leave from and arrive in buffers of
their own without a copy. The header carries the times at which the bytes occupied the sender's card, because the
receiver decides from them, not from its own wake-ups, when its card was busy. They are seconds of one
monotonic clock, which the processes of one host share and those of several have compared.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from emulator.core.pacing import MAX_FRAME_BYTES

_HEADER = struct.Struct("<QQQddII")
HEADER_BYTES = _HEADER.size
"""Length of a packed header."""


class FrameHeader(NamedTuple):
    """Bytes `offset` to `offset + nbytes` of a transfer, in its part number `part` (from 0).

    `crc` is the CRC-32 of these bytes, 0 unless the sender verifies.
    """

    ticket: int
    offset: int
    part: int
    start_s: float
    end_s: float
    nbytes: int
    crc: int


pack_header = _HEADER.pack
"""Pack a FrameHeader's fields, given in their order, into HEADER_BYTES."""


def parse_header(data: zmq.Frame) -> FrameHeader | None:
    """The header, or None if it cannot be one: wrong length, or times that are no interval."""
    if len(data) != HEADER_BYTES:
        return None
    header = FrameHeader._make(_HEADER.unpack(data.buffer))
    if not 0.0 <= header.start_s <= header.end_s:
        return None
    return header


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a transfer, as sent by one call: when its first frame began on the wire, when it was whole."""

    start_s: float
    end_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A complete transfer; times in seconds of `time.monotonic()`."""

    ticket: int
    nbytes: int
    start_s: float
    end_s: float
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class KvSenderStats:
    """What a sender has handed to its sockets since it started, and what still waits.

    `blocked_s` is the time in which bytes waited and no destination took any (back-pressure); `max_late_s`
    is the worst lateness of a frame behind its slot; `waiting_transfers` have not sent a byte so far.
    """

    bytes: int
    frames: int
    parts: int
    waiting_bytes: int
    waiting_transfers: int
    blocked_s: float
    max_late_s: float


@dataclass(frozen=True, slots=True)
class KvReceiverStats:
    """What a receiver accepted since it started, what it dropped and why, and what it stores.

    `bytes` and `frames` count accepted ones, `transfers` complete ones; the five reasons count dropped frames
    (malformed: messages). `broken_off` transfers were released with a part of them here.
    `unretained_bytes` arrived in order but exceeded the host memory granted, so they are not stored.
    """

    bytes: int
    frames: int
    transfers: int
    no_ticket: int
    beyond_reserved: int
    out_of_sequence: int
    malformed: int
    bad_checksum: int
    retained_bytes: int
    peak_retained_bytes: int
    unretained_bytes: int
    broken_off: int = 0

    @property
    def dropped(self) -> int:
        """Frames dropped for any reason."""
        return self.no_ticket + self.beyond_reserved + self.out_of_sequence + self.malformed + self.bad_checksum


FRAMES_PER_MESSAGE = 4
"""Frames that a sender at full speed puts into one message: one wake-up and one accounting for the four.

Where a link is shaped each frame is sent by itself.
"""


def full_speed(bytes_per_s: float | None, frame_bytes: int) -> bool:
    """Whether nothing shapes the link, neither this card nor, as smaller frames would tell, the network."""
    return bytes_per_s is None and frame_bytes == MAX_FRAME_BYTES


def queued_messages(frame_bytes: int, *, unlimited: bool, sending: bool) -> int:
    """Messages that ZeroMQ may queue per connection on one side before it pushes back.

    Shaped: 4 frames of 64 KiB to 16 of 1 MiB, enough to bridge a pause in scheduling of some 10 ms and not so
    much that a slow link hides congestion. At full speed 16 MiB may wait at the receiver; the sender queues
    references alone, and the more it may queue the less often it is woken (8 messages cost 10 % of the
    throughput against 32), but a frame may then leave some 25 ms after its time stamp.
    """
    if unlimited:
        return 32 if sending else 4
    return min(max(frame_bytes // (16 * 1024), 4), 16)


def socket_buffer_bytes(frame_bytes: int) -> int:
    """Kernel buffer per direction: four frames, at least 256 KiB; -1, the system's own choice, above 256 KiB.

    A slow link must not queue seconds of itself unseen. For a fast one the system adapts further than an
    application may ask it to.
    """
    return -1 if frame_bytes > 256 * 1024 else max(4 * frame_bytes, 256 * 1024)
