"""Ids are remembered for as long as they should be, and not for ever."""

from __future__ import annotations

from emulator.core.recent_ids import RecentIds


def test_an_id_is_kept_for_its_time_and_forgotten_after_twice_that() -> None:
    recent = RecentIds(5.0)
    recent.add("a")
    recent.forget(4.9)
    assert "a" in recent
    recent.forget(5.0)
    assert "a" in recent, "it may have been added just now"
    recent.add("b")
    recent.forget(9.9)
    assert "a" in recent
    recent.forget(10.0)
    assert "a" not in recent
    assert "b" in recent
