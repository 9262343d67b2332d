"""Namespaces for a user who is not root: the command runs itself again inside a user namespace, where it may make them.

    pdemu … ──exec──▶ unshare --user --map-root-user --mount --net ──exec──▶ pdemu … (the same process, "root" in there)

In there only what belongs to the user is reachable as before, so results are the user's own. /run is private, for the
names of namespaces are kept below it. Everything ends with the last process inside: nothing can be left over.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from emulator.core.errors import ConfigError
from emulator.live import namespace

GUARD_ENV = "PDEMU_OUTSIDE_MOUNTS"
"""Names the mount namespace that the command came from: set means that it has been executed again."""

PROBE_S = 10.0
_UNSHARE = ("--user", "--map-root-user", "--mount", "--net", "--")
_NEEDED = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC = 0x2, 0x4, 0x1000, 0x4000
_EVERY_ID = 2**32 - 1
_LOOPBACK_INDEX = 1
_WAY_OUT = "run as root, or use --launcher local with paced links"
_FORBIDDING = (
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ("user.max_user_namespaces", "0", "10000"),
    ("user.max_net_namespaces", "0", "10000"),
    ("user.max_mnt_namespaces", "0", "10000"),
)
"""Sysctls, the value with which each forbids it, and one that allows it."""


def missing_capabilities() -> list[str]:
    """Which of CAP_NET_ADMIN and CAP_SYS_ADMIN this process lacks."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    effective = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
    return [name for name, bit in _NEEDED.items() if not effective >> bit & 1]


def _missing_folder() -> list[str]:
    """The folder of names, where it cannot be written to: so it is in a user namespace without mounts of its own."""
    folder = namespace.FOLDER if namespace.FOLDER.exists() else namespace.FOLDER.parent
    return [] if os.access(folder, os.W_OK) else [f"a writable {folder}"]


def reexec_if_needed(argv: Sequence[str] | None = None) -> None:
    """Return once this process may make network namespaces; without the permission it first executes itself again.

    `argv` is the whole command, the interpreter first; without it, the one that started this process. Call this
    before anything is started or written, for whatever was done until now is done again. Raises ConfigError, in one
    line, where the kernel does not allow it.
    """
    if sys.platform != "linux":
        raise ConfigError("--launcher netns: network namespaces are a feature of Linux; use --launcher local")
    outside = os.environ.get(GUARD_ENV)
    mounts = str(Path("/proc/self/ns/mnt").readlink())
    capabilities = missing_capabilities()
    if outside is not None and outside != mounts and not capabilities and _ids_are_mapped():
        _furnish()
        os.environ[GUARD_ENV] = mounts
        return
    missing = capabilities or _missing_folder()
    if missing and outside is not None:
        raise ConfigError(f"--launcher netns: a user namespace does not give {' and '.join(missing)} here; {_WAY_OUT}")
    if missing:
        _execute_inside(argv or [sys.executable, *sys.orig_argv[1:]], mounts)


def _execute_inside(argv: Sequence[str], mounts: str) -> NoReturn:
    unshare = shutil.which("unshare")
    if unshare is None:
        raise ConfigError(f"--launcher netns: without root it needs the command unshare of util-linux; {_WAY_OUT}")
    # Some systems let the namespace be made and withhold the permissions in it: the second unshare needs them.
    probe = [unshare, *_UNSHARE, unshare, "--mount", "--net", "--", "true"]
    try:
        found = subprocess.run(probe, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--launcher netns: unshare did not answer within {PROBE_S:g} s; {_WAY_OUT}") from None
    if found.returncode != 0:
        raise ConfigError(_why_forbidden(found.stderr))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(unshare, [unshare, *_UNSHARE, *argv], {**os.environ, GUARD_ENV: mounts})


def _why_forbidden(said: str) -> str:
    """One line: what is forbidden, by which sysctl, and the ways out."""
    what = "--launcher netns: the kernel forbids user namespaces without root"
    for name, forbids, allows in _FORBIDDING:
        with contextlib.suppress(OSError):
            value = Path("/proc/sys", *name.split(".")).read_text(encoding="ascii").strip()
            if value == forbids:
                return f"{what} ({name} = {value}); have it set with `sysctl -w {name}={allows}`, {_WAY_OUT}"
    last = (said.strip().splitlines() or ["unshare failed"])[-1]
    return f"{what} ({last}; no sysctl does, so a container's or security module's rules); {_WAY_OUT}"


# --- inside ---------------------------------------------------------------------------------------------------------


def _ids_are_mapped() -> bool:
    """Whether this is a user namespace of somebody's, not the machine's own: there nothing may be mounted over /run."""
    return int(Path("/proc/self/uid_map").read_text(encoding="ascii").split()[2]) < _EVERY_ID


def _furnish() -> None:
    """Make the fresh namespaces fit to work in: a /run where names can be made, and a loopback interface."""
    try:
        _own_run(namespace.FOLDER.parent.resolve())
    except OSError as error:
        raise ConfigError(
            f"--launcher netns: a user namespace does not permit mounts here ({error.strerror}); {_WAY_OUT}"
        ) from None
    from pyroute2 import IPRoute  # noqa: PLC0415 - slow to import, see emulator.live.namespace

    with IPRoute() as route:
        route.link("set", index=_LOOPBACK_INDEX, state="up")


def _own_run(run: Path) -> None:
    """An empty tmpfs over /run, in this mount namespace alone, with all that was there bound into it again.

    All but the host's namespaces and state files, whose folders this user may not write to.
    """
    before = os.open(run, os.O_PATH | os.O_DIRECTORY)
    try:
        _mount("tmpfs", run, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755")
        with os.scandir(f"/proc/self/fd/{before}") as entries:
            for entry in entries:
                if entry.name not in (namespace.FOLDER.name, "pdemu"):
                    with contextlib.suppress(OSError):  # an empty place then: a run needs nothing of the others'
                        _bind(Path(entry.path), run / entry.name)
    finally:
        os.close(before)


def _bind(source: Path, place: Path) -> None:
    if source.is_symlink():
        place.symlink_to(source.readlink())
        return
    if source.is_dir():
        place.mkdir()
    else:
        place.touch()
    _mount(str(source), place, "", _MS_BIND | _MS_REC)


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
    if libc.mount(source.encode(), os.fsencode(target), kind.encode(), flags, options.encode()) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))
