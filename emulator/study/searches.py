"""Several searches at once, each asking for runs as it goes: in this process, or in workers that live for all of them.

A search is a generator that yields runs, is sent what each came to, and returns what it has found. It goes on as soon
as its own runs have come back, so that every core has work while any search has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from emulator.core.errors import RunError
from emulator.core.run_spec import RunSpec
from emulator.lab.parallel import cores

Answer = TypeVar("Answer")
Found = TypeVar("Found")


def find_all(
    searches: Sequence[Generator[Sequence[RunSpec], Sequence[Answer], Found]],
    make: Callable[[RunSpec], Answer],
    *,
    workers: int | None = None,
) -> list[Found]:
    """What each search finds, its runs made by `make` (a function of a module) on `workers` processes.

    The default is one a core; one worker is this process. Raises RunError when a worker dies.
    """
    workers = workers or cores()
    if workers <= 1:
        return [_here(search, make) for search in searches]
    with _pool(workers) as pool:
        return _at_once(searches, make, pool)


def _here(search: Generator[Sequence[RunSpec], Sequence[Answer], Found], make: Callable[[RunSpec], Answer]) -> Found:
    try:
        runs = next(search)
        while True:
            runs = search.send([make(run) for run in runs])
    except StopIteration as over:
        found: Found = over.value
        return found


def _at_once(
    searches: Sequence[Generator[Sequence[RunSpec], Sequence[Answer], Found]],
    make: Callable[[RunSpec], Answer],
    pool: ProcessPoolExecutor,
) -> list[Found]:
    found: dict[int, Found] = {}
    asked: dict[int, list[Future[Answer]]] = {}

    def proceed(number: int, answers: Sequence[Answer] | None) -> None:
        try:
            runs = next(searches[number]) if answers is None else searches[number].send(answers)
        except StopIteration as over:
            found[number] = over.value
        else:
            asked[number] = [pool.submit(make, run) for run in runs]

    for number in range(len(searches)):
        proceed(number, None)
    while asked:
        wait(
            [future for futures in asked.values() for future in futures if not future.done()],
            return_when=FIRST_COMPLETED,
        )
        for number in [n for n, futures in asked.items() if all(future.done() for future in futures)]:
            proceed(number, [future.result() for future in asked.pop(number)])
    return [found[number] for number in range(len(searches))]


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes; an error or Ctrl-C inside drops what waits and ends them."""
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_follow_the_parent)
    try:
        yield pool
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise RunError("a worker process has died, perhaps for want of memory; shorten the runs") from None
        raise
    pool.shutdown()


def _follow_the_parent() -> None:
    """A worker leaves interrupts to its parent, and ends with it: it would wait for one that was killed for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker was started by somebody"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
