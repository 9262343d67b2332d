"""Where an outcome changes: made-up outcomes whose turning points are known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.compare_summary import BreakEven
from emulator.core.specs import VerdictOutcome
from emulator.core.turning import Change, break_even, changes, first_bandwidths, is_monotone, next_bandwidths

OUTCOMES: tuple[VerdictOutcome, ...] = ("hurts", "no difference", "helps")
Outcomes = dict[float, VerdictOutcome]


def _search(turns: list[tuple[float, VerdictOutcome]], below: VerdictOutcome, tolerance: float) -> Outcomes:
    """Bisect from 1 to 1000 Mbps an outcome that is `below` at first, and each of the others from its turn on."""

    def outcome(bandwidth_bps: float) -> VerdictOutcome:
        return [below, *(above for turn, above in turns if bandwidth_bps >= turn)][-1]

    outcomes: Outcomes = {}
    wanted = first_bandwidths(1e6, 1e9)
    while wanted:
        assert not outcomes.keys() & set(wanted), "nothing is tried twice"
        outcomes |= {bandwidth: outcome(bandwidth) for bandwidth in wanted}
        wanted = next_bandwidths(outcomes, tolerance)
    return outcomes


def test_the_start_has_both_ends_steps_of_two_and_the_topologys_own_between() -> None:
    first = first_bandwidths(1e8, 4e11, [2.5e9, 5e9, 1e7, 4e11, 1e12])
    assert first[0] == 1e8
    assert first[-1] == 4e11
    assert {2.5e9, 5e9} <= set(first)
    assert 1e7 not in first
    assert 1e12 not in first
    assert all(1 < high / low <= 2.001 for low, high in itertools.pairwise(first))
    assert first_bandwidths(1e9, 1.1e9) == (1e9, 1.1e9)


@pytest.mark.parametrize("tolerance", [1.0, 0.05, 0.001])
def test_a_turning_point_is_enclosed_as_closely_as_asked(tolerance: float) -> None:
    outcomes = _search([(3.21e7, "helps")], "hurts", tolerance)
    (change,) = changes(outcomes)
    assert (change.below, change.above) == ("hurts", "helps")
    assert change.low_bps < 3.21e7 <= change.high_bps
    assert change.high_bps / change.low_bps <= 1 + tolerance + 1e-9
    assert break_even(outcomes) == BreakEven(low_bps=change.low_bps, high_bps=change.high_bps)
    assert is_monotone(outcomes)


def test_without_a_change_nothing_more_is_tried() -> None:
    outcomes = _search([], "no difference", 0.01)
    assert sorted(outcomes) == list(first_bandwidths(1e6, 1e9))
    assert changes(outcomes) == ()
    assert break_even(outcomes) is None


def test_a_turn_by_way_of_no_difference_is_two_changes_and_breaks_even_at_the_second() -> None:
    outcomes = _search([(1e7, "no difference"), (4e7, "helps")], "hurts", 0.05)
    first, second = changes(outcomes)
    assert (first.below, first.above, second.below, second.above) == (
        "hurts",
        "no difference",
        "no difference",
        "helps",
    )
    assert break_even(outcomes) == BreakEven(low_bps=second.low_bps, high_bps=second.high_bps)
    assert is_monotone(outcomes)


def test_what_turns_back_has_no_break_even() -> None:
    outcomes = _search([(1e7, "helps"), (1e8, "no difference")], "hurts", 0.05)
    assert [(change.below, change.above) for change in changes(outcomes)] == [
        ("hurts", "helps"),
        ("helps", "no difference"),
    ]
    assert break_even(outcomes) is None
    assert not is_monotone(outcomes)
    assert break_even({1e6: "helps", 1e7: "hurts"}) is None
    assert changes({1e6: "helps", 1e7: "hurts"}) == (Change(low_bps=1e6, high_bps=1e7, below="helps", above="hurts"),)


@given(
    st.lists(st.floats(6.2, 8.8), min_size=1, max_size=3).filter(
        lambda logs: all(high - low > 0.65 for low, high in itertools.pairwise(sorted(logs)))
    ),
    st.data(),
)
def test_every_change_that_lasts_for_a_factor_of_four_is_found(logs: list[float], data: st.DataObject) -> None:
    sides = [data.draw(st.sampled_from(OUTCOMES))]
    for _ in logs:
        sides.append(data.draw(st.sampled_from([outcome for outcome in OUTCOMES if outcome != sides[-1]])))
    turns = [10**log for log in sorted(logs)]
    outcomes = _search(list(zip(turns, sides[1:], strict=True)), sides[0], 0.05)
    found = changes(outcomes)
    assert [(change.below, change.above) for change in found] == list(itertools.pairwise(sides))
    for change, turn in zip(found, turns, strict=True):
        assert change.low_bps < turn <= change.high_bps
        assert change.high_bps / change.low_bps <= 1.05 + 1e-9
