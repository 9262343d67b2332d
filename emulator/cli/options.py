"""Options that change what a topology says, shared by every command that runs one."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from emulator.core import specs, traffic
from emulator.core.device_spec import DeviceName, DeviceSpec
from emulator.core.errors import ConfigError
from emulator.core.quantities import BitsPerSecond, Seconds, parse_span
from emulator.core.trace import check_rate
from emulator.core.workload import scale_rate
from emulator.lab.catalog_files import load_catalog
from emulator.lab.topology_files import load_topology, load_traces


def taking(*kinds: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command, whose first parameters are one of each of `kinds`, those dataclasses' fields as its options.

    A parameter of the command's own stands for the field of the same name.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(kinds) :]
        fields = {name: parameter for kind in kinds for name, parameter in _parameters(kind).items()}
        parameters = list({p.name: p for p in (*own, *fields.values(), *own)}.values())

        def run(**given: Any) -> None:
            made = [kind(**{name: given[name] for name in _parameters(kind)}) for kind in kinds]
            command(*made, **{p.name: given[p.name] for p in own})

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameters(kind: type[Any]) -> dict[str, inspect.Parameter]:
    """A dataclass's fields as parameters of a command; one without a default has to be given."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        f.name: inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in dataclasses.fields(kind)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlags:
    """Options of a trace: which file, how it is read, and which of its requests are used; as typed."""

    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Replay this trace instead of the topology's streams."),
    ] = None
    trace_format: Annotated[
        traffic.TraceFormat | None, typer.Option("--trace-format", help="The trace's format (default: as it shows).")
    ] = None
    trace_time_unit: Annotated[
        traffic.TimeUnit | None, typer.Option("--trace-time-unit", help="Unit of its times (default: the format's).")
    ] = None
    trace_sort: Annotated[
        bool, typer.Option("--trace-sort", help="Sort its rows by time, where they are not in order.")
    ] = False
    slice: Annotated[
        str | None,
        typer.Option(
            "--slice", metavar="START:END", help="Use this span of the trace, such as 10min:20min, 600: or :60."
        ),
    ] = None
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", help="Use at most the first N requests of the trace.")
    ] = None
    max_context: Annotated[
        traffic.MaxContext | None,
        typer.Option("--max-context", help="Requests longer than the model's context: let them fail, or change that."),
    ] = None

    def given(self) -> dict[str, Any]:
        """What was given, by the keys that a topology has for it."""
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit {self.limit}: must be at least 1")
        if self.slice is not None:
            try:
                parse_span(self.slice)
            except ConfigError as error:
                raise ConfigError(f"--slice: {error}") from None
        values = {
            "format": self.trace_format,
            "time_unit": self.trace_time_unit,
            "sort": self.trace_sort or None,
            "slice": self.slice,
            "limit": self.limit,
            "max_context": self.max_context,
        }
        return {key: value for key, value in values.items() if value is not None}

    def applied(self, workload: traffic.Workload, where: Path) -> traffic.Workload:
        """The workload with --trace in the place of its streams, and with the other options laid over its traces."""
        given, streams = self.given(), workload.streams
        if self.trace is not None:
            streams = (traffic.Stream(name="trace", arrivals=traffic.Trace(file=str(self.trace))),)
        if not given:
            return msgspec.structs.replace(workload, streams=streams)
        if not any(isinstance(stream.arrivals, traffic.Trace) for stream in streams):
            raise ConfigError(
                f"{_FLAGS[next(iter(given))]}: no stream of {where} replays a trace; give one by --trace FILE"
            )
        streams = tuple(
            msgspec.structs.replace(stream, arrivals=msgspec.structs.replace(stream.arrivals, **given))
            if isinstance(stream.arrivals, traffic.Trace)
            else stream
            for stream in streams
        )
        return msgspec.structs.replace(workload, streams=streams)


