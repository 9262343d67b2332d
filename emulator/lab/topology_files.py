"""Reading topology and trace files: the thin I/O in front of the strict parsers of the core."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from emulator.core import specs, strict
from emulator.core.errors import ConfigError
from emulator.core.trace import Trace, parse_trace


def load_topology(path: Path) -> specs.Topology:
    """Read a topology file; raises ConfigError naming the file and what is wrong in it."""
    text = _read(path, "topology")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not a topology: it is nested far too deeply") from None
    topology = strict.convert(data, specs.Topology, str(path))
    return _anchored(topology, path.parent)


def load_traces(workload: specs.Workload) -> dict[str, Trace]:
    """Every trace that the workload's streams name, by file; raises ConfigError for one that cannot be used."""
    files = {s.arrivals.file for s in workload.streams if isinstance(s.arrivals, specs.Trace)}
    return {file: parse_trace(_read(Path(file), "trace"), file) for file in sorted(files)}


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"{what} {path}: cannot be read ({error.strerror or error}); give the path of a file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path}: is not a text file in UTF-8") from None


def _anchored(topology: specs.Topology, folder: Path) -> specs.Topology:
    """Trace files in a topology are relative to the topology's own folder."""
    streams = tuple(
        msgspec.structs.replace(
            stream, arrivals=msgspec.structs.replace(stream.arrivals, file=str(folder / stream.arrivals.file))
        )
        if isinstance(stream.arrivals, specs.Trace)
        else stream
        for stream in topology.workload.streams
    )
    return msgspec.structs.replace(topology, workload=msgspec.structs.replace(topology.workload, streams=streams))
