"""Reading topology and trace files: the thin I/O in front of the strict parsers of the core."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from emulator.core import specs, strict, traffic
from emulator.core.deploy import context_tokens
from emulator.core.errors import ConfigError
from emulator.core.expectation import check_metrics
from emulator.core.hardware import Catalog
from emulator.core.layered import layered
from emulator.core.trace import Trace
from emulator.core.trace_selection import read_trace

EXTENDS = "extends"


def load_topology(path: Path) -> specs.Topology:
    """Read a topology file with what it extends; raises ConfigError naming the file and what is wrong in it."""
    topology = strict.convert(_layers(path, ()), specs.Topology, str(path))
    check_metrics(topology, str(path))
    return topology


def load_traces(topology: specs.Topology, catalog: Catalog) -> dict[str, Trace]:
    """The trace of every stream that replays one, by stream; raises ConfigError for one that cannot be used."""
    return {
        stream.name: load_trace(Path(stream.arrivals.file), stream.arrivals, context_tokens(topology, catalog))
        for stream in topology.workload.streams
        if isinstance(stream.arrivals, traffic.Trace)
    }


def load_trace(path: Path, options: traffic.TraceOptions, context: int | None = None) -> Trace:
    """What the options ask for of a trace file; see `read_trace`."""
    return read_trace(_read(path, "trace"), str(path), options, context)


def _layers(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """A file's own keys over those of the files that it extends, whose names are relative to its own folder."""
    resolved = path.resolve()
    if resolved in above:
        raise ConfigError(f"{path}: {EXTENDS}: the files extend each other in a circle; take one of them out")
    data = _parse(path)
    bases = data.pop(EXTENDS, [])
    names = [bases] if isinstance(bases, str) else bases
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f'{path}: {EXTENDS} = {bases!r}: give the name of a topology file, or a list: ["base.toml"]')
    _anchor(data, path.parent)
    return layered([*(_layers(path.parent / name, (*above, resolved)) for name in names), data])


def _parse(path: Path) -> dict[str, Any]:
    text = _read(path, "topology")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not a topology: it is nested far too deeply") from None


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"{what} {path}: cannot be read ({error.strerror or error}); give the path of a file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path}: is not a text file in UTF-8") from None


def _anchor(data: dict[str, Any], folder: Path) -> None:
    """Traces and calibrations in a topology are relative to the folder of the file that names them."""
    workload = data.get("workload")
    streams = workload.get("streams") if isinstance(workload, dict) else None
    for stream in streams if isinstance(streams, list) else ():
        arrivals = stream.get("arrivals") if isinstance(stream, dict) else None
        if isinstance(arrivals, dict) and isinstance(arrivals.get("file"), str):
            arrivals["file"] = str(folder / arrivals["file"])
    device = data.get("device")
    if isinstance(device, dict) and isinstance(device.get("calibration"), str):
        device["calibration"] = str(folder / device["calibration"])
