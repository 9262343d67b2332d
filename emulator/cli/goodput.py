"""`pdemu goodput`: the highest request rate, or with `--slo-scale` the tightest SLO, that a topology holds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from emulator.cli.display import RunDisplay, stdout
from emulator.cli.goodput_display import SearchDisplay
from emulator.cli.options import DeviceFlags, TraceFlags, Traffic, read_topology, taking
from emulator.cli.trace import tell_traces
from emulator.core.compare_summary import stated_first_token
from emulator.core.errors import CapacityError, ConfigError
from emulator.core.hardware import Catalog
from emulator.core.search_summary import LivePoint, SearchSummary, goodput_advantages, slo_advantages
from emulator.core.specs import Topology
from emulator.core.trace import Trace
from emulator.core.trace_summary import summarize_trace
from emulator.lab import docker, unprivileged
from emulator.lab import experiment as lab
from emulator.lab.catalog_files import load_catalog
from emulator.lab.devices import check_device
from emulator.lab.run_folder import results_folder
from emulator.lab.sites import LauncherName
from emulator.lab.topology_files import load_traces
from emulator.report import search_table
from emulator.study import final_points, slo_scale
from emulator.study.goodput import perform
from emulator.study.rated_runs import Candidate, SearchOptions, candidates, rated_runs

DEFAULTS = SearchOptions()

TopologyFile = Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="Topology file (TOML).")]
Deployments = Annotated[
    list[str] | None, typer.Option("--deployment", metavar="NAME", help="Search this one alone; may be repeated.")
]
Bandwidths = Annotated[
    str | None, typer.Option("--kv-bandwidth", metavar="RATE,…", help="KV bandwidths, such as 1Gbps,5Gbps.")
]
Seeds = Annotated[int, typer.Option("--seeds", metavar="N", help="Runs at each rate.")]
Low = Annotated[
    float | None, typer.Option("--low", metavar="R", help="Lowest rate to try (default: 20 requests a run).")
]
High = Annotated[
    float | None, typer.Option("--high", metavar="R", help="Highest rate to try (default: all that can be sent).")
]
Tolerance = Annotated[
    str, typer.Option("--tolerance", metavar="P%", help="How far apart passing and failing rate may end.")
]
Tightest = Annotated[
    bool, typer.Option("--slo-scale", help="The tightest multiple of the SLO that holds at a fixed rate instead.")
]
Rate = Annotated[
    float | None, typer.Option("--rate", metavar="R", help="First rate to try; with --slo-scale the fixed one.")
]
Duration = Annotated[
    str | None, typer.Option("--duration", metavar="TIME", help="How long requests arrive; longer is stricter.")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="The first seed.")]
Live = Annotated[bool, typer.Option("--live", help="Run the points found live too, and show both attainments.")]
Launcher = Annotated[
    LauncherName | None, typer.Option("--launcher", help="For --live: local (default), netns or compose.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Folder for the results (default: a new one in runs/).")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(goodput)


@taking(TraceFlags, DeviceFlags)
def goodput(
    replay: TraceFlags,
    device: DeviceFlags,
    topology: TopologyFile,
    *,
    deployment: Deployments = None,
    kv_bandwidth: Bandwidths = None,
    seeds: Seeds = DEFAULTS.seeds,
    low: Low = None,
    high: High = None,
    tolerance: Tolerance = "2%",
    tightest: Tightest = False,
    rate: Rate = None,
    duration: Duration = None,
    seed: Seed = None,
    live: Live = False,
    launcher: Launcher = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Find the highest rate at which enough requests of TOPOLOGY meet the SLO, by simulation."""
    traffic = Traffic(kv_bandwidth=kv_bandwidth, rate=rate, duration=duration, replay=replay, seed=seed, device=device)
    options = SearchOptions(seeds=seeds, low=low, high=high, tolerance=parse_share(tolerance))
    how = _conditions(live, launcher, device)
    if tightest and (low is not None or high is not None):
        raise ConfigError("--low and --high: --slo-scale has one rate; give it by --rate")
    asked = _Asked.read(topology, traffic, options)
    if how is not None:
        check_device(asked.topology.device, how.launcher)
    tell_traces(asked.traces)
    search = _slo_scale if tightest else _goodput
    found, folder = search(asked, candidates(asked.topology, deployment), out)
    _write(found, folder)
    if how is not None:
        found = msgspec.structs.replace(found, live=_live(asked, found, how, folder))
        _write(found, folder)
    Console(stderr=True).print(f"Results: {folder}", highlight=False, soft_wrap=True)
    if json:
        typer.echo(_document(found).decode(), nl=False)
    else:
        console = stdout()
        console.print(search_table.render(found, width=console.width))


