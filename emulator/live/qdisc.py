"""Token buckets, delay lines and redirection in the kernel: set one, read one, count what went through one.

pyroute2 carries the messages. Its own tbf knows 32-bit rates only, 34 Gbit/s, and no explicit burst, and its netem
loses the rate, so both are laid out here.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, nla, nlmsg
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import RTM_NEWQDISC, TC_H_INGRESS, TC_H_ROOT
from pyroute2.netlink.rtnl.tcmsg import sched_netem, tcmsg
from pyroute2.netlink.rtnl.tcmsg.common import stats2

from emulator.core.shaping import (
    NETEM_MAJOR,
    QDISC_MAJOR,
    Bucket,
    DelayLine,
    ShapingError,
    ShapingNotPermittedError,
)

TBF_HANDLE = QDISC_MAJOR << 16
NETEM_HANDLE = NETEM_MAJOR << 16
_TICK_S = 64e-9  # the kernel's unit for times of queueing disciplines
_ALL_PROTOCOLS = 0x0003
_CREATE = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL
_ETHERNET = 1
_MAX_RATE_32 = 2**32 - 1
_MISSING = (errno.ENOENT, errno.EOPNOTSUPP, errno.EAFNOSUPPORT)
_NOT_PERMITTED = (errno.EPERM, errno.EACCES)


class _TbfOptions(nla):  # type: ignore[misc]  # pyroute2 has no types
    nla_map = (
        ("TCA_TBF_UNSPEC", "none"),
        ("TCA_TBF_PARMS", "parms"),
        ("TCA_TBF_RTAB", "hex"),
        ("TCA_TBF_PTAB", "hex"),
        ("TCA_TBF_RATE64", "uint64"),
        ("TCA_TBF_PRATE64", "uint64"),
        ("TCA_TBF_BURST", "uint32"),
        ("TCA_TBF_PBURST", "uint32"),
    )

    class parms(nla):  # type: ignore[misc]  # noqa: N801  # the name is looked up by nla_map
        fields = (
            ("cell_log", "B"),
            ("linklayer", "B"),
            ("overhead", "H"),
            ("cell_align", "h"),
            ("mpu", "H"),
            ("rate", "I"),
            ("peak_log", "I"),
            ("peak_mpu", "I"),
            ("peak", "I"),
            ("limit", "I"),
            ("buffer", "I"),
            ("mtu", "I"),
        )


class _QdiscMessage(nlmsg):  # type: ignore[misc]
    """As pyroute2's own, but not its subclass: that would share a table of attributes compiled for the first user."""

    prefix = "TCA_"
    fields = tcmsg.fields
    nla_map = (
        ("TCA_UNSPEC", "none"),
        ("TCA_KIND", "asciiz"),
        ("TCA_OPTIONS", "options_of_kind"),
        ("TCA_STATS", "hex"),
        ("TCA_XSTATS", "hex"),
        ("TCA_RATE", "hex"),
        ("TCA_FCNT", "hex"),
        ("TCA_STATS2", "stats2"),
    )
    stats2 = stats2

    @staticmethod
    def options_of_kind(self: Any, *_: Any, **__: Any) -> Any:  # noqa: PLW0211  # pyroute2 passes the message
        kinds = {"tbf": _TbfOptions, "netem": sched_netem.options}
        return kinds.get(self.get_attr("TCA_KIND"), self.hex)


@dataclass(frozen=True, slots=True)
class Counts:
    """What one direction's queueing discipline has counted since it was set.

    `bytes` are whole Ethernet frames that went out of it, `backlog_bytes` wait now, `drops` are packets that found it
    full, and `overlimits` the times that it held one back.
    """

    bytes: int
    packets: int
    drops: int
    overlimits: int
    backlog_bytes: int


@dataclass(frozen=True, slots=True)
class Qdisc:
    """One queueing discipline as the kernel holds it; `bucket` or `delay` if it is such a one."""

    kind: str
    handle: int
    parent: int
    bucket: Bucket | None
    delay: DelayLine | None
    counts: Counts


