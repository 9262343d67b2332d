"""What the command says to input that cannot be, run in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from emulator.cli.main import main


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """The one line on standard error with which the command refuses `args`, exit status 2, and nothing else."""
    monkeypatch.setattr(sys, "argv", ["pdemu", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    assert ended.value.code == 2, captured.err
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("pdemu: ")
    return lines[0]
