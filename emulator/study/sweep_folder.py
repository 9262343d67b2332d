"""A sweep's folder: what it is, what is done, and the tables when all is.

sweep.json      topology, axes, seeds, versions, host, what costs rest on: a rerun must be of the same sweep to go on
points.jsonl    one finished point a line, appended and handed to the system as it ends
runs.csv, runs.jsonl            one deployment under one seed at one point a row
outcomes.csv, outcomes.jsonl    one deployment against one baseline at one point a row

The tables are made from the points when all are there, in the order of the grid, so that a sweep that was interrupted
ends with the same files as one that was not.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from emulator.core.errors import ConfigError
from emulator.core.grid import Cell, PointResult, Row, outcome_row
from emulator.core.upkeep import COST_BASIS
from emulator.lab.run_folder import host, new_folder, pretty, versions

WHAT_DIFFERS = {
    "pdemu": "of another version of pdemu",
    "topology": "of another topology, or of other deployments of it",
    "axes": "over other values of the axes",
    "seeds": "with other seeds",
    "traces": "of other traces",
    "catalog": "with another catalog",
}


class SweepFolder:
    """The folder of one sweep; `done` has every point that is finished, by its number."""

    def __init__(self, path: Path, done: Mapping[int, PointResult]) -> None:
        self.path = path
        self.done = dict(done)
        self._journal = (path / "points.jsonl").open("ab")

    @classmethod
    def open(cls, out: Path | None, name: str, identity: Mapping[str, Any]) -> SweepFolder:
        """Make the folder, or take up one that holds the same sweep; raises ConfigError for any other."""
        if out is None or not (out / "sweep.json").exists():
            folder = new_folder(out, f"{name}-sweep")
            about = {"sweep": dict(identity), "versions": versions(), "host": host(), "started_unix_s": time.time()}
            about["cost_basis"] = COST_BASIS
            (folder / "sweep.json").write_bytes(pretty(about))
            return cls(folder, {})
        _check_same(out, identity)
        return cls(out, _read_points(out / "points.jsonl"))

    def __enter__(self) -> SweepFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()

    def add(self, result: PointResult) -> None:
        """Note a finished point; once this returns, the end of this process does not lose it."""
        self._journal.write(msgspec.json.encode(result) + b"\n")
        self._journal.flush()
        self.done[result.point.index] = result

    def results(self) -> list[PointResult]:
        """All finished points in the order of the grid."""
        return [self.done[index] for index in sorted(self.done)]

    def finish(self) -> None:
        """Write the tables."""
        results = self.results()
        _write_table(self.path / "runs", [row for result in results for row in result.runs])
        _write_table(
            self.path / "outcomes", [outcome_row(result.point, o) for result in results for o in result.outcomes]
        )


def _check_same(folder: Path, identity: Mapping[str, Any]) -> None:
    try:
        there = msgspec.json.decode((folder / "sweep.json").read_bytes())["sweep"]
        differs = next((text for key, text in WHAT_DIFFERS.items() if there[key] != identity[key]), None)
    except (msgspec.DecodeError, KeyError, TypeError):
        raise ConfigError(f"--out {folder}: sweep.json is not that of a sweep; give a new folder") from None
    if differs is not None:
        raise ConfigError(
            f"--out {folder}: holds a sweep {differs}; give a new folder, or repeat the command that made this one"
        )


def _read_points(journal: Path) -> dict[int, PointResult]:
    """The finished points; what a killed process left half written at the end is cut off."""
    data = journal.read_bytes() if journal.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with journal.open("r+b") as file:
            file.truncate(len(whole))
    decoder = msgspec.json.Decoder(PointResult)
    done = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            result = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{journal}, line {number}: not a point of a sweep ({error}); give a new folder"
            ) from None
        done[result.point.index] = result
    return done


def _write_table(path: Path, rows: Sequence[Row]) -> None:
    """`path`.csv and `path`.jsonl, unless there are no rows. No value is empty in the one and null in the other."""
    if not rows:
        return
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_text(row.get(column)) for column in columns] for row in rows)
    encoder = msgspec.json.Encoder()
    path.with_suffix(".jsonl").write_bytes(b"".join(encoder.encode(row) + b"\n" for row in rows))


def _text(value: Cell) -> Cell:
    return str(value).lower() if isinstance(value, bool) else value
