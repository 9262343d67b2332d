"""What a run makes outside its own processes, written down before it is made, so that nothing outlives a killed run.

A process ends when its launcher does, but a namespace or a container has no such leash. Each run therefore keeps one
JSON file in a state folder: who owns it and what it made. The run takes the file away when all of that is gone; what
SIGKILL prevented, `clean` makes up for, by the recorded names alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import psutil

from emulator.core.errors import ConfigError, PdemuError
from emulator.lab import docker
from emulator.live import namespace

STATE_DIR_ENV = "PDEMU_STATE_DIR"
KILL_S = 2.0
# The boot time is read in whole seconds, so the same start may seem this far apart.
_START_TOLERANCE_S = 2.0
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,47}")


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process, told from a later one with the same pid by its start, in seconds since the machine's own.

    Both ends of that difference move together when the clock is set.
    """

    pid: int
    started_s: float


class ComposeProject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A compose project: its name, and the file it was started from."""

    project: str
    file: str


class Leftovers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A state file: the run, its owner, and what is or is about to be there because of it."""

    run_id: str
    owner: Process
    made_at_unix_s: float
    namespaces: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    compose: ComposeProject | None = None
    processes: tuple[Process, ...] = ()


def new_run_id(name: str = "run") -> str:
    """An id that no other run has: `name`, as far as it may stand in the names of things, and six random digits."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:32].strip("-") or "run"
    return f"{slug}-{secrets.token_hex(3)}"


def state_folder() -> Path:
    """Where state files are kept; made if missing. Raises ConfigError when it cannot be, or others may write to it."""
    folder = _state_path()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(
            f"state folder {folder}: cannot be used ({error.strerror}); set {STATE_DIR_ENV} to one that can be made"
        ) from None
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"state folder {folder}: belongs to somebody else or others may write to it, so its files cannot be "
            f"trusted; set {STATE_DIR_ENV} to a folder of your own"
        )
    return folder


def _state_path() -> Path:
    if chosen := os.environ.get(STATE_DIR_ENV):
        return Path(chosen)
    if os.geteuid() == 0 and Path("/run").is_dir():
        return Path("/run/pdemu")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "pdemu"
    return Path(tempfile.gettempdir()) / f"pdemu-{os.geteuid()}"


def identify(pid: int) -> Process | None:
    """The process that has this pid now; None when there is none, or only its exit status is left."""
    try:
        booted_unix_s = psutil.boot_time()
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return Process(pid, process.create_time() - booted_unix_s)
    except psutil.NoSuchProcess:
        return None


def is_alive(process: Process) -> bool:
    """Whether this very process still runs."""
    now = identify(process.pid)
    return now is not None and abs(now.started_s - process.started_s) < _START_TOLERANCE_S


# --- the run's side -------------------------------------------------------------------------------------------------


class Ledger:
    """The state file of this process's run. Note a thing before it is made, drop it after it is gone."""

    def __init__(self, path: Path, leftovers: Leftovers) -> None:
        self._path = path
        self._leftovers = leftovers
        self._closed = False

    @classmethod
    def open(cls, run_id: str) -> Ledger:
        """Begin the state file of a run owned by this process.

        Raises ConfigError for an id that cannot stand in names or is taken, or when the state folder is not usable.
        """
        if not _RUN_ID.fullmatch(run_id):
            raise ConfigError(f"run id {run_id!r}: up to 48 of a-z, 0-9, - and _, a letter or digit first")
        owner = identify(os.getpid())
        assert owner is not None
        ledger = cls(state_folder() / f"{run_id}.json", Leftovers(run_id, owner, time.time()))
        ledger._create()
        return ledger

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._leftovers.run_id

    def note_namespace(self, *names: str) -> None:
        """About to make these network namespaces."""
        self._change(namespaces=(*self._leftovers.namespaces, *names))

    def drop_namespace(self, name: str) -> None:
        """This network namespace is gone."""
        self._change(namespaces=tuple(known for known in self._leftovers.namespaces if known != name))

    def note_link(self, *names: str) -> None:
        """About to make these interfaces inside the run's namespaces; they go with their namespace."""
        self._change(links=(*self._leftovers.links, *names))

    def note_compose(self, project: str, file: Path) -> None:
        """About to start this compose project."""
        self._change(compose=ComposeProject(project, str(file.resolve())))

    def drop_compose(self) -> None:
        """The compose project is down."""
        self._change(compose=None)

    def note_process(self, pid: int) -> None:
        """This process was started for the run; nothing when it has ended already."""
        if (process := identify(pid)) is not None:
            self._change(processes=(*self._leftovers.processes, process))

    def close(self) -> None:
        """Take the state file away when all that was noted is gone, else leave it for `clean`. Idempotent."""
        left = self._leftovers
        if self._closed or left.namespaces or left.compose or any(map(is_alive, left.processes)):
            return
        self._path.unlink(missing_ok=True)
        self._closed = True

    def _change(self, **fields: object) -> None:
        assert not self._closed, "a closed ledger takes no notes"
        self._leftovers = msgspec.structs.replace(self._leftovers, **fields)
        self._write()

    # Both ways whoever reads sees a whole file or none.

    def _create(self) -> None:
        draft = self._draft()
        try:
            self._path.hardlink_to(draft)
        except FileExistsError:
            raise ConfigError(
                f"run id {self.run_id!r} is taken by {self._path}; choose another, or run `pdemu clean` if that run "
                "was killed"
            ) from None
        finally:
            draft.unlink()

    def _write(self) -> None:
        self._draft().replace(self._path)

    def _draft(self) -> Path:
        draft = self._path.with_suffix(f".{self._leftovers.owner.pid}.tmp")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(self._leftovers), indent=2) + b"\n")
        return draft


