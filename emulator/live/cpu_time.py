"""CPU time of this process during a run."""

from __future__ import annotations

import time


class CpuTime:
    """CPU seconds, of all threads, from `start` to `stop`; 0 before."""

    def __init__(self) -> None:
        self._start_s: float | None = None
        self._stop_s: float | None = None

    def start(self) -> None:
        """Count from now."""
        self._start_s = time.process_time()

    def stop(self) -> None:
        """Count no more. Idempotent."""
        if self._stop_s is None:
            self._stop_s = time.process_time()

    @property
    def seconds(self) -> float:
        """CPU seconds up to now, or to the stop."""
        if self._start_s is None:
            return 0.0
        return (time.process_time() if self._stop_s is None else self._stop_s) - self._start_s
