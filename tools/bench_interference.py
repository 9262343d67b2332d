"""The textbook stall, simulated and live: topologies/interference.toml against what theory says of it.

Prints each figure beside its bound. With --check the exit status is 1 when one is missed; --simulated leaves the live
runs out. Live figures need an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from emulator.core.records import Record
from emulator.core.run_spec import RunSpec
from emulator.lab.catalog_files import load_catalog
from emulator.lab.experiment import Experiment, perform, prepare
from emulator.lab.topology_files import load_topology
from emulator.simulate import simulate

TOPOLOGY = Path(__file__).parents[1] / "topologies" / "interference.toml"
LONG_PREFILL_MS = 80.0


class Figure(NamedTuple):
    """A measured figure, milliseconds, and the interval in which it must be."""

    name: str
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """Whether it is within its bounds."""
        return self.low <= self.value <= self.high


def figures(run: RunSpec, records: Sequence[Record], *, live: bool) -> list[Figure]:
    """What must hold of one deployment's records."""
    streams: Mapping[str, list[Record]] = {s: [r for r in records if r.stream == s] for s in ("running", "long")}
    gaps_ms = np.concatenate([np.diff(record.times()) for record in streams["running"]]) * 1e3
    if run.deployment == "colocated-prefill-first":
        return [Figure("running streams, largest ITL", float(gaps_ms.max()), 102.0, 108.0)]
    if run.link is None:
        return []
    found = [
        Figure("running streams, p99 ITL", float(np.percentile(gaps_ms, 99)), 0.0, 30.0)
        if live
        else Figure("running streams, largest ITL", float(gaps_ms.max()), 0.0, 30.0)
    ]
    for record in streams["long"]:
        times = record.times()
        due_ms = LONG_PREFILL_MS + record.kv_bytes * 8 / run.link.payload_bps * 1e3
        ttft_ms = (float(times[0]) - record.scheduled_s) * 1e3
        found.append(Figure(f"{record.request_id}, TTFT less prefill and bytes/rate", ttft_ms - due_ms, -5.0, 5.0))
        found.append(Figure(f"{record.request_id}, first ITL", float(times[1] - times[0]) * 1e3, 25.0, 50.0))
    return found


def live_records(experiment: Experiment) -> list[Sequence[Record]]:
    """The records of each run, executed."""
    return [result.records for result in asyncio.run(perform(experiment, lambda *_: None, lambda *_: None))]


def main() -> int:
    """Run and print; 1 when --check finds a bound missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bound is missed")
    parser.add_argument("--simulated", action="store_true", help="leave the live runs out")
    options = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        experiment = prepare(load_topology(TOPOLOGY), load_catalog(), {}, out=Path(folder) / "out")
        drivers = [("simulated", [simulate(run).records for run in experiment.runs])]
        if not options.simulated:
            drivers.append(("live", live_records(experiment)))  # type: ignore[arg-type]
    for driver, all_records in drivers:
        for run, records in zip(experiment.runs, all_records, strict=True):
            for figure in figures(run, records, live=driver == "live"):
                missed += not figure.holds
                mark = "" if figure.holds else "   MISSED"
                bounds = f"{figure.low:g} … {figure.high:g} ms"
                print(f"{driver:10s} {run.label:24s} {figure.name:50s} {figure.value:8.2f} ms   ({bounds}){mark}")
    print("all bounds hold" if not missed else f"{missed} bounds missed")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
