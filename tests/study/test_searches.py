"""Searches in several processes: when the one that asked is killed, the others end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from emulator.study.searches import find_all
from tests.live.lab import all_gone, children_of, eventually


def begins(path: str) -> None:
    """A run that says that it has begun, and does not end."""
    Path(path).touch()
    time.sleep(600)


def search_for_ever(folder: str) -> None:
    """A search on two workers whose runs do not end."""

    def search() -> Generator[Sequence[str], Sequence[None], None]:
        yield [f"{folder}/1", f"{folder}/2"]

    find_all([search()], begins, workers=2)  # type: ignore[list-item, arg-type]


@pytest.mark.live
def test_a_killed_search_leaves_no_worker(tmp_path: Path) -> None:
    script = f"from {__name__} import search_for_ever; search_for_ever({str(tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as process:
        try:
            assert eventually(lambda: len(list(tmp_path.iterdir())) == 2)
            children = children_of(process.pid)
        finally:
            process.kill()
    assert len(children) >= 2
    assert all_gone(children, within_s=10.0)