_FLAGS = {
    "format": "--trace-format",
    "time_unit": "--trace-time-unit",
    "sort": "--trace-sort",
    "slice": "--slice",
    "limit": "--limit",
    "max_context": "--max-context",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFlags:
    """Options of the device that computes the steps of live runs; as typed."""

    device: Annotated[
        DeviceName | None,
        typer.Option(
            "--device",
            help="What computes steps: virtual keeps their modelled time, numpy and cuda compute.",
        ),
    ] = None
    allow_shared_gpu: Annotated[
        bool,
        typer.Option("--allow-shared-gpu", help="Judge runs whose nodes share a GPU too, marked SHARED GPU."),
    ] = False
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="Plan steps by this file of `pdemu calibrate`, instead of measuring at each start.",
        ),
    ] = None

    def applied(self, device: DeviceSpec) -> DeviceSpec:
        """A topology's device with these laid over it."""
        device = device.of_kind(self.device or device.kind)
        if device.kind == "virtual" and self.allow_shared_gpu:
            raise ConfigError("--allow-shared-gpu: virtual devices share nothing; leave it out, or add --device cuda")
        if device.kind == "virtual" and self.calibration is not None:
            raise ConfigError(
                f"--calibration {self.calibration}: virtual devices compute nothing; leave it out, or add --device cuda"
            )
        if self.allow_shared_gpu:
            device = msgspec.structs.replace(device, allow_shared_gpu=True)
        if self.calibration is not None:
            device = msgspec.structs.replace(device, calibration=str(self.calibration))
        return device

    def refuse(self, why: str) -> None:
        """Raise ConfigError where nothing is computed and a device is asked for."""
        if self.device not in (None, "virtual"):
            raise ConfigError(f"--device {self.device}: {why}")
        if self.allow_shared_gpu:
            raise ConfigError(f"--allow-shared-gpu: {why}")
        if self.calibration is not None:
            raise ConfigError(f"--calibration {self.calibration}: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Options that change what a topology says; as typed."""

    kv_bandwidth: str | None
    rate: float | None
    duration: str | None
    replay: TraceFlags
    seed: int | None
    model: str | None = None
    device: DeviceFlags = DeviceFlags()


def read_topology(path: Path, traffic: Traffic) -> specs.Topology:
    """The topology of a file with the options laid over it."""
    topology = load_topology(path)
    workload = topology.workload
    changes: dict[str, object] = {}
    if traffic.duration is not None:
        changes["duration"] = _seconds(traffic.duration)
    if traffic.seed is not None:
        if traffic.seed < 0:
            raise ConfigError(f"--seed {traffic.seed}: must be 0 or more")
        changes["seed"] = traffic.seed
    workload = traffic.replay.applied(msgspec.structs.replace(workload, **changes), path)
    device = traffic.device.applied(topology.device)
    model = traffic.model or topology.model
    topology = msgspec.structs.replace(topology, model=model, workload=workload, device=device)
    if traffic.rate is not None:
        check_rate(traffic.rate, f"--rate {traffic.rate:g}")
        workload = scale_rate(workload, traffic.rate, load_traces(topology, load_catalog()))
    network = topology.kv_network
    if traffic.kv_bandwidth is not None:
        if network is None:
            raise ConfigError(f"--kv-bandwidth: {path} has no [kv_network], so no KV crosses a network in it")
        network = msgspec.structs.replace(network, bandwidth=_bandwidths(traffic.kv_bandwidth))
    return msgspec.structs.replace(topology, workload=workload, kv_network=network)


def _bandwidths(text: str) -> tuple[BitsPerSecond, ...]:
    try:
        rates = tuple(BitsPerSecond.parse(part) for part in text.split(","))
    except ConfigError as error:
        raise ConfigError(f"--kv-bandwidth: {error}") from None
    if len(set(rates)) != len(rates):
        raise ConfigError(f"--kv-bandwidth {text}: the same bandwidth is given twice")
    return rates


def _seconds(text: str) -> Seconds:
    try:
        seconds = Seconds(text) if text.replace(".", "", 1).isdecimal() else Seconds.parse(text)
    except ConfigError as error:
        raise ConfigError(f"--duration: {error}") from None
    if not seconds > 0:
        raise ConfigError(f"--duration {text}: must be above 0 s")
    return seconds
