"""`pdemu validate`: published results beside what the simulator makes of them, and step times beside the models'."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console

from emulator.cli.display import stdout
from emulator.core.errors import ConfigError
from emulator.report import step_times_table, validate_table
from emulator.study.published import load_published
from emulator.study.step_times import validate_step_times
from emulator.study.validate import validate as run_validation


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(validate)


def validate(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]…", help="Reproductions to run (default: all of them).")
    ] = None,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")] = False,
    only_list: Annotated[bool, typer.Option("--list", help="List the reproductions and run none.")] = False,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Runs of each rate, with one seed each.")] = 3,
    step_times: Annotated[
        bool, typer.Option("--step-times", help="Hold the cost models against published step times instead.")
    ] = False,
) -> None:
    """Reproduce published results by simulation: published against ours, and where and why they differ."""
    if step_times:
        if names or only_list:
            raise ConfigError("--step-times checks every published step time; it takes no NAME and no --list")
        found = validate_step_times()
        if json:
            typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        else:
            stdout().print(step_times_table.render(found))
        return
    if only_list:
        known = load_published().values()
        stdout().print(validate_table.listing((r.name, r.title, r.source) for r in known))
        return
    progress = Console(stderr=True)

    def tell(name: str, done: int, of: int) -> None:
        progress.print(f"{name}: part {done} of {of} done", highlight=False, soft_wrap=True)

    summary = run_validation(names or [], seeds=seeds, on_part=tell)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
    else:
        stdout().print(validate_table.render(summary))
