"""Reservation of a network card's time: which bytes occupy it from when to when.

A card carries one byte after the other, so every frame is given the slot that follows the last one. Slots are
absolute: each is computed from the start of the busy period and the bytes since, so neither a late sleep nor
rounding makes the rate drift, however long the card stays busy. The same reservation paces a sender's
egress, lets two senders share a receiver's ingress, and needs no clock of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from emulator.core.specs import RateBasis

LINE_BYTES_PER_SEGMENT = 1514
"""Bytes of one full Ethernet frame at MTU 1500, header included, which is what a shaper or a card counts."""
PAYLOAD_BYTES_PER_SEGMENT = 1448
"""Of those, what TCP carries for the application: less 14 Ethernet, 20 IP and 32 TCP with timestamps."""

MIN_FRAME_BYTES = 64 * 1024
MAX_FRAME_BYTES = 1024 * 1024
_FRAME_S = 1e-3
_GENTLE_FRAME_BYTES = 128 * 1024
_GENTLE_BYTES_PER_S = 750e6
"""6 Gbps: measured, frames of 128 KiB carry 5 Gbps within 0.7 % and take 10 Gbps 3 to 8 % longer."""


class Slot(NamedTuple):
    """The time in seconds that some bytes occupy a card; end equals start on an unshaped one."""

    start_s: float
    end_s: float


class Nic:
    """One direction of a network card of `bytes_per_s` payload bytes per second (None: unshaped).

    Raises ValueError for a rate that is not positive and finite.
    """

    __slots__ = ("_base_s", "_bytes_since_base", "_next_free_s", "bytes_per_s")

    def __init__(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None and not 0 < bytes_per_s < math.inf:
            raise ValueError(f"a rate must be positive and finite, not {bytes_per_s} bytes/s; None is unshaped")
        self.bytes_per_s = bytes_per_s
        self._base_s = -math.inf
        self._bytes_since_base = 0
        self._next_free_s = -math.inf

    def reserve(self, nbytes: int, not_before_s: float) -> Slot:
        """Give `nbytes` the first time that is free and not before `not_before_s`.

        Raises ValueError for negative bytes.
        """
        if nbytes < 0:
            raise ValueError(f"cannot reserve {nbytes} bytes")
        if not_before_s > self._next_free_s:
            self._base_s = self._next_free_s = not_before_s
            self._bytes_since_base = 0
        start_s = self._next_free_s
        if self.bytes_per_s is not None:
            self._bytes_since_base += nbytes
            self._next_free_s = self._base_s + self._bytes_since_base / self.bytes_per_s
        return Slot(start_s, self._next_free_s)


def payload_bits_per_s(rate_bps: float, basis: RateBasis) -> float:
    """The application's bits per second on a link of `rate_bps`.

    `basis` "line": the rate counts whole Ethernet frames, as a vendor's label and a kernel's shaper do;
    "payload": the rate is already the application's.
    """
    if basis == "payload":
        return rate_bps
    return rate_bps * PAYLOAD_BYTES_PER_SEGMENT / LINE_BYTES_PER_SEGMENT


def frame_bytes_for(payload_bytes_per_s: float | None, *, kernel_shaped: bool = False) -> int:
    """The frame size for a link: the power of two nearest to 1 ms of it, from 64 KiB to 1 MiB.

    Short frames let destinations interleave finely; below 1 MiB each costs throughput, so an unshaped link
    (None) uses the largest. A kernel copies a frame in one go, while the control network's messages wait: where it
    shapes, frames have 128 KiB at most, up to the rate that these carry.
    """
    if payload_bytes_per_s is None:
        return MAX_FRAME_BYTES
    nearest = math.log2(max(payload_bytes_per_s * _FRAME_S, 1.0))
    exponent = min(max(round(nearest), MIN_FRAME_BYTES.bit_length() - 1), MAX_FRAME_BYTES.bit_length() - 1)
    most = _GENTLE_FRAME_BYTES if kernel_shaped and payload_bytes_per_s <= _GENTLE_BYTES_PER_S else MAX_FRAME_BYTES
    return min(1 << int(exponent), most)
