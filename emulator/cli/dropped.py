"""An interrupt that Python drops: one that comes while a finalizer or a weak reference's callback runs.

Imports have such callbacks by the thousand, and what is raised in one is reported and forgotten.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading

AGAIN_S = 0.05
"""By then the callback is over."""


def heed_dropped() -> None:
    """From now on an interrupt that is dropped comes again in a moment."""
    before = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        timer = threading.Timer(AGAIN_S, _interrupt)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook


def _interrupt() -> None:
    """SIGINT to the main thread, which ends its system calls too."""
    if hasattr(signal, "pthread_kill") and (ident := threading.main_thread().ident) is not None:
        signal.pthread_kill(ident, signal.SIGINT)
    else:
        _thread.interrupt_main()
