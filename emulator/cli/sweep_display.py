"""How far a sweep is, on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time

from rich.progress import BarColumn, TextColumn

from emulator.cli.progress import Display

SECONDS_BETWEEN_LINES = 10.0


class PointsDisplay(Display):
    """Points done of `total`, points per second, and how long the rest takes at that pace.

    `done` were there before, and do not count for the pace.
    """

    def __init__(self, total: int, *, done: int = 0) -> None:
        super().__init__(BarColumn(bar_width=24), TextColumn("{task.fields[state]}"))
        self._total, self._before, self._done = total, done, done
        self._started_s = self._last_line_s = time.monotonic()
        self._task = self._progress.add_task("", total=total, completed=done, state=self.state())

    def advance(self) -> None:
        """One more point is done."""
        self._done += 1
        self._progress.update(self._task, completed=self._done, state=self.state())
        now_s = time.monotonic()
        due = self._done == self._total or now_s - self._last_line_s >= SECONDS_BETWEEN_LINES
        if not self._live and due:
            self._last_line_s = now_s
            self._console.print(self.state(), soft_wrap=True)

    def state(self) -> str:
        """`120/600 points, 8.3 points/s, 58 s left`."""
        elapsed_s = time.monotonic() - self._started_s
        fresh = self._done - self._before
        text = f"{self._done}/{self._total} points"
        if not fresh or elapsed_s <= 0:
            return text
        pace = fresh / elapsed_s
        text += f", {pace:.3g} points/s"
        return text if self._done == self._total else f"{text}, {_time_text((self._total - self._done) / pace)} left"


def _time_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
