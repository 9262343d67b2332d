"""Starting `pdemu` as a user does, and seeing what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from emulator.core.records import read_records

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


def eventually(holds: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Wait for what another process, another thread or the kernel brings about; whether it came in time."""
    deadline_s = time.monotonic() + limit_s
    while not (done := holds()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return done


def skip_unless(there: bool, what: str) -> None:
    """Skip a test for want of something; in CI, which has it, fail instead."""
    if there:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI is meant to have {what}")
    pytest.skip(f"needs {what}")


def check_kernel_shaped_transfers(run_folder: Path) -> None:
    """Every request of the small lab brought its KV to the byte, none faster than a 200 Mbps line carries it."""
    payload_bytes_per_s = 2e8 * 1448 / 1514 / 8
    burst_bytes = 73728 + 6250
    records = read_records((run_folder / "records.jsonl").read_bytes())
    assert records
    for record in records:
        assert record.kv_bytes == 4096 * record.prompt_tokens
        assert record.kv_start_s is not None
        assert record.kv_end_s is not None
        least_s = (record.kv_bytes - 2 * burst_bytes) / payload_bytes_per_s
        assert record.kv_end_s - record.kv_start_s >= least_s
