"""The progress display of an experiment, on standard error: one line a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn

from emulator.cli.progress import Display
from emulator.core.run_spec import RunSpec
from emulator.core.run_summary import RunResult
from emulator.live.status import Interim, Waiting


class RunDisplay(Display):
    """Shows how far each run is; on anything but a terminal, one plain line when a run has ended."""

    def __init__(self, runs: Sequence[RunSpec]) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[state]}"))
        super().__init__(*columns, TimeElapsedColumn())
        self._tasks: dict[str, TaskID] = {
            run.label: self._progress.add_task(run.label, total=run.load.duration_s, start=False, state="waiting")
            for run in runs
        }

    def progress(self, run: RunSpec, status: Interim) -> None:
        """A run is under way, or waits for something."""
        if isinstance(status, Waiting):
            self._console.print(f"{run.label}: {status.what}", soft_wrap=True)
            return
        task = self._tasks[run.label]
        if not self._progress.tasks[self._progress.task_ids.index(task)].started:
            self._progress.start_task(task)
        drains = status.now_s > run.load.duration_s
        what = "draining" if drains else "running"
        state = f"{what}  {status.ended}/{status.sent} requests ended"
        self._progress.update(task, completed=min(status.now_s, run.load.duration_s), state=state)

    def result(self, run: RunSpec, result: RunResult) -> None:
        """A run has ended."""
        summary = result.summary
        attained = "-" if summary.slo_attainment is None else f"{summary.slo_attainment:.1%}"
        state = f"{summary.completed}/{summary.requests} completed, SLO attainment {attained}"
        if not summary.fidelity.ok:
            state += ", fidelity failed"
        task = self._tasks[run.label]
        self._progress.update(task, completed=run.load.duration_s, state=state)
        self._progress.stop_task(task)
        if not self._live:
            self._console.print(f"{run.label}: {state}", soft_wrap=True)


def stdout() -> Console:
    """Where results go: as wide as the terminal, and wide enough for a table where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 110)
    return console
