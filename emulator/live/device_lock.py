"""One process at a time measures a device: two at once would each measure a device that is shared.

The lock is on a file in the folder for temporary files, or in `PDEMU_LOCKS`, which containers of one machine may share.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from emulator.core.errors import ConfigError, DeadlineError

if os.name == "posix":
    import fcntl

LOCKS_ENV = "PDEMU_LOCKS"
POLL_S = 0.1


@contextlib.contextmanager
def device_lock(device_id: str, patience_s: float, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of a device, by a file that all processes of this user and host see.

    Calls `waiting` once when another holds it, and raises DeadlineError when it has it for longer than `patience_s`,
    ConfigError where there can be no such file.
    The lock goes with the process, however that ends.
    """
    if os.name != "posix":
        yield
        return
    with _opened(device_id) as file:
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


def _opened(device_id: str) -> IO[str]:
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", device_id)
    folder = Path(os.environ.get(LOCKS_ENV) or tempfile.gettempdir())
    try:
        return (folder / f"pdemu-{os.getuid()}-{name}.lock").open("a")
    except OSError as error:
        raise ConfigError(
            f"the device cannot be locked in {folder} ({error.strerror}); name a folder by {LOCKS_ENV} that can be "
            "written to"
        ) from None
