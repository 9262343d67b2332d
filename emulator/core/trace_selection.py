"""Which rows of a trace file are replayed: every row that is left out or changed is counted, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emulator.core.errors import ConfigError
from emulator.core.quantities import parse_span
from emulator.core.trace import DropReason, Trace, TraceReading, TraceRow
from emulator.core.trace_formats.columns import Columns
from emulator.core.trace_formats.detection import read_columns
from emulator.core.traffic import TraceOptions

_Integers = NDArray[np.int64]
_NS = 1e9

DROPPED: dict[DropReason, str] = {
    "no_time": "without an arrival time",
    "no_length": "without a length",
    "outside_slice": "outside the slice",
    "no_output_tokens": "failed (0 output tokens)",
    "no_prompt_tokens": "with an empty prompt",
    "over_context": "longer than the context",
    "beyond_limit": "beyond the limit",
}


def read_trace(text: str, file: str, options: TraceOptions, context_tokens: int | None = None) -> Trace:
    """The requests of a trace file's text that `options` ask for; `file` names it in errors.

    `context_tokens` is what the model takes, prompt and output together. Raises ConfigError, one line, for text that
    cannot be read, rows out of order, options that do not go with the file, and when no request is left.
    """
    return select(read_columns(text, file, options.format, options.time_unit), file, options, context_tokens)


def select(columns: Columns, file: str, options: TraceOptions, context_tokens: int | None) -> Trace:
    """The rows that are used: sorted, sliced, without the failed ones, within the context, limited, in that order."""
    rows = _Rows.of(columns)
    steps_back = rows.put_in_order(file, sort=options.sort)
    dropped: dict[DropReason, int] = {"no_time": columns.without_time, "no_length": columns.without_length}
    if options.slice is not None:
        dropped["outside_slice"] = rows.keep(rows.within(file, options.slice))
    dropped["no_output_tokens"] = rows.keep(rows.outputs > 0)
    dropped["no_prompt_tokens"] = rows.keep(rows.prompts > 0)
    if options.max_context == "drop":
        dropped["over_context"] = rows.keep(~rows.over(_needed(context_tokens, file, options)))
    if options.limit is not None:
        dropped["beyond_limit"] = rows.keep(np.arange(len(rows)) < options.limit)
    truncated = over_context = 0
    if options.max_context == "truncate":
        truncated = rows.truncate(_needed(context_tokens, file, options))
    elif context_tokens is not None:
        over_context = int(rows.over(context_tokens).sum())
    dropped = {reason: count for reason, count in dropped.items() if count}
    if not columns.rows_read:
        raise ConfigError(f"{file}: there is no request in it; give a file that has at least one")
    if not len(rows):
        raise ConfigError(
            f"{file}: no request is left of {counted(columns.rows_read, 'row')}: {dropped_text(dropped)}; "
            "give a file or options that leave at least one"
        )
    reading = TraceReading(
        file=file,
        format=columns.form.name,
        time_unit=columns.unit,
        time_unit_given=options.time_unit is not None,
        rows_read=columns.rows_read,
        rows_used=len(rows),
        dropped=dropped,
        truncated=truncated,
        over_context=over_context,
        context_tokens=context_tokens,
        steps_back=steps_back,
        ignored=columns.ignored,
    )
    return Trace(tuple(rows.requests()), timed=columns.times_ns is not None, reading=reading)


def counted(number: int, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def dropped_text(dropped: dict[DropReason, int]) -> str:
    """`30 failed (0 output tokens), 2 outside the slice`."""
    return ", ".join(f"{count:,} {DROPPED[reason]}" for reason, count in dropped.items())


@dataclass(slots=True)
class _Rows:
    """The rows that are left, as columns."""

    times_ns: _Integers | None
    prompts: _Integers
    outputs: _Integers
    lines: _Integers

    @classmethod
    def of(cls, columns: Columns) -> _Rows:
        times = None if columns.times_ns is None else np.array(columns.times_ns, dtype=np.int64)
        rest = (np.array(column, dtype=np.int64) for column in (columns.prompts, columns.outputs, columns.lines))
        return cls(times, *rest)

    def __len__(self) -> int:
        return len(self.prompts)

    def put_in_order(self, file: str, *, sort: bool) -> int:
        """How many rows come before the row above them; refuses them, or sorts all rows by time."""
        if self.times_ns is None:
            return 0
        back = np.flatnonzero(np.diff(self.times_ns) < 0)
        if len(back) and not sort:
            at = int(back[0])
            gap_s = int(self.times_ns[at] - self.times_ns[at + 1]) / _NS
            raise ConfigError(
                f"{file}: line {self.lines[at + 1]}: its time is {gap_s:.10g} s before that of line {self.lines[at]}: "
                "rows must be in order of time; sort them, or give --trace-sort (sort = true)"
            )
        if len(back):
            self._take(np.argsort(self.times_ns, kind="stable"))
        return len(back)

    def within(self, file: str, span: str) -> NDArray[np.bool_]:
        """Which rows come in a span of time after the first one."""
        if self.times_ns is None:
            raise ConfigError(f"{file}: has lengths and no times: leave --slice (slice) out, or use --limit (limit)")
        start_s, end_s = parse_span(span)
        after_ns = self.times_ns - self.times_ns[:1]
        return (after_ns >= start_s * _NS) & (after_ns < end_s * _NS)

    def over(self, context_tokens: int) -> NDArray[np.bool_]:
        """Which rows are longer than the context."""
        return self.prompts + self.outputs > context_tokens

    def keep(self, wanted: NDArray[np.bool_]) -> int:
        """Leave out the rows that are not wanted; how many they were."""
        before = len(self)
        if not wanted.all():
            self._take(np.flatnonzero(wanted))
        return before - len(self)

    def truncate(self, context_tokens: int) -> int:
        """Cut longer rows to the context: the prompt first, down to one token, then the output; how many they were."""
        over = self.over(context_tokens)
        self.outputs = np.where(over, np.minimum(self.outputs, context_tokens - 1), self.outputs)
        self.prompts = np.where(over, context_tokens - self.outputs, self.prompts)
        return int(over.sum())

    def requests(self) -> Iterable[TraceRow]:
        """The requests, the first at 0 s."""
        after_ns = np.zeros(len(self)) if self.times_ns is None else self.times_ns - self.times_ns[0]
        times_s = (after_ns / _NS).tolist()
        return map(TraceRow, times_s, self.prompts.tolist(), self.outputs.tolist())

    def _take(self, indices: NDArray[np.intp]) -> None:
        self.times_ns = None if self.times_ns is None else self.times_ns[indices]
        self.prompts, self.outputs, self.lines = (c[indices] for c in (self.prompts, self.outputs, self.lines))


def _needed(context_tokens: int | None, file: str, options: TraceOptions) -> int:
    if context_tokens is None:
        raise ConfigError(
            f"{file}: --max-context {options.max_context}: of which model? Give --max-model-len TOKENS too"
        )
    if context_tokens < 2:
        raise ConfigError(f"{file}: a context of {context_tokens} has no room for a prompt and an output")
    return context_tokens
