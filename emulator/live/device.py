"""Devices: what makes a step take its time. The virtual device keeps the cost model's time without computing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from emulator.live.alarm import Alarm


class VirtualDevice:
    """Sleeps to each step's absolute deadlines in its own thread; calls `step_progress(n)` on the loop when it has
    passed the first n of those within a step, and `step_done(woke_s)` with the instant at which the step really ended.

    Deadlines are absolute, so a late wake-up shortens the next sleep and lateness never adds up.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        step_done: Callable[[float], None],
        step_progress: Callable[[int], None],
        name: str,
    ) -> None:
        self._step_done = step_done
        self._step_progress = step_progress
        self._passed = self._within = 0
        self._alarm = Alarm(loop, self._rung, f"{name}-device")

    def run(self, deadline_s: float, progress_at_s: Sequence[float] = ()) -> None:
        """Run one step that ends at `deadline_s`, and tell when it gets to each of the rising instants `progress_at_s`.

        All are instants of `time.monotonic()`; one step at a time.
        """
        self._passed, self._within = 0, len(progress_at_s)
        self._alarm.arm(*progress_at_s, deadline_s)

    def close(self) -> None:
        """End the device's thread."""
        self._alarm.close()

    def _rung(self, woke_s: float) -> None:
        if self._passed == self._within:
            self._step_done(woke_s)
        else:
            self._passed += 1
            self._step_progress(self._passed)