# --- the cleaner's side ---------------------------------------------------------------------------------------------


def end_process(process: Process) -> bool:
    """Kill this very process and wait for its end; False when it had ended already. Raises OSError if refused."""
    if not is_alive(process):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + KILL_S
    while is_alive(process):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"still there {KILL_S:g} s after SIGKILL")
        time.sleep(0.01)
    return True


def take_down(project: ComposeProject) -> bool:
    """Remove a compose project; False when nothing of it was there. Raises RunError when the engine refuses."""
    return docker.take_down(project.project)


@dataclass(frozen=True, slots=True)
class Remover:
    """How each kind of thing is removed: False when it was gone already; OSError or PdemuError when it would not go."""

    process: Callable[[Process], bool] = end_process
    namespace: Callable[[str], bool] = namespace.remove
    compose: Callable[[ComposeProject], bool] = take_down


def clean(remover: Remover | None = None) -> list[str]:
    """Remove what runs left behind whose owner is dead, by its recorded name, and say each in a line.

    Runs in progress are left alone. A line that begins with "left" tells of something that is still there: a state
    file that cannot be read, or a thing that would not go; `clean` tries the latter again next time. Raises
    ConfigError when the state folder is not usable.
    """
    lines: list[str] = []
    for path in sorted(state_folder().glob("*.json")):
        try:
            leftovers = msgspec.json.decode(path.read_bytes(), type=Leftovers)
        except FileNotFoundError:
            continue  # its run has just ended well
        except (OSError, msgspec.DecodeError) as error:
            lines.append(f"left {path}: not a state file that can be read ({error})")
            continue
        if not is_alive(leftovers.owner):
            lines += _clean_run(path, leftovers, remover or Remover())
    return lines


def _clean_run(path: Path, leftovers: Leftovers, remover: Remover) -> Iterable[str]:
    """Remove everything of one dead run; its file goes when all went."""
    removals: list[tuple[str, Callable[[], bool]]] = [
        *((f"process {process.pid}", partial(remover.process, process)) for process in leftovers.processes),
        *((f"network namespace {name}", partial(remover.namespace, name)) for name in leftovers.namespaces),
    ]
    if (compose := leftovers.compose) is not None:
        removals.append((f"compose project {compose.project}", partial(remover.compose, compose)))
    all_gone = True
    for what, remove in removals:
        try:
            if remove():
                yield f"removed {what} of run {leftovers.run_id}"
        except (OSError, PdemuError) as error:
            all_gone = False
            yield f"left {what} of run {leftovers.run_id}: {error}"
    if all_gone:
        path.unlink(missing_ok=True)
