"""How late an event loop is: a thread posts a stamped call now and then and the loop notes its age when it runs."""

from __future__ import annotations

import asyncio
import threading
import time

SAMPLE_INTERVAL_S = 0.025


class LoopLag:
    """Samples of one loop's lag, wall seconds, taken about every 25 ms from `start` to `stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.samples_s: list[float] = []

    def start(self) -> None:
        """Begin to sample."""
        self._thread = threading.Thread(target=self._run, name="loop-lag", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End sampling. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._loop.call_soon_threadsafe(self._note, time.monotonic())

    def _note(self, posted_s: float) -> None:
        self.samples_s.append(time.monotonic() - posted_s)
