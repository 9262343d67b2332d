"""Request traces as text -> rows of (time, prompt tokens, output tokens).

Published traces differ in their columns and in how they write time, and a row read wrongly changes a verdict
without anything failing. So each format is an entry of `FORMATS`, recognised by its first line, and whatever cannot
be read exactly is refused with the file, the line and what would be right.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

from emulator.core.errors import ConfigError

MAX_TOKENS_DIGITS = 9


class TraceRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One request: seconds after the trace's first one, prompt and output lengths in tokens (both at least 1)."""

    time_s: float
    prompt_tokens: int
    output_tokens: int


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests in order of time, at least one; the first is at 0 s."""

    rows: tuple[TraceRow, ...]

    @property
    def span_s(self) -> float:
        """Seconds from the first to the last request."""
        return self.rows[-1].time_s - self.rows[0].time_s

    @property
    def rate_per_s(self) -> float | None:
        """Requests per second, (rows − 1)/span, the inverse of the mean gap; None when all come at one instant."""
        return (len(self.rows) - 1) / self.span_s if self.span_s > 0 else None


class TraceFormat(NamedTuple):
    """A kind of trace file: whether its first line that is not blank looks like one, and how its text is read."""

    name: str
    expects: str
    recognises: Callable[[str], bool]
    parse: Callable[[str, str], Trace]


def parse_trace(text: str, file: str) -> Trace:
    """Read the text of a trace in any known format; `file` names it in errors.

    Raises ConfigError, one line with file and line number, for text that is empty, of no known format or unreadable.
    """
    text = text.removeprefix("\ufeff")
    known = "; ".join(f"{form.name}: {form.expects}" for form in FORMATS)
    for at, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        for form in FORMATS:
            if form.recognises(line):
                return form.parse(text, file)
        raise ConfigError(f"{file}: line {at}: no header of a known trace format in {_shorten(line)}; expected {known}")
    raise ConfigError(f"{file}: line 1: the trace is empty; expected {known}")


# --- Azure: one CSV row a request -----------------------------------------------------------------------------

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_AZURE_TIME = re.compile(
    r"(?P<second>[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2})"
    r"(?:\.(?P<fraction>[0-9]{1,9}))?(?P<zone>Z|[+-][0-9]{2}:[0-9]{2})?"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)


def _recognises_azure(first_line: str) -> bool:
    names = {name.strip().strip('"') for name in first_line.split(",")}
    return not names.isdisjoint(_AZURE_COLUMNS)


def _parse_azure(text: str, file: str) -> Trace:
    """Azure/AzurePublicDataset's LLM inference traces, 2023 (no zone, 7 digits) and 2024 (+00:00, 6 digits)."""
    lines = _csv_lines(text, file)
    header_at, header = next(lines)
    columns = _azure_columns(header, f"{file}: line {header_at}")
    rows: list[TraceRow] = []
    first_ns = last_ns = last_at = 0
    for at, cells in lines:
        if len(cells) != len(header):
            raise ConfigError(f"{file}: line {at}: {len(cells)} columns where the header has {len(header)}")
        time, prompt, output = (cells[column].strip() for column in columns)
        time_ns = _azure_time_ns(time)
        prompt_tokens, output_tokens = _tokens(prompt), _tokens(output)
        if time_ns is None or prompt_tokens is None or output_tokens is None:
            raise ConfigError(f"{file}: line {at}: {_azure_problem(time, prompt, output)}")
        if not rows:
            first_ns = last_ns = time_ns
        elif time_ns < last_ns:
            raise ConfigError(
                f"{file}: line {at}: TIMESTAMP {time} is before that of line {last_at}: rows must be in order of time"
            )
        last_ns, last_at = time_ns, at
        rows.append(TraceRow((time_ns - first_ns) / 1e9, prompt_tokens, output_tokens))
    if not rows:
        raise ConfigError(f"{file}: line {header_at + 1}: no row after the header; expected at least one request")
    return Trace(tuple(rows))


def _csv_lines(text: str, file: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every line that is not blank."""
    reader = csv.reader(text.split("\n"), strict=True)
    try:
        for cells in reader:
            if len(cells) > 1 or (cells and cells[0].strip()):
                yield reader.line_num, cells
    except csv.Error as error:
        raise ConfigError(
            f"{file}: line {reader.line_num}: not CSV ({error}); expected comma-separated cells"
        ) from None


def _azure_columns(header: list[str], where: str) -> tuple[int, ...]:
    names = [name.strip() for name in header]
    for column in _AZURE_COLUMNS:
        if (n := names.count(column)) != 1:
            problem = "is missing" if n == 0 else f"is there {n} times"
            raise ConfigError(
                f"{where}: column {column} {problem} in {_shorten(','.join(names))}; "
                f"expected each of {', '.join(_AZURE_COLUMNS)} once"
            )
    return tuple(names.index(column) for column in _AZURE_COLUMNS)


def _azure_time_ns(text: str) -> int | None:
    """Nanoseconds since 1970, exact; UTC where no zone is written; None when unreadable."""
    match = _AZURE_TIME.fullmatch(text)
    if match is None:
        return None
    second, fraction, zone = match.groups()
    try:
        instant = datetime.fromisoformat(f"{second}{zone or '+00:00'}")
    except ValueError:
        return None
    return (instant - _EPOCH) // _SECOND * 1_000_000_000 + int((fraction or "").ljust(9, "0"))


def _tokens(text: str) -> int | None:
    """A whole number of 1 or more; None for anything else."""
    if text.isascii() and text.isdecimal() and len(text) <= MAX_TOKENS_DIGITS:
        return int(text) or None
    return None


def _azure_problem(time: str, prompt: str, output: str) -> str:
    if _azure_time_ns(time) is None:
        return f"TIMESTAMP {_shorten(time)} is not a time; expected one like 2023-11-16 18:17:03.9799600"
    column, cell = ("ContextTokens", prompt) if _tokens(prompt) is None else ("GeneratedTokens", output)
    return f"{column} {_shorten(cell)} is not a number of tokens; expected a whole number of 1 or more"


def _shorten(text: str, limit: int = 60) -> str:
    return repr(text.strip() if len(text) <= limit else text[:limit].strip() + "…")


FORMATS: tuple[TraceFormat, ...] = (
    TraceFormat("Azure CSV", "a header with " + ",".join(_AZURE_COLUMNS), _recognises_azure, _parse_azure),
)
