"""`pdemu calibrate`: what a computing device really does, measured within a few minutes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn

from emulator.cli.display import stdout
from emulator.cli.progress import Display
from emulator.core.calibration import Calibration
from emulator.core.datasheet import find_gpu, shares
from emulator.core.device_spec import DeviceName
from emulator.core.errors import ConfigError
from emulator.core.quantities import Seconds
from emulator.lab.calibrate import PARTS, calibrate
from emulator.lab.calibration_files import check_writable, write_calibration
from emulator.lab.catalog_files import load_catalog
from emulator.lab.measured_device import measured_device
from emulator.lab.measuring import FULL_S, QUICK_S, Plan, quick_plan
from emulator.report import calibration_table

LEAST_S, MOST_S = 5.0, 3600.0


class CalibrationDisplay(Display):
    """The part and the figure that are being measured; on anything but a terminal a line a part."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(BarColumn(bar_width=24), TextColumn("{task.fields[state]}"))
        self._limit_s = limit_s
        self._began_s = time.monotonic()
        self._part, self._number, self._figures = "", 0, 0
        self._task = self._progress.add_task("", total=limit_s, state="opening the device")

    def waiting(self, device: str) -> None:
        """Another process calibrates the device."""
        self._console.print(f"{device}: another process measures it; waiting until that ends", soft_wrap=True)

    def part(self, name: str) -> None:
        """A part begins."""
        self._part, self._number, self._figures = name, self._number + 1, 0
        if not self._live:
            elapsed_s = time.monotonic() - self._began_s
            self._console.print(f"{self._number}/{len(PARTS)} {name}, after {elapsed_s:.0f} s", soft_wrap=True)

    def figure(self, what: str) -> None:
        """One more figure."""
        self._figures += 1
        elapsed_s = time.monotonic() - self._began_s
        state = f"{self._number}/{len(PARTS)} {self._part}: {what}, {elapsed_s:.0f} of at most {self._limit_s:.0f} s"
        self._progress.update(self._task, completed=min(elapsed_s, self._limit_s), state=state)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("calibrate")(measure)


def measure(
    *,
    device: Annotated[DeviceName, typer.Option("--device", help="What to measure: a GPU, or NumPy here.")] = "cuda",
    gpu: Annotated[int | None, typer.Option("--gpu", metavar="N", min=0, help="Which of the visible GPUs (0).")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to write the calibration (default: calibration.toml)."),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option("--limit", metavar="TIME", help="How long to measure at most (5min; with --quick 1min)."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A rough look: few samples of each figure.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")
    ] = False,
) -> None:
    """Measure a device that computes: rates, how exactly its steps keep time, and what sharing it costs."""
    limit_s = _limit_s(limit, quick)
    path = out or Path("calibration.toml")
    check_writable(path)
    target = measured_device(device, gpu)
    plan = quick_plan(limit_s) if quick else Plan(limit_s)
    with CalibrationDisplay(limit_s) as display:
        found = calibrate(target, plan, display)
    try:
        write_calibration(path, found)
        Console(stderr=True).print(f"Calibration: {path}", highlight=False, soft_wrap=True)
    finally:  # what was measured is shown even if it cannot be kept
        _show(found, json=json)


def _show(found: Calibration, *, json: bool) -> None:
    of = find_gpu(found.device, load_catalog().gpus)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        stdout().print(calibration_table.render(found, of, shares(found, of) if of else []))


def _limit_s(text: str | None, quick: bool) -> float:
    if text is None:
        return QUICK_S if quick else FULL_S
    try:
        seconds = Seconds(text) if text.replace(".", "", 1).isdecimal() else Seconds.parse(text)
    except ConfigError as error:
        raise ConfigError(f"--limit: {error}") from None
    if not LEAST_S <= seconds <= MOST_S:
        raise ConfigError(f"--limit {text}: must be from {LEAST_S:g} s to {MOST_S / 60:g} min")
    return float(seconds)