@contextmanager
def asking(what: str, needs: str = "", missing: tuple[int, ...] = _MISSING) -> Iterator[None]:
    """Turn the kernel's refusal of `what` into an error that says what is missing.

    `needs` names the modules that it takes, and `missing` the error numbers by which the kernel says it lacks them.
    Raises ShapingNotPermittedError or ShapingError.
    """
    try:
        yield
    except NetlinkError as error:
        if error.code in _NOT_PERMITTED:
            raise not_permitted(what) from error
        if needs and error.code in missing:
            raise ShapingError(
                f"cannot {what}: this kernel lacks {needs} (the kernel says: {error}); load it with modprobe on the "
                "host, use a kernel that has it, or --shaping paced"
            ) from error
        raise ShapingError(
            f"cannot {what}: the kernel refuses with {error}; --shaping paced needs no kernel"
        ) from error


def not_permitted(what: str) -> ShapingNotPermittedError:
    """The error for a process without the right to shape, with the two ways out."""
    return ShapingNotPermittedError(
        f"cannot {what}: not permitted; it needs CAP_NET_ADMIN in this network namespace. Either use --shaping paced, "
        "which needs no rights, or a network namespace of one's own: --launcher netns, also as an ordinary user where "
        "the kernel allows unprivileged user namespaces (unshare -Urn)"
    )


def teach_tbf(ip: IPRoute) -> None:
    """Let this socket read tbf's 64-bit rates."""
    ip.marshal.msg_map = {**ip.marshal.msg_map, RTM_NEWQDISC: _QdiscMessage}


def set_bucket(ip: IPRoute, index: int, bucket: Bucket, where: str) -> None:
    """Make the bucket the root queueing discipline of an interface; `where` names it in errors."""
    parameters = {
        "linklayer": _ETHERNET,
        "rate": min(bucket.rate_bytes_per_s, _MAX_RATE_32),
        "limit": bucket.limit_bytes,
        "buffer": _ticks(bucket.burst_bytes / bucket.rate_bytes_per_s),
    }
    attributes = [
        ("TCA_TBF_PARMS", parameters),
        ("TCA_TBF_RATE64", bucket.rate_bytes_per_s),
        ("TCA_TBF_BURST", bucket.burst_bytes),
    ]
    with asking(f"set a token bucket on {where}", "tbf (module sch_tbf)"):
        _add(ip, index, "tbf", handle=TBF_HANDLE, parent=TC_H_ROOT, options={"attrs": attributes})


def set_delay(ip: IPRoute, index: int, line: DelayLine, *, below_bucket: bool, where: str) -> bool:
    """Delay what leaves an interface, inside its bucket if it has one; False if the kernel has no netem."""
    parent = TBF_HANDLE | 1 if below_bucket else TC_H_ROOT
    attributes = [("TCA_NETEM_RATE", {"rate": line.ordered_bytes_per_s})] if line.ordered_bytes_per_s else []
    options = {
        "delay": _ticks(line.delay_us / 1e6),
        "jitter": _ticks(line.jitter_us / 1e6),
        "limit": line.limit_packets,
        "attrs": attributes,
    }
    try:
        _add(ip, index, "netem", handle=NETEM_HANDLE, parent=parent, options=options)
    except NetlinkError as error:
        if error.code in _MISSING:
            return False
        with asking(f"delay packets on {where}"):
            raise
    return True


def redirect_ingress(ip: IPRoute, index: int, target: int, where: str) -> None:
    """Lead everything that arrives at an interface through another one's egress."""
    with asking(f"attach to what arrives at {where}", "an ingress hook (module sch_ingress)"):
        ip.tc("add", "ingress", index)
    action = {"kind": "mirred", "direction": "egress", "action": "redirect", "ifindex": target}
    common = {"parent": TC_H_INGRESS & 0xFFFF0000, "protocol": _ALL_PROTOCOLS, "prio": 1, "action": action}
    with asking(
        f"redirect what arrives at {where}", "mirred (module act_mirred) or a classifier (cls_u32 or cls_matchall)"
    ):
        try:
            ip.tc("add-filter", "u32", index, target=0, keys=["0x0/0x0+0"], **common)
        except NetlinkError as error:
            if error.code not in _MISSING:
                raise
            ip.tc("add-filter", "matchall", index, **common)


