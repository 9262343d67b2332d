"""Two network namespaces with a cable between them, for tests of shaping; always removed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """One end of the cable: its namespace, its address, and its interface's name."""

    namespace: str
    address: str
    interface: str

    def start(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Begin `work` in the namespace, on a thread that ends with it."""
        with_own_thread = ThreadPoolExecutor(1)
        future = with_own_thread.submit(self._enter, work, *arguments)
        with_own_thread.shutdown(wait=False)
        return future

    def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do `work` in the namespace."""
        return self.start(work, *arguments).result(60)

    def _enter(self, work: Callable[..., T], *arguments: Any) -> T:
        from pyroute2 import netns

        netns.setns(self.namespace, flags=0)
        return work(*arguments)


@contextmanager
def cable(tag: str) -> Iterator[tuple[Host, Host]]:
    """Two namespaces, 10.99.0.1 and 10.99.0.2 (and fd99::1, fd99::2) at the ends of a veth pair."""
    from pyroute2 import IPRoute, netns

    name = f"pdemu-test-{os.getpid()}-{tag}"
    hosts = Host(f"{name}-a", "10.99.0.1", "va"), Host(f"{name}-b", "10.99.0.2", "vb")
    made: list[str] = []

    def plug() -> None:
        with IPRoute() as ip:
            ip.link("add", ifname="va", kind="veth", peer={"ifname": "vb", "net_ns_fd": hosts[1].namespace})

    def set_up(host: Host) -> None:
        with IPRoute() as ip:
            for interface in ("lo", host.interface):
                ip.link("set", index=ip.link_lookup(ifname=interface)[0], state="up")
            index = ip.link_lookup(ifname=host.interface)[0]
            ip.addr("add", index=index, address=host.address, prefixlen=24)
            ip.addr("add", index=index, address=f"fd99::{host.address[-1]}", prefixlen=64, flags=0x02)  # no probing

    try:
        for host in hosts:
            netns.create(host.namespace)
            made.append(host.namespace)
        hosts[0].run(plug)
        for host in hosts:
            host.run(set_up, host)
        yield hosts
    finally:
        for namespace in made:
            netns.remove(namespace)


def try_shaping() -> None:
    """Set a token bucket in a namespace, by other means than those under test; raises whatever prevents it."""
    from pyroute2 import IPRoute

    def shape(interface: str) -> None:
        with IPRoute() as ip:
            ip.tc("add", "tbf", ip.link_lookup(ifname=interface)[0], rate="100mbit", burst=73728, limit=1 << 20)

    with cable("check") as (host, _):
        host.run(shape, host.interface)
