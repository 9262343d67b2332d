"""How late an event loop is: a thread posts a stamped call now and then and the loop notes its age when it runs.

A process that does not run at all posts nothing. The samples that it owes then are made up for when it runs again,
each as late as it came, so that a stall weighs as much as it lasted.
"""

from __future__ import annotations

import asyncio
import threading
import time

SAMPLE_INTERVAL_S = 0.025
MOST_SAMPLES = 200_000


class LoopLag:
    """Samples of one loop's lag, wall seconds, taken about every 25 ms from `start` to `stop`.

    Beyond `most` samples every other one is dropped, and from then on only every other one kept, and so on: what is
    left stands for all of the time alike.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int = MOST_SAMPLES) -> None:
        self._loop = loop
        self._most = most
        self._stride = 1
        self._seen = 0
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
        due_s = time.monotonic() + SAMPLE_INTERVAL_S
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            self._loop.call_soon_threadsafe(self._note, owed_samples(due_s, time.monotonic()))
            due_s = time.monotonic() + SAMPLE_INTERVAL_S

    def _note(self, posted_s: list[float]) -> None:
        now_s = time.monotonic()
        for instant in posted_s:
            if self._seen % self._stride == 0:
                self.samples_s.append(now_s - instant)
            self._seen += 1
        while len(self.samples_s) > self._most:
            del self.samples_s[1::2]
            self._stride *= 2


def owed_samples(due_s: float, now_s: float) -> list[float]:
    """The instants from which lag counts when a sample due at `due_s` is posted at `now_s`.

    A little late, it counts from now, since the lateness is the thread's own; after a stall of more than a sample's
    interval, every sample missed counts from when it was due.
    """
    missed = int((now_s - due_s) / SAMPLE_INTERVAL_S)
    return [due_s + n * SAMPLE_INTERVAL_S for n in range(missed)] or [now_s]
