"""`pdemu up`: an emulated cluster behind an OpenAI endpoint; `pdemu tokenizer`: how its clients count tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from emulator.cli.display import stdout
from emulator.cli.options import DeviceFlags, TraceFlags, Traffic, read_topology, taking
from emulator.core.deploy import context_tokens
from emulator.core.errors import ConfigError, RunError
from emulator.core.listen import Listen
from emulator.core.record_limits import RecordLimits
from emulator.core.tokenizer_files import tokenizer_files
from emulator.lab import serve as serving
from emulator.lab import unprivileged
from emulator.lab.catalog_files import load_catalog
from emulator.lab.devices import check_device, sharing_remarks
from emulator.lab.experiment import Conditions
from emulator.lab.launch import Addresses, Service
from emulator.lab.run_folder import pretty
from emulator.lab.scale import apply_scale
from emulator.lab.sites import ShapingName
from emulator.lab.topology_files import load_topology
from emulator.live.status import HttpService
from emulator.report import table

ANY_CONTEXT_TOKENS = 131_072

Http = Annotated[str, typer.Option("--http", metavar="ADDRESS:PORT", help="Where to serve HTTP; port 0: any free one.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="PDEMU_API_KEY",
        help="Clients must show this key; needed beyond loopback. Better set by the environment.",
    ),
]


Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="ADDRESS:PORT",
        help="Have the router serve Prometheus metrics there and each node on one of the ports after it; 0: free ones.",
    ),
]
MetricsTargets = Annotated[
    Path | None,
    typer.Option(
        "--metrics-targets", metavar="FILE", help="Write those addresses as a target list for Prometheus (file_sd)."
    ),
]
Records = Annotated[
    int | None,
    typer.Option(
        "--records",
        metavar="N",
        min=1,
        help="Record the first N requests, however long they are (default: "
        f"{RecordLimits().requests:,}, and at most {RecordLimits().tokens:,} output tokens).",
    ),
]


@taking(DeviceFlags)
def up(
    device: DeviceFlags,
    topology: Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="Topology file (TOML).")],
    *,
    deployment: Annotated[
        str | None,
        typer.Option("--deployment", metavar="NAME", help="Which to serve by (default: the first)."),
    ] = None,
    http: Http = "127.0.0.1:8000",
    api_key: ApiKey = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve beyond loopback without a key.")] = False,
    secret: Annotated[
        str,
        typer.Option(
            "--secret",
            metavar="SECRET",
            envvar="PDEMU_SECRET",
            help="Clients that know it may join the control network, such as `pdemu bench --url tcp://…`. Better set "
            "by the environment.",
            show_default=False,
        ),
    ] = "",
    metrics: Metrics = None,
    metrics_targets: MetricsTargets = None,
    records: Records = None,
    kv_bandwidth: Annotated[
        str | None, typer.Option("--kv-bandwidth", metavar="RATE", help="The KV bandwidth, such as 5Gbps.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="A model of the catalog.")] = None,
    scale: Annotated[float | None, typer.Option("--scale", metavar="K", help="Stretch time K times.")] = None,
    launcher: Annotated[
        Literal["local", "netns"],
        typer.Option("--launcher", help="local: processes on loopback; netns: a network namespace for each (as root)."),
    ] = "local",
    shaping: Annotated[ShapingName | None, typer.Option("--shaping", help="Who keeps the KV rate.")] = None,
    verify_kv: Annotated[bool, typer.Option("--verify-kv", help="Check every KV frame by checksum.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Serve over KV links that are not as asked.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for the results.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout in the end.")] = False,
) -> None:
    """Serve one deployment of TOPOLOGY as an OpenAI endpoint until Ctrl-C; then print what came of it."""
    limits = RecordLimits() if records is None else RecordLimits(requests=records, tokens=None)
    service = _service(http, api_key, insecure=insecure)
    if launcher == "netns" and unprivileged.missing_capabilities():
        raise ConfigError(
            "--launcher netns: a user's own namespaces are cut off from this machine's network, so nobody would reach "
            "the endpoint; run as root, or use --launcher local"
        )
    traffic = Traffic(
        kv_bandwidth=kv_bandwidth,
        rate=None,
        duration=None,
        replay=TraceFlags(),
        seed=None,
        model=model,
        device=device,
    )
    catalog = load_catalog()
    spec = apply_scale(read_topology(topology, traffic), None if scale is None else str(scale), catalog, {}).topology
    check_device(spec.device, launcher)
    how = Conditions(launcher=launcher, shaping=shaping, verify_kv=verify_kv, force=force)
    metrics_listen = _metrics(metrics, metrics_targets, insecure=insecure)
    which = deployment or spec.deployments[0].name
    prepared = serving.prepare(spec, catalog, how, deployment=which, out=out, metrics=metrics_listen)
    told = Console(stderr=True, highlight=False, soft_wrap=True)
    run = prepared.runs[0]
    for remark in sharing_remarks(prepared.runs, launcher):
        told.print(remark)

    def on_ready(ready: Addresses) -> None:
        if metrics_targets is not None:
            _write_targets(metrics_targets, ready.metrics)
        for name, metrics_url in ready.metrics.items():
            told.print(f"metrics of {name}: {metrics_url}")
        beside = f", and at {ready.router} to those who know PDEMU_SECRET" if secret and launcher == "local" else ""
        told.print(f"{run.label} serves {run.model} at {ready.http}/v1{beside}; Ctrl-C ends it")

    downs: list[str] = []
    served = Service(
        http=service,
        stop=asyncio.Event(),
        on_ready=on_ready,
        on_news=told.print,
        on_down=downs.append,
        metrics=metrics_listen,
        secret=secret,
        record=limits,
    )
    summary = serving.serve(prepared, served)
    told.print(f"Results: {prepared.folder}")
    if json:
        typer.echo(pretty(summary).decode(), nl=False)
    else:
        console = stdout()
        console.print(table.render(summary, judged=False, width=console.width))
    if downs:
        raise RunError(downs[0])


def tokenizer(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to, new or empty.")],
    *,
    topology: Annotated[
        Path | None, typer.Option("--topology", metavar="FILE", help="Take the model's context from this topology.")
    ] = None,
) -> None:
    """Write the endpoint's tokenizer in Hugging Face's form to DIR, so that clients count tokens as it does."""
    context = ANY_CONTEXT_TOKENS if topology is None else context_tokens(load_topology(topology), load_catalog())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"DIR {folder}: the folder is not empty; give a new one")
        for name, data in tokenizer_files(context).items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"DIR {folder}: cannot be written to ({error.strerror}); give a folder that can") from None
    typer.echo(f"{folder}: {', '.join(tokenizer_files(context))}", err=True)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command()(up)
    app.command()(tokenizer)


def _service(listen: str, api_key: str | None, *, insecure: bool) -> HttpService:
    where = Listen.parse(listen, "--http")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise ConfigError("--api-key: must be printable ASCII, without spaces at its ends")
    if not where.loopback and api_key is None and not insecure:
        raise ConfigError(
            f"--http {listen}: beyond loopback others could use it; give --api-key, or --insecure on a network that "
            "nobody else reaches"
        )
    return HttpService(host=where.host, port=where.port, api_key=api_key or "")


def _metrics(listen: str | None, targets: Path | None, *, insecure: bool) -> Listen | None:
    if listen is None:
        if targets is not None:
            raise ConfigError(f"--metrics-targets {targets}: nobody serves metrics of its own; give --metrics too")
        return None
    where = Listen.parse_metrics(listen, insecure=insecure)
    if targets is not None and not targets.parent.is_dir():
        raise ConfigError(f"--metrics-targets {targets}: there is no folder {targets.parent}")
    return where


def _write_targets(file: Path, urls: Mapping[str, str]) -> None:
    try:
        file.write_bytes(serving.targets_file(urls))
    except OSError as error:
        raise ConfigError(f"--metrics-targets {file}: cannot be written to ({error.strerror})") from None
