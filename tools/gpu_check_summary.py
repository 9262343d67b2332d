"""What tools/gpu_check.sh has found: each figure that must hold beside its bound, from the folder that it left.

Writes summary.json and summary.txt there and prints the latter. The exit status is 1 unless all figures hold; one that
was not measured does not.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from emulator.core.calibration import Calibration, StepAccuracy
from emulator.core.datasheet import find_gpu, shares
from emulator.core.errors import PdemuError
from emulator.lab.calibration_files import read_calibration
from emulator.lab.catalog_files import load_catalog

LEAST_STEP_MS = 5.0
STEP_ERROR = 0.02
RATE_SHARE = 0.85
STALLED = 2.0
"""ITL's p99 over its median where long prompts stall a colocated node's streams; 7.6 by simulation."""
STRETCHED = 1.2
"""ITL's p99 of two nodes on one device over that of a simulation, in which each has its own."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that must be within its bounds; null where it was not measured."""

    name: str
    value: float | None
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether it was measured and is within its bounds."""
        if self.value is None:
            return False
        low, high = self.at_least, self.at_most
        return (low is None or self.value >= low) and (high is None or self.value <= high)

    def line(self) -> str:
        """It in a line."""
        bound = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        value = "not measured" if self.value is None else f"{self.value:.4g}"
        return f"{'holds ' if self.holds else 'MISSED'}  {self.name:66s} {value:>12s}  ({bound})  {self.note}".rstrip()


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a part of the check ended; `exit_status` is null where there was no time for it."""

    name: str
    exit_status: int | None
    seconds: int
    last_line: str


def figures(folder: Path) -> list[Figure]:
    """Everything that must hold, as far as the folder has it."""
    calibration = _calibration(folder)
    return [
        _failed_tests(folder, next((part for part in parts(folder) if part.name == "tests"), None)),
        *_figures_of_steps(calibration),
        Figure(
            name="colocated, ITL p99 over its median: prompts stall streams",
            value=_ratio(_itl_ms(folder, "colocated", "p99"), _itl_ms(folder, "colocated", "p50")),
            at_least=STALLED,
        ),
        Figure(
            name="1P1D on one device, ITL p99 over the simulated one: steps stretch",
            value=_ratio(_itl_ms(folder, "shared", "p99"), _itl_ms(folder, "simulated", "p99")),
            at_least=STRETCHED,
        ),
    ]


def _figures_of_steps(calibration: Calibration | None) -> list[Figure]:
    steps = [step for step in calibration.steps if step.target_ms >= LEAST_STEP_MS] if calibration else []
    closed = [step for step in steps if step.loop == "closed"]
    worst = max(closed, key=lambda step: abs(step.error.median), default=None)
    gemm = calibration.gemm_tflops("low-toggle") if calibration else None
    copy = calibration.copy_gb_per_s("within") if calibration else None
    return [
        Figure(
            name=f"steps of {LEAST_STEP_MS:g} ms and more alone, largest median error",
            value=abs(worst.error.median) if worst else None,
            at_most=STEP_ERROR,
            note=f"{worst.activity} of {worst.target_ms:g} ms" if worst else "",
        ),
        _share("decode steps' reads, of the rate of copies within the device", steps, "decode", copy, "GB/s"),
        _share("prefill steps' GEMMs, of the fastest GEMM that steps use", steps, "prefill", gemm, "TFLOP/s"),
    ]


def _share(name: str, steps: Iterable[StepAccuracy], activity: str, ceiling: float | None, unit: str) -> Figure:
    rates = [step.rate.median for step in steps if step.activity == activity and step.rate is not None]
    slowest = min(rates, default=None)
    note = f"{slowest:.4g} of {ceiling:.4g} {unit}" if slowest is not None and ceiling is not None else ""
    return Figure(name=name, value=_ratio(slowest, ceiling), at_least=RATE_SHARE, note=note)


