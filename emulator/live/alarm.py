"""Waking an event loop at an absolute instant, precisely, from a thread that sleeps.

Timers of asyncio and uvloop are coarse to a millisecond. Here one thread sleeps to the deadline and then posts to
the loop; what it posts carries the instant at which it woke, so that lateness can be measured.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from emulator.live.timers import sharpen_timers


class Alarm:
    """Calls `ring(woke_s)` on the loop at each deadline. Arming again replaces deadlines that have not come yet.

    Deadlines and `woke_s` are seconds of `time.monotonic()`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[float], None], name: str) -> None:
        self._loop = loop
        self._ring = ring
        self._orders: queue.SimpleQueue[tuple[float, ...] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def arm(self, *deadlines_s: float) -> None:
        """Ring once for each of these, in their order; at once where one is past."""
        self._orders.put(deadlines_s)

    def close(self) -> None:
        """End the thread; nothing rings afterwards. Idempotent."""
        self._closed = True
        self._orders.put(None)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        sharpen_timers()
        deadlines_s: deque[float] = deque()
        while True:
            try:
                timeout_s = max(0.0, deadlines_s[0] - time.monotonic()) if deadlines_s else None
                order = self._orders.get(timeout=timeout_s)
            except queue.Empty:
                woke_s = time.monotonic()
                deadlines_s.popleft()
                if not self._closed:
                    self._loop.call_soon_threadsafe(self._fire, woke_s)
                continue
            if order is None:
                return
            deadlines_s = deque(order)

    def _fire(self, woke_s: float) -> None:
        if not self._closed:
            self._ring(woke_s)
