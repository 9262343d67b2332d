"""Time that measuring may take: split over its parts, and within each over its figures, by weight.

What one part leaves over goes to those after it. Pure but for the clock that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence


class TimeBudget:
    """Until `until_s` of `clock`."""

    def __init__(self, until_s: float, clock: Callable[[], float]) -> None:
        self.until_s = until_s
        self._clock = clock

    @property
    def left_s(self) -> float:
        """Seconds left, 0 when there are none."""
        return max(0.0, self.until_s - self._clock())

    def split(self, weights: Sequence[float]) -> Iterator[TimeBudget]:
        """A budget for each of the parts in turn, to be asked for when the one before is done."""
        for index, weight in enumerate(weights):
            share = self.left_s * weight / sum(weights[index:])
            yield TimeBudget(self._clock() + share, self._clock)

    def samples(self, take: Callable[[], float], *, most: int, expected_s: float = 0.0) -> list[float]:
        """Up to `most` results of `take`, fewer where another one would not end in time, and none without any time.

        One takes `expected_s` at least, and as long as the longest so far.
        """
        taken: list[float] = []
        longest_s = expected_s
        while len(taken) < most:
            began_s = self._clock()
            if began_s + longest_s >= self.until_s:
                break
            taken.append(take())
            longest_s = max(longest_s, self._clock() - began_s)
        return taken
