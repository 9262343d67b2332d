"""How a computing device keeps its steps at the modelled time though clocks and temperatures drift."""

from __future__ import annotations

import math

LEAST_PLANNED_S = 0.003
"""Of shorter steps a launch or an interrupt is a part that counts."""
STEPS = 30
"""The time constant of the moving average."""
FARTHEST = math.log(1.15)
"""A step that is farther from the average than this was disturbed: clocks do not change so much from step to step."""
MOST_NEWS = 0.02
"""So far does a single step count, however far it is from the average: what is rare and large is no drift."""
LOWEST, HIGHEST = 0.8, 1.25


class StepScale:
    """`factor` by which planned work is multiplied, from a slow moving average of how long steps alone really took.

    A step that shared its device, or whose time only contention or a hiccup explains, says nothing and is left out. So
    a drift is followed that is within 15 % of what was known before, and nothing beyond 0.8 … 1.25 in all.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._log = 0.0

    def note(self, planned_s: float, took_s: float, *, alone: bool) -> None:
        """Work that was to take `planned_s` by the times of its units (`step_work.work_s`) took `took_s` on the device.

        The factor is part of the work: it is what makes `planned_s` more or less than the time that is aimed at.
        """
        if not alone or planned_s < LEAST_PLANNED_S or took_s <= 0.0:
            return
        news = math.log(planned_s / took_s) - self._log
        if abs(news) > FARTHEST:
            return
        self._log += max(-MOST_NEWS, min(MOST_NEWS, news)) / STEPS
        self._log = max(math.log(LOWEST), min(math.log(HIGHEST), self._log))
        self.factor = math.exp(self._log)
