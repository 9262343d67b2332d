"""CPU time of this process during a run."""

from __future__ import annotations

import time


class CpuTime:
    """CPU seconds, of all threads, since `start`; 0 before."""

    def __init__(self) -> None:
        self._start_s: float | None = None

    def start(self) -> None:
        """Count from now."""
        self._start_s = time.process_time()

    @property
    def seconds(self) -> float:
        """CPU seconds up to now."""
        return 0.0 if self._start_s is None else time.process_time() - self._start_s