def parse_share(text: str) -> float:
    """Read `2%` or `0.02`; raises ConfigError for anything else."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0.001 <= share <= 1:
        raise ConfigError(f"--tolerance {text}: must be a share from 0.1% to 100%, such as 2% or 0.02")
    return share


def _conditions(live: bool, launcher: LauncherName | None, device: DeviceFlags) -> lab.Conditions | None:
    """How the points found are run live; None when they are not."""
    if not live:
        if launcher is not None:
            raise ConfigError(f"--launcher {launcher}: the search is simulated; it goes with --live")
        device.refuse("the search is simulated; it goes with --live")
        return None
    if launcher == "simulate":
        raise ConfigError("--launcher simulate: --live needs a live one: local, netns or compose")
    if launcher == "netns":
        unprivileged.reexec_if_needed()
    if launcher == "compose":
        docker.compose_command()
    # over a link that is not as asked a run is unfaithful and withheld; refusing it would lose the other points
    return lab.Conditions(launcher=launcher or "local", force=True)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is searched, and how."""

    topology: Topology
    catalog: Catalog
    traces: dict[str, Trace]
    options: SearchOptions

    @classmethod
    def read(cls, path: Path, traffic: Traffic, options: SearchOptions) -> _Asked:
        topology, catalog = read_topology(path, traffic), load_catalog()
        return cls(topology, catalog, load_traces(topology, catalog), options)

    def folder(self, out: Path | None) -> AbstractContextManager[Path]:
        """A new folder for the results."""
        return results_folder(out, f"{self.topology.name}-goodput")

    def summary(self) -> SearchSummary:
        """A summary without results."""
        return SearchSummary(
            topology=self.topology.name,
            first_token=stated_first_token(d.first_token for d in self.topology.deployments if d.disaggregated),
            seed=self.topology.workload.seed,
            seeds=self.options.seeds,
            duration_s=float(self.topology.workload.duration),
            slo=self.topology.slo,
            tolerance=self.options.tolerance,
            traces=tuple(summarize_trace(trace) for trace in self.traces.values()),
        )


def _goodput(asked: _Asked, wanted: Sequence[Candidate], out: Path | None) -> tuple[SearchSummary, Path]:
    planned = [rated_runs(asked.topology, asked.catalog, asked.traces, each, asked.options) for each in wanted]
    with asked.folder(out) as folder, SearchDisplay([each.label for each in wanted]) as display:
        rows = perform(
            planned,
            on_trial=lambda each, trial: display.trial(each.label, trial),
            on_found=lambda each, row: display.found(each.label, row),
        )
    return msgspec.structs.replace(asked.summary(), goodput=tuple(rows), advantages=goodput_advantages(rows)), folder


def _slo_scale(asked: _Asked, wanted: Sequence[Candidate], out: Path | None) -> tuple[SearchSummary, Path]:
    seeds = asked.options.seeds
    planned = [slo_scale.fixed_runs(asked.topology, asked.catalog, asked.traces, each, seeds) for each in wanted]
    with asked.folder(out) as folder, SearchDisplay([each.label for each in wanted]) as display:
        rows = slo_scale.perform(planned, on_result=lambda each, row: display.scaled(each.label, row))
    return msgspec.structs.replace(asked.summary(), slo_scale=tuple(rows), advantages=slo_advantages(rows)), folder


def _live(asked: _Asked, found: SearchSummary, how: lab.Conditions, folder: Path) -> tuple[LivePoint, ...]:
    """Run the points found live, one after the other; one that does not fit this machine is withheld."""
    if found.goodput:
        points = final_points.goodput_points(asked.topology, asked.traces, found.goodput)
    else:
        points = final_points.slo_points(asked.topology, found.slo_scale)
    confirmed = []
    for point in points:
        try:
            experiment = final_points.prepare(point, asked.catalog, asked.traces, how, folder)
        except CapacityError as error:
            confirmed.append(final_points.refused(point, how.launcher, folder, error))
            continue
        Console(stderr=True).print(f"live: {point.label}", highlight=False, soft_wrap=True)
        with RunDisplay(experiment.runs) as display:
            confirmed.append(final_points.run(point, experiment, display.progress, display.result))
    return tuple(confirmed)


def _write(found: SearchSummary, folder: Path) -> None:
    (folder / "summary.json").write_bytes(_document(found))


def _document(found: SearchSummary) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
