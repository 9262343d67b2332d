"""A device of known speeds on a clock that stands still but for what is done: measuring it must give these speeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from emulator.core.calibration import Direction, Operands, gemm_flops
from emulator.core.step_work import UnitTimes
from emulator.lab.measuring import Clock, Work
from emulator.lab.rivals import Rival


class FakeClock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0
        self.now_s += seconds

    def clock(self) -> Clock:
        """As measuring wants it."""
        return Clock(self, lambda until_s: self.advance(max(0.0, until_s - self.now_s)))


class Speeds(NamedTuple):
    """Of the fake device."""

    flops: float = 500e12
    random: float = 0.8
    read_bytes_per_s: float = 3e12
    copy_bytes_per_s: float = 25e9
    within_bytes_per_s: float = 1.4e12
    launch_s: float = 3e-6
    fill_s: float = 2e-6


class FakeBackend:
    """Work takes what the speeds say, `slower` times that, and time passes when it is waited for."""

    name = "fake"
    device_id = "fake:0"
    description = "Fake H100"
    driver = "none"
    mn = 4096
    gemm_ks: tuple[int, ...] = (512, 1024, 4096)
    read_bytes_at_hand = 4 << 30

    def __init__(self, clock: FakeClock, speeds: Speeds | None = None) -> None:
        self.clock = clock
        self.speeds = speeds or Speeds()
        self.slower = 1.0
        self.closed = False
        self._enqueued_s = 0.0

    def warm_up(self, units: UnitTimes | None = None) -> None:
        """Nothing is loaded late."""

    def gemm(self, k: int, times: int) -> None:
        self.product(k, times, rows=self.mn, operands="low-toggle")

    def product(self, k: int, times: int, *, rows: int, operands: Operands) -> None:
        flops = self.speeds.flops * (self.speeds.random if operands == "random" else 1.0)
        self._take(times * gemm_flops(rows, self.mn, k) / flops)

    def fill(self, iterations: int) -> None:
        self._take(self.speeds.launch_s + iterations * self.speeds.fill_s)

    def read(self, nbytes: int) -> None:
        self._take(self.speeds.launch_s + nbytes / self.speeds.read_bytes_per_s)

    def copy(self, nbytes: int, direction: Direction) -> None:
        rate = self.speeds.within_bytes_per_s if direction == "within" else self.speeds.copy_bytes_per_s
        self._take(nbytes / rate)

    def mark(self) -> None:
        """All is in order."""

    def wait(self, mark: object) -> None:
        self.clock.advance(self._enqueued_s)
        self._enqueued_s = 0.0

    def time_s(self, enqueue: Callable[[], None], repeats: int = 1) -> list[float]:
        took_s = []
        for _ in range(repeats):
            began_s = self.clock()
            enqueue()
            self.wait(None)
            took_s.append(self.clock() - began_s)
        return took_s

    def close(self) -> None:
        self.closed = True

    def _take(self, seconds: float) -> None:
        self._enqueued_s += seconds * self.slower


class FakeRival:
    """Slows the device by a factor while it works; what it does once, it does by itself."""

    def __init__(self, backend: FakeBackend, factor: float) -> None:
        self._backend = backend
        self._factor = factor
        self._own = FakeBackend(FakeClock(), backend.speeds)

    def begin(self, work: Work) -> None:
        self._backend.slower = self._factor

    def stop(self) -> None:
        self._backend.slower = 1.0

    def once(self, work: Work) -> None:
        self._own.clock.now_s = self._backend.clock.now_s
        work.enqueue(self._own)
        self._own.wait(None)

    def ended_s(self) -> float:
        return self._own.clock.now_s


def fake_rivals(
    backend: FakeBackend, *, thread: float, process: float
) -> Callable[[Literal["thread", "process"], float], contextlib.AbstractContextManager[Rival]]:
    """Opens rivals that slow the device so many times."""

    @contextlib.contextmanager
    def opened(kind: Literal["thread", "process"], within_s: float) -> Iterator[Rival]:
        yield FakeRival(backend, thread if kind == "thread" else process)

    return opened
