"""Devices: what makes a step take its time. The virtual device keeps the cost model's time without computing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from emulator.live.alarm import Alarm


class VirtualDevice:
    """Sleeps to each step's absolute deadline in its own thread, then reports the instant at which it really ended.

    Deadlines are absolute, so a late wake-up shortens the next sleep and lateness never adds up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, step_done: Callable[[float], None], name: str) -> None:
        self._alarm = Alarm(loop, step_done, f"{name}-device")

    def run(self, deadline_s: float) -> None:
        """Run one step that ends at `deadline_s` of `time.monotonic()`; one step at a time."""
        self._alarm.arm(deadline_s)

    def close(self) -> None:
        """End the device's thread."""
        self._alarm.close()
