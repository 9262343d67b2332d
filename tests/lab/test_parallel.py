"""Work for several processes: every answer comes once, errors are the caller's, and no worker is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import pytest

from emulator.core.errors import ConfigError, RunError
from emulator.lab.parallel import Team
from tests.live.lab import all_gone


def _answers(function: Callable[[int], Iterator[Any]], tasks: Sequence[int], workers: int) -> list[tuple[int, Any]]:
    with Team(function, workers) as team:
        return list(team.stream(tasks))


def thrice(number: int) -> Iterator[tuple[int, int]]:
    """Three answers a task, with the process that gave them."""
    yield from ((number * 10 + n, os.getpid()) for n in range(3))


def refuses(number: int) -> Iterator[int]:
    """An error at 3."""
    if number == 3:
        raise ConfigError("three is too many")
    yield number


def dies(number: int) -> Iterator[int]:
    """A worker killed from outside, as for want of memory."""
    yield number
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.live
@pytest.mark.parametrize("workers", [1, 2])
def test_every_answer_of_every_task_comes_once(workers: int) -> None:
    answers = _answers(thrice, range(5), workers)
    assert sorted((index, value) for index, (value, _) in answers) == [
        (t, t * 10 + n) for t in range(5) for n in range(3)
    ]
    pids = {pid for _, (_, pid) in answers}
    assert (os.getpid() in pids) == (workers == 1)
    assert len(pids) <= workers


@pytest.mark.live
def test_a_team_keeps_its_workers_and_ends_them() -> None:
    with Team(thrice, 2) as team:
        first = {pid for _, (_, pid) in team.stream([1, 2, 3])}
        second = {pid for _, (_, pid) in team.stream([4, 5, 6])}
        assert len(first | second) == 2
        workers = [psutil.Process(pid) for pid in first | second]
    assert all_gone(workers, 5)


@pytest.mark.live
def test_an_error_in_a_worker_is_the_callers() -> None:
    with pytest.raises(ConfigError, match="three is too many"):
        _answers(refuses, range(6), 2)


@pytest.mark.live
def test_a_worker_that_dies_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(RunError, match="a worker process has died"):
        _answers(dies, range(4), 2)
