"""Somebody else on the device: a second stream of this process, or another process, that works when it is told to.

It lives on the other end of a pipe and ends when that closes, however its owner went.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Literal, Protocol

from emulator.core.errors import PdemuError, RunError
from emulator.lab.measuring import Work
from emulator.lab.parallel import interrupts_held_back
from emulator.live.backend import MeasuredBackend

LEAST_OPEN_S = 5.0
ANSWER_S = 60.0
END_S = 10.0
BETWEEN = 2
"""Batches that a rival has enqueued at a time, so that the device never waits for it."""

OpenBackend = Callable[[], MeasuredBackend]
"""Opens the device anew, with a stream of its own; picklable."""


class Rival(Protocol):
    """Works on the same device."""

    def begin(self, work: Work) -> None:
        """Do this over and over; returns when it has been done once."""

    def stop(self) -> None:
        """Stop that."""

    def once(self, work: Work) -> None:
        """Do this once, from now on; returns at once."""

    def ended_s(self) -> float:
        """The instant of `time.monotonic()` at which that was done."""


@contextlib.contextmanager
def rival(kind: Literal["thread", "process"], within_s: float, open_backend: OpenBackend) -> Iterator[Rival]:
    """A rival that has the device open within some time, `LEAST_OPEN_S` at least; raises RunError when it cannot.

    It is ended in any case.
    """
    ours, theirs = multiprocessing.Pipe()
    worker: threading.Thread | multiprocessing.context.SpawnProcess
    if kind == "thread":
        worker = threading.Thread(target=serve, args=(theirs, open_backend), name="rival", daemon=True)
        worker.start()
    else:
        worker = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, open_backend), daemon=True)
        with interrupts_held_back():
            worker.start()
        theirs.close()
    far = _Far(ours)
    try:
        far.hear("ready", max(LEAST_OPEN_S, within_s))
        yield far
    finally:
        ours.close()
        worker.join(END_S)
        if isinstance(worker, multiprocessing.context.SpawnProcess) and worker.is_alive():
            worker.terminate()
            worker.join(END_S)


class _Far:
    """A rival at the other end of a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self, work: Work) -> None:
        self._tell("begin", work)
        self.hear("begun", ANSWER_S)

    def stop(self) -> None:
        self._tell("stop", None)
        self.hear("stopped", ANSWER_S)

    def once(self, work: Work) -> None:
        self._tell("once", work)

    def ended_s(self) -> float:
        return self.hear("ended", ANSWER_S)

    def hear(self, expected: str, within_s: float) -> float:
        try:
            if not self._pipe.poll(within_s):
                raise RunError(f"another user of the device did not answer within {within_s:.0f} s")
            what, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise RunError("another user of the device has died, perhaps for want of memory") from None
        if what == "failed":
            raise RunError(f"another user of the device failed: {value}")
        assert what == expected
        return float(value)

    def _tell(self, order: str, work: Work | None) -> None:
        try:
            self._pipe.send((order, work))
        except (OSError, ValueError):
            raise RunError("another user of the device has died, perhaps for want of memory") from None


# --- the other end ------------------------------------------------------------------------------------------------


def serve(pipe: Connection, open_backend: OpenBackend) -> None:
    """A rival's life: open the device, do what is ordered, until the pipe closes."""
    with contextlib.suppress(EOFError, OSError):
        try:
            backend = open_backend()
            try:
                backend.warm_up()
                pipe.send(("ready", 0.0))
                while True:
                    _obey(pipe, backend)
            finally:
                backend.close()
        except PdemuError as error:
            pipe.send(("failed", str(error)))
        finally:
            pipe.close()


def _obey(pipe: Connection, backend: MeasuredBackend) -> None:
    order, work = pipe.recv()
    if order == "once":
        work.enqueue(backend)
        backend.wait(backend.mark())
        pipe.send(("ended", time.monotonic()))
        return
    marks: list[object] = []
    begun = False
    while not pipe.poll():
        work.enqueue(backend)
        marks.append(backend.mark())
        if len(marks) == BETWEEN:
            backend.wait(marks.pop(0))
            if not begun:
                pipe.send(("begun", 0.0))
                begun = True
    pipe.recv()
    for mark in marks:
        backend.wait(mark)
    pipe.send(("stopped", 0.0))
