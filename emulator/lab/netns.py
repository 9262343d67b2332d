"""The network namespaces of one run: what each process of it sees of the network is made here, and nowhere else.

      router    client    node …        one namespace each, `lo` up
        │         │        │   │
      ┌─┴─────────┴────────┴┐ ┌┴──┐
      │ bridge control      │ │kv │     the hub: a namespace with the two bridges and the other end of every pair
      └─────────────────────┘ └───┘

Every pair is made inside the hub with its far end already in its namespace, so the host's own namespace never sees an
interface or an address. Addresses are the same in every run: no packet leaves the hub.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, Literal

from emulator.core.errors import ConfigError, RunError
from emulator.lab.leftovers import Ledger
from emulator.live import namespace

if TYPE_CHECKING:
    from pyroute2 import IPRoute

CONTROL_NETWORK = IPv4Network("10.201.0.0/16")
KV_NETWORK = IPv4Network("10.202.0.0/16")
MTU_BYTES = 1500
ROUTER, CLIENT, HUB = "router", "client", "hub"
_CLONE_NEWNET = 0x40000000
_LOOPBACK_INDEX = 1

Network = Literal["control", "kv"]
_NETWORKS: tuple[tuple[Network, IPv4Network], ...] = (("control", CONTROL_NETWORK), ("kv", KV_NETWORK))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process lives: its namespace, and its addresses there; only nodes are on the KV network."""

    netns: str
    control_address: str
    kv_address: str | None


class NetnsSite:
    """The namespaces of a run with these nodes, recorded in its ledger before they are made."""

    def __init__(self, run_id: str, nodes: Sequence[str], ledger: Ledger) -> None:
        """Name everything after the run; nothing is made yet."""
        assert not {ROUTER, CLIENT, HUB} & set(nodes), "these names are taken"
        assert len(set(nodes)) == len(nodes), "two nodes of one name"
        self._nodes = tuple(nodes)
        self._ledger = ledger
        self._tag = "p" + hashlib.blake2s(run_id.encode(), digest_size=3).hexdigest()
        self._standing: list[str] = []
        self.hub = f"pdemu-{run_id}-{HUB}"
        self.places = {
            name: Place(
                netns=f"pdemu-{run_id}-{name}",
                control_address=str(CONTROL_NETWORK[number]),
                kv_address=str(KV_NETWORK[number]) if name in nodes else None,
            )
            for number, name in enumerate((ROUTER, CLIENT, *nodes), start=1)
        }

    def interface(self, network: Network) -> str:
        """The interface to `control` or `kv` in every namespace; in the hub, the bridge."""
        return f"{self._tag}-{network[:2]}"

    def port(self, name: str, network: Network) -> str:
        """The hub's end of the pair that joins `name` to `control` or `kv`: a port of that bridge.

        What leaves through a port is what `name` receives.
        """
        return f"{self.interface(network)}-{list(self.places).index(name) + 1}"

    def open(self) -> dict[str, Place]:
        """Make everything; returns the place of `router`, of `client` and of each node. Blocks for half a second or so.

        Whatever goes wrong, nothing stays behind. Raises ConfigError where the kernel does not permit it or a name is
        taken, RunError where it fails otherwise.
        """
        names = [self.hub, *(place.netns for place in self.places.values())]
        if taken := [name for name in names if namespace.exists(name)]:
            raise ConfigError(f"network namespace {taken[0]} is there already; run `pdemu clean`, or remove it")
        self._ledger.note_namespace(*names)
        self._ledger.note_link(*self._links())
        self._standing = names
        try:
            # A namespace belongs to a thread: one of its own makes them, and no other thread ever leaves the host's.
            with ThreadPoolExecutor(1, thread_name_prefix="netns") as thread:
                thread.submit(self._make).result()
        except BaseException as error:
            self._undo()
            if problem := _explain(error):
                raise problem from error
            raise
        return self.places

    def close(self) -> None:
        """Remove everything; harmless when done already. Raises RunError naming what would not go."""
        problems = []
        for name in list(self._standing):
            try:
                namespace.remove(name)
            except OSError as error:
                problems.append(f"{name} ({error.strerror})")
            else:
                self._standing.remove(name)
                self._ledger.drop_namespace(name)
        if problems:
            raise RunError(f"network namespaces that could not be removed: {', '.join(problems)}; try `pdemu clean`")

    def _undo(self) -> None:
        """Close, where an earlier error is what counts; the ledger keeps what would not go."""
        with suppress(RunError):
            self.close()

    def _links(self) -> list[str]:
        ports = [self.port(name, "control") for name in self.places] + [self.port(name, "kv") for name in self._nodes]
        return [self.interface("control"), self.interface("kv"), *ports]

    # --- in a thread of its own ---------------------------------------------------------------------------------

    def _make(self) -> None:
        with ExitStack() as stack:
            hub = stack.enter_context(_new_namespace(self.hub))
            bridges = {network: _make_bridge(hub, self.interface(network)) for network, _ in _NETWORKS}
            for name, place in self.places.items():
                with _new_namespace(place.netns) as inside:
                    for network, addresses in _NETWORKS:
                        address = place.control_address if network == "control" else place.kv_address
                        if address is not None:
                            self._join(hub, bridges[network], name, network)
                            _give_address(inside, self.interface(network), address, addresses.prefixlen)

    def _join(self, hub: IPRoute, bridge: int, name: str, network: Network) -> None:
        """A pair of interfaces between a bridge and a namespace."""
        port = self.port(name, network)
        peer = {"ifname": self.interface(network), "net_ns_fd": self.places[name].netns, "mtu": MTU_BYTES}
        hub.link("add", ifname=port, kind="veth", mtu=MTU_BYTES, peer=peer)
        hub.link("set", index=_index(hub, port), master=bridge, state="up")


