"""Commands of a cluster without a launcher: `router`, `node`, `client`, for containers and for starting by hand.

All take the same options, from the environment too, and plan the same run from them. A member that is given the
finished run in a file (`--run`) was started by a launcher: it tells how it does in status lines on standard output.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import uvloop

from emulator.cli.display import RunDisplay, stdout
from emulator.cli.options import DeviceFlags, TraceFlags, Traffic, read_topology, taking
from emulator.cli.trace import tell_traces
from emulator.core.device_spec import DeviceName
from emulator.core.errors import ConfigError
from emulator.core.listen import Listen
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Topology
from emulator.core.traffic import MaxContext, TimeUnit, TraceFormat
from emulator.lab import compose as containers
from emulator.lab import experiment as lab
from emulator.lab import member as members
from emulator.lab.catalog_files import load_catalog
from emulator.lab.run_folder import pretty
from emulator.lab.scale import apply_scale
from emulator.lab.sites import ShapingName
from emulator.lab.topology_files import load_topology, load_traces
from emulator.live.control import CurveKeys
from emulator.live.process import tell as tell_launcher
from emulator.live.status import Failed, Ready, Status, Waiting
from emulator.report import table


def _option(name: str, *, help: str, metavar: str | None = None, hidden: bool = False) -> Any:  # noqa: A002
    """An option that the environment may set too: `--kv-bandwidth` is PDEMU_KV_BANDWIDTH."""
    variable = "PDEMU_" + name.removeprefix("--").replace("-", "_").upper()
    return typer.Option(name, envvar=variable, help=help, metavar=metavar, hidden=hidden, show_envvar=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Options that say which run it is, the same for all its members."""

    topology: Annotated[Path | None, _option("--topology", metavar="FILE", help="Topology file (TOML).")] = None
    deployment: Annotated[str, _option("--deployment", metavar="NAME", help="The deployment to run.")] = ""
    kv_bandwidth: Annotated[str | None, _option("--kv-bandwidth", metavar="RATE", help="One KV bandwidth.")] = None
    rate: Annotated[float | None, _option("--rate", metavar="N", help="Total open-loop requests per second.")] = None
    duration: Annotated[str | None, _option("--duration", metavar="TIME", help="How long requests arrive.")] = None
    trace: Annotated[Path | None, _option("--trace", metavar="FILE", help="Replay this trace.")] = None
    trace_format: Annotated[TraceFormat | None, _option("--trace-format", help="The trace's format.")] = None
    trace_time_unit: Annotated[TimeUnit | None, _option("--trace-time-unit", help="Unit of its times.")] = None
    trace_sort: Annotated[bool, _option("--trace-sort", help="Sort its rows by time.")] = False
    slice: Annotated[str | None, _option("--slice", metavar="START:END", help="Use this span of it.")] = None
    limit: Annotated[int | None, _option("--limit", metavar="N", help="Use at most N requests of it.")] = None
    max_context: Annotated[MaxContext | None, _option("--max-context", help="What is longer than the context.")] = None
    seed: Annotated[int | None, _option("--seed", metavar="N", help="Seed of all that is random.")] = None
    model: Annotated[str | None, _option("--model", metavar="NAME", help="A model of the catalog.")] = None
    scale: Annotated[float | None, _option("--scale", metavar="K", help="Stretch time K times.")] = None
    shaping: Annotated[ShapingName, _option("--shaping", help="Who keeps the KV rate.")] = "kernel"
    verify_kv: Annotated[bool, _option("--verify-kv", help="Check every KV frame by checksum.")] = False
    force: Annotated[bool, _option("--force", help="Run over links that are not as asked.")] = False
    device: Annotated[DeviceName | None, _option("--device", help="What computes the steps of all nodes.")] = None
    allow_shared_gpu: Annotated[bool, _option("--allow-shared-gpu", help="Judge nodes that share a GPU too.")] = False
    calibration: Annotated[Path | None, _option("--calibration", metavar="FILE", help="Plan steps by this.")] = None

    def read(self) -> Topology:
        """The topology with the options laid over it."""
        if self.topology is None or not self.deployment:
            raise ConfigError("--topology and --deployment must be given, or PDEMU_TOPOLOGY and PDEMU_DEPLOYMENT set")
        traffic = Traffic(
            kv_bandwidth=self.kv_bandwidth,
            rate=self.rate,
            duration=self.duration,
            replay=TraceFlags(**{field.name: getattr(self, field.name) for field in dataclasses.fields(TraceFlags)}),
            seed=self.seed,
            model=self.model,
            device=DeviceFlags(
                device=self.device, allow_shared_gpu=self.allow_shared_gpu, calibration=self.calibration
            ),
        )
        topology = read_topology(self.topology, traffic)
        return apply_scale(topology, None if self.scale is None else str(self.scale), load_catalog(), {}).topology

    def plan(self) -> RunSpec:
        """The run."""
        spec = self.read()
        catalog = load_catalog()
        traces = load_traces(spec, catalog)
        how = {"verify_kv": self.verify_kv, "force": self.force}
        return members.plan_member(spec, catalog, traces, self.deployment, **how)

    def environment(self) -> dict[str, str]:
        """What was given, as the environment of containers; files are theirs to name."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            f"PDEMU_{name.upper()}": str(int(value) if isinstance(value, bool) else value)
            for name, value in given.items()
            if value not in (None, False) and not isinstance(value, Path)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Planned):
    """Options of every member."""

    run: Annotated[Path | None, _option("--run", metavar="FILE", help="The finished run.", hidden=True)] = None
    secret: Annotated[str, _option("--secret", help="The run's secret; better set by the environment.")] = ""
    router_public_key: Annotated[str, _option("--router-public-key", help="See `pdemu keys`.")] = ""
    insecure: Annotated[
        bool, _option("--insecure", help="No keys beyond loopback: the control network is reached by nobody else.")
    ] = False
    user: Annotated[
        str | None,
        _option("--user", metavar="UID:GID", help="Become this user once the link is shaped, which then stays shaped."),
    ] = None

    def member(
        self, name: str, run: RunSpec, *, router_secret_key: str = "", metrics: str | None = None
    ) -> members.Member:
        """The process of this name."""
        return members.Member(
            run=run,
            access=members.Access(
                secret=self.secret,
                public_key=self.router_public_key,
                secret_key=router_secret_key,
                insecure=self.insecure,
            ),
            tell=tell_launcher if self.run is not None else _say_ready(name),
            identity=members.Identity.parse(self.user) if self.user else None,
            kernel_shaping=self.shaping == "kernel",
            metrics=Listen.parse_metrics(metrics, insecure=self.insecure) if metrics is not None else None,
        )

    def spec(self) -> RunSpec:
        """The run, from its file or planned here."""
        if self.run is None:
            return self.plan()
        try:
            return msgspec.json.decode(self.run.read_bytes(), type=RunSpec)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"--run {self.run}: cannot be used ({error})") from None

    @contextmanager
    def failures_told(self) -> Iterator[None]:
        """Within it, an error is told to the launcher too, if there is one."""
        try:
            yield
        except Exception as error:
            if self.run is not None:
                tell_launcher(Failed(type(error).__name__, str(error)))
            raise


def _say_ready(name: str) -> Callable[[Status], None]:
    def say(status: Status) -> None:
        if isinstance(status, Ready):
            typer.echo(f"{name}: ready{'; metrics at ' if status.metrics else ''}{status.metrics}", err=True)
        elif isinstance(status, Waiting):
            typer.echo(status.what, err=True)

    return say


# --- commands -----------------------------------------------------------------------------------------------------

Router = Annotated[str, _option("--router", metavar="HOST:PORT", help="Where the router listens.")]
Stay = Annotated[
    bool, _option("--stay", help="Do not end after the run, but when told to: a container that ends ends the others.")
]
Metrics = Annotated[
    str | None, _option("--metrics", metavar="ADDRESS:PORT", help="Where to serve Prometheus metrics of one's own.")
]


@taking(Joined)
def router(
    options: Joined,
    *,
    listen: Annotated[str, _option("--listen", metavar="ADDRESS:PORT", help="Where to listen.")] = "127.0.0.1:5555",
    router_secret_key: Annotated[str, _option("--router-secret-key", help="See `pdemu keys`.")] = "",
    metrics: Metrics = None,
    stay: Stay = False,
) -> None:
    """Be the router of a cluster whose members are started one by one."""
    members.reexec_for_memory()
    with options.failures_told():
        member = options.member("router", options.spec(), router_secret_key=router_secret_key, metrics=metrics)
        member.route(listen)
    if stay:
        members.stay()


@taking(Joined)
def node(
    options: Joined,
    *,
    name: Annotated[str, _option("--name", metavar="NAME", help="Which node, such as prefill-0.")],
    router: Router = "127.0.0.1:5555",
    kv_address: Annotated[
        str | None, _option("--kv-address", metavar="HOST", help="This node's address or name on the KV network.")
    ] = None,
    kv_network: Annotated[
        str | None, _option("--kv-network", metavar="SUBNET", help="The KV network, to find that address by.")
    ] = None,
    metrics: Metrics = None,
    gpu: Annotated[
        int | None,
        _option("--gpu", metavar="N", help="The CUDA device of this node, counted here."),
    ] = None,
    stay: Stay = False,
) -> None:
    """Be one node of a cluster; its link is shaped first, as the run asks."""
    members.reexec_for_memory()
    with options.failures_told():
        run = options.spec()
        names = [known.name for known in run.nodes]
        if name in names:
            member = options.member(name, members.on_gpu(run, name, gpu), metrics=metrics)
            member.serve(name, router, _kv_address(run, kv_address, kv_network))
        elif stay:
            typer.echo(f"{name}: no part of {run.deployment}, whose nodes are {', '.join(names)}", err=True)
        else:
            raise ConfigError(f"--name {name}: {run.deployment} has the nodes {', '.join(names)}")
    if stay:
        members.stay()


@taking(Joined)
def client(
    options: Joined,
    *,
    router: Router = "127.0.0.1:5555",
    out: Annotated[Path | None, _option("--out", metavar="DIR", help="Folder for the results, new or empty.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Drive the run of a cluster, judge it and print its table."""
    members.reexec_for_memory()
    with options.failures_told():
        if options.run is not None:
            _drive_for_launcher(options, router, out or Path())
        else:
            _drive(options, router, out, as_json=json)


