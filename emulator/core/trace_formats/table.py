"""CSV traces, whose columns are found by the names in the header."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence

from emulator.core.errors import ConfigError
from emulator.core.trace_formats.columns import Columns
from emulator.core.trace_formats.forms import Form
from emulator.core.trace_formats.values import shorten, time_ns, time_problem, tokens, tokens_problem
from emulator.core.traffic import TimeUnit


def read_table(text: str, file: str, form: Form, asked_unit: TimeUnit | None) -> Columns:
    """The rows of a CSV text whose first line that is not blank is the header."""
    rows = csv_rows(text, file)
    header_at, header = next(rows)
    time_at, prompt_at, output_at = _find(header, form, f"{file}: line {header_at}")
    unit = asked_unit or form.unit
    times: list[int] = []
    prompts: list[int] = []
    outputs: list[int] = []
    lines: list[int] = []
    for line, cells in rows:
        if len(cells) != len(header):
            raise ConfigError(f"{file}: line {line}: {len(cells)} columns where the header has {len(header)}")
        prompt, output = tokens(cells[prompt_at].strip()), tokens(cells[output_at].strip())
        time = 0 if time_at is None else time_ns(cells[time_at].strip(), unit)
        if time is None:
            assert time_at is not None
            raise ConfigError(f"{file}: line {line}: {time_problem(form.time, cells[time_at].strip(), unit)}")
        if prompt is None or output is None:
            at, name = (prompt_at, form.prompt[0]) if prompt is None else (output_at, form.output[0])
            raise ConfigError(f"{file}: line {line}: {tokens_problem(name, cells[at].strip())}")
        times.append(time)
        prompts.append(prompt)
        outputs.append(output)
        lines.append(line)
    if not lines:
        raise ConfigError(f"{file}: line {header_at + 1}: no row after the header; expected at least one request")
    used = {time_at, prompt_at, output_at}
    return Columns(
        form=form,
        unit=None if time_at is None else unit,
        times_ns=None if time_at is None else times,
        prompts=prompts,
        outputs=outputs,
        lines=lines,
        ignored=tuple(name.strip() for at, name in enumerate(header) if at not in used),
    )


def csv_rows(text: str, file: str) -> Iterator[tuple[int, list[str]]]:
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


def has(header: Sequence[str], form: Form) -> int:
    """How many of a format's two columns of lengths a header names."""
    names = {name.strip().casefold() for name in header}
    return sum(not names.isdisjoint(map(str.casefold, spellings)) for spellings in (form.prompt, form.output))


def _find(header: Sequence[str], form: Form, where: str) -> tuple[int | None, int, int]:
    """Where time (if there is one, and it may be missing), prompt and output are."""
    names = [name.strip().casefold() for name in header]
    found: list[int | None] = []
    for column in (form.time, form.prompt[0], form.output[0]):
        count = names.count(column.casefold())
        if count == 0 and column == form.time and not form.needs_time:
            found.append(None)
        elif count == 1:
            found.append(names.index(column.casefold()))
        else:
            problem = "is missing" if count == 0 else f"is there {count} times"
            shown = shorten(",".join(header))
            raise ConfigError(f"{where}: column {column} {problem} in {shown}; expected each of {form.expects} once")
    time, prompt, output = found
    assert prompt is not None
    assert output is not None
    return time, prompt, output
