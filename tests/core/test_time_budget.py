"""Time for measuring: split by weight, what is left over passed on, and no sample begun that would not end in time."""

from __future__ import annotations

import pytest

from emulator.core.time_budget import TimeBudget
from tests.fake_device import FakeClock


def test_parts_get_their_shares_and_what_is_left_over_goes_to_those_that_follow() -> None:
    clock = FakeClock()
    parts = TimeBudget(12.0, clock).split([1.0, 2.0, 3.0])
    assert next(parts).until_s == pytest.approx(2.0)
    clock.advance(2.0)
    assert next(parts).until_s == pytest.approx(2.0 + 10.0 * 2 / 5)
    clock.advance(0.5)  # sooner than it might
    assert next(parts).until_s == pytest.approx(12.0)
    assert next(parts, None) is None


def test_a_part_that_overran_leaves_nothing_behind_the_end() -> None:
    clock = FakeClock()
    parts = TimeBudget(10.0, clock).split([1.0, 1.0])
    next(parts)
    clock.advance(15.0)
    last = next(parts)
    assert last.left_s == 0.0
    assert last.samples(lambda: 1.0, most=5) == []


@pytest.mark.parametrize(("until_s", "taken"), [(0.0, 0), (0.9, 1), (2.5, 2), (3.1, 3), (100.0, 4)])
def test_as_many_samples_as_fit_by_what_the_longest_took(until_s: float, taken: int) -> None:
    clock = FakeClock()
    budget = TimeBudget(until_s, clock)

    def take() -> float:
        clock.advance(1.0)
        return clock()

    assert len(budget.samples(take, most=4)) == taken
    assert clock() <= max(until_s, 1.0)


def test_a_sample_that_is_known_to_be_too_long_is_not_begun() -> None:
    clock = FakeClock()
    assert TimeBudget(2.0, clock).samples(lambda: 1.0, most=3, expected_s=2.5) == []
