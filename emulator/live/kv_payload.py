"""The bytes that a sender gives away: random ones, drawn in turn from buffers that were filled once."""

from __future__ import annotations

import os
import zlib
from typing import Any

import zmq

PAYLOAD_BYTES = 16 * 1024 * 1024
"""Random bytes that the frames are cut from."""


class Payload:
    """Frames of `frame_bytes`, as references, so that sending costs no copy; no link can compress them.

    `message_bytes`: the most that are drawn at a time. With `verify` each draw comes with its checksum.
    """

    __slots__ = ("_drawn", "_frame_bytes", "_pool", "_verify")

    def __init__(self, frame_bytes: int, message_bytes: int, *, verify: bool) -> None:
        count = max(PAYLOAD_BYTES, 2 * message_bytes) // frame_bytes
        self._pool = [zmq.Frame(os.urandom(frame_bytes), copy=True) for _ in range(count)]
        self._frame_bytes = frame_bytes
        self._verify = verify
        self._drawn = 0

    def draw(self, _offset: int, nbytes: int) -> tuple[list[Any], int]:
        """Random buffers of `nbytes` in all, the next ones in turn wherever the transfer is, and their checksum."""
        whole, rest = divmod(nbytes, self._frame_bytes)
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
