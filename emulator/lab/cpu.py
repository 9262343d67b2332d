"""How busy the cores of this machine are while a run goes on."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil


class CpuSampler:
    """Within a `with` block, or up to `stop`, `busiest` gets the busiest core's share (0 to 1) of each second."""

    def __init__(self) -> None:
        self.busiest: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpu", daemon=True)

    def __enter__(self) -> CpuSampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join(timeout=2.0)

    def stop(self) -> None:
        """Sample no more. Idempotent."""
        self._stopped.set()

    def _run(self) -> None:
        psutil.cpu_percent(percpu=True)
        while not self._stopped.wait(1.0):
            self.busiest.append(max(psutil.cpu_percent(percpu=True)) / 100)
