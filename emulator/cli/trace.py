"""`pdemu trace`, and the lines by which every command tells how it read a trace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from emulator.cli.display import stdout
from emulator.cli.options import TraceFlags, taking
from emulator.core import traffic
from emulator.core.errors import ConfigError
from emulator.core.trace import Trace, check_rate
from emulator.core.trace_summary import reading_line, replay_line, summarize_trace
from emulator.lab.experiment import Experiment
from emulator.lab.run_folder import pretty
from emulator.lab.topology_files import load_trace
from emulator.report import trace_table


@taking(TraceFlags)
def trace(
    options: TraceFlags,
    trace: Annotated[Path, typer.Argument(metavar="FILE", help="Trace file, in any format that is published.")],
    *,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", help="Stretch its times to N requests per second.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", metavar="TOKENS", help="The context, for --max-context.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")
    ] = False,
) -> None:
    """Say what FILE is: its format, rows read, used and dropped, rate, burstiness and lengths."""
    if max_model_len is not None and max_model_len < 2:
        raise ConfigError(f"--max-model-len {max_model_len}: a prompt and an output are at least 2 tokens")
    found = load_trace(trace, traffic.TraceOptions(**options.given()), max_model_len)
    if rate is not None:
        found = _at_rate(found, rate, trace)
    summary = summarize_trace(found)
    if json:
        typer.echo(pretty(summary).decode(), nl=False)
        return
    for line in trace_table.head(summary):
        typer.echo(line)
    stdout().print(trace_table.lengths(summary))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(trace)


def tell_traces(traces: Mapping[str, Trace], prepared: Experiment | None = None) -> None:
    """One line a trace on standard error: how it was read and, of an experiment, how much of it is sent."""
    replays = {} if prepared is None else {replay.stream: replay for replay in prepared.traces}
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for stream, found in traces.items():
        if prepared is not None and stream in replays:
            duration_s = float(prepared.topology.workload.duration)
            console.print(replay_line(found, replays[stream], prepared.runs[0].load, duration_s))
        else:
            console.print(reading_line(found))


def _at_rate(found: Trace, rate_per_s: float, file: Path) -> Trace:
    check_rate(rate_per_s, f"--rate {rate_per_s:g}")
    if found.rate_per_s is None:
        what = "come at one instant" if found.timed else "have no times"
        raise ConfigError(f"--rate {rate_per_s:g}: the requests of {file} {what}, so there is no rate to change")
    return found.at_rate(rate_per_s)
