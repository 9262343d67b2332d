"""How a command is told to end: SIGTERM and a terminal that closes are what Ctrl-C is, whatever started the command.

A shell without job control starts what is in the background (`pdemu up … &` in a script) with SIGINT ignored. Here it
is heard all the same, for the other two come down to it. What `nohup` starts outlives its terminal, as asked.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable

SAME_S = 1.0
"""`timeout` tells a command twice, a terminal that closes by its kernel and its shell: within this time it is once."""


class Ending:
    """A signal handler that passes on a signal to end as `interrupt`, once for all that come within `SAME_S`."""

    def __init__(self, interrupt: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._interrupt, self._clock = interrupt, clock
        self._told_s = -math.inf

    def __call__(self, *_: object) -> None:
        """A signal came."""
        now_s = self._clock()
        if now_s - self._told_s >= SAME_S:
            self._told_s = now_s
            self._interrupt()


def hear_the_end() -> None:
    """From now on SIGINT, SIGTERM and SIGHUP all interrupt this process."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ending = Ending(lambda: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGTERM, ending)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, ending)
