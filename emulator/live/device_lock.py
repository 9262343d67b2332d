"""One process at a time measures a device: two at once would each measure a device that is shared."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from emulator.core.errors import DeadlineError

if os.name == "posix":
    import fcntl

POLL_S = 0.1


@contextlib.contextmanager
def device_lock(device_id: str, patience_s: float, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of a device, by a file that all processes of this user and host see.

    Calls `waiting` once when another holds it, and raises DeadlineError when it has it for longer than `patience_s`.
    The lock goes with the process, however that ends.
    """
    if os.name != "posix":
        yield
        return
    with _file(device_id).open("a") as file:
        until_s = time.monotonic() + patience_s
        told = False
        while not _locked(file.fileno()):
            if time.monotonic() >= until_s:
                raise DeadlineError(
                    f"{device_id} is being calibrated by another process, for more than {patience_s:g} s; "
                    "try again when that has ended"
                )
            if not told:
                waiting()
                told = True
            time.sleep(POLL_S)
        yield


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _file(device_id: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", device_id)
    return Path(tempfile.gettempdir()) / f"pdemu-{os.getuid()}-{name}.lock"
