"""Ctrl-C in the moment in which Python would drop it."""

from __future__ import annotations

import subprocess
import sys

import pytest

DROPPED = """
import signal, sys, time
from emulator.cli.dropped import heed_dropped

class Ends:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

heed_dropped()
Ends()
sys.stdout.write("dropped\\n")
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupt_within_a_finalizer_comes_again() -> None:
    ended = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=50, check=False)
    assert ended.stdout == "dropped\n"
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "ignored" not in ended.stderr


def test_other_exceptions_that_are_dropped_are_told_as_ever() -> None:
    code = DROPPED.replace("signal.raise_signal(signal.SIGINT)", "1 / 0").replace("time.sleep(60)", "")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stdout) == (0, "dropped\n")
    assert "ZeroDivisionError" in ended.stderr
