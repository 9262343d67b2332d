"""At most so many requests at a time, as `--max-concurrency` asks; the others wait in the order in which they came."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Gate(Generic[T]):
    """Says of whoever arrives or leaves who goes in; without a limit everyone does at once."""

    def __init__(self, limit: int | None) -> None:
        assert limit is None or limit >= 1
        self._limit = limit
        self._inside = 0
        self._waiting: deque[T] = deque()

    @property
    def inside(self) -> int:
        """How many are in."""
        return self._inside

    def arrive(self, who: T) -> bool:
        """Whether `who` goes in now; otherwise a later `leave` says so."""
        if self._limit is not None and self._inside >= self._limit:
            self._waiting.append(who)
            return False
        self._inside += 1
        return True

    def leave(self) -> T | None:
        """One of those inside has left: who goes in for it, if anyone waits."""
        assert self._inside > 0, "nobody is inside"
        if self._waiting:
            return self._waiting.popleft()
        self._inside -= 1
        return None

    def check_integrity(self) -> None:
        """Assert that nobody waits while there is room."""
        assert self._limit is None or self._inside <= self._limit, "more inside than may be"
        assert not self._waiting or self._inside == self._limit, "somebody waits although there is room"