@taking(Planned)
def compose(
    options: Planned,
    topology: Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="Topology file (TOML).")],
) -> None:
    """Print a compose file that runs one deployment of TOPOLOGY in containers."""
    run = options.plan()
    given = {"trace": options.trace, "calibration": options.calibration}
    if run.device.calibration is not None and options.calibration is None:
        named = load_topology(topology).device.calibration  # which may lie outside the folder of the topology
        given["calibration"] = None if named is None else Path(named)
    text = containers.render_for_hand(run, topology, options.environment(), given)
    typer.echo(text, nl=False)


def keys() -> None:
    """Print a new secret and key pair for a cluster whose control network others could reach, as shell variables."""
    pair, secret = CurveKeys.new(), members.new_secret()
    typer.echo(f"export PDEMU_SECRET='{secret}'\nexport PDEMU_ROUTER_PUBLIC_KEY='{pair.public}'")
    typer.echo(f"export PDEMU_ROUTER_SECRET_KEY='{pair.secret}'  # for the router alone")


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (router, node, client, compose, keys):
        app.command(command.__name__)(command)


def _kv_address(run: RunSpec, address: str | None, network: str | None) -> str:
    if run.link is None:
        return "127.0.0.1"
    if address is not None:
        return members.resolve(address, members.RESOLVE_S)
    if network is not None:
        return members.own_address(network)
    raise ConfigError("--kv-address or --kv-network must be given: the KV of this deployment crosses a network")


