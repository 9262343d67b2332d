"""The load generator: every request once, in order, and users who wait for their last one."""

from __future__ import annotations

import heapq
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core import traffic
from emulator.core.errors import ProtocolError
from emulator.core.lengths import LengthPair, LengthSource
from emulator.core.load import MIN_USER_PERIOD_S, LoadGenerator
from emulator.core.workload import LoadPlan, PlannedRequest, UserPlan
from tests.examples import examples

LENGTHS = LengthPair(traffic.UniformLength(low=1, high=1000), traffic.UniformLength(low=1, high=1000))


def _request(n: int, scheduled_s: float) -> PlannedRequest:
    return PlannedRequest(f"chat-{n:05d}", "chat", scheduled_s, 100 + n, 10)


def _user(user: int, start_s: float = 0.0, think_s: float = 0.0) -> UserPlan:
    return UserPlan("users", user, start_s, think_s, LENGTHS, seed=user)


def _generator(*times_s: float, users: tuple[UserPlan, ...] = (), duration_s: float = 10.0) -> LoadGenerator:
    requests = tuple(_request(n, time_s) for n, time_s in enumerate(times_s))
    return LoadGenerator(LoadPlan(requests, users, duration_s, drain_s=5.0))


def _ids(requests: list[PlannedRequest]) -> list[str]:
    return [request.request_id for request in requests]


def test_open_requests_are_due_once_at_their_time_and_in_order() -> None:
    generator = _generator(0.0, 1.0, 1.0, 2.5)
    assert generator.next_due_s() == 0.0
    assert _ids(generator.due(0.0)) == ["chat-00000"]
    assert generator.due(0.999) == []
    assert generator.next_due_s() == 1.0
    assert _ids(generator.due(1.0)) == ["chat-00001", "chat-00002"]
    assert not generator.exhausted()
    assert generator.due(60.0) == [_request(3, 2.5)], "a late driver gets the schedule, not its own time"
    assert generator.next_due_s() is None
    assert generator.exhausted()
    assert list(generator.outstanding) == [f"chat-{n:05d}" for n in range(4)]
    for n in (3, 0, 1, 2):
        generator.finished(f"chat-{n:05d}", 60.0)
        generator.check_integrity()
    assert not generator.outstanding


def test_an_open_request_that_never_ends_holds_nothing_up() -> None:
    generator = _generator(0.0, 1.0)
    generator.due(0.0)
    assert _ids(generator.due(1.0)) == ["chat-00001"]
    assert generator.exhausted()


def test_a_user_sends_again_a_think_time_after_the_last_has_ended() -> None:
    generator = _generator(users=(_user(0, start_s=1.0, think_s=0.5),))
    assert generator.next_due_s() == 1.0
    (first,) = generator.due(1.0)
    assert first.request_id == "users-u00-00000"
    assert (first.stream, first.scheduled_s) == ("users", 1.0)
    assert generator.next_due_s() is None
    assert not generator.exhausted()
    generator.finished("users-u00-00000", 3.0)
    assert generator.next_due_s() == 3.5
    (second,) = generator.due(4.0)
    assert (second.request_id, second.scheduled_s) == ("users-u00-00001", 3.5)
    assert [(r.prompt_tokens, r.max_tokens) for r in (first, second)] == LengthSource(LENGTHS, 0).draw(2)


def test_users_and_open_requests_are_merged_by_time_then_id() -> None:
    generator = _generator(0.0, 2.0, users=(_user(1, start_s=1.0), _user(0, start_s=1.0), _user(2)))
    assert _ids(generator.due(2.0)) == [
        "chat-00000",
        "users-u02-00000",
        "users-u00-00000",
        "users-u01-00000",
        "chat-00001",
    ]


def test_nothing_is_scheduled_at_or_after_the_end() -> None:
    generator = _generator(users=(_user(0, think_s=2.0), _user(1, start_s=10.0)), duration_s=10.0)
    assert _ids(generator.due(0.0)) == ["users-u00-00000"]
    generator.finished("users-u00-00000", 8.0)
    assert generator.next_due_s() is None
    assert generator.exhausted()
    assert generator.due(100.0) == []


def test_a_user_whose_answer_comes_too_late_to_go_on_counts_as_done() -> None:
    generator = _generator(users=(_user(0, think_s=2.0),), duration_s=10.0)
    generator.due(7.9)
    assert not generator.exhausted()
    generator.due(8.0)
    assert generator.exhausted()
    generator.finished("users-u00-00000", 8.0)
    assert generator.next_due_s() is None


def test_a_user_refused_at_once_does_not_send_for_ever_at_one_instant() -> None:
    generator = _generator(users=(_user(0),), duration_s=0.01)
    sent = 0
    while (now_s := generator.next_due_s()) is not None:
        for request in generator.due(now_s):
            sent += 1
            generator.finished(request.request_id, now_s)
        assert sent <= 20
    assert sent == pytest.approx(0.01 / MIN_USER_PERIOD_S, abs=1)


@pytest.mark.parametrize("request_id", ["chat-00000", "chat-00001", "nonsense"])
def test_only_an_outstanding_request_can_end(request_id: str) -> None:
    generator = _generator(0.0, 1.0)
    generator.due(0.0)
    generator.finished("chat-00000", 0.5)
    with pytest.raises(ProtocolError, match=f"{request_id} has ended but is not outstanding"):
        generator.finished(request_id, 0.6)


@given(
    times=st.lists(st.floats(0, 9.99), max_size=20),
    starts=st.lists(st.floats(0, 12), max_size=4),
    think_s=st.sampled_from([0.0, 0.3]),
    service=st.lists(st.floats(0, 4), min_size=1, max_size=8),
    lag_s=st.floats(0, 0.5),
)
@examples(60)
def test_any_driver_gets_every_request_once_and_users_one_at_a_time(
    times: list[float], starts: list[float], think_s: float, service: list[float], lag_s: float
) -> None:
    users = tuple(_user(n, start_s, think_s) for n, start_s in enumerate(starts))
    generator = _generator(*sorted(times), users=users)
    seen: list[PlannedRequest] = []
    ended: dict[str, float] = {}
    ends: list[tuple[float, str]] = []
    while True:
        instants = [ends[0][0]] if ends else []
        if (due_s := generator.next_due_s()) is not None:
            instants.append(due_s + lag_s)
        if not instants:
            break
        now_s = min(instants)
        while ends and ends[0][0] <= now_s:
            end_s, request_id = heapq.heappop(ends)
            generator.finished(request_id, end_s)
            ended[request_id] = end_s
        for request in generator.due(now_s):
            assert request.scheduled_s <= now_s
            heapq.heappush(ends, (now_s + service[len(seen) % len(service)] + 0.05, request.request_id))
            seen.append(request)
        generator.check_integrity()
    assert generator.exhausted()
    assert not generator.outstanding
    assert len({request.request_id for request in seen}) == len(seen)
    assert sum(request.stream == "chat" for request in seen) == len(times)
    assert all(request.scheduled_s < 10.0 for request in seen)
    for user in users:
        turns = sorted((r for r in seen if r.request_id.startswith(user.prefix)), key=lambda r: r.request_id)
        assert [turn.request_id for turn in turns] == [user.request_id(n) for n in range(len(turns))]
        for before, after in itertools.pairwise(turns):
            assert after.scheduled_s == ended[before.request_id] + think_s
