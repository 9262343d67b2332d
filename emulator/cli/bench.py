"""`pdemu bench`: a load test of an OpenAI-compatible server, or of a cluster's router, in the words of vLLM's own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from emulator.cli.bench_options import BenchFlags, PlannedLoad, plan_traffic
from emulator.cli.bench_output import OutputFlags, default_name, save
from emulator.cli.bench_server import ServerFlags, driver
from emulator.cli.display import stdout
from emulator.cli.options import taking
from emulator.cli.progress import Display
from emulator.cli.trace import tell_traces
from emulator.core.bench.prompts import PromptFit
from emulator.core.bench.result import Asked, Observed, fold
from emulator.core.bench.target import ROUTER_BACKEND, RouterTarget, Target
from emulator.core.records import write_rows
from emulator.core.workload import PlannedRequest
from emulator.lab.run_folder import new_folder, pretty
from emulator.live.bench import LoadTest, Server, prepare, stopped_by_interrupt, tuned
from emulator.live.client import Progress
from emulator.report import bench_table

INTERRUPTED = 130
NOTHING_COMPLETED = 1


@dataclass(frozen=True, slots=True)
class Served:
    """What the server said of itself before the run."""

    model: str = ""
    scale_time: float | None = None
    prompt_fit: PromptFit = "exact"


@taking(ServerFlags, BenchFlags, OutputFlags)
def bench(
    server: ServerFlags,
    flags: BenchFlags,
    output: OutputFlags,
    bounds: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME:MS]...", help="Further bounds of --goodput.")
    ] = None,
) -> None:
    """Send requests to the server at URL; print latencies, throughput and goodput. Status 1: none completed."""
    pace, measures = flags.pace(), flags.measures(bounds or ())
    target = server.target(keep_text=output.save_detailed)
    date = time.strftime("%Y%m%d-%H%M%S")

    def asked(load: PlannedLoad, served: Served, num_prompts: int, metadata: dict[str, str]) -> Asked:
        head = _head(target, load, served, date=date, num_prompts=num_prompts, label=output.label) | metadata
        return Asked(head=head, pace=pace, measures=measures, max_concurrency=flags.max_concurrency)

    load = plan_traffic(flags, pace)
    known = fold(Observed((), (), 0.0), asked(load, Served(), 0, {}), detailed=True)
    metadata = output.parse_metadata(list(known))
    output.check()
    tell_traces(load.traces)
    folder = new_folder(output.out, "bench") if output.out is not None else None
    with tuned():
        observed, served = uvloop.run(_perform(target, load, flags, server, quiet=output.disable_tqdm))
    question = asked(load, served, flags.num_prompts or len(load.plan.open) or len(observed.exchanges), metadata)
    document = fold(observed, question)
    if output.json:
        typer.echo(pretty(document).decode(), nl=False)
    else:
        stdout().print(bench_table.render(document))
    if output.save_detailed:
        document = fold(observed, question, detailed=True)
    output.save(document, default_name(flags, output.label or _backend(target), served.model, date))
    if folder is not None:
        save(document, folder / "bench.json")
        (folder / "records.jsonl").write_bytes(write_rows(e.record() for e in observed.exchanges))
    _tell_failures(document)
    if observed.interrupted:
        raise typer.Exit(INTERRUPTED)
    if document["requests"] and not document["completed"]:
        raise typer.Exit(NOTHING_COMPLETED)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)


async def _perform(
    target: Target | RouterTarget, load: PlannedLoad, flags: BenchFlags, how: ServerFlags, *, quiet: bool
) -> tuple[Observed, Served]:
    """Reach the server, warm it up, and run the load."""
    async with driver(target, load.plan, load.seed) as server:
        await prepare(server, how.model, how.ready_check_timeout_sec)
        served = Served(server.model, server.scale_time, server.prompt_fit)
        if served.prompt_fit == "word_per_token":
            note = "the server does not count prompt tokens: prompts have one word for each token that is asked for"
            Console(stderr=True, highlight=False, soft_wrap=True).print(note)
        await _warm_up(server, load, flags)
        test = LoadTest(load.plan, server, max_concurrency=flags.max_concurrency, scale_time=server.scale_time)
        with _Display(len(load.plan.open), quiet=quiet) as display, stopped_by_interrupt(test):
            return await test.run(display.progress), served


async def _warm_up(server: Server, load: PlannedLoad, flags: BenchFlags) -> None:
    """Requests like the first one, as many at a time as may be."""
    first = load.plan.open[0] if load.plan.open else PlannedRequest("warmup", "warmup", 0.0, 128, 16)
    free = asyncio.Semaphore(flags.max_concurrency) if flags.max_concurrency else contextlib.nullcontext()
    clock = time.monotonic

    async def one(n: int) -> None:
        async with free:
            await server.warm_up(first, n, clock)

    await asyncio.gather(*(one(n) for n in range(flags.num_warmups)))


def _tell_failures(document: dict[str, Any]) -> None:
    """One line about requests that failed, whatever becomes of standard output."""
    if not document["failed"]:
        return
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in document["failed_by_reason"].items())
    none = "" if document["completed"] else "no request completed: "
    line = f"{none}{document['failed']:,} of {document['requests']:,} requests failed ({reasons})"
    Console(stderr=True, highlight=False, soft_wrap=True).print(line, markup=False)


class _Display(Display):
    """One line that says how many requests have ended."""

    def __init__(self, planned: int, *, quiet: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[state]}"))
        super().__init__(*columns, TimeElapsedColumn(), quiet=quiet)
        self._task = self._progress.add_task("bench", total=planned or None, state="starting")

    def progress(self, now: Progress) -> None:
        """The load test is under way."""
        self._progress.update(self._task, completed=now.ended, state=f"{now.ended}/{now.sent} requests ended")


def _backend(target: Target | RouterTarget) -> str:
    return target.backend if isinstance(target, Target) else ROUTER_BACKEND


def _head(
    target: Target | RouterTarget, load: PlannedLoad, served: Served, *, date: str, num_prompts: int, label: str | None
) -> dict[str, Any]:
    """What the result says of the run before its figures: who was asked for what."""
    if isinstance(target, Target):
        url, endpoint = target.base_url, target.endpoint
        prompts = "token_ids" if target.token_ids else "text"
    else:
        url, endpoint, prompts = target.endpoint, None, "counts"
    return {
        "date": date,
        "endpoint_type": _backend(target),
        "backend": _backend(target),
        "label": label,
        "model_id": served.model,
        "tokenizer_id": None,
        "base_url": url,
        "endpoint": endpoint,
        "num_prompts": num_prompts,
        "seed": load.seed,
        "request_id_prefix": target.request_id_prefix,
        "prompts": prompts,
        "prompt_fit": served.prompt_fit,
        "scale_time": served.scale_time,
        "traces": {stream: msgspec.to_builtins(trace.reading) for stream, trace in load.traces.items()},
    }
