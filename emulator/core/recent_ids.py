"""Ids that were in use until just now."""

from __future__ import annotations


class RecentIds:
    """Ids for at least `kept_s` after they were added, as long as `forget` is called now and then. Model seconds."""

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._new: set[str] = set()
        self._old: set[str] = set()
        self._aged_s = 0.0

    def add(self, request_id: str) -> None:
        """This one is not in use any more."""
        self._new.add(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._new or request_id in self._old

    def forget(self, now_s: float) -> None:
        """Drop what is old by now."""
        if now_s - self._aged_s >= self._kept_s:
            self._old, self._new, self._aged_s = self._new, set(), now_s
