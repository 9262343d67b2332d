"""Windows: what a NIC can carry between two instants."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emulator.core.physics_link import Span, first_late

spans = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 8), st.integers(1, 6)).map(
        lambda t: Span(float(t[0]), float(t[0] + t[1]), float(t[2]), "")
    ),
    max_size=7,
)


@given(spans, st.integers(0, 3))
def test_a_nic_is_late_exactly_when_a_window_holds_more_than_fits(found: list[Span], slack: int) -> None:
    named = [span._replace(name=str(n)) for n, span in enumerate(found)]
    overfull = any(
        sum(span.work_s for span in named if span.start_s >= start and span.end_s <= end) > end - start + slack
        for start in {span.start_s for span in named}
        for end in {span.end_s for span in named}
        if end > start
    )
    assert (first_late(named, float(slack)) is not None) == overfull
