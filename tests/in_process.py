"""The command run in the test's own process: quick, and its refusals held to one form."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from emulator.cli.main import main


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    def check_refusal(self, expected: Sequence[str]) -> None:
        """One line on standard error that has all of `expected`, nothing on standard output, exit status 2."""
        assert self.code == 2, self.err
        assert self.out == ""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("pdemu: ")
        for part in expected:
            assert part in lines[0], lines[0]


Pdemu = Callable[..., Ended]


@pytest.fixture
def pdemu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Pdemu:
    """Runs the command with some arguments."""

    def run(*args: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["pdemu", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, captured.out, captured.err)

    return run
