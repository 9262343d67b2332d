"""What the progress displays share: standard error, and a live part on a terminal alone."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn


class Display:
    """Shows `columns` of its tasks while it is entered; only what is printed off a terminal or `quiet`."""

    def __init__(self, *columns: ProgressColumn, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = self._console.is_terminal and not quiet
        self._progress = Progress(*columns, console=self._console, refresh_per_second=2, disable=not self._live)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
