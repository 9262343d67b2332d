"""The interface that carries an address, and the route to the network behind it.

An interface is found by its address, because names differ between hosts, containers and restarts. The connected
route is where a network's TCP can be given a congestion control of its own without touching the rest of the host;
a namespace or container may often not change the system's.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from emulator.core.errors import ConfigError
from emulator.core.shaping import ShapingError

_MAIN_TABLE = 254
_UNICAST = 1
_CARRIED = {
    "RTA_PREFSRC": "prefsrc",
    "RTA_PRIORITY": "priority",
}


@dataclass(frozen=True, slots=True)
class Route:
    """A connected route: its network, its congestion control (None: the system's), and all that it consists of."""

    prefix: str
    congestion: str | None
    parts: dict[str, Any]


def interface_of(ip: IPRoute, address: str) -> tuple[int, str]:
    """Index and name of the interface that carries a local address; raises ConfigError naming those there are."""
    wanted = ipaddress.ip_address(address)
    names = {int(link["index"]): str(link.get_attr("IFLA_IFNAME")) for link in ip.get_links()}
    present: list[str] = []
    for message in ip.get_addr():
        index = int(message["index"])
        text = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
        if ipaddress.ip_address(text) == wanted:
            return index, names[index]
        present.append(f"{text} ({names.get(index, index)})")
    listed = ", ".join(present) or "none"
    raise ConfigError(f"no interface of this network namespace has the address {address}; addresses here: {listed}")


def index_of(ip: IPRoute, name: str) -> int | None:
    """The index of the interface of that name; None if there is none."""
    return next((int(index) for index in ip.link_lookup(ifname=name)), None)


def connected_route(ip: IPRoute, address: str, index: int, name: str) -> Route:
    """The narrowest connected route of an interface that a local address belongs to; raises ShapingError if none."""
    routes = connected_routes(ip, address, index)
    if not routes:
        raise ShapingError(
            f"{name} has no connected route for {address}, so TCP over it cannot be given a congestion control; give "
            "the address the prefix length of the KV network, such as /24"
        )
    return routes[0]


def connected_routes(ip: IPRoute, address: str, index: int) -> list[Route]:
    """The connected routes of an interface that a local address belongs to, the narrowest first."""
    local = ipaddress.ip_address(address)
    family = socket.AF_INET if local.version == 4 else socket.AF_INET6
    found: list[tuple[int, Route]] = []
    for message in ip.get_routes(family=family):
        network = message.get_attr("RTA_DST")
        if (
            network is None
            or message["type"] != _UNICAST
            or message.get_attr("RTA_TABLE") != _MAIN_TABLE
            or message.get_attr("RTA_OIF") != index
            or message.get_attr("RTA_GATEWAY") is not None
        ):
            continue
        prefix = f"{network}/{message['dst_len']}"
        if local in ipaddress.ip_network(prefix):
            found.append((int(message["dst_len"]), _route(message, prefix, index, family)))
    return [route for _, route in sorted(found, key=lambda pair: -pair[0])]


def set_congestion(ip: IPRoute, route: Route, congestion: str | None) -> None:
    """Give a route a congestion control, or with None the system's; all else about it stays.

    Raises pyroute2's NetlinkError as the kernel refuses.
    """
    metrics = {**route.parts["metrics"], "cc_algo": congestion}
    ip.route(
        "replace", **{**route.parts, "metrics": {key: value for key, value in metrics.items() if value is not None}}
    )


def add_ifb(ip: IPRoute, name: str) -> int:
    """Make an intermediate device, set it up, and return its index. Raises pyroute2's NetlinkError if refused."""
    ip.link("add", ifname=name, kind="ifb")
    index = index_of(ip, name)
    assert index is not None
    ip.link("set", index=index, state="up")
    return index


def delete_link(ip: IPRoute, index: int) -> None:
    """Remove a device; nothing happens if it is gone. Raises pyroute2's NetlinkError if refused."""
    try:
        ip.link("del", index=index)
    except NetlinkError as error:
        if error.code != errno.ENODEV:
            raise


def _route(message: Any, prefix: str, index: int, family: int) -> Route:
    packed = message.get_attr("RTA_METRICS")
    metrics = {} if packed is None else {key.removeprefix("RTAX_").lower(): value for key, value in packed["attrs"]}
    parts: dict[str, Any] = {
        "family": family,
        "dst": prefix,
        "oif": index,
        "table": _MAIN_TABLE,
        "proto": message["proto"],
        "scope": message["scope"],
        "type": message["type"],
        "metrics": metrics,
    }
    parts |= {name: message.get_attr(key) for key, name in _CARRIED.items() if message.get_attr(key) is not None}
    return Route(prefix, metrics.get("cc_algo"), parts)
