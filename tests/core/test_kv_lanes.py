"""Whose message is on the way between two nodes, and whose bytes flow: turns, places, costs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.deployments import TransferOrder
from emulator.core.kv_lanes import Lane, Message
from tests.examples import examples


def _lane(names: str, *, cap: int = 1, order: TransferOrder = "fifo", **costs: float) -> tuple[Lane[Message], str]:
    """A lane with messages ready at 0, one a letter, whose request it is; and those whose bytes flow then."""
    lane: Lane[Message] = Lane(cap, order)
    for name in names:
        lane.add(Message(name, costs.get(name, 0.0)), 0.0)
    lane.flow(0.0)
    return lane, _flowing(lane)


def _flowing(lane: Lane[Message]) -> str:
    return "".join(str(message.request) for message in lane.flowing)


def _in_turn(lane: Lane[Message]) -> str:
    """The requests in the order in which they have all the bytes to themselves until nothing is left."""
    order = ""
    while not lane.idle:
        order += _flowing(lane)
        lane.remove(lane.flowing[0], 0.0)
        lane.flow(0.0)
        lane.check_integrity()
    return order


def test_fifo_sends_messages_as_they_were_ready() -> None:
    assert _in_turn(_lane("aabcab")[0]) == "aabcab"


@pytest.mark.parametrize("cap", [2, 3, 7])
def test_without_costs_a_higher_limit_changes_nothing_of_fifo(cap: int) -> None:
    assert _in_turn(_lane("aabcab", cap=cap)[0]) == "aabcab"


def test_fair_takes_requests_in_turn() -> None:
    assert _in_turn(_lane("aaabbc", order="fair")[0]) == "abcaba"


def test_a_request_queues_up_anew_behind_those_that_wait() -> None:
    lane, _ = _lane("aab", order="fair")
    lane.add(Message("c", 0.0), 0.0)
    assert _in_turn(lane) == "abca"


def test_fair_lets_as_many_flow_as_may_be_on_the_way_and_one_of_each_request() -> None:
    lane, flowing = _lane("aabcd", cap=3, order="fair")
    assert flowing == "abc"
    lane.remove(lane.flowing[1], 0.0)
    lane.flow(0.0)
    assert _flowing(lane) == "acd"
    lane.remove(lane.flowing[0], 0.0)
    lane.flow(0.0)
    assert _flowing(lane) == "cda"


def test_fifo_sends_what_is_due_before_what_still_pays() -> None:
    lane, flowing = _lane("abc", cap=3, a=2.0, b=1.0)
    assert flowing == "c"
    assert lane.next_due_s() == math.inf, "nothing else flows before c is through"
    lane.remove(lane.flowing[0], 0.5)
    assert (lane.flow(0.5), lane.next_due_s()) == ([], 1.0)
    lane.flow(1.0)
    assert _flowing(lane) == "b"
    lane.remove(lane.flowing[0], 5.0)
    lane.flow(5.0)
    assert _flowing(lane) == "a"


def test_the_cost_of_a_message_passes_only_when_it_has_a_place() -> None:
    lane, flowing = _lane("ab", a=1.0, b=1.0)
    assert flowing == ""
    lane.flow(1.0)
    lane.remove(lane.flowing[0], 4.0)
    assert lane.flow(4.0) == []
    assert lane.next_due_s() == 5.0


def test_a_request_between_its_messages_keeps_no_place() -> None:
    lane, _ = _lane("a")
    lane.remove(lane.flowing[0], 0.0)
    lane.add(Message("b", 0.0), 0.0)
    lane.flow(0.0)
    lane.add(Message("a", 0.0), 0.0)
    assert _flowing(lane) == "b"


def test_what_is_dropped_while_it_waits_leaves_its_turn_to_the_next_of_its_request() -> None:
    lane, _ = _lane("abbc", order="fair")
    lane.remove(lane.of("b")[0], 0.0)
    assert _in_turn(lane) == "abc"


def test_a_lane_has_at_least_one_place() -> None:
    with pytest.raises(ValueError, match="max_in_flight must be 1 or more, not 0"):
        Lane(0)


moves = st.lists(st.tuples(st.sampled_from(["add", "drop", "send", "wait"]), st.integers(0, 99)), max_size=60)


@given(moves=moves, cap=st.integers(1, 4), order=st.sampled_from(["fifo", "fair"]), costs=st.booleans())
@examples(200)
def test_whatever_comes_nothing_is_lost_and_no_place_stays_free(
    moves: list[tuple[str, int]], cap: int, order: TransferOrder, costs: bool
) -> None:
    lane: Lane[Message] = Lane(cap, order)
    there: list[Message] = []
    now_s = 0.0
    for move, drawn in moves:
        if move == "add":
            there.append(Message("abcde"[drawn % 5], (drawn % 3) * 0.5 if costs else 0.0))
            lane.add(there[-1], now_s)
        elif move == "wait":
            now_s += drawn / 50
        elif pick := there if move == "drop" else lane.flowing:
            message = pick[drawn % len(pick)]
            lane.remove(message, now_s)
            there.remove(message)
        begun = lane.flow(now_s)
        lane.check_integrity()
        assert sorted(map(id, lane)) == sorted(map(id, there))
        assert all(message.due_s <= now_s for message in begun)
        assert lane.next_due_s() > now_s
        assert lane.idle == (not there)
        flowing = [message.request for message in lane.flowing]
        assert len(flowing) == len(set(flowing)) <= (cap if order == "fair" else 1)
        assert all(message is lane.of(message.request)[0] for message in lane.flowing), "in sequence"
