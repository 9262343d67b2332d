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
from emulator.live.device_lock import device_lock
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
    """Open the device and measure it within the plan's limit; wait as long for whoever else is measuring it."""
    sharpen_timers()
    backend = target.open()
    try:
        waiting = functools.partial(watcher.waiting, backend.description)
        with device_lock(backend.device_id, plan.limit_s, waiting):
            backend.warm_up()
            bench = Bench(backend, plan, clock or Clock(), watcher.figure)
            open_rival = functools.partial(rival, open_backend=target.open)
            return measure(bench, target.kind, open_rival, watcher.part)
    finally:
        backend.close()


def measure(bench: Bench, kind: str, open_rival: OpenRival, part: Callable[[str], None]) -> Calibration:
    """Every part in turn, each within its share of the time that is left."""
    plan, now_s = bench.plan, bench.clock.now_s
    began_s = now_s()
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    parts = TimeBudget(began_s + plan.limit_s * (1 - RESERVE), now_s).split(list(PARTS.values()))
    part("rates")
    rates = measure_rates(bench, next(parts))
    found = Calibration(
        format=FORMAT,
        pdemu=__version__,
        kind=kind,
        device=bench.backend.description,
        device_id=device_digest(bench.backend.device_id),
        driver=bench.backend.driver,
        measured_at=measured_at,
        quick=plan.quick,
        limit_s=plan.limit_s,
        took_s=0.0,
        mn=bench.backend.mn,
        **rates._asdict(),
    )
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


def _steps(bench: Bench, budget: TimeBudget, found: Calibration) -> tuple[StepAccuracy, ...]:
    try:
        units = found.unit_times()
    except ConfigError:
        bench.leave_out("steps", "no time left for the rates that they are planned by")
        return ()
    return tuple(measure_steps(bench, budget, units))
