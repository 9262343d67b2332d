"""`pdemu bench`: a load test of an OpenAI-compatible server, in the words of `vllm bench serve`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from emulator.cli.bench_options import BenchFlags, PlannedLoad, plan_traffic
from emulator.cli.display import stdout
from emulator.cli.options import taking
from emulator.cli.progress import Display
from emulator.cli.trace import tell_traces
from emulator.core.bench.result import Asked, Observed, fold
from emulator.core.bench.target import Target, base_url
from emulator.core.errors import ConfigError
from emulator.core.records import write_rows
from emulator.core.workload import PlannedRequest
from emulator.lab.run_folder import new_folder, pretty
from emulator.live.bench import LoadTest, stopped_by_interrupt, tuned
from emulator.live.client import Progress
from emulator.report import bench_table

if TYPE_CHECKING:
    from emulator.live.http_client import OpenAiClient

INTERRUPTED = 130


@taking(BenchFlags)
def bench(
    flags: BenchFlags,
    bounds: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME:MS]...", help="Further bounds of --goodput.")
    ] = None,
    *,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="The server, such as http://127.0.0.1:8000.")],
    endpoint: Annotated[
        str, typer.Option("--endpoint", metavar="PATH", help="/v1/completions or /v1/chat/completions.")
    ] = "/v1/completions",
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Model to ask for (default: the server's first).")
    ] = None,
    prompt_token_ids: Annotated[
        bool,
        typer.Option("--prompt-token-ids", help="Send prompts as token ids: exact lengths, where a server takes them."),
    ] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Ask for outputs of the full length.")
    ] = True,
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="KEY", envvar="OPENAI_API_KEY", help="Key of the server.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="A request fails that has not ended by then.")
    ] = 6 * 3600.0,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the result as JSON.")] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With a value for every request, and what was generated.")
    ] = False,
    result_dir: Annotated[Path | None, typer.Option("--result-dir", metavar="DIR", help="Where to write it.")] = None,
    result_filename: Annotated[
        str | None, typer.Option("--result-filename", metavar="NAME", help="Its name (default: by rate, model, time).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for bench.json and records.jsonl.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")
    ] = False,
) -> None:
    """Send requests to the OpenAI-compatible server at URL; print latencies, throughput and goodput."""
    pace, measures = flags.pace(), flags.measures(bounds or ())
    if not timeout > 0:
        raise ConfigError(f"--timeout {timeout:g}: must be above 0 s")
    target = Target(
        base_url=base_url(url, endpoint),
        endpoint=endpoint,
        api_key=api_key,
        timeout_s=timeout,
        ignore_eos=ignore_eos,
        token_ids=prompt_token_ids,
        keep_text=save_detailed,
    )
    if prompt_token_ids and target.api == "chat":
        raise ConfigError("--prompt-token-ids: a chat takes text; leave it out, or use --endpoint /v1/completions")
    load = plan_traffic(flags, pace)
    tell_traces(load.traces)
    folder = new_folder(out, "bench") if out is not None else None
    if result_dir is not None:
        result_dir.mkdir(parents=True, exist_ok=True)
    with tuned():
        observed, served_model = uvloop.run(_perform(target, load, flags, model))
    date = time.strftime("%Y%m%d-%H%M%S")
    head = _head(target, load, served_model, date, flags.num_prompts or len(load.plan.open) or len(observed.exchanges))
    asked = Asked(head=head, pace=pace, measures=measures, max_concurrency=flags.max_concurrency)
    document = fold(observed, asked)
    if json:
        typer.echo(pretty(document).decode(), nl=False)
    else:
        stdout().print(bench_table.render(document))
    if save_detailed:
        document = fold(observed, asked, detailed=True)
    if save_result or save_detailed:
        _save(document, (result_dir or Path()) / (result_filename or _filename(flags, target, served_model, date)))
    if folder is not None:
        _save(document, folder / "bench.json")
        (folder / "records.jsonl").write_bytes(write_rows(e.record() for e in observed.exchanges))
    if observed.interrupted:
        raise typer.Exit(INTERRUPTED)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)


async def _perform(target: Target, load: PlannedLoad, flags: BenchFlags, model: str | None) -> tuple[Observed, str]:
    """Reach the server, warm it up, and run the load."""
    from emulator.live.http_client import OpenAiClient  # noqa: PLC0415 - slow to import, and needed by this command alone

    async with OpenAiClient(target, load.seed) as client:
        await client.prepare(model)
        _tell_prompts(client, target)
        await _warm_up(client, load, flags)
        test = LoadTest(load.plan, client, max_concurrency=flags.max_concurrency)
        with _Display(len(load.plan.open)) as display, stopped_by_interrupt(test):
            return await test.run(display.progress), client.model


def _tell_prompts(client: OpenAiClient, target: Target) -> None:
    if not target.token_ids and client.calibration is None:
        note = "the server does not count prompt tokens: prompts have one word for each token that is asked for"
        Console(stderr=True, highlight=False, soft_wrap=True).print(note)


async def _warm_up(client: OpenAiClient, load: PlannedLoad, flags: BenchFlags) -> None:
    """Requests like the first one, as many at a time as may be."""
    first = load.plan.open[0] if load.plan.open else PlannedRequest("warmup", "warmup", 0.0, 128, 16)
    free = asyncio.Semaphore(flags.max_concurrency) if flags.max_concurrency else contextlib.nullcontext()
    clock = time.monotonic

    async def one(n: int) -> None:
        async with free:
            await client.warm_up(first, n, clock)

    await asyncio.gather(*(one(n) for n in range(flags.num_warmups)))


class _Display(Display):
    """One line that says how many requests have ended."""

    def __init__(self, planned: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[state]}"))
        super().__init__(*columns, TimeElapsedColumn())
        self._task = self._progress.add_task("bench", total=planned or None, state="starting")

    def progress(self, now: Progress) -> None:
        """The load test is under way."""
        self._progress.update(self._task, completed=now.ended, state=f"{now.ended}/{now.sent} requests ended")


# --- what is written ----------------------------------------------------------------------------------------------


def _head(target: Target, load: PlannedLoad, model: str, date: str, num_prompts: int) -> dict[str, Any]:
    return {
        "date": date,
        "endpoint_type": target.backend,
        "backend": target.backend,
        "label": None,
        "model_id": model,
        "tokenizer_id": None,
        "base_url": target.base_url,
        "endpoint": target.endpoint,
        "num_prompts": num_prompts,
        "seed": load.seed,
        "prompts": "token_ids" if target.token_ids else "text",
        "traces": {stream: msgspec.to_builtins(trace.reading) for stream, trace in load.traces.items()},
    }


def _filename(flags: BenchFlags, target: Target, model: str, date: str) -> str:
    """As vLLM names it."""
    rate = f"{flags.request_rate:g}qps"
    if flags.ramp_up_strategy is not None:
        rate = f"ramp-up-{flags.ramp_up_strategy}-{flags.ramp_up_start_rps:g}qps-{flags.ramp_up_end_rps:g}qps"
    limit = f"-concurrency{flags.max_concurrency}" if flags.max_concurrency is not None else ""
    return f"{target.backend}-{rate}{limit}-{model.rsplit('/', maxsplit=1)[-1]}-{date}.json"


def _save(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pretty(document))
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"Result: {path}")
