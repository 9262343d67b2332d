"""What all parts of a calibration measure with: the device, time and its limits, and what could not be measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from emulator.core.calibration import Activity, Spread
from emulator.core.time_budget import TimeBudget
from emulator.live.backend import MeasuredBackend

CHUNK_BYTES = 1 << 20
"""Reads and copies are sized in these."""


class Plan(NamedTuple):
    """How thoroughly to measure: at most `most` samples a figure; of rates over `batch_s`, of contention `beside_s`."""

    limit_s: float
    quick: bool = False
    most: int = 30
    batch_s: float = 0.01
    beside_s: float = 0.04
    warm_s: float = 1.0
    step_targets_s: tuple[float, ...] = (0.2e-3, 1e-3, 5e-3, 20e-3, 50e-3, 200e-3, 1.0)


FULL_S, QUICK_S = 300.0, 60.0


def quick_plan(limit_s: float) -> Plan:
    """A rough look."""
    return Plan(limit_s, quick=True, most=3, batch_s=0.003, beside_s=0.01, warm_s=0.1)


class Clock(NamedTuple):
    """Host time, and sleeping until an instant of it."""

    now_s: Callable[[], float] = time.monotonic
    sleep_until: Callable[[float], None] = lambda until_s: time.sleep(max(0.0, until_s - time.monotonic()))


class Work(NamedTuple):
    """Some of one activity: GEMMs of the largest K, or chunks to read or copy."""

    activity: Activity
    amount: int

    def enqueue(self, backend: MeasuredBackend) -> None:
        """Enqueue all of it."""
        if self.activity == "prefill":
            backend.gemm(max(backend.gemm_ks), self.amount)
        elif self.activity == "decode":
            backend.read(self.amount * CHUNK_BYTES)
        else:
            backend.copy(self.amount * CHUNK_BYTES, "out")


class Bench:
    """A device on which figures are measured; `tell` hears of each."""

    def __init__(self, backend: MeasuredBackend, plan: Plan, clock: Clock, tell: Callable[[str], None]) -> None:
        self.backend = backend
        self.plan = plan
        self.clock = clock
        self.tell = tell
        self.left_out: list[str] = []

    def took_s(self, enqueue: Callable[[], None]) -> float:
        """Seconds on the device of what is enqueued."""
        return self.backend.time_s(enqueue)[0]

    def spread(
        self, what: str, budget: TimeBudget, take: Callable[[], float], *, expected_s: float = 0.0
    ) -> Spread | None:
        """A figure from as many samples as fit; None, and said to be left out, where none does."""
        samples = budget.samples(take, most=self.plan.most, expected_s=expected_s)
        self.tell(what)
        if not samples:
            self.leave_out(what)
            return None
        return Spread.of(samples)

    def leave_out(self, what: str, why: str = "no time left") -> None:
        """Say that something is not measured."""
        self.left_out.append(f"{what}: {why}")

    def sized(self, enqueue: Callable[[int], None], batch_s: float, budget: TimeBudget) -> int:
        """How much of it takes about `batch_s`, at least 1; the first call warms up."""
        if budget.left_s:
            self.took_s(lambda: enqueue(1))
        amount = 1
        while budget.left_s:
            took_s = max(self.took_s(lambda: enqueue(amount)), 1e-9)  # noqa: B023 - called at once
            if took_s >= batch_s / 2:
                return max(1, round(amount * batch_s / took_s))
            amount = max(amount + 1, round(amount * min(16.0, batch_s / took_s)))
        return amount

    def sized_work(self, activity: Activity, batch_s: float, budget: TimeBudget) -> Work:
        """Work that takes about `batch_s`."""
        return Work(activity, self.sized(lambda amount: Work(activity, amount).enqueue(self.backend), batch_s, budget))