def _ratio(value: float | None, of: float | None) -> float | None:
    return None if value is None or not of else value / of


def _calibration(folder: Path) -> Calibration | None:
    try:
        return read_calibration(folder / "calibration.toml")
    except PdemuError:
        return None


def _itl_ms(folder: Path, run: str, percentile: str) -> float | None:
    try:
        document: Any = msgspec.json.decode((folder / run / "summary.json").read_bytes())
        value = document["runs"][0]["itl_ms"][percentile]
    except (OSError, msgspec.DecodeError, KeyError, IndexError):
        return None
    return float(value) if value is not None else None


def _failed_tests(folder: Path, part: Ended | None) -> Figure:
    """Where pytest did not come to its end, what it has written says nothing of the tests that were left."""
    name = "tests that failed"
    if part is None or part.exit_status not in (0, 1):
        how = "not run" if part is None else f"{how_ended(part)} after {part.seconds} s, see tests.out"
        return Figure(name=name, value=None, at_most=0, note=how)
    try:
        suite = ET.parse(folder / "tests.xml").getroot().find("testsuite")
    except (OSError, ET.ParseError):
        suite = None
    if suite is None:
        return Figure(name=name, value=None, at_most=0)
    count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    ran = count["tests"] - count["skipped"]
    failed = float(count["failures"] + count["errors"])
    return Figure(
        name=name, value=failed if ran else None, at_most=0, note=f"{ran} ran, {count['skipped']} were skipped"
    )


def parts(folder: Path) -> list[Ended]:
    """How each part ended."""
    found = []
    for line in (folder / "steps.tsv").read_text(encoding="utf-8", errors="replace").splitlines():
        name, status, seconds, last = line.split("\t", 3)
        found.append(
            Ended(name=name, exit_status=int(status) if status else None, seconds=int(seconds), last_line=last)
        )
    return found


def text(
    device: str, seconds: str, ended: Sequence[Ended], found: Sequence[Figure], calibration: Calibration | None
) -> str:
    """The summary to read."""
    what = calibration.device if calibration else device
    lines = [f"gpu_check on {what}, {seconds} s", ""]
    lines += [figure.line() for figure in found]
    lines += ["", *(_ended_line(part) for part in ended)]
    if calibration is not None:
        lines += _beside_datasheet(calibration)
    held = sum(figure.holds for figure in found)
    return "\n".join([*lines, "", f"{held} of {len(found)} hold", ""])


def how_ended(part: Ended) -> str:
    """In a few words; the exit statuses are those of `timeout`."""
    if part.exit_status is None:
        return "not run"
    return {124: "out of time", 137: "killed"}.get(part.exit_status, f"exit {part.exit_status}")


def _ended_line(part: Ended) -> str:
    last = part.last_line if part.exit_status != 0 else ""
    return f"{part.name:12s} {how_ended(part):12s} {part.seconds:4d} s  {last}".rstrip()


def _beside_datasheet(calibration: Calibration) -> list[str]:
    gpu = find_gpu(calibration.device, load_catalog().gpus)
    if gpu is None:
        return []
    lines = [f"{one.what}: {one.share:.1%} of the datasheet of {gpu.name}" for one in shares(calibration, gpu)]
    if calibration.mixed is not None:
        lines.append(f"mixed steps: p-norm with p {calibration.mixed.norm:.2f}")
    return ["", *lines]


def main() -> int:
    """Fold, write, print."""
    folder, device, seconds = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    found, ended = figures(folder), parts(folder)
    holds = all(figure.holds for figure in found)
    document = {
        "device": device,
        "seconds": int(seconds),
        "holds": holds,
        "figures": [msgspec.to_builtins(figure) | {"holds": figure.holds} for figure in found],
        "parts": ended,
    }
    (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    summary = text(device, seconds, ended, found, _calibration(folder))
    (folder / "summary.txt").write_text(summary, encoding="utf-8")
    print(summary, end="")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
