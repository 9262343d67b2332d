"""`pdemu plan`: how to use a number of GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from emulator.cli.display import stdout
from emulator.cli.options import TraceFlags, Traffic, read_topology, taking
from emulator.cli.trace import tell_traces
from emulator.core.errors import ConfigError
from emulator.core.plan import Objective
from emulator.core.search import Goodput
from emulator.lab.catalog_files import load_catalog
from emulator.lab.run_folder import results_folder
from emulator.lab.topology_files import load_traces
from emulator.report import plan_table
from emulator.study.plan import perform, prepare
from emulator.study.plan_rounds import PlanOptions, Round


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)


@taking(TraceFlags)
def plan(
    replay: TraceFlags,
    topology: Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="Topology file (TOML).")],
    *,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", help="GPUs in all.")],
    kv_bandwidth: Annotated[
        str | None,
        typer.Option("--kv-bandwidth", metavar="RATE", help="KV bandwidth of each NIC (default: TOPOLOGY's highest)."),
    ] = None,
    gpu_types: Annotated[
        str | None,
        typer.Option(
            "--gpu-types", metavar="GPU,…", help="GPUs to choose from, also one for each pool: h100,a100-80g."
        ),
    ] = None,
    objective: Annotated[Objective, typer.Option("--objective", help="What to rank by.")] = "goodput",
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Runs of each rate near the best.")] = 3,
    duration: Annotated[
        str | None, typer.Option("--duration", metavar="TIME", help="How long requests arrive; longer is stricter.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="The first seed.")] = None,
    top: Annotated[int, typer.Option("--top", metavar="K", help="Rows of the ranking to print.")] = 10,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the results (default: a new one in runs/).")
    ] = None,
) -> None:
    """Rank colocated serving and every xPyD split of N GPUs by simulated goodput, and recommend one.

    Nodes are those of TOPOLOGY's pools (GPU, tp, limits), in every number; colocated ones batch whole prompts first, or
    with several chunk budgets. "Per dollar" is requests per dollar at the catalog's prices, "per kW" requests per
    second and kW of TDP.
    """
    if kv_bandwidth is not None and "," in kv_bandwidth:
        raise ConfigError(f"--kv-bandwidth {kv_bandwidth}: a plan is for one bandwidth; give one")
    if top < 1:
        raise ConfigError(f"--top {top}: must be at least 1")
    traffic = Traffic(kv_bandwidth=kv_bandwidth, rate=None, duration=duration, replay=replay, seed=seed)
    spec = read_topology(topology, traffic)
    options = PlanOptions(gpus=gpus, gpu_types=_types(gpu_types), objective=objective, seeds=seeds)
    catalog = load_catalog()
    traces = load_traces(spec, catalog)
    progress = Console(stderr=True, highlight=False)
    prepared = prepare(spec, catalog, traces, options)
    tell_traces(traces)
    progress.print(f"{len(prepared.fits)} deployments of {gpus} GPUs", soft_wrap=True)

    def tell(deployment: str, round_name: Round, found: Goodput) -> None:
        rate = "serves no rate that was tried" if found.rate_per_s is None else f"{found.rate_per_s:.3g} requests/s"
        progress.print(f"{round_name} {deployment}: {rate}", soft_wrap=True)

    with results_folder(out, f"{spec.name}-plan") as folder:
        made = perform(prepared, catalog, traces, tell)
        document = msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n"
        (folder / "plan.json").write_bytes(document)
    progress.print(f"Results: {folder}", soft_wrap=True)
    if json:
        typer.echo(document.decode(), nl=False)
    else:
        stdout().print(plan_table.render(made, top=top))


def _types(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ConfigError(f"--gpu-types {text}: a name is empty; separate names by single commas")
    if len({name.casefold() for name in names}) != len(names):
        raise ConfigError(f"--gpu-types {text}: the same GPU is given twice")
    return names
