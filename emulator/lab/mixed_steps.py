"""What a step costs that computes prompts and reads KV at once, beside what its parts cost alone.

Cost models join the two by a p-norm (`core.step_shape`); here its p is measured: GEMMs of some tokens on one stream and
a read of device memory on another, begun together, until both have ended.
"""

from __future__ import annotations

from collections.abc import Callable

from emulator.core.calibration import MixedPoint, MixedSteps, Spread, fit_norm
from emulator.core.errors import PdemuError
from emulator.core.time_budget import TimeBudget
from emulator.lab.interference import OpenRival
from emulator.lab.measuring import Bench, Work
from emulator.lab.rivals import Rival

TOKENS = (128, 256, 512, 1024, 2048)
READ_TOKENS = 512
"""The read takes as long as the GEMMs of so many tokens, so that the points lie on both sides of that."""

OPENING = 0.15
"""Share of the time for opening the device a second time and for sizing."""


def measure_mixed(bench: Bench, budget: TimeBudget, open_rival: OpenRival) -> MixedSteps | None:
    """Every number of tokens that the device's GEMMs have rows for; None, and said, where there is no second stream."""
    tokens = [n for n in TOKENS if n <= bench.backend.mn]
    try:
        with open_rival("thread", budget.left_s) as rival:
            points = _points(bench, budget, rival, tokens)
    except PdemuError as error:
        bench.leave_out("mixed steps", str(error))
        return None
    if beyond := [n for n in TOKENS if n > bench.backend.mn]:
        bench.leave_out(f"mixed steps of {', '.join(map(str, beyond))} tokens", f"GEMMs have {bench.backend.mn} rows")
    if not points:
        return None
    found = [(point.gemm_ms.median, point.read_ms.median, point.together_ms.median) for point in points]
    return MixedSteps(norm=fit_norm(found), points=tuple(points))


def _points(bench: Bench, budget: TimeBudget, rival: Rival, tokens: list[int]) -> list[MixedPoint]:
    k = max(bench.backend.gemm_ks)
    middle = min(READ_TOKENS, bench.backend.mn)

    def gemms(rows: int, times: int) -> None:
        bench.backend.product(k, times, rows=rows, operands="low-toggle")

    sizing, measuring = budget.split([OPENING, 1 - OPENING])
    times = bench.sized(lambda amount: gemms(middle, amount), bench.plan.beside_s, sizing)
    read = bench.sized_work("decode", bench.plan.beside_s, sizing)
    found = []
    for rows, own in zip(tokens, measuring.split([1.0] * len(tokens)), strict=True):
        what = f"mixed step of {rows} tokens"
        parts = own.split([1.0, 1.0, 2.0])
        gemm = _host_ms(bench, f"{what}, GEMMs alone", next(parts), lambda: gemms(rows, times))  # noqa: B023
        reading = _host_ms(bench, f"{what}, read alone", next(parts), lambda: read.enqueue(bench.backend))
        both = _together_ms(bench, what, next(parts), (lambda: gemms(rows, times), rival, read))  # noqa: B023
        if gemm is not None and reading is not None and both is not None:
            found.append(MixedPoint(tokens=rows, gemm_ms=gemm, read_ms=reading, together_ms=both))
    return found


def _host_ms(bench: Bench, what: str, budget: TimeBudget, enqueue: Callable[[], None]) -> Spread | None:
    """By the host's clock, as both together are, whose streams have no clock in common."""

    def take() -> float:
        began_s = bench.clock.now_s()
        enqueue()
        bench.backend.wait(bench.backend.mark())
        return (bench.clock.now_s() - began_s) * 1e3

    return bench.spread(what, budget, take)


def _together_ms(
    bench: Bench, what: str, budget: TimeBudget, both: tuple[Callable[[], None], Rival, Work]
) -> Spread | None:
    enqueue, rival, read = both

    def take() -> float:
        began_s = bench.clock.now_s()
        rival.once(read)
        enqueue()
        bench.backend.wait(bench.backend.mark())
        ended_s = bench.clock.now_s()
        return (max(ended_s, rival.ended_s()) - began_s) * 1e3

    return bench.spread(what, budget, take)
