"""`pdemu profile`: step times of a model on a GPU, and a profile fitted to one's own measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from emulator.cli.display import stdout
from emulator.core.errors import ConfigError
from emulator.core.hardware import WeightsDtype
from emulator.core.profile_fit import Phase, fit, parse_measurements, to_toml
from emulator.lab.catalog_files import load_catalog
from emulator.report import profile_table
from emulator.study import profile_show

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]

UNNAMED = {"model": "your-model", "gpu": "your-gpu"}
"""What a profile is of where neither the file nor an option says it."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Step times: shown for a model on a GPU, or fitted to measurements.")
    group.command("fit")(fit_file)
    group.command("show")(show)
    app.add_typer(group, name="profile")


def fit_file(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="CSV with the columns phase (prefill or decode), tokens, batch, ms. Tokens are of each prompt of "
            "a prefill, and the context of each sequence of a decode step.",
        ),
    ],
    *,
    name: Annotated[str | None, typer.Option("--name", help="The profile's name (default: the file's).")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="The model measured.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="GPU", help="The GPU measured on.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", metavar="N", min=1, help="GPUs that share a layer (1).")] = None,
    json: Json = False,
) -> None:
    """Fit a three-term profile to measured steps; print it as TOML, and its errors on standard error."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"{file}: cannot be read: {what}") from None
    measured = parse_measurements(text, file.name)
    of = {**UNNAMED, "tp": "1", **measured.of}
    if tp is None and not (of["tp"].isdecimal() and int(of["tp"]) >= 1):
        raise ConfigError(f"{file.name}: tp = {of['tp']!r}: must be a whole number of at least 1")
    found = fit(
        measured.rows,
        where=file.name,
        name=name or file.stem,
        model=model or of["model"],
        gpu=gpu or of["gpu"],
        tp=tp or int(of["tp"]),
    )
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    typer.echo(to_toml(found.profile), nl=False)
    console = Console(stderr=True, highlight=False)
    console.print(profile_table.render_fit(found))
    if found.profile.model == UNNAMED["model"] or found.profile.gpu == UNNAMED["gpu"]:
        console.print("Name the model and the GPU with --model and --gpu, as the topology does.", soft_wrap=True)


def show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model of the catalog.")],
    gpu: Annotated[str, typer.Argument(metavar="GPU", help="A GPU of the catalog.")],
    *,
    tp: Annotated[int, typer.Option("--tp", metavar="N", min=1, help="GPUs that share a layer.")] = 1,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="NAME", help="A profile or table instead of the roofline.")
    ] = None,
    weights: Annotated[WeightsDtype, typer.Option("--weights", help="What the weights are held in.")] = "fp16",
    phase: Annotated[
        Phase | None, typer.Option("--phase", help="Show one step alone: of prefill, or of decode.")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", metavar="B", help="Requests in that step (1).")] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", metavar="N", help="Prompt tokens of each (prefill), or context of each (decode)."),
    ] = None,
    json: Json = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the roofline plot as an HTML page too.")
    ] = None,
) -> None:
    """Step times of MODEL on GPU, what bounds each, and where they stand under the roofline."""
    of = profile_show.subject(load_catalog(), model, gpu, tp=tp, profile_name=profile, weights=weights)
    if phase is not None or batch is not None or tokens is not None:
        if phase is None or tokens is None:
            raise ConfigError("one step needs --phase and --tokens; --batch is 1 unless it is given")
        if out is not None:
            raise ConfigError("--out draws all steps: leave --phase, --batch and --tokens out")
        point = profile_show.point(of, phase, 1 if batch is None else batch, tokens)
        if json:
            typer.echo(msgspec.json.format(msgspec.json.encode(point), indent=2).decode())
        else:
            stdout().print(profile_table.render_point(point), soft_wrap=True)
        return
    found = profile_show.profiled(of)
    if out is not None:
        from emulator.report.roofline_chart import write_roofline  # noqa: PLC0415 - plotly is slow to load

        write_roofline(found, out)
        Console(stderr=True).print(f"Plot: {out}", highlight=False, soft_wrap=True)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        stdout().print(profile_table.render(found))
