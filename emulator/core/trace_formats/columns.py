"""The rows of a trace file as columns, in the order of the file, before any is left out for what it says."""

from __future__ import annotations

from dataclasses import dataclass, field

from emulator.core.trace_formats.forms import Form
from emulator.core.traffic import TimeUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Times in nanoseconds (None: the file has none), tokens, and the line of each row that has time and lengths.

    Rows without a time, in a file that has times, and rows without a length are only counted.
    """

    form: Form
    unit: TimeUnit | None
    times_ns: list[int] | None
    prompts: list[int]
    outputs: list[int]
    lines: list[int]
    without_time: int = 0
    without_length: int = 0
    ignored: tuple[str, ...] = field(default=())

    @property
    def rows_read(self) -> int:
        """All rows of the file."""
        return len(self.lines) + self.without_time + self.without_length
