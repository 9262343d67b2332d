"""The steps of one node's device: what it runs now, and what merged steps have brought when anything else happens.

Steps that are alike are planned as one (`core.running`). Until an input comes nobody needs to know how far they are;
then those that are over are settled, and from there on the scheduler and the clients' tokens follow as far as needed.
"""

from __future__ import annotations

from emulator.core.cost import CostModel, StepShape
from emulator.core.running import Running
from emulator.core.scheduler import Scheduler
from emulator.core.sequence import Sequence, Step, StepResult
from emulator.core.token_runs import TokenRuns

MOST_MERGED_STEPS = 64
"""How far merged steps are planned at a time: most are overtaken by a change of the batch long before."""


class DeviceSteps:
    """What one device runs: `running`, None while it has nothing to do. With `merge` decode steps alike run as one."""

    def __init__(self, scheduler: Scheduler, cost: CostModel, token_runs: TokenRuns, *, merge: bool) -> None:
        self.running: Running | None = None
        self._scheduler = scheduler
        self._cost = cost
        self._token_runs = token_runs
        self._merge = merge

    def start(self, step: Step, shape: StepShape, now_s: float) -> float:
        """Run a step, just planned, from now on, and as many more alike as are certain; how long the first takes."""
        if self._merge and not step.chunks:
            most, slack = min(self._scheduler.repeats(step), MOST_MERGED_STEPS), self._scheduler.slack(step)
            if most > slack:
                most = self._scheduler.room(step, most)
            planned_s = self._cost.decode_steps_s(shape.decode_batch, shape.decode_context_sum, most)
        else:
            planned_s, slack = [self._cost.step_s(shape)], 1
        self.running = Running(step, now_s, planned_s, slack)
        return planned_s[0]

    def finish(self) -> tuple[Running, StepResult]:
        """The device has finished what it ran: that, and what its last steps have brought."""
        running = self.running
        assert running is not None, "a step ended that was never started"
        self.running = None
        result = self._scheduler.complete(running.step, len(running.planned_s) - running.applied)
        if self._merge and running.step.decodes:
            self._token_runs.add(running.tell(len(running.planned_s)))
        return running, result

    def computes(self, sequence: Sequence) -> bool:
        """Whether a sequence is in what the device runs now."""
        running = self.running
        if running is None:
            return False
        step = running.step
        return sequence in step.decodes or any(sequence is chunked for chunked, _ in step.chunks)

    def settle(self, now_s: float, *, inclusive: bool) -> None:
        """Of merged steps, count those that have ended before `now_s`, or (`inclusive`) at it."""
        running = self.running
        if running is None or len(running.planned_s) == 1:
            return
        running.settled = running.ended(now_s, inclusive=inclusive)
        if running.settled >= running.slack:
            self._apply_settled(running)

    def note_settled(self) -> None:
        """Note the tokens of settled steps, before somebody leaves in the midst of merged ones."""
        running = self.running
        if running is not None and running.settled > running.told:
            self._apply_settled(running)
            self._token_runs.add(running.tell(running.settled))

    def close_ranks(self) -> None:
        """The next batch is another one: of merged steps only the present one remains."""
        if self.running is not None and len(self.running.planned_s) > 1:
            self.running.shorten(1)

    def keep_within_memory(self) -> None:
        """Blocks have been given away: merged steps go on only as far as there are enough of them."""
        running = self.running
        if running is not None and running.left > 1 and running.slack < len(running.planned_s):
            self._apply_settled(running)
            running.shorten(self._scheduler.room(running.step, running.left))

    def cut(self) -> Running | None:
        """The run is over: those of merged steps that are settled, as if nothing more had been planned; None without.

        What is not settled runs on, and nobody hears of it.
        """
        running = self.running
        if running is None or not running.settled:
            return None
        self.note_settled()
        running.shorten(0)
        self.running = None
        return running

    def _apply_settled(self, running: Running) -> None:
        if running.settled > running.applied:
            self._scheduler.repeat(running.step, running.settled - running.applied)
            running.applied = running.settled
            running.slack = running.applied + self._scheduler.slack(running.step)
