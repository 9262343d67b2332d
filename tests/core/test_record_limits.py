"""How much a served cluster records."""

from __future__ import annotations

import pytest

from emulator.core.record_limits import RecordCount, RecordLimits


@pytest.mark.parametrize(
    ("requests", "tokens", "limit"),
    [(3, 10, ""), (4, 0, "3 requests"), (0, 11, "10 output tokens"), (4, 11, "3 requests")],
)
def test_a_limit_is_exceeded_by_more_than_it(requests: int, tokens: int, limit: str) -> None:
    assert RecordLimits(requests=3, tokens=10).exceeded(requests, tokens) == limit


def test_who_bounds_requests_alone_may_have_them_of_any_length() -> None:
    assert RecordLimits(requests=3, tokens=None).exceeded(3, 10**12) == ""


def test_requests_of_all_clients_count_and_the_one_too_many_is_not_among_them() -> None:
    record = RecordCount(RecordLimits(requests=3, tokens=10))
    assert [record.request(client) for client in ("http", "bench", "http")] == ["", "", ""]
    assert not record.over
    assert [record.request("bench"), record.request("http")] == ["3 requests", ""], "it ends once"
    assert record.over
    assert (record.requests, record.requests_of("http"), record.requests_of("bench")) == (3, 2, 1)
    assert record.requests_of("late") == 0
    assert record.tokens(100) == ""


def test_a_record_ends_with_the_message_that_has_too_many_tokens() -> None:
    record = RecordCount(RecordLimits(requests=3, tokens=10))
    assert [record.request("http"), record.tokens(10), record.tokens(1)] == ["", "", "10 output tokens"]
    assert [record.request("http"), record.requests] == ["", 1]
