"""A load test on a real clock, by a driver that is a script: what is due is sent, and waits where it must."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest

from emulator.core.bench.arrivals import Pace
from emulator.core.bench.exchange import Exchange
from emulator.core.bench.measures import Measures
from emulator.core.bench.plan import lengths_plan
from emulator.core.bench.result import Asked, Observed, fold
from emulator.core.lengths import LengthPair
from emulator.core.traffic import FixedLength
from emulator.core.workload import LoadPlan, UserPlan
from emulator.live.bench import LoadTest, stopped_by_interrupt
from emulator.live.client import Progress

pytestmark = pytest.mark.live


class Scripted:
    """Takes `service_s` for each request, one after the other or all at a time; `fails` says which fail."""

    def __init__(
        self, service_s: float, *, one_at_a_time: bool = False, fails: Callable[[int], bool] | None = None
    ) -> None:
        self._service_s = service_s
        self._turn = asyncio.Lock() if one_at_a_time else asyncio.Semaphore(10_000)
        self._fails = fails or (lambda _: False)
        self.inside = self.most_inside = 0

    async def perform(self, exchange: Exchange, now_s: Callable[[], float]) -> None:
        exchange.sent_s = now_s()
        self.inside += 1
        self.most_inside = max(self.inside, self.most_inside)
        async with self._turn:
            await asyncio.sleep(self._service_s)
        self.inside -= 1
        if self._fails(exchange.number):
            exchange.seen.fail("scripted")
            return
        exchange.seen.token_times_s.append(now_s())


async def _run(plan: LoadPlan, driver: Scripted, max_concurrency: int | None = None) -> Observed:
    return await LoadTest(plan, driver, max_concurrency=max_concurrency).run(lambda _: None)


async def test_everything_is_sent_once_and_not_before_it_is_due() -> None:
    plan = lengths_plan(10, 1, 40, Pace(200.0), 0)
    observed = await _run(plan, Scripted(0.01, fails=lambda number: number % 4 == 0))
    assert [e.request for e in observed.exchanges] == list(plan.open)
    assert [e.outcome for e in observed.exchanges] == ["failed", "completed", "completed", "completed"] * 10
    assert all(e.sent_s is not None and e.sent_s >= e.request.scheduled_s for e in observed.exchanges)
    assert observed.duration_s == max(e.end_s for e in observed.exchanges if e.end_s is not None)
    assert observed.duration_s >= plan.open[-1].scheduled_s
    assert not observed.interrupted


async def test_no_more_at_a_time_than_may_be() -> None:
    driver = Scripted(0.01)
    observed = await _run(lengths_plan(10, 1, 30, Pace(), 0), driver, max_concurrency=4)
    assert driver.most_inside == 4
    assert len(observed.exchanges) == 30
    assert observed.exchanges[-1].due_s >= 0.06  # after six turns of four, of 10 ms each
    assert observed.exchanges[0].due_s == 0.0


async def test_latency_from_the_schedule_has_the_backlog_that_latency_from_the_send_hides() -> None:
    """A server of one request each 20 ms, asked for 200 a second by a client that keeps only one open."""
    plan = lengths_plan(10, 1, 60, Pace(200.0), 0)
    observed = await _run(plan, Scripted(0.02, one_at_a_time=True), max_concurrency=1)
    found = fold(observed, Asked({}, Pace(200.0), Measures(), 1))
    assert found["completed"] == 60
    assert found["median_ttft_ms"] < 100
    assert found["median_ttft_ms_from_schedule"] > 300  # half of 60 × (20 − 5) ms is 450
    assert found["achieved_rate"] < found["requested_rate"] / 2


async def test_a_generator_that_cannot_keep_its_schedule_says_so() -> None:
    """Each send holds the loop for 20 ms, where one is due every 5 ms."""

    class Blocking:
        async def perform(self, exchange: Exchange, now_s: Callable[[], float]) -> None:
            exchange.sent_s = now_s()
            time.sleep(0.02)  # noqa: ASYNC251 - that is what is tested
            exchange.seen.token_times_s.append(now_s())

    pace = Pace(200.0)
    observed = await LoadTest(lengths_plan(10, 1, 50, pace, 0), Blocking()).run(lambda _: None)
    found = fold(observed, Asked({}, pace, Measures()))
    assert not found["fidelity"]["ok"]
    assert any("could not keep its schedule" in reason for reason in found["fidelity"]["reasons"])
    assert found["achieved_rate"] < found["requested_rate"] / 2
    assert found["median_ttft_ms_from_schedule"] > 5 * found["median_ttft_ms"]


async def test_closed_loop_users_send_again_when_they_are_answered() -> None:
    lengths = LengthPair(FixedLength(tokens=10), FixedLength(tokens=1))
    users = tuple(UserPlan("users", n, 0.0, 0.0, lengths, n) for n in range(3))
    driver = Scripted(0.02)
    observed = await _run(LoadPlan((), users, 0.2, 0.0), driver)
    assert driver.most_inside == 3
    assert 6 <= len(observed.exchanges) <= 30
    assert all(e.outcome == "completed" for e in observed.exchanges)


async def test_an_interrupt_leaves_what_there_is() -> None:
    plan = lengths_plan(10, 1, 100, Pace(100.0), 0)
    test = LoadTest(plan, Scripted(0.05), max_concurrency=1)
    asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), signal.SIGINT)
    with stopped_by_interrupt(test):
        observed = await test.run(lambda _: None)
    assert observed.interrupted
    outcomes = [e.outcome for e in observed.exchanges]
    assert 1 <= outcomes.count("completed") < len(outcomes) < 100
    assert any(e.sent_s is None for e in observed.exchanges)
    found = fold(observed, Asked({}, Pace(100.0), Measures(), 1))
    assert found["unfinished"] == outcomes.count("unfinished") > 0


async def test_a_driver_that_breaks_ends_the_test() -> None:
    class Broken:
        async def perform(self, exchange: Exchange, now_s: Callable[[], float]) -> None:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await LoadTest(lengths_plan(10, 1, 3, Pace(), 0), Broken()).run(lambda _: None)


async def test_progress_is_told() -> None:
    told: list[Progress] = []
    await LoadTest(lengths_plan(10, 1, 3, Pace(2.0), 0), Scripted(0.01)).run(told.append)
    assert told
    assert told[-1].sent <= 3
