"""The `pdemu` command. Results go to standard output, progress and errors to standard error.

Each command is thin: it turns options into a topology, hands it to the lab, and prints what comes back.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.console import Console
from typer.main import get_command

from emulator import __version__
from emulator.cli import bench, calibrate, goodput, member, plan, profile, shape, sweep, trace, up, validate
from emulator.cli.display import RunDisplay, stdout
from emulator.cli.interrupts import hear_the_end
from emulator.cli.options import DeviceFlags, TraceFlags, Traffic, read_topology, taking
from emulator.cli.trace import tell_traces
from emulator.core import catalog as catalogs
from emulator.core.deployments import KV_ELEMENT_BYTES, KvDtype
from emulator.core.errors import ConfigError, PdemuError
from emulator.lab import docker, leftovers, unprivileged
from emulator.lab import experiment as lab
from emulator.lab.catalog_files import load_catalog
from emulator.lab.devices import check_device, sharing_remarks
from emulator.lab.run_folder import pretty
from emulator.lab.scale import apply_scale
from emulator.lab.sites import LauncherName, ShapingName
from emulator.lab.topology_files import load_traces
from emulator.report import catalog_tables, parity_table, table

app = typer.Typer(
    name="pdemu",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Does splitting prefill from decode help or hurt? Real processes, real KV bytes, shaped links.",
)

TopologyFile = Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="Topology file (TOML).")]
Bandwidths = Annotated[
    str | None, typer.Option("--kv-bandwidth", metavar="RATE,…", help="KV bandwidths to run, such as 1Gbps,5Gbps.")
]
Rate = Annotated[float | None, typer.Option("--rate", metavar="N", help="Total open-loop requests per second.")]
Duration = Annotated[
    str | None, typer.Option("--duration", metavar="TIME", help="How long requests arrive; seconds, or such as 2min.")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of all that is random.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Folder for the results (default: a new one in runs/).")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
Launcher = Annotated[
    LauncherName,
    typer.Option(
        "--launcher",
        help="local: processes on loopback; netns: a network namespace for each (Linux); compose: containers; "
        "simulate: none of them, in virtual time.",
    ),
]
Shaping = Annotated[
    ShapingName | None,
    typer.Option(
        "--shaping", help="Who keeps the KV rate: paced (user space), kernel (tc); default: the best there is."
    ),
]
Stretch = Annotated[
    str | None,
    typer.Option("--scale", metavar="K|auto", help="Stretch time K times; auto: so that this machine stays half idle."),
]
Force = Annotated[bool, typer.Option("--force", help="Run over KV links that are not as asked, marked UNSHAPED.")]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Simulate each live run too and print how far they are apart; exit with 1 if too far, or where an "
        "expectation of TOPOLOGY does not hold.",
    ),
]
VerifyKv = Annotated[bool, typer.Option("--verify-kv", help="Check every KV frame by checksum.")]


@app.command()
@taking(TraceFlags, DeviceFlags)
def compare(
    replay: TraceFlags,
    device: DeviceFlags,
    topology: TopologyFile,
    *,
    kv_bandwidth: Bandwidths = None,
    rate: Rate = None,
    duration: Duration = None,
    seed: Seed = None,
    out: Out = None,
    json: Json = False,
    verify_kv: VerifyKv = False,
    force: Force = False,
    launcher: Launcher = "local",
    shaping: Shaping = None,
    scale: Stretch = None,
    check: Check = False,
) -> None:
    """Run every deployment of TOPOLOGY on the same requests; print a table and what follows from it."""
    traffic = Traffic(kv_bandwidth=kv_bandwidth, rate=rate, duration=duration, replay=replay, seed=seed, device=device)
    how = lab.Conditions(launcher=launcher, shaping=shaping, verify_kv=verify_kv, force=force, check=check)
    _execute(topology, None, traffic, how, scale=scale, out=out, as_json=json)


@app.command()
@taking(TraceFlags, DeviceFlags)
def run(
    replay: TraceFlags,
    device: DeviceFlags,
    topology: TopologyFile,
    *,
    deployment: Annotated[str, typer.Option("--deployment", metavar="NAME", help="The deployment to run.")],
    kv_bandwidth: Bandwidths = None,
    rate: Rate = None,
    duration: Duration = None,
    seed: Seed = None,
    out: Out = None,
    json: Json = False,
    verify_kv: VerifyKv = False,
    force: Force = False,
    launcher: Launcher = "local",
    shaping: Shaping = None,
    scale: Stretch = None,
) -> None:
    """Run one deployment of TOPOLOGY; print its table."""
    traffic = Traffic(kv_bandwidth=kv_bandwidth, rate=rate, duration=duration, replay=replay, seed=seed, device=device)
    how = lab.Conditions(launcher=launcher, shaping=shaping, verify_kv=verify_kv, force=force)
    _execute(topology, [deployment], traffic, how, scale=scale, out=out, as_json=json)


@app.command("kv-size")
def kv_size(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model of the catalog.")],
    tokens: Annotated[int, typer.Argument(metavar="TOKENS", help="Prompt length in tokens.")],
    *,
    kv_dtype: Annotated[KvDtype, typer.Option(help="Type of the elements that KV is kept in.")] = "fp16",
    json: Json = False,
) -> None:
    """Bytes of KV cache that a prompt of TOKENS tokens has, and how long links take to carry them."""
    found = catalogs.find_model(load_catalog(), model)
    if tokens < 1:
        raise ConfigError(f"TOKENS {tokens}: a prompt has at least 1 token")
    element_bytes = KV_ELEMENT_BYTES[kv_dtype]
    per_token = found.kv_bytes_per_token(element_bytes)
    if json:
        _print_json({"model": found.name, "tokens": tokens, "bytes_per_token": per_token, "bytes": per_token * tokens})
        return
    stdout().print(catalog_tables.kv_size(found, tokens, element_bytes))


@app.command()
def clean() -> None:
    """Remove what killed runs left: namespaces, containers, processes; never what a run in progress uses."""
    lines = leftovers.clean()
    for line in lines or ["nothing to remove"]:
        typer.echo(line)
    if any(line.startswith("left ") for line in lines):
        raise typer.Exit(1)


@app.command()
def models(json: Json = False) -> None:
    """The models of the catalog."""
    known = load_catalog().models
    if json:
        _print_json([msgspec.to_builtins(model) for model in known])
        return
    stdout().print(catalog_tables.models(known))


@app.command()
def gpus(json: Json = False) -> None:
    """The GPUs of the catalog."""
    known = load_catalog().gpus
    if json:
        _print_json([msgspec.to_builtins(gpu) for gpu in known])
        return
    stdout().print(catalog_tables.gpus(known))


bench.register(app)
calibrate.register(app)
member.register(app)
plan.register(app)
profile.register(app)
goodput.register(app)
shape.register(app)
sweep.register(app)
trace.register(app)
up.register(app)
validate.register(app)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Entry of every command."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


# --- output -------------------------------------------------------------------------------------------------------


def _execute(
    path: Path,
    deployments: list[str] | None,
    traffic: Traffic,
    how: lab.Conditions,
    *,
    scale: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    if how.launcher == "netns":
        unprivileged.reexec_if_needed()
    if how.launcher == "compose":
        docker.compose_command()
    if how.launcher == "simulate" and scale is not None:
        raise ConfigError(f"--scale {scale}: a simulation runs in virtual time, which is not stretched; leave it out")
    if how.launcher == "simulate":
        traffic.device.refuse("a simulation models its steps; leave it out, or use a live --launcher")
    spec, catalog = read_topology(path, traffic), load_catalog()
    check_device(spec.device, how.launcher)
    traces = load_traces(spec, catalog)
    scaled = apply_scale(spec, scale, catalog, traces, deployments)
    prepared = lab.prepare(scaled.topology, catalog, traces, how, deployments=deployments, out=out)
    tell_traces(traces, prepared)
    for remark in (scaled.remark, *sharing_remarks(prepared.runs, how.launcher)):
        if remark:
            Console(stderr=True).print(remark, highlight=False, soft_wrap=True)
    with RunDisplay(prepared.runs) as display:
        summary = lab.compare(prepared, display.progress, display.result)
    Console(stderr=True).print(f"Results: {prepared.folder}", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(pretty(summary).decode(), nl=False)
    else:
        console = stdout()
        console.print(table.render(summary, judged=deployments is None, width=console.width))
        if summary.parity:
            console.print("", parity_table.render(summary.parity))
    if how.check and not (all(run.within for run in summary.parity) and summary.as_expected):
        raise typer.Exit(1)


def _print_json(value: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


INTERRUPTED = 130

# Typer carries its own copy of click, whose usage error is public only as the base of this one.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__bases__[0]


@cache
def _command() -> Callable[..., object]:
    """Made once a process: it takes longer than many a command."""
    return get_command(app)


def main() -> None:
    """Run the command line; an error that a user can mend is one line and its exit status."""
    hear_the_end()
    try:
        code = _command()(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except PdemuError as error:
        _fail(str(error), error.exit_code)
    except _UsageError as error:
        _fail(error.format_message(), 2)
    except BrokenPipeError:  # whoever read the output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except OSError as error:
        _fail(f"cannot write or read {error.filename or 'the output'}: {error.strerror or error}", 1)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", INTERRUPTED)
    if code == INTERRUPTED:  # typer turns Ctrl-C into this exit status
        _fail("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    line = " ".join(message.split())
    with contextlib.suppress(OSError):
        print(f"pdemu: {line}", file=sys.stderr)  # noqa: T201
    sys.exit(code)


if __name__ == "__main__":
    main()
