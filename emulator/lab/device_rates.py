"""What a device does alone: GEMMs, reads, copies, and what launching a kernel costs."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import NamedTuple, get_args

from emulator.core.calibration import (
    CopyRate,
    Direction,
    FillTime,
    GemmRate,
    LaunchTime,
    Operands,
    ReadRate,
    Spread,
    gemm_flops,
)
from emulator.core.time_budget import TimeBudget
from emulator.lab.measuring import CHUNK_BYTES, Bench

LAUNCHES = 200
SHORTER = 8
"""A rate is the slope between a batch and one so many times shorter: what a launch costs is not in it."""


class Rates(NamedTuple):
    """Everything measured of a device alone, but its steps."""

    gemms: tuple[GemmRate, ...]
    read: ReadRate | None
    fill: FillTime | None
    copies: tuple[CopyRate, ...]
    launch: LaunchTime | None


def measure_rates(bench: Bench, budget: TimeBudget) -> Rates:
    """GEMMs of every K with both kinds of operands, reads, the small kernel, copies of each direction, launches."""
    kinds = [(k, operands) for operands in get_args(Operands) for k in bench.backend.gemm_ks]
    directions = get_args(Direction)
    budgets = budget.split([1.0] * (3 + len(kinds) + len(directions)))
    warm(bench, next(budgets))
    gemms = [_gemm(bench, next(budgets), k, operands) for k, operands in kinds]
    read = _read(bench, next(budgets))
    copies = [_copy(bench, next(budgets), direction) for direction in directions]
    fill, launch = _small_kernel(bench, next(budgets))
    return Rates(
        gemms=tuple(gemm for gemm in gemms if gemm is not None),
        read=read,
        fill=fill,
        copies=tuple(copy for copy in copies if copy is not None),
        launch=launch,
    )


def warm(bench: Bench, budget: TimeBudget) -> None:
    """Run GEMMs until clocks are up."""
    k, now_s = max(bench.backend.gemm_ks), bench.clock.now_s
    until_s = min(budget.until_s, now_s() + bench.plan.warm_s)
    while now_s() < until_s:
        bench.took_s(lambda: bench.backend.gemm(k, 8))


def _gemm(bench: Bench, budget: TimeBudget, k: int, operands: Operands) -> GemmRate | None:
    backend = bench.backend

    def enqueue(times: int) -> None:
        backend.product(k, times, rows=backend.mn, operands=operands)

    times = bench.sized(enqueue, bench.plan.batch_s, budget)
    flops = times * gemm_flops(backend.mn, backend.mn, k)
    what = f"GEMM K {k}, {operands} operands"
    tflops = bench.spread(what, budget, lambda: flops / bench.took_s(lambda: enqueue(times)) / 1e12)
    return None if tflops is None else GemmRate(k=k, operands=operands, tflops=tflops)


def _read(bench: Bench, budget: TimeBudget) -> ReadRate | None:
    found = _slope(bench, "read", budget, lambda chunks: bench.backend.read(chunks * CHUNK_BYTES))
    if found is None:
        return None
    per_chunk_s, launch_s = found
    return ReadRate(
        gb_per_s=Spread.of([CHUNK_BYTES / each_s / 1e9 for each_s in per_chunk_s]),
        launch_us=Spread.of([each_s * 1e6 for each_s in launch_s]),
    )


def _copy(bench: Bench, budget: TimeBudget, direction: Direction) -> CopyRate | None:
    def enqueue(chunks: int) -> None:
        bench.backend.copy(chunks * CHUNK_BYTES, direction)

    chunks = bench.sized(enqueue, bench.plan.batch_s, budget)
    nbytes = chunks * CHUNK_BYTES * (2 if direction == "within" else 1)
    rate = bench.spread(f"copy {direction}", budget, lambda: nbytes / bench.took_s(lambda: enqueue(chunks)) / 1e9)
    return None if rate is None else CopyRate(direction=direction, gb_per_s=rate)


def _small_kernel(bench: Bench, budget: TimeBudget) -> tuple[FillTime | None, LaunchTime | None]:
    fills, launches = budget.split([1.0, 1.0])
    fill = None
    if (found := _slope(bench, "small kernel", fills, bench.backend.fill)) is not None:
        each_s, launch_s = found
        fill = FillTime(
            iteration_us=Spread.of([s * 1e6 for s in each_s]), launch_us=Spread.of([s * 1e6 for s in launch_s])
        )
    return fill, _launch(bench, launches)


def _launch(bench: Bench, budget: TimeBudget) -> LaunchTime | None:
    calls_us: list[float] = []

    def enqueue() -> None:
        began_s = bench.clock.now_s()
        for _ in range(LAUNCHES):
            bench.backend.fill(1)
        calls_us.append((bench.clock.now_s() - began_s) / LAUNCHES * 1e6)

    device_us = bench.spread("launch", budget, lambda: bench.took_s(enqueue) / LAUNCHES * 1e6)
    return None if device_us is None else LaunchTime(device_us=device_us, call_us=Spread.of(calls_us))


def _slope(
    bench: Bench, what: str, budget: TimeBudget, enqueue: Callable[[int], None]
) -> tuple[list[float], list[float]] | None:
    """Seconds of each unit, and of a launch beside its units, of each sample; None where there is none."""
    longer = max(SHORTER, bench.sized(enqueue, bench.plan.batch_s, budget))
    shorter = longer // SHORTER
    pairs: list[tuple[float, float]] = []

    def take() -> float:
        longer_s, shorter_s = (bench.took_s(functools.partial(enqueue, amount)) for amount in (longer, shorter))
        pairs.append((longer_s, shorter_s))
        return longer_s

    if bench.spread(what, budget, take) is None:
        return None
    each_s = [(long_s - short_s) / (longer - shorter) for long_s, short_s in pairs if long_s > short_s]
    if not each_s:
        bench.leave_out(what, "longer work takes no longer; something else uses the device")
        return None
    unit_s = statistics.median(each_s)
    return each_s, [max(0.0, short_s - shorter * unit_s) for _, short_s in pairs]
