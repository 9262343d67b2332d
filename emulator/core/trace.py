"""A trace as it is replayed: requests with times and lengths, and how they were got from a file.

The way there: `core.trace_formats` reads a file's text into columns, `core.trace_selection` takes from them what is
used, and `core.trace_summary` says what that is like.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from emulator.core.errors import ConfigError
from emulator.core.traffic import TimeUnit, TraceFormat

DropReason = Literal[
    "no_time", "no_length", "outside_slice", "no_output_tokens", "no_prompt_tokens", "over_context", "beyond_limit"
]


LOWEST_RATE_PER_S, HIGHEST_RATE_PER_S = 1e-6, 1e6
"""What may be asked for: beyond these, times are no longer told apart, or nobody waits for the end."""


def check_rate(rate_per_s: float, what: str) -> None:
    """Raises ConfigError for a rate that no traffic can have; `what` asked for it."""
    if not LOWEST_RATE_PER_S <= rate_per_s <= HIGHEST_RATE_PER_S:
        raise ConfigError(
            f"{what}: must be from {LOWEST_RATE_PER_S:.6f} to {HIGHEST_RATE_PER_S:,.0f} requests per second"
        )


class TraceRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One request: seconds after the trace's first one, prompt and output lengths in tokens (both at least 1)."""

    time_s: float
    prompt_tokens: int
    output_tokens: int


class TraceReading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What became of the rows of a file: `rows_read` are `rows_used` and all of `dropped`, each for its first reason.

    `time_unit` is null where times are dates or there are none, `time_unit_given` false where it is the format's
    default. `truncated` requests are used and were cut to `context_tokens`; `over_context` ones are used, exceed it
    and will fail at the node (both 0 where the context is not known). `steps_back` rows came before the row above
    them and were sorted. `ignored` are columns or keys that are not looked at.
    """

    file: str
    format: TraceFormat
    time_unit: TimeUnit | None
    time_unit_given: bool
    rows_read: int
    rows_used: int
    dropped: dict[DropReason, int]
    truncated: int
    over_context: int
    context_tokens: int | None
    steps_back: int
    ignored: tuple[str, ...]


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests in order of time, at least one, the first at 0 s; without times (`timed` false) all are at 0 s."""

    rows: tuple[TraceRow, ...]
    timed: bool = True
    reading: TraceReading | None = None

    @property
    def span_s(self) -> float:
        """Seconds from the first to the last request."""
        return self.rows[-1].time_s - self.rows[0].time_s

    @property
    def rate_per_s(self) -> float | None:
        """Requests per second, (rows − 1)/span, the inverse of the mean gap; None when all come at one instant."""
        return (len(self.rows) - 1) / self.span_s if self.span_s > 0 else None

    def at_rate(self, rate_per_s: float) -> Trace:
        """The same requests, their times stretched so that they come at this mean rate; it must have a rate."""
        assert self.rate_per_s is not None
        stretch = self.rate_per_s / rate_per_s
        rows = tuple(msgspec.structs.replace(row, time_s=row.time_s * stretch) for row in self.rows)
        return msgspec.structs.replace(self, rows=rows)