def _drive_for_launcher(options: Joined, router: str, results: Path) -> None:
    launcher = options.member("client", options.spec()).client(router)
    live = uvloop.run(launcher.launch())
    (results / "live.json").write_bytes(msgspec.json.encode(live))


def _drive(options: Joined, router: str, out: Path | None, *, as_json: bool) -> None:
    run = options.plan()
    spec = options.read()
    how = lab.Conditions(launcher="compose", shaping=options.shaping, verify_kv=options.verify_kv, force=options.force)
    catalog = load_catalog()
    traces = load_traces(spec, catalog)
    prepared = lab.prepare(spec, catalog, traces, how, deployments=[run.deployment], out=out)
    prepared = dataclasses.replace(prepared, launcher="members")
    tell_traces(traces, prepared)
    member = options.member("client", run)
    if member.identity is not None:
        member.identity.own(prepared.folder)
    launcher = member.client(router)
    with RunDisplay(prepared.runs) as display:
        results = uvloop.run(lab.perform(prepared, display.progress, display.result, lambda *_: launcher))
    summary = lab.conclude(prepared, results)
    typer.echo(f"Results: {prepared.folder}", err=True)
    if as_json:
        sys.stdout.write(pretty(summary).decode())
    else:
        stdout().print(table.render(summary, judged=False))
