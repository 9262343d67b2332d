"""Which format a trace's text has, told by the names in its first line that is not blank."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from emulator.core.errors import ConfigError
from emulator.core.trace_formats.columns import Columns
from emulator.core.trace_formats.forms import AIBRIX, BAILIAN, JSON_LINES, MOONCAKE, RAGPULSE, TABLES, Form, known
from emulator.core.trace_formats.lines import decoded, json_lines, read_lines
from emulator.core.trace_formats.table import csv_rows, has, read_table
from emulator.core.trace_formats.values import shorten
from emulator.core.traffic import TimeUnit, TraceFormat

_DISTRIBUTION = re.compile(r"gamma|weibull|exponential|poisson|lognormal|pareto", re.IGNORECASE)
_WINDOWED = {"rate", "cv", "rps", "qps", "pattern", "total", "success"}


def read_columns(
    text: str, file: str, form_name: TraceFormat | None = None, time_unit: TimeUnit | None = None
) -> Columns:
    """Read the text of a trace, in the format that it shows or that is given; `file` names it in errors.

    Raises ConfigError, one line with file and line number, for text that is empty, of no known format or unreadable.
    """
    text = text.removeprefix("\ufeff")
    first = next(json_lines(text), None)
    if first is None:
        raise ConfigError(f"{file}: line 1: the trace is empty; expected one of {known()}")
    form = _detected(text, file, *first) if form_name is None else _named(form_name)
    if form in JSON_LINES:
        looked_at = {form.time, *form.prompt, *form.output, "requests"}
        ignored = tuple(key for key in _object(file, *first) if key not in looked_at)
        columns = read_lines(text, file, form, time_unit, ignored)
    else:
        columns = read_table(text, file, form, time_unit)
    if time_unit is not None and columns.times_ns is None:
        raise ConfigError(f"{file}: has no {form.time}, so it has no times: leave --trace-time-unit (time_unit) out")
    return columns


def _named(name: TraceFormat) -> Form:
    return next(form for form in (*TABLES, *JSON_LINES) if form.name == name)


def _detected(text: str, file: str, at: int, line: str) -> Form:
    """The format of the first line; raises ConfigError for one that is none, saying so of what holds no requests."""
    if line.lstrip().startswith("["):
        raise ConfigError(f"{file}: line {at}: a JSON array; expected one JSON object a line, or CSV with a header")
    form = _of_object(file, at, line) if line.lstrip().startswith("{") else _of_header(text, file)
    if form is None:
        raise ConfigError(
            f"{file}: line {at}: no header and no keys of a known trace format in {shorten(line)}; expected {known()}"
        )
    return form


def _of_header(text: str, file: str) -> Form | None:
    _, header = next(csv_rows(text, file))
    form = max(TABLES, key=lambda table: has(header, table))
    if has(header, form):
        return form
    windowed = not _WINDOWED.isdisjoint(name.strip().casefold() for name in header)
    if windowed or (_is_number(header[0]) and _names_a_distribution(text, file)):
        raise _no_requests(file, "rows of this file are windows of time with a rate")
    return None


def _is_number(cell: str) -> bool:
    return cell.strip().replace(".", "", 1).isdecimal()


def _names_a_distribution(text: str, file: str) -> bool:
    """Whether a table without a header has a window of traffic; windows without any name no distribution."""
    return any(_DISTRIBUTION.fullmatch(cell.strip()) for _, cells in csv_rows(text, file) for cell in cells)


def _of_object(file: str, at: int, line: str) -> Form | None:
    keys = _object(file, at, line)
    if keys and all(_is_number(key) for key in keys):
        raise _no_requests(file, "the keys of this file are windows of time with distributions of lengths")
    if "requests" in keys:
        return AIBRIX
    if keys.keys().isdisjoint((MOONCAKE.prompt[0], MOONCAKE.output[0])):
        return None
    if isinstance(keys.get(RAGPULSE.time), str) or isinstance(keys.get("hash_ids"), dict):
        return RAGPULSE
    return BAILIAN if "chat_id" in keys else MOONCAKE


def _object(file: str, at: int, line: str) -> dict[str, Any]:
    return decoded(msgspec.json.Decoder(dict[str, Any]), file, at, line)


def _no_requests(file: str, what: str) -> ConfigError:
    return ConfigError(
        f"{file}: line 1: {what}, as in ServeGen's data: it holds no requests, so there is nothing to replay; "
        "let ServeGen generate requests and write those, or describe the traffic by a stream's rate and lengths"
    )
