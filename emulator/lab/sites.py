"""Where the processes of a run live: on loopback, or each in a network namespace of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from emulator.core.errors import ConfigError
from emulator.core.run_spec import RunSpec
from emulator.lab.leftovers import Ledger, new_run_id

LauncherName = Literal["local", "netns", "compose", "simulate"]
ShapingName = Literal["paced", "kernel"]

ROUTER, CLIENT = "router", "client"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """A process's namespace (empty: this one) and its addresses on the two networks."""

    netns: str = ""
    control: str = LOOPBACK
    kv: str = LOOPBACK


class Site(Protocol):
    """Where a run happens. Made before its processes, taken away after them, whatever happened."""

    def open(self) -> Mapping[str, Address]:
        """Make it; the address of every process, by name."""

    def note_process(self, pid: int) -> None:
        """A process was started here."""

    def close(self) -> None:
        """Take it away. Idempotent."""


@dataclass(slots=True)
class LocalSite:
    """Plain processes on loopback, on any system."""

    names: Sequence[str]

    def open(self) -> Mapping[str, Address]:
        """Everybody is at home."""
        return {name: Address() for name in self.names}

    def note_process(self, pid: int) -> None:
        """Nothing to note: a process ends with its launcher."""

    def close(self) -> None:
        """Nothing to take away."""


class NamespaceSite:
    """A network namespace for each process, recorded so that `pdemu clean` finds what a killed run leaves."""

    def __init__(self, run: RunSpec) -> None:
        from emulator.lab.netns import NetnsSite  # noqa: PLC0415 - Linux only

        self._ledger = Ledger.open(new_run_id(run.topology))
        self._site = NetnsSite(self._ledger.run_id, [node.name for node in run.nodes], self._ledger)

    def open(self) -> Mapping[str, Address]:
        """Make the namespaces, bridges and links."""
        places = self._site.open()
        return {name: Address(p.netns, p.control_address, p.kv_address or "") for name, p in places.items()}

    def note_process(self, pid: int) -> None:
        """Record a process of the run."""
        self._ledger.note_process(pid)

    def close(self) -> None:
        """Remove them, and the record when all is gone."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._ledger.close)
            self._site.close()


def make_site(launcher: str, run: RunSpec) -> Site:
    """The site for the processes of one run on this machine."""
    if launcher == "netns":
        return NamespaceSite(run)
    return LocalSite([ROUTER, CLIENT, *(node.name for node in run.nodes)])


def choose_shaping(launcher: LauncherName, asked: ShapingName | None) -> str:
    """How links are shaped: as asked, else by the best means that the launcher has; in a simulation they are modelled.

    Raises ConfigError for kernel shaping on loopback, which carries everything at once, and for any in a simulation.
    """
    if launcher == "simulate":
        if asked is not None:
            raise ConfigError(f"--shaping {asked}: a simulation models its links; leave it out, or use a live launcher")
        return "modelled"
    if asked == "kernel" and launcher == "local":
        raise ConfigError(
            "--shaping kernel: the local launcher has all processes on loopback, which the kernel cannot shape for "
            "one of them; use --launcher netns, or --shaping paced"
        )
    return asked or ("paced" if launcher == "local" else "kernel")
