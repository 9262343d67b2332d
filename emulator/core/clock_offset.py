"""How far one host's clock is from another's, from exchanges of readings: an interval that only ever narrows.

A reading that was taken there between sending and hearing here bounds the offset on both sides, as in NTP (RFC 5905).
Where 0 remains possible the clocks are taken for one and the same, which they are on one host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class ClockOffset:
    """`low_s`…`high_s` bound what has to be added to an instant here to have it there."""

    low_s: float = -math.inf
    high_s: float = math.inf

    def add(self, sent_s: float, there_s: float, heard_s: float) -> None:
        """A reading `there_s`, asked for at `sent_s` and heard at `heard_s`, both here.

        Raises ValueError for an answer that came before its question.
        """
        if heard_s < sent_s:
            raise ValueError(f"an answer at {heard_s} to a question at {sent_s}")
        self.low_s = max(self.low_s, there_s - heard_s)
        self.high_s = min(self.high_s, there_s - sent_s)

    @property
    def seconds(self) -> float:
        """The offset: 0 on one host, else the middle of what is possible."""
        if self.low_s <= 0 <= self.high_s:
            return 0.0
        return (self.low_s + self.high_s) / 2

    @property
    def uncertainty_s(self) -> float:
        """How far off that may be at most: half of the interval, 0 on one host."""
        return 0.0 if self.seconds == 0 else abs(self.high_s - self.low_s) / 2
