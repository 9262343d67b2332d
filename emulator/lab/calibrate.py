"""Measuring a computing device within a given time: what it does alone, how steps keep time, and what sharing costs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import msgspec

from emulator import __version__
from emulator.core.calibration import FORMAT, Calibration, StepAccuracy
from emulator.core.device_use import device_digest
from emulator.core.errors import ConfigError
from emulator.core.time_budget import TimeBudget
from emulator.lab.device_rates import measure_rates
from emulator.lab.interference import OpenRival, measure_interference
from emulator.lab.measuring import Bench, Clock, Plan
from emulator.lab.mixed_steps import measure_mixed
from emulator.lab.paced_steps import measure_steps
from emulator.lab.rivals import OpenBackend, rival
from emulator.live.device_lock import Patience, device_lock
from emulator.live.timers import sharpen_timers

RESERVE = 0.05
"""Share of the limit that is kept back for what overruns: a rival's opening, the last sample, closing."""

PARTS = {"rates": 25.0, "steps": 35.0, "interference": 30.0, "mixed steps": 10.0}
"""The parts of a calibration in their order, and their shares of the time."""


class Watcher(Protocol):
    """Told how a calibration goes."""

    def waiting(self, device: str) -> None:
        """Another process calibrates the device; this one waits."""

    def part(self, name: str) -> None:
        """A part begins."""

    def figure(self, what: str) -> None:
        """One more figure is there, or left out."""


class Target(NamedTuple):
    """A device to calibrate: its kind, and how it is opened."""

    kind: str
    open: OpenBackend


def calibrate(target: Target, plan: Plan, watcher: Watcher, clock: Clock | None = None) -> Calibration:
    """Open the device and measure it, both within the plan's limit; before it, wait as long for whoever else does."""
    sharpen_timers()
    clock = clock or Clock()
    called_s = clock.now_s()
    backend = target.open()
    try:
        opening_s = clock.now_s() - called_s
        waiting = functools.partial(watcher.waiting, backend.description)
        with device_lock(backend.device_id, Patience(plan.limit_s, waiting), backend.description):
            began_s = clock.now_s() - opening_s
            backend.warm_up()
            bench = Bench(backend, plan, clock, watcher.figure)
            open_rival = functools.partial(rival, open_backend=target.open)
            return measure(bench, target.kind, open_rival, watcher.part, began_s)
    finally:
        backend.close()


def measure(
    bench: Bench, kind: str, open_rival: OpenRival, part: Callable[[str], None], began_s: float | None = None
) -> Calibration:
    """Every part in turn, each within its share of what is left of the limit since `began_s` (None: now)."""
    now_s = bench.clock.now_s
    began_s = now_s() if began_s is None else began_s
    parts = TimeBudget(began_s + bench.plan.limit_s * (1 - RESERVE), now_s).split(list(PARTS.values()))
    part("rates")
    found = measured_alone(bench, kind, next(parts))
    part("steps")
    steps = _steps(bench, next(parts), found)
    part("interference")
    interference = tuple(measure_interference(bench, next(parts), open_rival))
    part("mixed steps")
    mixed = measure_mixed(bench, next(parts), open_rival)
    return msgspec.structs.replace(
        found,
        steps=steps,
        interference=interference,
        mixed=mixed,
        left_out=tuple(bench.left_out),
        took_s=round(now_s() - began_s, 3),
    )


def measured_alone(bench: Bench, kind: str, budget: TimeBudget) -> Calibration:
    """A calibration that has the rates alone."""
    return Calibration(
        format=FORMAT,
        pdemu=__version__,
        kind=kind,
        device=bench.backend.description,
        device_id=device_digest(bench.backend.device_id),
        driver=bench.backend.driver,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=bench.plan.quick,
        limit_s=bench.plan.limit_s,
        took_s=0.0,
        mn=bench.backend.mn,
        **measure_rates(bench, budget)._asdict(),
    )


def _steps(bench: Bench, budget: TimeBudget, found: Calibration) -> tuple[StepAccuracy, ...]:
    try:
        units = found.unit_times()
    except ConfigError:
        bench.leave_out("steps", "no time left for the rates that they are planned by")
        return ()
    return tuple(measure_steps(bench, budget, units))
