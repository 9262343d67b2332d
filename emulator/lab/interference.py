"""How activities that share a device slow each other down."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Literal

from emulator.core.calibration import (
    ACTIVITIES,
    SHARINGS,
    Activity,
    Interference,
    Sharing,
)
from emulator.core.errors import PdemuError
from emulator.core.time_budget import TimeBudget
from emulator.lab.measuring import Bench, Work
from emulator.lab.rivals import Rival
from emulator.live.backend import MeasuredBackend

SLICES = 8
"""On one stream the two take turns in so many parts."""

OpenRival = Callable[[Literal["thread", "process"], float], AbstractContextManager[Rival]]
"""Opens a rival within so many seconds."""


def measure_interference(bench: Bench, budget: TimeBudget, open_rival: OpenRival) -> Iterator[Interference]:
    """Each activity beside each, under every way to share the device."""
    for sharing, own in zip(SHARINGS, budget.split([1.0] * len(SHARINGS)), strict=True):
        try:
            if sharing == "one stream":
                yield from _in_turn(bench, own)
            else:
                kind: Literal["thread", "process"] = "thread" if sharing == "two streams" else "process"
                with open_rival(kind, own.left_s) as rival:
                    yield from _beside(bench, own, sharing, rival)
        except PdemuError as error:
            bench.leave_out(f"interference on {sharing}", str(error))


def _in_turn(bench: Bench, budget: TimeBudget) -> Iterator[Interference]:
    """Both on one stream, in slices that take the same time alone."""
    for activity, beside, works, own in _pairs(bench, budget):
        together = _in_slices(works[activity], works[beside])
        which: Which = ("one stream", activity, beside)
        found = _slowdown(bench, own, which, alone=_in_slices(works[activity]), together=together)
        if found is not None:
            yield found


def _beside(bench: Bench, budget: TimeBudget, sharing: Sharing, rival: Rival) -> Iterator[Interference]:
    """One here, the other by a rival without a pause."""
    for activity, beside, works, own in _pairs(bench, budget):
        enqueue, which = _in_slices(works[activity]), (sharing, activity, beside)
        with_rival = _working(rival, works[beside])
        found = _slowdown(bench, own, which, alone=enqueue, together=enqueue, rivalry=with_rival)
        if found is not None:
            yield found


Enqueue = Callable[[MeasuredBackend], None]
Which = tuple[Sharing, Activity, Activity]


def _pairs(bench: Bench, budget: TimeBudget) -> Iterator[tuple[Activity, Activity, dict[Activity, Work], TimeBudget]]:
    """Each pair, a slice of each activity, and the pair's part of the time."""
    pairs = [(activity, beside) for activity in ACTIVITIES for beside in ACTIVITIES]
    budgets = budget.split([1.0] * (1 + len(pairs)))
    sizings = next(budgets).split([1.0] * len(ACTIVITIES))
    slice_s = bench.plan.beside_s / SLICES
    works = {name: bench.sized_work(name, slice_s, own) for name, own in zip(ACTIVITIES, sizings, strict=True)}
    for (activity, beside), own in zip(pairs, budgets, strict=True):
        yield activity, beside, works, own


def _in_slices(*works: Work) -> Enqueue:
    """So many slices of each, in turn."""

    def enqueue(backend: MeasuredBackend) -> None:
        for _ in range(SLICES):
            for work in works:
                work.enqueue(backend)

    return enqueue


@contextlib.contextmanager
def _working(rival: Rival, work: Work) -> Iterator[None]:
    """While this is entered, the rival works."""
    rival.begin(work)
    try:
        yield
    finally:
        rival.stop()


def _slowdown(
    bench: Bench,
    budget: TimeBudget,
    which: Which,
    *,
    alone: Enqueue,
    together: Enqueue,
    rivalry: AbstractContextManager[None] | None = None,
) -> Interference | None:
    """What `together` takes, during the rivalry if there is one, over what `alone` takes just before."""
    sharing, activity, beside = which
    what = f"{activity} beside {beside} on {sharing}"
    parts = budget.split([1.0, 2.0])
    alone_s = next(parts).samples(lambda: bench.took_s(lambda: alone(bench.backend)), most=bench.plan.most)
    if not alone_s:
        bench.tell(what)
        bench.leave_out(what)
        return None
    unit_s = statistics.median(alone_s)
    with rivalry or contextlib.nullcontext():
        slowdown = bench.spread(
            what,
            next(parts),
            lambda: bench.took_s(lambda: together(bench.backend)) / unit_s,
            expected_s=unit_s,
        )
    if slowdown is None:
        return None
    return Interference(sharing=sharing, activity=activity, beside=beside, slowdown=slowdown)
