"""Starting `pdemu` as a user does, and seeing what is left of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil

SMALL = Path(__file__).parent / "small.toml"
TOPOLOGIES = Path(__file__).parents[2] / "topologies"
PDEMU = [sys.executable, "-m", "emulator"]


def pdemu(*args: str | Path, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [*PDEMU, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def json_of(result: subprocess.CompletedProcess[str]) -> Any:
    """The one JSON document on standard output."""
    assert result.returncode == 0, result.stderr
    return msgspec.json.decode(result.stdout)


def children_of(pid: int) -> list[psutil.Process]:
    """All processes below a process."""
    return psutil.Process(pid).children(recursive=True)


def all_gone(processes: list[psutil.Process], within_s: float) -> bool:
    """Whether all of them end in time."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not alive
