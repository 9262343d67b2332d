"""Devices: what makes a step take its time. The virtual device keeps the cost model's time without computing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from emulator.core.effects import KvWrite
from emulator.core.step_shape import StepShape
from emulator.live.alarm import Alarm
from emulator.live.kv_places import WatchedStore

StepDone = Callable[[float, float], None]
"""Told `(woke_s, slipped_s)`: the instant at which a step was over, and by how much its work overran its deadline."""

StepProgress = Callable[[int], None]
"""Told how many of a step's instants of progress have passed."""


class DeviceStep(NamedTuple):
    """A step to run until `deadline_s`, telling when it gets to each of the rising instants `progress_at_s`.

    All are instants of `time.monotonic()`. `shape` is what it computes, of which its prompts' chunks alone would take
    `prefill_s` wall seconds; `progress` are the shares of its work at those instants, and `writes` the KV it computes.
    """

    deadline_s: float
    progress_at_s: Sequence[float] = ()
    shape: StepShape = StepShape((), 0, 0)
    start_s: float = 0.0
    prefill_s: float = 0.0
    progress: Sequence[float] = ()
    writes: Sequence[KvWrite] = ()


class Device(Protocol):
    """Runs one step at a time in its own thread; tells its progress and its end on the event loop.

    `device_id` is the same for all processes that use the same piece of hardware, and empty where none is used.
    """

    device_id: str
    description: str

    @property
    def store(self) -> WatchedStore | None:
        """KV in the device's memory; a device that does not compute has none."""

    def run(self, step: DeviceStep) -> None:
        """Begin a step; the one before is over."""

    def close(self) -> None:
        """End the device's thread and free its memory. Idempotent."""


class VirtualDevice:
    """Sleeps to each step's absolute deadlines in its own thread; calls `step_progress(n)` on the loop when it has
    passed the first n instants of a step, and `step_done(woke_s, 0.0)` with the instant at which the step ended.

    Deadlines are absolute, so a late wake-up shortens the next sleep and lateness never adds up.
    """

    device_id = ""
    description = "virtual"
    store = None

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        step_done: StepDone,
        step_progress: StepProgress,
        name: str,
    ) -> None:
        self._step_done = step_done
        self._step_progress = step_progress
        self._passed = self._within = 0
        self._alarm = Alarm(loop, self._rung, f"{name}-device")

    def run(self, step: DeviceStep) -> None:
        """Run one step: sleep to its instants."""
        self._passed, self._within = 0, len(step.progress_at_s)
        self._alarm.arm(*step.progress_at_s, step.deadline_s)

    def close(self) -> None:
        """End the device's thread."""
        self._alarm.close()

    def _rung(self, woke_s: float) -> None:
        if self._passed == self._within:
            self._step_done(woke_s, 0.0)
        else:
            self._passed += 1
            self._step_progress(self._passed)
