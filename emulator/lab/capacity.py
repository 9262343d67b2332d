"""What KV links this machine carries, measured in a second or two between two processes on loopback."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from emulator.core.errors import RunError
from emulator.live.allocator import NODE_ALLOCATOR_ENV

LIMIT_S = 30.0
_MODULE = (sys.executable, "-m", "emulator.live.capacity")


def link_capacity_bps() -> float:
    """Payload bits per second of one unshaped KV link here; raises RunError when it cannot be measured."""
    with contextlib.ExitStack() as stack:
        receiver = _start(stack, "receive")
        assert receiver.stdout is not None
        endpoint = receiver.stdout.readline().strip()
        _start(stack, "send", endpoint)
        try:
            out, _ = receiver.communicate(timeout=LIMIT_S)
            return float(out)
        except (subprocess.TimeoutExpired, ValueError):
            raise RunError(f"--scale auto: this machine's links could not be measured within {LIMIT_S:g} s") from None


def _start(stack: contextlib.ExitStack, *args: str) -> subprocess.Popen[str]:
    """Start one end; it is ended with the stack, whatever happens."""
    process = subprocess.Popen(
        [*_MODULE, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **NODE_ALLOCATOR_ENV},
    )
    stack.callback(process.wait, 5)
    stack.callback(process.kill)
    return process
