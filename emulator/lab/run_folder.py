"""A run's folder: everything from which its numbers can be made again, later too.

manifest.json   topology, deployment, seed, versions, host, shaping, scale, fidelity, state
records.jsonl   one request a line          steps.jsonl      device steps, those alike in one line
transfers.jsonl one KV transfer a line      memory.jsonl     KV memory of each node over time
summary.json    what it all comes to        logs/            what each process wrote
"""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from emulator import __version__
from emulator.core import specs, strict
from emulator.core.errors import ConfigError
from emulator.core.records import write_rows
from emulator.core.run_spec import RunSpec
from emulator.core.run_summary import RunResult
from emulator.live.reports import TransferRow

State = Literal["running", "complete", "broken"]
_LIBRARIES = ("pyzmq", "msgpack", "msgspec", "numpy", "uvloop")


def new_folder(out: Path | None, name: str) -> Path:
    """Create the folder of an experiment: `out`, which must be new or empty, or one named by time under runs/.

    Raises ConfigError when it cannot be used.
    """
    folder = out if out is not None else Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    try:
        if out is None:
            folder = _free_name(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--out {folder}: the folder is not empty; give a new one")
    except OSError as error:
        raise ConfigError(
            f"--out {folder}: cannot be used ({error.strerror}); give a folder that can be made"
        ) from None
    return folder


@contextlib.contextmanager
def results_folder(out: Path | None, name: str) -> Iterator[Path]:
    """The folder of `new_folder`, which goes again if what is done in it ends early and leaves it empty."""
    folder = new_folder(out, name)
    try:
        yield folder
    except BaseException:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise


def _free_name(folder: Path) -> Path:
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


class RunFolder:
    """The folder of one run."""

    def __init__(self, parent: Path, run: RunSpec, topology: specs.Topology, *, launcher: str, shaping: str) -> None:
        self.path = parent / run.label
        self.logs = self.path / "logs"
        self.logs.mkdir(parents=True)
        self._manifest: dict[str, Any] = {
            "state": "running",
            "deployment": run.deployment,
            "kv_bandwidth_bps": run.link.bandwidth_bps if run.link else None,
            "kv_payload_bps": run.link.payload_bps if run.link else None,
            "gpus": run.gpus,
            "seed": run.seed,
            "launcher": launcher,
            "shaping": shaping,
            "scale": strict.to_builtins(run.scale),
            "first_token": run.first_token,
            "device": strict.to_builtins(run.device),
            "versions": versions(),
            "host": host(),
            "started_unix_s": time.time(),
            "topology": strict.to_builtins(topology),
        }
        self._write_manifest()

    def write(self, result: RunResult, transfers: Iterable[TransferRow]) -> None:
        """Everything of a finished run."""
        (self.path / "records.jsonl").write_bytes(write_rows(result.records))
        (self.path / "steps.jsonl").write_bytes(write_rows(result.steps))
        (self.path / "memory.jsonl").write_bytes(write_rows(result.memory))
        encoder = msgspec.json.Encoder()
        rows = b"".join(encoder.encode(row) + b"\n" for row in transfers)
        (self.path / "transfers.jsonl").write_bytes(rows)
        (self.path / "summary.json").write_bytes(pretty(result.summary))
        used = result.summary.device
        self._manifest["device"] |= {"nodes": strict.to_builtins(used.nodes), "shared": strict.to_builtins(used.shared)}
        self._manifest["fidelity"] = strict.to_builtins(result.summary.fidelity)
        self.finish("complete")

    def finish(self, state: State) -> None:
        """Note how the run ended."""
        self._manifest["state"] = state
        self._manifest["ended_unix_s"] = time.time()
        self._write_manifest()

    def _write_manifest(self) -> None:
        (self.path / "manifest.json").write_bytes(pretty(self._manifest))


def pretty(value: msgspec.Struct | dict[str, Any]) -> bytes:
    """Indented JSON, newline at the end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def versions() -> dict[str, str]:
    """This program, Python and the libraries that measurements pass through."""
    return {"pdemu": __version__, "python": platform.python_version()} | {name: version(name) for name in _LIBRARIES}


def host() -> dict[str, Any]:
    """The machine, without names that tell whose it is."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "byteorder": sys.byteorder,
    }
