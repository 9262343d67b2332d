"""What a node's device is at: one step, or a run of decode steps that are alike but for the tokens they attend to.

Between two changes of a decode batch every step is known in advance, so a simulation lets one event stand for many of
them: the run is planned as far as nothing but the batch itself can change it, shortened when something else does, and
the steps that are over by then are settled first.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from emulator.core.records import StepRecord, TimeRun
from emulator.core.sequence import Step


@dataclass(slots=True, eq=False)
class Running:
    """Steps back to back from `start_s` on, of `planned_s` seconds each, rising by equal amounts.

    Step j ends at `bounds_s[j + 1]`. `settled` of them are over; the scheduler knows of the first `applied`, and the
    tokens of the first `told` are noted. For the first `slack` the sequences hold enough blocks already.
    """

    step: Step
    start_s: float
    planned_s: list[float]
    slack: int
    bounds_s: list[float] = field(init=False)
    settled: int = 0
    applied: int = 0
    told: int = 0

    def __post_init__(self) -> None:
        self.bounds_s = list(itertools.accumulate(self.planned_s, initial=self.start_s))

    @property
    def end_s(self) -> float:
        """When the last step is to end."""
        return self.bounds_s[-1]

    @property
    def left(self) -> int:
        """Steps that are not settled, the present one included; at least 1."""
        return len(self.planned_s) - self.settled

    def ended(self, now_s: float, *, inclusive: bool) -> int:
        """Steps that have ended before `now_s`, or (`inclusive`) at it; the last one's end is an event of its own."""
        find = bisect_right if inclusive else bisect_left
        return min(find(self.bounds_s, now_s, 1), len(self.planned_s)) - 1

    def shorten(self, left: int) -> None:
        """Let only `left` of the steps that are not settled remain (0 when the run is over)."""
        del self.planned_s[self.settled + left :]
        del self.bounds_s[self.settled + left + 1 :]

    def rise_s(self) -> float:
        """By how much each step takes longer than the one before."""
        steps = len(self.planned_s)
        return (self.planned_s[-1] - self.planned_s[0]) / (steps - 1) if steps > 1 else 0.0

    def tell(self, upto: int) -> TimeRun:
        """The ends of the steps from the first that has not been told to number `upto`."""
        first, self.told = self.told, upto
        next_s = self.planned_s[first + 1] if upto - first > 1 else 0.0
        return TimeRun(self.bounds_s[first + 1], next_s, self.rise_s() if upto - first > 2 else 0.0, upto - first)

    def record(self, node: str, kv_blocks_used: int, end_s: float) -> StepRecord:
        """All the steps as one row; the last has really ended at `end_s`."""
        decodes, chunks = len(self.step.decodes), len(self.step.chunks)
        return StepRecord(
            node=node,
            kind=self.step.kind,
            start_s=self.start_s,
            end_s=end_s,
            planned_s=self.planned_s[0],
            prefill_tokens=self.step.prefill_tokens if chunks else 0,
            decode_batch=decodes,
            requests=decodes + chunks,
            kv_blocks_used=kv_blocks_used,
            steps=len(self.planned_s),
            delta_s=self.rise_s(),
        )
