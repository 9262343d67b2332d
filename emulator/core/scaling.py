"""Model quantities as this machine carries them: time stretched by `scale.time`, bytes divided by `scale.bytes`."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable

from emulator.core.specs import Scale

LARGEST_BYTES_SCALE = 10**9


def sufficient_bytes_scale(needed: Callable[[float], float], at_most: float, now: float) -> int | None:
    """The least whole `scale.bytes` from `now` on at which no more than `at_most` bytes are needed, None if none is."""
    scales = range(math.ceil(now), LARGEST_BYTES_SCALE + 1)
    found = bisect.bisect_left(scales, True, key=lambda scale: needed(scale) <= at_most)
    return scales[found] if found < len(scales) else None


class Scaling:
    """Conversions for one run. Cumulative rounding keeps the parts of a transfer adding up to its whole."""

    def __init__(self, scale: Scale) -> None:
        self.time = scale.time
        self.bytes = scale.bytes

    def wall_s(self, model_s: float) -> float:
        """Wall seconds of a model duration."""
        return model_s * self.time

    def wall_bytes_per_s(self, payload_bps: float) -> float:
        """The wire's bytes per wall second for a payload rate in model bits per second."""
        return payload_bps / 8 / self.time / self.bytes

    def wire_bytes(self, offset: int, nbytes: int, total: int) -> int:
        """Bytes on the wire for model bytes `offset` … `offset + nbytes` of a transfer of `total` bytes.

        The parts of a transfer add up to its whole, and the last part is never empty: KV cannot be complete before it.
        """
        return self._wire_offset(offset + nbytes, total) - self._wire_offset(offset, total)

    def wire_span(self, start: int, stop: int) -> tuple[int, int]:
        """The bytes on the wire, first and behind the last, that model bytes `start` … `stop` of a transfer touch."""
        return math.floor(start / self.bytes), math.ceil(stop / self.bytes)

    def wire_block_bytes(self, block_bytes: int) -> int:
        """Bytes of a KV block for what `block_bytes` of the model are on the wire, however parts are rounded."""
        return block_bytes if self.bytes == 1 else math.floor(block_bytes / self.bytes) + 1

    def _wire_offset(self, offset: int, total: int) -> int:
        return math.ceil(offset / self.bytes) if offset == total else math.floor(offset / self.bytes)

    def model_bytes(self, wire_bytes: int, total: int) -> int:
        """Model bytes that `wire_bytes` stand for: exact when nothing is scaled, or when all of `total` came."""
        if self.bytes == 1:
            return wire_bytes
        return total if wire_bytes == self.wire_bytes(0, total, total) else math.floor(wire_bytes * self.bytes)
