"""Options of `pdemu bench` that say what becomes of the result, named as those of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from emulator.cli.bench_options import BenchFlags
from emulator.core.errors import ConfigError
from emulator.lab.run_folder import pretty


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """What is printed, what is written and where; as typed."""

    label: Annotated[
        str | None,
        typer.Option("--label", metavar="TEXT", help="Name of the result, and what its file's name begins with."),
    ] = None
    metadata: Annotated[
        list[str] | None,
        typer.Option("--metadata", metavar="KEY=VALUE", help="A key of the result; may be given several times."),
    ] = None
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the result as JSON.")] = False
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With a value for every request, and what was generated.")
    ] = False
    append_result: Annotated[
        bool, typer.Option("--append-result", help="Write it as one more line of a file of JSON lines.")
    ] = False
    result_dir: Annotated[Path | None, typer.Option("--result-dir", metavar="DIR", help="Where to write it.")] = None
    result_filename: Annotated[
        str | None, typer.Option("--result-filename", metavar="NAME", help="Its name (default: by rate, model, time).")
    ] = None
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for bench.json and records.jsonl.")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")] = (
        False
    )
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", help="Show no progress.")] = False

    @property
    def saves(self) -> bool:
        """Whether the result is written by itself."""
        return self.save_result or self.save_detailed or self.append_result

    def check(self) -> None:
        """Refuse, before anything is sent, a place that cannot be written to."""
        if self.label is not None and ("/" in self.label or not self.label.isprintable()):
            raise ConfigError(f"--label {self.label!r}: must be printable, without /")
        if self.result_dir is not None:
            try:
                self.result_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--result-dir {self.result_dir}: cannot be made ({error.strerror})") from None

    def parse_metadata(self, taken: Sequence[str]) -> dict[str, str]:
        """Further keys of the result; raises ConfigError for those that it has already (`taken`)."""
        found: dict[str, str] = {}
        for text in self.metadata or ():
            key, equals, value = (part.strip() for part in text.partition("="))
            if not equals or not key:
                raise ConfigError(f"--metadata {text}: must be KEY=VALUE, such as tp=2")
            if key in taken or key in found:
                why = "is given twice" if key in found else "is a key that every result has"
                raise ConfigError(f"--metadata {text}: {key} {why}; choose another")
            found[key] = value
        return found

    def save(self, document: dict[str, Any], default_name: str) -> None:
        """Write the result, if it is to be written."""
        if not self.saves:
            return
        path = (self.result_dir or Path()) / (self.result_filename or default_name)
        if self.append_result:
            append(document, path)
        else:
            save(document, path)


def default_name(flags: BenchFlags, beginning: str, model: str, date: str) -> str:
    """A result's name as vLLM has it."""
    rate = f"{flags.request_rate:g}qps"
    if flags.ramp_up_strategy is not None:
        rate = f"ramp-up-{flags.ramp_up_strategy}-{flags.ramp_up_start_rps:g}qps-{flags.ramp_up_end_rps:g}qps"
    limit = f"-concurrency{flags.max_concurrency}" if flags.max_concurrency is not None else ""
    return f"{beginning}-{rate}{limit}-{model.rsplit('/', maxsplit=1)[-1]}-{date}.json"


def save(document: dict[str, Any], path: Path) -> None:
    """Write a document for people to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pretty(document))
    _tell(path)


def append(document: dict[str, Any], path: Path) -> None:
    """Add a document to a file as a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(msgspec.json.encode(document) + b"\n")
    _tell(path)


def _tell(path: Path) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"Result: {path}")
