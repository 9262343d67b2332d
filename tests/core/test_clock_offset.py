"""Comparing clocks: the true offset stays inside an interval that narrows, and one host has none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.clock_offset import ClockOffset

delays = st.floats(1e-6, 1e-2)


@given(st.floats(-1e5, 1e5).filter(lambda s: abs(s) > 0.1), st.lists(st.tuples(delays, delays), min_size=1))
def test_the_true_offset_is_never_further_off_than_the_uncertainty(
    true_s: float, trips: list[tuple[float, float]]
) -> None:
    offset = ClockOffset()
    for n, (there_s, back_s) in enumerate(trips):
        sent_s = 10.0 * n
        offset.add(sent_s, sent_s + there_s + true_s, sent_s + there_s + back_s)
    assert abs(offset.seconds - true_s) <= offset.uncertainty_s + 1e-9
    assert offset.uncertainty_s <= min(there_s + back_s for there_s, back_s in trips) / 2 + 1e-9


def test_clocks_that_may_be_the_same_are() -> None:
    offset = ClockOffset()
    offset.add(1.0, 1.0004, 1.0005)
    assert offset.seconds == offset.uncertainty_s == 0.0
    assert ClockOffset().seconds == 0.0, "nothing is known"


def test_an_answer_before_its_question_is_refused() -> None:
    with pytest.raises(ValueError, match="question"):
        ClockOffset().add(2.0, 1.0, 1.0)
