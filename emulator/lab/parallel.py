"""Many simulations at once: one process a core, results as they come."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from emulator.core.deploy import RunSpec
from emulator.core.summary import RunSummary
from emulator.lab.simulated import simulated_result


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def simulate_all(runs: Sequence[RunSpec], *, workers: int | None = None) -> Iterator[tuple[int, RunSummary]]:
    """Simulate all runs on `workers` processes (default: one a core); (index, summary) in the order of ending.

    With one worker, or one run, everything happens in this process. Closing the iterator ends the workers.
    """
    workers = min(workers or cores(), len(runs))
    if workers <= 1:
        for index, run in enumerate(runs):
            yield index, _summary(run)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_leave_interrupts_to_the_parent) as pool:
        pending = {pool.submit(_summary, run): index for index, run in enumerate(runs)}
        try:
            for done in as_completed(pending):
                yield pending[done], done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _summary(run: RunSpec) -> RunSummary:
    return simulated_result(run).summary


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