@contextmanager
def _new_namespace(name: str) -> Iterator[IPRoute]:
    """Make a namespace with `lo` up and move this thread into it; gives the way to talk to it."""
    from pyroute2 import IPRoute, netns  # noqa: PLC0415 - slow to import, see emulator.live.namespace

    _unshare_network()
    # The thread's own id: /proc/self would name the namespace of the process's first thread.
    netns.attach(name, threading.get_native_id())
    with IPRoute() as inside:
        inside.link("set", index=_LOOPBACK_INDEX, state="up")
        yield inside


def _unshare_network() -> None:
    """Move this thread into a new network namespace (os.unshare came with Python 3.12)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _make_bridge(hub: IPRoute, name: str) -> int:
    hub.link("add", ifname=name, kind="bridge", mtu=MTU_BYTES)
    index = _index(hub, name)
    hub.link("set", index=index, state="up")
    return index


def _give_address(inside: IPRoute, interface: str, address: str, prefix_length: int) -> None:
    index = _index(inside, interface)
    inside.addr("add", index=index, address=address, prefixlen=prefix_length)
    inside.link("set", index=index, state="up")


def _index(route: IPRoute, interface: str) -> int:
    return int(route.link_lookup(ifname=interface)[0])


def _explain(error: BaseException) -> Exception | None:
    """What a refusal by the kernel means to the user; None for any other kind of error."""
    from pyroute2.netlink.exceptions import NetlinkError  # noqa: PLC0415 - see above

    if not isinstance(error, OSError | NetlinkError):
        return None
    code = error.errno if isinstance(error, OSError) else error.code
    if code in (errno.EPERM, errno.EACCES):
        return ConfigError(
            "--launcher netns: the kernel does not permit network namespaces here (CAP_SYS_ADMIN and CAP_NET_ADMIN are "
            "needed); run as root, or use --launcher local with paced links"
        )
    if code == errno.ENOSPC:
        return ConfigError(
            "--launcher netns: the kernel allows no further network namespace; run `pdemu clean`, or raise the sysctl "
            "user.max_net_namespaces"
        )
    return RunError(f"--launcher netns: the namespaces could not be made: {error}")