def qdiscs(ip: IPRoute, index: int) -> list[Qdisc]:
    """What is set on an interface, on egress and ingress."""
    return [_read(message) for message in ip.get_qdiscs(index) if message["index"] == index]


def redirect_targets(ip: IPRoute, index: int) -> list[int | None]:
    """Where each ingress filter of an interface leads: an interface's index, or None for any other action."""
    targets: list[int | None] = []
    for message in ip.get_filters(index, parent=TC_H_INGRESS & 0xFFFF0000):
        options = message.get_attr("TCA_OPTIONS")
        kind = message.get_attr("TCA_KIND")
        if options is None or (kind == "u32" and options.get_attr("TCA_U32_SEL") is None):
            continue  # a classifier's head or hash table, not a filter
        actions = options.get_attr(f"TCA_{kind.upper()}_ACT") if kind in ("u32", "matchall") else None
        targets.append(_mirred_target(actions))
    return targets


def drop_qdisc(ip: IPRoute, index: int, parent: int) -> None:
    """Remove the root or ingress discipline with everything on it; nothing happens if there is none."""
    try:
        ip.tc("del", index=index, parent=parent, handle=0xFFFF0000 if parent == TC_H_INGRESS else 0)
    except NetlinkError as error:
        if error.code not in (errno.ENOENT, errno.EINVAL, errno.ENODEV):
            with asking("remove shaping"):
                raise


def same_bucket(held: Bucket | None, asked: Bucket | None) -> bool:
    """Whether the kernel holds what was asked; it keeps the burst as a time in ticks of 64 ns."""
    if held is None or asked is None:
        return held is asked
    slack = 2 * _TICK_S * asked.rate_bytes_per_s + 1
    return (
        held.rate_bytes_per_s == asked.rate_bytes_per_s
        and held.limit_bytes == asked.limit_bytes
        and abs(held.burst_bytes - asked.burst_bytes) <= slack
    )


def _add(ip: IPRoute, index: int, kind: str, *, handle: int, parent: int, options: dict[str, Any]) -> None:
    message = _QdiscMessage()
    message["header"]["type"] = RTM_NEWQDISC
    message["header"]["flags"] = _CREATE
    message["index"] = index
    message["handle"] = handle
    message["parent"] = parent
    message["attrs"] = [("TCA_KIND", kind), ("TCA_OPTIONS", options)]
    ip.nlm_request_batch([message])


def _ticks(seconds: float) -> int:
    return min(int(seconds / _TICK_S), 2**32 - 1)


def _mirred_target(actions: Any) -> int | None:
    if actions is None:
        return None
    for _, action in actions["attrs"]:
        if action.get_attr("TCA_ACT_KIND") == "mirred":
            parameters = action.get_attr("TCA_ACT_OPTIONS").get_attr("TCA_MIRRED_PARMS")
            return int(parameters["ifindex"])
    return None


def _read(message: Any) -> Qdisc:
    kind = str(message.get_attr("TCA_KIND"))
    options = message.get_attr("TCA_OPTIONS")
    stats = message.get_attr("TCA_STATS2")
    basic = stats.get_attr("TCA_STATS_BASIC")
    queue = stats.get_attr("TCA_STATS_QUEUE")
    return Qdisc(
        kind,
        int(message["handle"]),
        int(message["parent"]),
        _read_bucket(options) if kind == "tbf" else None,
        _read_delay(options) if kind == "netem" else None,
        Counts(basic["bytes"], basic["packets"], queue["drops"], queue["overlimits"], queue["backlog"]),
    )


def _read_bucket(options: Any) -> Bucket:
    parameters = options.get_attr("TCA_TBF_PARMS")
    rate = int(options.get_attr("TCA_TBF_RATE64") or parameters["rate"])
    return Bucket(rate, round(parameters["buffer"] * _TICK_S * rate), int(parameters["limit"]))


def _read_delay(options: Any) -> DelayLine:
    rate = options.get_attr("TCA_NETEM_RATE")
    return DelayLine(
        round(options["delay"] * _TICK_S * 1e6),
        round(options["jitter"] * _TICK_S * 1e6),
        int(options["limit"]),
        0 if rate is None else int(rate["rate"]),
    )
