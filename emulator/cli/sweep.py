"""`pdemu sweep` and `pdemu break-even`: many simulated runs, and what they say about where a split pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console

from emulator.cli.display import RunDisplay, stdout
from emulator.cli.options import DeviceFlags, TraceFlags, Traffic, read_topology, taking
from emulator.cli.sweep_display import PointsDisplay
from emulator.cli.trace import tell_traces
from emulator.core.break_even import Tried
from emulator.core.errors import ConfigError
from emulator.core.grid import Axes, PointResult, outcome_row
from emulator.core.quantities import BitsPerSecond
from emulator.core.upkeep import COST_BASIS
from emulator.lab import docker, unprivileged
from emulator.lab.catalog_files import load_catalog
from emulator.lab.devices import check_device
from emulator.lab.experiment import Conditions
from emulator.lab.run_folder import pretty, results_folder
from emulator.lab.simulated import SIMULATE
from emulator.lab.sites import LauncherName, ShapingName
from emulator.lab.topology_files import load_traces
from emulator.report import break_even_table, sweep_table
from emulator.study import break_even as search
from emulator.study.break_even_live import confirm
from emulator.study.sweep import Sweep, plan_sweep, run_sweep
from emulator.study.sweep_folder import SweepFolder
from emulator.study.variants import parse_ratio

T = TypeVar("T", int, float)

TopologyFile = Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="Topology file (TOML).")]
Duration = Annotated[
    str | None, typer.Option("--duration", metavar="TIME", help="How long requests arrive; seconds, or such as 2min.")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="The first seed (default: the topology's).")]
Seeds = Annotated[int, typer.Option("--seeds", metavar="N", help="Run everything under N seeds, from the first on.")]
Workers = Annotated[
    int | None, typer.Option("--workers", metavar="N", help="Processes that simulate (default: one a core).")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(sweep)
    app.command("break-even")(break_even)


@taking(TraceFlags)
def sweep(
    replay: TraceFlags,
    topology: TopologyFile,
    *,
    kv_bandwidth: Annotated[
        str | None, typer.Option("--kv-bandwidth", metavar="RATE,…", help="KV bandwidths, such as 1Gbps,5Gbps.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="N,…", help="Total open-loop requests per second, such as 2,4,6.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="N,…", help="Prompt tokens of every open-loop request.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", metavar="N,…", help="Output tokens of every open-loop request.")
    ] = None,
    ratio: Annotated[
        str | None,
        typer.Option("--ratio", metavar="xPyD,…", help="Deployments by ratio, such as 1P3D,2P2D,4C (4 colocated)."),
    ] = None,
    deployment: Annotated[
        list[str] | None,
        typer.Option("--deployment", metavar="NAME", help="Only this deployment of TOPOLOGY; may be repeated."),
    ] = None,
    duration: Duration = None,
    seed: Seed = None,
    seeds: Seeds = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the results; an interrupted sweep goes on in its own."),
    ] = None,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Simulate every deployment at every point of a grid; print maps of where a split helps, write tidy tables."""
    traffic = Traffic(kv_bandwidth=None, rate=None, duration=duration, replay=replay, seed=seed)
    spec, catalog = read_topology(topology, traffic), load_catalog()
    traces = load_traces(spec, catalog)
    axes = Axes(
        kv_bandwidth_bps=_listed("--kv-bandwidth", kv_bandwidth, _bandwidth),
        rate_per_s=_listed("--rate", rate, _rate),
        prompt_tokens=_listed("--prompt", prompt, _tokens),
        output_tokens=_listed("--output", output, _tokens),
    )
    try:
        ratios = [parse_ratio(text) for text in ratio.split(",")] if ratio is not None else []
    except ConfigError as error:
        raise ConfigError(f"--ratio: {error}") from None
    _check_workers(workers)
    planned = plan_sweep(
        spec,
        catalog,
        traces,
        axes,
        deployments=deployment or (),
        ratios=ratios,
        seeds=seeds,
    )
    tell_traces(traces)
    with SweepFolder.open(out, spec.name, planned.identity()) as folder:
        results = _perform(planned, folder, workers)
    if json:
        _print_json(_document(planned, folder.path, results))
        return
    console = stdout()
    console.print(sweep_table.render(results, planned.axes, planned.topology.slo, width=console.width))


def _perform(planned: Sweep, folder: SweepFolder, workers: int | None) -> list[PointResult]:
    """Simulate what is missing, showing how far it is; an interruption says how to go on."""
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    for remark in planned.remarks:
        notes.print(remark)
    total = len(planned.axes.points())
    if folder.done:
        notes.print(f"{len(folder.done)} of {total} points are in {folder.path} already")
    try:
        with PointsDisplay(total, done=len(folder.done)) as display:
            for _ in run_sweep(planned, folder, workers=workers):
                display.advance()
    except KeyboardInterrupt:
        here = f"{len(folder.done)} of {total} points are in {folder.path}"
        notes.print(f"{here}; the same command with --out {folder.path} goes on")
        raise
    notes.print(f"Results: {folder.path}")
    return folder.results()


