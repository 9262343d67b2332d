"""The progress of a search, on standard error: a line for each trial, and on a terminal where each search stands."""

from __future__ import annotations

from collections.abc import Sequence

from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from emulator.cli.progress import Display
from emulator.core.search import Goodput, Trial, bracket
from emulator.core.slo_scale import SloScale


class SearchDisplay(Display):
    """Shows each trial when it ends; below them, on a terminal alone, one line for each search."""

    def __init__(self, labels: Sequence[str]) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.fields[state]}"))
        super().__init__(*columns, TimeElapsedColumn())
        self._trials: dict[str, list[Trial]] = {label: [] for label in labels}
        self._width = max(map(len, labels))
        self._tasks: dict[str, TaskID] = {
            label: self._progress.add_task(label, total=None, state="simulating") for label in labels
        }

    def trial(self, label: str, trial: Trial) -> None:
        """A rate has been evaluated."""
        self._trials[label].append(trial)
        where = bracket_text(self._trials[label])
        verdict = "passes" if trial.passes else "fails"
        self._line(label, f"{trial.rate_per_s:>7.4g}/s  {attainment_text(trial):<26}  {verdict:<6}  {where}")
        self._progress.update(self._tasks[label], state=f"{len(self._trials[label])} rates tried, {where}")

    def found(self, label: str, found: Goodput) -> None:
        """A search has ended."""
        state = "no rate passes" if found.rate_per_s is None else f"goodput {found.rate_per_s:.4g}/s"
        self._end(label, state + (f", bounded by {found.bounded_by}" if found.bounded_by else ""))

    def scaled(self, label: str, found: SloScale) -> None:
        """The tightest SLO of a candidate is known."""
        self._end(
            label, "no SLO holds" if found.factor is None else f"SLO × {found.factor:.4g} met by {found.mean:.1%}"
        )

    def _end(self, label: str, state: str) -> None:
        self._line(label, state)
        self._progress.update(self._tasks[label], state=state, total=1, completed=1)

    def _line(self, label: str, text: str) -> None:
        self._progress.console.print(f"{label:<{self._width}}  {text}", soft_wrap=True, markup=False)


def attainment_text(trial: Trial) -> str:
    """`93.3% (88.1% to 98.5%)`, or the share alone when a single seed was run."""
    share = f"{trial.mean:.1%}"
    return share if len(trial.attainment) == 1 else f"{share} ({trial.low:.1%} to {trial.high:.1%})"


def bracket_text(trials: Sequence[Trial]) -> str:
    """`between 6 and 12/s`, an end left open where nothing has passed, or failed, yet."""
    found = bracket(trials)
    if found.passing is None:
        return "" if found.failing is None else f"below {found.failing.rate_per_s:.4g}/s"
    if found.failing is None:
        return f"above {found.passing.rate_per_s:.4g}/s"
    return f"between {found.passing.rate_per_s:.4g} and {found.failing.rate_per_s:.4g}/s"
