"""How exactly steps of a computing device keep their length: planned from unit times, worked, and padded to the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from emulator.core.calibration import Loop, Spread, StepAccuracy, gemm_flops
from emulator.core.step_scale import StepScale
from emulator.core.step_work import StepWork, UnitTimes, plan_work, work_s
from emulator.core.time_budget import TimeBudget
from emulator.lab.measuring import Bench
from emulator.live.compute import WORK_SHARE

"""Share of a step that is filled with work; the host pads the rest to the absolute deadline."""

SETTLE_S, SETTLE_STEPS = 5e-3, 40
"""Steps by which the closed loop settles before it is measured."""

Phase = Literal["prefill", "decode"]


class Taken(NamedTuple):
    """One step: its error to its end, its work's against what was planned, and the rate of that work or None."""

    error: float
    work_error: float
    rate: float | None


def measure_steps(bench: Bench, budget: TimeBudget, units: UnitTimes) -> Iterator[StepAccuracy]:
    """Every length, of GEMMs and of reads, with work as planned and with its correction."""
    kinds: list[tuple[Phase, Loop]] = [(phase, loop) for phase in get_args(Phase) for loop in get_args(Loop)]
    for (phase, loop), own in zip(kinds, budget.split([1.0] * len(kinds)), strict=True):
        scale = StepScale()
        targets_s = bench.plan.step_targets_s
        if loop == "closed":
            _settle(bench, own, phase, units, scale)
        # Longer steps need more of the time, but short ones are to be repeated more often.
        weights = [0.05 + target_s for target_s in targets_s]
        for target_s, part in zip(targets_s, own.split(weights), strict=True):
            found = _accuracy(bench, part, phase=phase, loop=loop, target_s=target_s, units=units, scale=scale)
            if found is not None:
                yield found


def _settle(bench: Bench, budget: TimeBudget, phase: Phase, units: UnitTimes, scale: StepScale) -> None:
    def take() -> float:
        return run_step(bench, phase, SETTLE_S, units, scale, correct=True).error

    budget.samples(take, most=min(SETTLE_STEPS, 4 * bench.plan.most), expected_s=SETTLE_S)


def _accuracy(
    bench: Bench, budget: TimeBudget, *, phase: Phase, loop: Loop, target_s: float, units: UnitTimes, scale: StepScale
) -> StepAccuracy | None:
    taken: list[Taken] = []

    def take() -> float:
        taken.append(run_step(bench, phase, target_s, units, scale, correct=loop == "closed"))
        return taken[-1].error

    what = f"steps of {target_s * 1e3:g} ms, {phase}, {loop} loop"
    error = bench.spread(what, budget, take, expected_s=target_s)
    if error is None:
        return None
    rates = [one.rate for one in taken if one.rate is not None]
    return StepAccuracy(
        activity=phase,
        loop=loop,
        target_ms=float(f"{target_s * 1e3:g}"),
        error=error,
        work_error=Spread.of([one.work_error for one in taken]),
        rate=Spread.of(rates) if rates else None,
        factor=float(f"{scale.factor:.6g}"),
    )


def run_step(
    bench: Bench, phase: Phase, target_s: float, units: UnitTimes, scale: StepScale, *, correct: bool
) -> Taken:
    """One step as a node's device runs it; `correct` lets the moving average learn from it."""
    backend, now_s = bench.backend, bench.clock.now_s
    asked_s = WORK_SHARE * target_s * scale.factor
    work = plan_work(asked_s, 0.0, units) if phase == "prefill" else plan_work(0.0, asked_s, units)
    began_s = now_s()
    _enqueue(bench, work)
    backend.wait(backend.mark())
    took_s = now_s() - began_s
    bench.clock.sleep_until(began_s + target_s)
    error = (now_s() - began_s) / target_s - 1
    planned_s = work_s(work, units) / scale.factor
    if correct and planned_s > 0:
        scale.note(planned_s, took_s, alone=True)
    done = _done(work, backend.mn)
    return Taken(error, took_s / (WORK_SHARE * target_s) - 1, done / took_s if done and took_s > 0 else None)


def _enqueue(bench: Bench, work: StepWork) -> None:
    for k, times in work.gemms:
        bench.backend.gemm(k, times)
    if work.fill_iterations:
        bench.backend.fill(work.fill_iterations)
    if work.read_bytes:
        bench.backend.read(work.read_bytes)


def _done(work: StepWork, mn: int) -> float:
    """TFLOPs of the GEMMs, or GB that were read."""
    return sum(times * gemm_flops(mn, mn, k) for k, times in work.gemms) / 1e12 or work.read_bytes / 1e9