def _write_break_even(found: search.Found, folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(found.summary)
    (folder / "break-even.json").write_bytes(pretty(document))
    return document


def _document(planned: Sweep, folder: Path, results: list[PointResult]) -> dict[str, Any]:
    return {
        "topology": planned.topology.name,
        "folder": str(folder),
        "axes": msgspec.to_builtins(planned.axes),
        "seeds": list(planned.seeds),
        "deployments": [deployment.name for deployment in planned.topology.deployments],
        "runs": [row for result in results for row in result.runs],
        "outcomes": [outcome_row(result.point, outcome) for result in results for outcome in result.outcomes],
        "best": [
            {"point": result.point.index, **result.point.axes(), **msgspec.structs.asdict(best)}
            for result in results
            for best in result.best
        ],
        "remarks": list(planned.remarks),
        "cost_basis": COST_BASIS,
    }


@taking(TraceFlags, DeviceFlags)
def break_even(
    replay: TraceFlags,
    device: DeviceFlags,
    topology: TopologyFile,
    *,
    deployment: Annotated[
        list[str] | None,
        typer.Option("--deployment", metavar="NAME", help="Only this disaggregated deployment; may be repeated."),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option("--baseline", metavar="NAME", help="Of the topology's baselines only this; may be repeated."),
    ] = None,
    low: Annotated[str, typer.Option("--low", metavar="RATE", help="The lowest bandwidth to try.")] = "100Mbps",
    high: Annotated[str, typer.Option("--high", metavar="RATE", help="The highest bandwidth to try.")] = "400Gbps",
    tolerance: Annotated[
        str, typer.Option("--tolerance", metavar="P%", help="How close the two bandwidths of a change must be.")
    ] = "5%",
    chunk_budgets: Annotated[
        str | None,
        typer.Option("--chunk-budgets", metavar="N,…", help="max_num_batched_tokens to try for the best chunk budget."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", help="Total open-loop requests per second.")
    ] = None,
    duration: Duration = None,
    seed: Seed = None,
    seeds: Seeds = 3,
    live: Annotated[
        bool, typer.Option("--live", help="Confirm by live runs at half and twice the bandwidths found.")
    ] = False,
    launcher: Annotated[LauncherName, typer.Option("--launcher", help="Where live runs run; see compare.")] = "local",
    shaping: Annotated[
        ShapingName | None, typer.Option("--shaping", help="Who keeps the KV rate of live runs; see compare.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option("--scale", metavar="K|auto", help="Stretch the time of live runs; see compare.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the results (default: a new one in runs/).")
    ] = None,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Find the bandwidths between which a split turns from hurting to helping, against every baseline."""
    _check_live(live, launcher, shaping, scale, device)
    traffic = Traffic(kv_bandwidth=None, rate=rate, duration=duration, replay=replay, seed=seed, device=device)
    spec, catalog = read_topology(topology, traffic), load_catalog()
    if live:
        check_device(spec.device, launcher)
    traces = load_traces(spec, catalog)
    _check_workers(workers)
    budgets = _listed("--chunk-budgets", chunk_budgets, _tokens)
    options = search.SearchOptions(
        deployments=deployment or (),
        baselines=baseline or (),
        low_bps=_parsed("--low", low, _bandwidth),
        high_bps=_parsed("--high", high, _bandwidth),
        tolerance=_parsed("--tolerance", tolerance, _share),
        budgets=budgets or search.DEFAULT_BUDGETS,
        seeds=seeds,
        workers=workers,
    )
    planned = search.plan_search(spec, catalog, traces, options)
    tell_traces(traces)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    for remark in planned.remarks:
        notes.print(remark)

    def told(name: str, bandwidth_bps: float, against: Mapping[str, Tried]) -> None:
        found = ", ".join(f"{tried.outcome} against {baseline}" for baseline, tried in against.items())
        notes.print(f"{name} at {BitsPerSecond(bandwidth_bps)}: {found}")

    with results_folder(out, f"{spec.name}-break-even") as folder:
        found = search.find_break_even(planned, told)
        document = _write_break_even(found, folder)
        if live:
            # over a link that is not as asked a run is unfaithful and its verdict withheld; refusing it loses the rest
            how = Conditions(launcher=launcher, shaping=shaping, force=True)
            found = confirm(found, spec, catalog, traces, how, scale=scale, folder=folder, show=RunDisplay)
            document = _write_break_even(found, folder)
    notes.print(f"Results: {folder}")
    if json:
        _print_json(document)
    else:
        stdout().print(break_even_table.render(found.summary))


def _check_live(
    live: bool, launcher: LauncherName, shaping: ShapingName | None, scale: str | None, device: DeviceFlags
) -> None:
    """Refuse what does not go together, and make ready what a launcher needs."""
    if not live:
        for option, value in (("--shaping", shaping), ("--scale", scale)):
            if value is not None:
                raise ConfigError(f"{option} {value}: is for live runs; add --live, or leave it out")
        device.refuse("is for live runs; add --live, or leave it out")
        return
    if launcher == SIMULATE:
        raise ConfigError("--live --launcher simulate: a simulation confirms nothing; use local, netns or compose")
    if launcher == "netns":
        unprivileged.reexec_if_needed()
    if launcher == "compose":
        docker.compose_command()


# --- options --------------------------------------------------------------------------------------------------


def _listed(option: str, text: str | None, parse: Callable[[str], T]) -> tuple[T, ...]:
    """The values of an axis, ascending; none where the option was not given."""
    if text is None:
        return ()
    values = [_parsed(option, part.strip(), parse) for part in text.split(",")]
    if len(set(values)) != len(values):
        raise ConfigError(f"{option} {text}: the same value is given twice")
    return tuple(sorted(values))


def _parsed(option: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _bandwidth(text: str) -> float:
    return float(BitsPerSecond.parse(text))


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ConfigError(f"{text!r} is not a rate: write a number of requests per second above 0, such as 2.5")
    return rate


def _tokens(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 10_000_000):
        raise ConfigError(f"{text!r} is not a number of tokens: write a whole number from 1 to 10000000, such as 1000")
    return int(text)


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ConfigError(f"{text!r} is not a share: write it such as 5%") from None


def _check_workers(workers: int | None) -> None:
    if workers is not None and not 1 <= workers <= 1024:
        raise ConfigError(f"--workers {workers}: must be from 1 to 1024")


def _print_json(value: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
