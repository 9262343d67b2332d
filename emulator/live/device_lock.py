"""One process at a time measures a device: two at once would each measure a device that is shared.

The lock is on a file in the folder for temporary files, or in `PDEMU_LOCKS`, which containers of one machine may share.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from emulator.core.errors import ConfigError, DeadlineError, RunError

if os.name == "posix":
    import fcntl

LOCKS_ENV = "PDEMU_LOCKS"
POLL_S = 0.1


class Patience(NamedTuple):
    """How to wait for a lock: for `limit_s`, `told` once that has taken `tell_after_s`, and no longer than until `stop`
    is set."""

    limit_s: float
    told: Callable[[], None] = lambda: None
    tell_after_s: float = 0.0
    stop: threading.Event | None = None


@contextlib.contextmanager
def device_lock(device_id: str, patience: Patience, name: str = "") -> Iterator[None]:
    """Hold the lock of a device by a file that all processes of this user and host see; errors call it `name`.

    Raises DeadlineError when another has it for longer than there is patience, RunError where that was stopped, and
    ConfigError where there can be no such file.
    The lock goes with the process, however that ends.
    """
    if os.name != "posix":
        yield
        return
    stop, told = patience.stop or threading.Event(), False
    with _opened(device_id) as file:
        began_s = time.monotonic()
        while not _locked(file.fileno()):
            waited_s = time.monotonic() - began_s
            if waited_s >= patience.limit_s:
                raise DeadlineError(
                    f"{name or device_id} is being measured by another process, for more than {patience.limit_s:g} s; "
                    "try again when that has ended"
                )
            if not told and waited_s >= patience.tell_after_s:
                patience.told()
                told = True
            if stop.wait(POLL_S):
                raise RunError(f"{name or device_id}: stopped while another process measured it")
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
