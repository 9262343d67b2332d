"""A backend in fake time: its work takes what units say, times how slow it is, and the host only waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from emulator.core.effects import KvWrite
from emulator.core.step_work import StepWork, UnitTimes, work_s
from emulator.live import compute

UNITS = UnitTimes(
    gemm_s=((64, 20e-6), (256, 80e-6)),
    fill_s=1e-6,
    fill_launch_s=5e-6,
    read_bytes_per_s=100e9,
    read_launch_s=5e-6,
)


class FakeBackend:
    """Keeps what was called in `calls`; `slowness` stretches work, `on_wait` is called within each wait."""

    name = "fake"
    device_id = "fake:0"
    description = "fake device"
    mn = 1
    gemm_ks: tuple[int, ...] = (64, 256)
    read_bytes_at_hand = 1 << 30

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s
        self.free_s = now_s
        self.slowness = 1.0
        self.calls: list[tuple[Any, ...]] = []
        self.worked_s = 0.0
        self.closed = 0
        self.on_wait: Callable[[], None] = lambda: None

    def _work(self, work: StepWork) -> None:
        seconds = work_s(work, UNITS)
        self.worked_s += seconds
        self.free_s = max(self.free_s, self.now_s) + seconds * self.slowness

    def warm_up(self, units: UnitTimes | None = None) -> None:
        self.calls.append(("warm_up", units))

    def gemm(self, k: int, times: int) -> None:
        self.calls.append(("gemm", k, times))
        self._work(StepWork(gemms=((k, times),)))

    def fill(self, iterations: int) -> None:
        self.calls.append(("fill", iterations))
        self._work(StepWork(fill_iterations=iterations))

    def read(self, nbytes: int) -> None:
        self.calls.append(("read", nbytes))
        self._work(StepWork(read_bytes=nbytes))

    def mark(self) -> float:
        self.calls.append(("mark", self.free_s))
        return self.free_s

    def wait(self, mark: float) -> None:
        self.calls.append(("wait", mark))
        self.on_wait()
        self.now_s = max(self.now_s, mark)

    def time_s(self, enqueue: Callable[[], None], repeats: int = 1) -> list[float]:
        took_s = []
        for _ in range(repeats):
            self.now_s = began_s = max(self.now_s, self.free_s)
            enqueue()
            took_s.append(self.free_s - began_s)
        return took_s

    def close(self) -> None:
        self.closed += 1

    def kinds(self) -> list[str]:
        """The names of all calls in order."""
        return [call[0] for call in self.calls]


class FakeStore:
    """A store that only notes what is written, among the calls of its backend."""

    block_bytes = 1000

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.closed = 0

    def write(self, write: KvWrite, start: int, stop: int) -> None:
        self.backend.calls.append(("write", write.request_id, start, stop))

    def gather(self, _blocks: Sequence[int], _offset: int, nbytes: int) -> memoryview:
        return memoryview(bytes(nbytes))

    def scatter(self, _blocks: Sequence[int], _offset: int, _frames: Sequence[Any]) -> None:
        pass

    def is_right(self, _request_id: str, _blocks: Sequence[int], _nbytes: int) -> bool:
        return True

    def close(self) -> None:
        self.closed += 1


def in_fake_time(patch: pytest.MonkeyPatch, backend: FakeBackend) -> None:
    """The device's thread reads the backend's clock, and pauses by setting it on."""

    def pause_until(deadline_s: float, stop: threading.Event) -> None:
        if not stop.is_set():
            backend.now_s = max(backend.now_s, deadline_s)

    patch.setattr(compute, "time", SimpleNamespace(monotonic=lambda: backend.now_s))
    patch.setattr(compute, "pause_until", pause_until)
