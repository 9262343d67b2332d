"""Work for several processes at once: one a core, answers as they come.

Apart from `concurrent.futures` for three reasons: a task may give many answers, each of which is at hand as soon as it
is there; the work can be ended in the middle of a task; and when this process is killed its workers see their pipe
closed and end, where those of a pool would wait for ever.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, TypeVar

from emulator.core.errors import RunError
from emulator.core.run_spec import RunSpec
from emulator.core.run_summary import RunResult, RunSummary
from emulator.lab.simulated import simulated_result

Task = TypeVar("Task")
Answer = TypeVar("Answer")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Team(Generic[Task, Answer]):
    """Up to `workers` processes (default: one a core) that do `function(task)`, which gives any number of answers.

    A worker starts when it is first needed and gets `function` once; it, the tasks and the answers must be picklable.
    With one worker, or one task alone, everything happens in this process.
    """

    def __init__(self, function: Callable[[Task], Iterable[Answer]], workers: int | None = None) -> None:
        self._function = function
        self._most = workers or cores()
        self._workers: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> Team[Task, Answer]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dismiss()

    def stream(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Answer]]:
        """(index of the task, answer) in the order in which they come; tasks are taken in their order.

        An error of the function is raised here, and RunError when a worker dies; these, or closing the iterator, end
        all workers at once.
        """
        wanted = min(self._most, len(tasks))
        if wanted <= 1:
            for index, task in enumerate(tasks):
                for answer in self._function(task):
                    yield index, answer
            return
        while len(self._workers) < wanted:
            pipe, worker = _hire(self._function)
            self._workers[pipe] = worker
        try:
            yield from _hand_out(tasks, list(self._workers))
        except BaseException:
            self.dismiss()
            raise

    def dismiss(self) -> None:
        """End all workers, whatever they are doing."""
        for worker in self._workers.values():
            worker.terminate()
        for pipe, worker in self._workers.items():
            worker.join()
            pipe.close()
        self._workers.clear()


def simulate_all(runs: Sequence[RunSpec], *, workers: int | None = None) -> Iterator[tuple[int, RunSummary]]:
    """Simulate all runs; (index, summary) in the order of ending. Closing the iterator ends the workers."""
    with Team(_summary, workers) as team:
        yield from team.stream(runs)


def simulate_records(runs: Sequence[RunSpec], *, workers: int | None = None) -> Iterator[tuple[int, RunResult]]:
    """Simulate all runs; (index, result with its records and without its steps) in the order of ending."""
    with Team(_result, workers) as team:
        yield from team.stream(runs)


def _summary(run: RunSpec) -> Iterator[RunSummary]:
    yield simulated_result(run).summary


def _result(run: RunSpec) -> Iterator[RunResult]:
    result = simulated_result(run)
    yield RunResult(result.summary, result.records)


# --- workers --------------------------------------------------------------------------------------------------


def _hire(function: Callable[[Any], Iterable[Any]]) -> tuple[Connection, BaseProcess]:
    """A process that works for this one, and the pipe to it."""
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=_work, args=(theirs, function), daemon=True)
    with interrupts_held_back():
        worker.start()
    theirs.close()
    return ours, worker


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """A process started in here inherits that SIGINT is blocked: Ctrl-C is for this process alone to deal with."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hand_out(tasks: Sequence[Any], pipes: Sequence[Connection]) -> Iterator[tuple[int, Any]]:
    """One task at a time to each worker; pass on what they answer."""
    left = iter(enumerate(tasks))
    at_work: dict[Any, int] = {}

    def assign(pipe: Connection) -> None:
        at_work.pop(pipe, None)
        if (following := next(left, None)) is not None:
            at_work[pipe], task = following
            pipe.send(task)

    try:
        for pipe in pipes:
            assign(pipe)
        while at_work:
            for ready in wait(list(at_work)):
                assert isinstance(ready, Connection)
                kind, value = ready.recv()
                if kind == "answer":
                    yield at_work[ready], value
                elif kind == "failed":
                    raise value
                else:
                    assign(ready)
    except (EOFError, ConnectionError):
        raise RunError("a worker process has died, perhaps for want of memory; use fewer (--workers)") from None


def _work(pipe: Connection, function: Callable[[Any], Iterable[Any]]) -> None:
    """A worker's life: a task, its answers, the next task, until the parent has gone."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            task = pipe.recv()
            try:
                for answer in function(task):
                    pipe.send(("answer", answer))
            except Exception as error:
                pipe.send(("failed", error))
            else:
                pipe.send(("done", None))
