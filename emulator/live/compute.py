"""A device that computes: each step is real work on a backend, sized to the modelled time, and padded to its end.

    run() ──▶ device thread: enqueue ──▶ backend ──▶ wait for each mark ──▶ pad to the instant ──▶ tell the loop

The work is planned from what its units take alone (`core.step_work`). So it is the work that is fixed, not the time: on
a device that others use too a step overruns its deadline, and says by how much.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from emulator.core.errors import PdemuError, RunError
from emulator.core.scaling import Scaling
from emulator.core.step_portions import Portion, portions
from emulator.core.step_scale import StepScale
from emulator.core.step_work import UnitTimes
from emulator.live.backend import Backend, KvStore
from emulator.live.device import DeviceStep, StepDone, StepProgress
from emulator.live.kv_places import WatchedStore
from emulator.live.timers import pause_until, sharpen_timers

WORK_SHARE = 0.98
"""Of the time of a step is work; the rest is waited for, so that the step ends to the instant."""
LEAST_SHARE = 0.75
"""Where the host is late with a step, its work is that much less; but not less than this share of it."""
AHEAD_S = 0.05
"""Work of a step that is enqueued ahead: all of it in most steps. A close need not wait for more."""
_JOIN_S = 10.0


class Hardware(NamedTuple):
    """What a computing device works with: its backend, what its units take, and KV in its memory."""

    backend: Backend
    units: UnitTimes
    store: KvStore


class ComputeDevice:
    """Runs one step at a time in its own thread, in which `open_hardware` is called first, with what stops it early.

    It is ready to use once `opened` has returned. `alone`: nobody else is known to use the device, so that steps tell
    how its speed drifts. `failed` is called on the loop, once, with what went wrong in the thread. `scaling` is that of
    the KV on the wire.
    """

    device_id: str
    description: str
    store: WatchedStore

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        open_hardware: Callable[[threading.Event], Hardware],
        *,
        step_done: StepDone,
        step_progress: StepProgress,
        failed: Callable[[Exception], None],
        scaling: Scaling,
        alone: bool,
        name: str,
    ) -> None:
        self._loop = loop
        self._open_hardware = open_hardware
        self._step_done = step_done
        self._step_progress = step_progress
        self._failed = failed
        self._scaling = scaling
        self._alone = alone
        self._name = name
        self._scale = StepScale()
        self._stop = threading.Event()
        self._orders: queue.SimpleQueue[DeviceStep | None] = queue.SimpleQueue()
        self._opening: asyncio.Future[Hardware] = loop.create_future()
        self._thread = threading.Thread(target=self._live, name=f"{name}-device", daemon=True)
        self._thread.start()

    # --- the loop's thread ---

    async def opened(self) -> None:
        """Wait until the hardware is open; raises what `open_hardware` raises. Where this fails all is closed."""
        try:
            hardware = await self._opening
        except BaseException:
            self.close()
            raise
        self.device_id, self.description = hardware.backend.device_id, hardware.backend.description

    def _opening_ended(self, how: Hardware | Exception) -> None:
        if self._opening.done():  # nobody waits for it any more
            return
        if isinstance(how, Exception):
            self._opening.set_exception(how)
        else:
            self._opening.set_result(how)

    def run(self, step: DeviceStep) -> None:
        """Begin a step; the one before is over."""
        self._orders.put(step)

    def close(self) -> None:
        """End the thread, be it within a step, and free the device's memory. Idempotent."""
        self._stop.set()
        self._orders.put(None)
        self._thread.join(_JOIN_S)

    def _tell(self, told: Callable[..., None], *what: Any) -> None:
        """Call this on the loop, unless the device is closed until then."""

        def call() -> None:
            if not self._stop.is_set():
                told(*what)

        if not self._stop.is_set():
            self._loop.call_soon_threadsafe(call)

    # --- the device's thread ---

    def _live(self) -> None:
        sharpen_timers()
        try:
            hardware = self._open_hardware(self._stop)
        except Exception as error:
            self._tell(self._opening_ended, self._one_line(error))
            return
        self._backend, self._units, store = hardware
        self.store = WatchedStore(store)
        self._tell(self._opening_ended, hardware)
        try:
            while (step := self._orders.get()) is not None and not self._stop.is_set():
                self._carry_out(step)
        except Exception as error:
            self._tell(self._failed, self._one_line(error))
            while self._orders.get() is not None:
                pass
        finally:
            self.store.close()
            self._backend.close()

    def _carry_out(self, step: DeviceStep) -> None:
        """Do the step's work, telling when its instants have come; nothing is told once the device is closed."""
        began_s, copies = time.monotonic(), self.store.copies
        planned_s, parts = self._portions(step, began_s)
        instants = [*step.progress_at_s, step.deadline_s]
        worked_s, padded_s = began_s, 0.0
        for passes in self._worked(parts):
            worked_s, at_s = time.monotonic(), instants[passes - 1]
            pause_until(at_s, self._stop)
            if passes < len(instants):
                padded_s += max(0.0, at_s - worked_s)
                self._tell(self._step_progress, passes)
        if self._stop.is_set():
            return
        alone = self._alone and self.store.still_since(copies) and padded_s < AHEAD_S
        self._scale.note(planned_s, worked_s - began_s, alone=alone)
        self._tell(self._step_done, time.monotonic(), max(0.0, worked_s - step.deadline_s))

    def _portions(self, step: DeviceStep, began_s: float) -> tuple[float, Iterator[Portion]]:
        """What the step's work is to take alone, and its portions."""
        whole_s = step.deadline_s - step.start_s
        left_s = min(whole_s, max(step.deadline_s - began_s, LEAST_SHARE * whole_s))
        planned_s = WORK_SHARE * self._scale.factor * left_s
        prefill_s = min(1.0, step.prefill_s / whole_s) * planned_s if whole_s > 0 else 0.0
        return planned_s, portions(
            prefill_s,
            planned_s - prefill_s,
            step.progress,
            step.writes,
            units=self._units,
            scaling=self._scaling,
        )

    def _worked(self, parts: Iterator[Portion]) -> Iterator[int]:
        """Enqueue portions, some ahead, and wait for them; the number of each instant that they pass, once there."""
        pending: deque[tuple[Portion, Any]] = deque()
        ahead_s, portion = 0.0, next(parts, None)
        while not self._stop.is_set():
            while portion is not None and ahead_s < AHEAD_S:
                pending.append((portion, self._enqueue(portion)))
                ahead_s += portion.planned_s
                portion = next(parts, None)
            if not pending:
                return
            done, mark = pending.popleft()
            self._backend.wait(mark)
            ahead_s -= done.planned_s
            if done.passes and not self._stop.is_set():
                yield done.passes

    def _enqueue(self, portion: Portion) -> Any:
        work, backend = portion.work, self._backend
        for k, times in work.gemms:
            backend.gemm(k, times)
        if work.fill_iterations:
            backend.fill(work.fill_iterations)
        if work.read_bytes:
            backend.read(work.read_bytes)
        for write, start, stop in portion.writes:
            self.store.write(write, start, stop)
        return backend.mark()

    def _one_line(self, error: Exception) -> Exception:
        """The error as the user reads it: what is known as it is, anything else in a line."""
        if isinstance(error, PdemuError):
            return error
        first = (str(error).strip().splitlines() or [""])[0]
        told = RunError(f"{self._name}: the device failed: {type(error).__name__}: {first}")
        told.__cause__ = error
        return told
