"""Traces of one JSON object a line: a request each, or all requests of one instant."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from emulator.core.errors import ConfigError
from emulator.core.trace_formats.columns import Columns
from emulator.core.trace_formats.forms import AIBRIX, Form
from emulator.core.trace_formats.values import time_ns, time_problem, tokens, tokens_problem
from emulator.core.traffic import TimeUnit

T = TypeVar("T")


class _Request(msgspec.Struct, gc=False):
    """The keys of a line that are looked at; others, such as long lists of hash ids, are skipped unread."""

    timestamp: Any = None
    input_length: Any = None
    output_length: Any = None


class _InstantsRequest(msgspec.Struct, gc=False):
    prompt_length: Any = None
    output_length: Any = None
    old_prompt_length: Any = msgspec.field(default=None, name="Prompt Length")
    old_output_length: Any = msgspec.field(default=None, name="Output Length")


class _Instant(msgspec.Struct, gc=False):
    timestamp: Any
    requests: list[_InstantsRequest]


_Found = tuple[int, Any, Any, Any]
"""Line, time, prompt and output, as decoded; None where there is none."""


def read_lines(text: str, file: str, form: Form, asked_unit: TimeUnit | None, ignored: tuple[str, ...]) -> Columns:
    """The rows of a text of JSON objects, one a line; `ignored` are the keys that are not looked at."""
    unit = asked_unit or form.unit
    found = _instants(text, file) if form is AIBRIX else _requests(text, file)
    times: list[int] = []
    prompts: list[int] = []
    outputs: list[int] = []
    lines: list[int] = []
    without_time = without_length = 0
    timeless: list[tuple[int, int, int]] = []
    for line, given_time, given_prompt, given_output in found:
        if given_prompt is None or given_output is None:
            without_length += 1
            continue
        prompt, output = tokens(given_prompt), tokens(given_output)
        if prompt is None or output is None:
            name, value = (form.prompt[0], given_prompt) if prompt is None else (form.output[0], given_output)
            raise ConfigError(f"{file}: line {line}: {tokens_problem(name, value)}")
        if given_time is None:
            timeless.append((prompt, output, line))
            continue
        time = time_ns(given_time, unit)
        if time is None:
            raise ConfigError(f"{file}: line {line}: {time_problem(form.time, given_time, unit)}")
        times.append(time)
        prompts.append(prompt)
        outputs.append(output)
        lines.append(line)
    if timeless and not times and not form.needs_time:
        prompts, outputs, lines = (list(column) for column in zip(*timeless, strict=True))
    else:
        without_time = len(timeless)
    return Columns(
        form=form,
        unit=unit if times else None,
        times_ns=times if times or without_time else None,
        prompts=prompts,
        outputs=outputs,
        lines=lines,
        without_time=without_time,
        without_length=without_length,
        ignored=ignored,
    )


def json_lines(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not blank."""
    for at, line in enumerate(text.split("\n"), start=1):
        if line and not line.isspace():
            yield at, line


def decoded(decoder: msgspec.json.Decoder[T], file: str, at: int, line: str) -> T:
    """The object of a line; raises ConfigError for a line that is not what every line of such a file is."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{file}: line {at}: {what}; expected one JSON object a line") from None


def _requests(text: str, file: str) -> Iterator[_Found]:
    decoder = msgspec.json.Decoder(_Request, float_hook=Decimal)
    for at, line in json_lines(text):
        row = decoded(decoder, file, at, line)
        yield at, row.timestamp, row.input_length, row.output_length


def _instants(text: str, file: str) -> Iterator[_Found]:
    decoder = msgspec.json.Decoder(_Instant, float_hook=Decimal)
    for at, line in json_lines(text):
        instant = decoded(decoder, file, at, line)
        for request in instant.requests:
            prompt, output = request.prompt_length, request.output_length
            prompt = request.old_prompt_length if prompt is None else prompt
            output = request.old_output_length if output is None else output
            yield at, instant.timestamp, prompt, output
