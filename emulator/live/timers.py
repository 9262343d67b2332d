"""Sleeping to an absolute deadline, precisely.

Linux may delay a thread's timers by 50 µs to save power, which is a twentieth of a frame's time; a thread that
paces asks for 1 ns instead. Elsewhere the platform's own precision stands.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

_PR_SET_TIMERSLACK = 29
_INTERRUPTIBLE_S = 2e-3


def sharpen_timers() -> bool:
    """Ask for timers exact to 1 ns in the calling thread; True if the system granted it."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0) == 0)


def pause_until(deadline_s: float, stop: threading.Event) -> None:
    """Sleep until `time.monotonic()` reaches `deadline_s`, or until `stop` is set (noticed within 2 ms)."""
    while not stop.is_set():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return
        if left_s > _INTERRUPTIBLE_S:
            stop.wait(left_s - _INTERRUPTIBLE_S)
        else:
            time.sleep(left_s)
