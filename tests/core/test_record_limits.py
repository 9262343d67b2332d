"""How much a served cluster records."""

from __future__ import annotations

import pytest

from emulator.core.record_limits import RecordLimits


@pytest.mark.parametrize(
    ("requests", "tokens", "limit"),
    [(3, 10, ""), (4, 0, "3 requests"), (0, 11, "10 output tokens"), (4, 11, "3 requests")],
)
def test_a_limit_is_exceeded_by_more_than_it(requests: int, tokens: int, limit: str) -> None:
    assert RecordLimits(requests=3, tokens=10).exceeded(requests, tokens) == limit


def test_who_bounds_requests_alone_may_have_them_of_any_length() -> None:
    assert RecordLimits(requests=3, tokens=None).exceeded(3, 10**12) == ""
