"""Shape the interface of the KV network in the current network namespace, and prove that it is shaped.

    egress    application ──▶ tbf on the interface (netem inside it) ──▶ wire
    ingress   wire ──▶ ingress hook ──▶ ifb device with a tbf ──▶ application

Linux only; import it where it is needed. The interface is found by a local address, never by name. Everything set
is read back from the kernel and compared, and if any step fails all is taken back and the error raised: nothing is
ever left half shaped. What was set here is known again by its handles and by the ifb device's name, so that another
process can read and remove it. All functions act in the namespace of the calling thread and may be called on a
thread whose event loop runs; they take some 50 ms.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from emulator.core.errors import ConfigError, RunError
from emulator.core.shaping import (
    Bucket,
    DelayBy,
    DelayLine,
    ShapePlan,
    ShapingError,
    delay_line,
    ifb_name,
    plan_as_held,
    retransmitted_segments,
    tc_commands,
    undo_commands,
)

try:
    from pyroute2 import IPRoute
    from pyroute2.netlink.rtnl import TC_H_INGRESS, TC_H_ROOT

    from emulator.live import interface, qdisc
except ImportError as missing:
    raise ShapingError(
        f"kernel shaping needs Linux and pyroute2 ({missing}); install pyroute2, or use --shaping paced"
    ) from missing

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Applied:
    """What was set where, enough to count, to compare and to take it back.

    `prefix` is the KV network; `previous_congestion` what its route used before (None: the system's default);
    `delay_by` says whether the caller has to hold frames for `plan.delay_s` itself.
    """

    plan: ShapePlan
    interface: str
    index: int
    ifb: str
    prefix: str
    previous_congestion: str | None
    delay_by: DelayBy

    @property
    def commands(self) -> list[str]:
        """The `ip` and `tc` commands to the same effect."""
        return tc_commands(self.plan, self.interface, self.ifb, prefix=self.prefix, delay_by=self.delay_by)

    @property
    def undo_commands(self) -> list[str]:
        """The commands that take it back."""
        return undo_commands(self.plan, self.interface, self.ifb, prefix=self.prefix, delay_by=self.delay_by)


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """Both directions since they were shaped (None: not shaped), and the namespace's TCP retransmissions ever."""

    egress: qdisc.Counts | None
    ingress: qdisc.Counts | None
    retransmitted_segments: int


def apply(plan: ShapePlan) -> Applied:
    """Shape as planned, replacing what an earlier call set there, and read it back.

    Raises ConfigError for an address that is not here, ShapingNotPermittedError without the right to shape, and
    ShapingError if the kernel lacks a part, somebody else's shaping is in the way, or the kernel holds other values
    than asked; then nothing of it is left in place.
    """
    return _with_kernel(lambda ip: _apply(ip, plan))


def find(address: str) -> Applied | None:
    """What is set on the interface that carries a local address, as the kernel holds it; None if nothing is.

    A delay held by the receiver is not in the kernel, and the route's earlier congestion control is not known.
    Raises ConfigError for an address that is not here.
    """
    return _with_kernel(lambda ip: _find(ip, address))


def undo(applied: Applied) -> None:
    """Remove what was set, and only that; what is gone already is no error. Raises ShapingError if it is refused."""
    _with_kernel(lambda ip: _undo(ip, applied))


def verify(applied: Applied) -> None:
    """Compare what the kernel holds now with what was applied. Raises ShapingError for any difference."""
    _with_kernel(lambda ip: _verify(ip, applied))


def counters(applied: Applied) -> LinkCounts:
    """What both directions have counted. Raises RunError if the shaping is no longer there."""
    return _with_kernel(lambda ip: _counters(ip, applied))


def congestion_of(connection: socket.socket) -> str:
    """The congestion control that a TCP socket uses, as the kernel has it; raises OSError for any other socket."""
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.split(b"\0", 1)[0].decode("ascii")


def tcp_retransmits() -> int:
    """TCP segments retransmitted in the calling thread's network namespace since it was made."""
    return retransmitted_segments(Path("/proc/thread-self/net/snmp").read_text(encoding="ascii"))


def _with_kernel(work: Callable[[IPRoute], _T]) -> _T:
    """Do `work` on a netlink socket, on a thread of its own if the caller's runs an event loop, as pyroute2 has one."""

    def run() -> _T:
        try:
            ip = IPRoute()
        except OSError as error:
            raise ShapingError(f"cannot talk to the kernel about networks: {error}; use --shaping paced") from error
        with ip:
            qdisc.teach_tbf(ip)
            return work(ip)

    if not _loop_runs():
        return run()
    with ThreadPoolExecutor(1) as thread:  # a new thread is in its creator's namespace
        return thread.submit(run).result()


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# --- set and compare ------------------------------------------------------------------------------------------


def _apply(ip: IPRoute, plan: ShapePlan) -> Applied:
    if plan.egress is None and plan.ingress is None:
        raise ConfigError(f"nothing to shape at {plan.address}: give a rate for egress, ingress or both")
    index, name = interface.interface_of(ip, plan.address)
    earlier = _find(ip, plan.address)
    _check_free(ip, index, name)
    if earlier is not None:
        _undo(ip, earlier)
    route = interface.connected_route(ip, plan.address, index, name)
    line = delay_line(plan)
    delay_by: DelayBy = "none" if plan.delay_s == 0 else "receiver" if line is None else "kernel"
    applied = Applied(plan, name, index, ifb_name(index), route.prefix, route.congestion, delay_by)
    _undo(ip, applied)  # what is left of a killed process and was not found
    try:
        if plan.egress is not None:
            qdisc.set_bucket(ip, index, plan.egress, name)
        if line is not None:
            below_bucket = plan.egress is not None
            if not qdisc.set_delay(ip, index, line, below_bucket=below_bucket, where=name):
                applied = replace(applied, delay_by="receiver")
        if plan.ingress is not None:
            _shape_ingress(ip, applied, plan.ingress)
        with qdisc.asking(
            f"use {plan.congestion_control} on the route to {applied.prefix}",
            f"this congestion control (module tcp_{plan.congestion_control})",
            missing=(errno.EINVAL, errno.ENOENT),
        ):
            interface.set_congestion(ip, route, plan.congestion_control)
        _verify(ip, applied)
    except BaseException:
        _undo(ip, applied)
        raise
    return applied


def _shape_ingress(ip: IPRoute, applied: Applied, bucket: Bucket) -> None:
    with qdisc.asking(f"make the device {applied.ifb}", "intermediate devices (module ifb)"):
        ifb = interface.add_ifb(ip, applied.ifb)
    qdisc.set_bucket(ip, ifb, bucket, applied.ifb)
    qdisc.redirect_ingress(ip, applied.index, ifb, applied.interface)


def _check_free(ip: IPRoute, index: int, name: str) -> None:
    """Refuse to replace what somebody else has set; the kernel's own defaults have no handle."""
    ours = (qdisc.TBF_HANDLE, qdisc.NETEM_HANDLE)
    ifb = interface.index_of(ip, ifb_name(index))
    for held in qdisc.qdiscs(ip, index):
        if held.parent == TC_H_ROOT and held.handle not in (0, *ours):
            raise ShapingError(
                f"{name} has a queueing discipline of somebody else ({held.kind} {held.handle >> 16:x}:); remove it "
                f"(tc qdisc del dev {name} root) or use another interface"
            )
        if held.parent == TC_H_INGRESS and not _leads_here(ip, index, ifb):
            raise ShapingError(
                f"{name} has an ingress hook of somebody else; remove it (tc qdisc del dev {name} ingress) or use "
                "another interface"
            )


def _leads_here(ip: IPRoute, index: int, ifb: int | None) -> bool:
    """Whether an ingress hook is ours: it leads to our device, or to one that is gone, or half done nowhere yet."""
    targets = qdisc.redirect_targets(ip, index)
    return all(target in (ifb, 0) for target in targets) and (ifb is not None or bool(targets))


def _verify(ip: IPRoute, applied: Applied) -> None:
    plan = applied.plan
    name = applied.interface
    egress, ingress, delay = _held(ip, applied.index)
    for held, asked, where in ((egress, plan.egress, name), (ingress, plan.ingress, applied.ifb)):
        if not qdisc.same_bucket(held, asked):
            raise ShapingError(f"{where} is not shaped as asked: it holds {held or 'no bucket'}, not {asked or 'none'}")
    asked_delay = delay_line(plan) if applied.delay_by == "kernel" else None
    if delay != asked_delay:
        raise ShapingError(
            f"{name} does not delay as asked: it holds {delay or 'no netem'}, not {asked_delay or 'none'}"
        )
    congestion = interface.connected_route(ip, plan.address, applied.index, name).congestion
    if congestion != plan.congestion_control:
        raise ShapingError(
            f"the route to {applied.prefix} on {name} has congestion control {congestion or 'of the system'}, "
            f"not {plan.congestion_control}"
        )


def _held(ip: IPRoute, index: int) -> tuple[Bucket | None, Bucket | None, DelayLine | None]:
    """The egress bucket, the ingress bucket if what arrives is led to it, and the delay; each None if not set here."""
    egress: Bucket | None = None
    ingress: Bucket | None = None
    delay: DelayLine | None = None
    for held in qdisc.qdiscs(ip, index):
        if held.handle == qdisc.TBF_HANDLE and held.parent == TC_H_ROOT:
            egress = held.bucket
        if held.handle == qdisc.NETEM_HANDLE:
            delay = held.delay
    ifb = interface.index_of(ip, ifb_name(index))
    if ifb is not None and qdisc.redirect_targets(ip, index) == [ifb]:
        ingress = next((held.bucket for held in qdisc.qdiscs(ip, ifb) if held.handle == qdisc.TBF_HANDLE), None)
    return egress, ingress, delay


def _find(ip: IPRoute, address: str) -> Applied | None:
    index, name = interface.interface_of(ip, address)
    egress, ingress, delay = _held(ip, index)
    ifb = ifb_name(index)
    if egress is None and delay is None and not _leads_here(ip, index, interface.index_of(ip, ifb)):
        return None
    route = interface.connected_route(ip, address, index, name)
    plan = plan_as_held(address, egress, ingress, delay, route.congestion)
    return Applied(plan, name, index, ifb, route.prefix, None, "none" if delay is None else "kernel")


def _undo(ip: IPRoute, applied: Applied) -> None:
    """Remove by what is there, not by what should be, so that half-done work goes too."""
    index = applied.index
    ifb = interface.index_of(ip, applied.ifb)
    for held in qdisc.qdiscs(ip, index):
        if held.parent == TC_H_ROOT and held.handle in (qdisc.TBF_HANDLE, qdisc.NETEM_HANDLE):
            qdisc.drop_qdisc(ip, index, TC_H_ROOT)
        if held.parent == TC_H_INGRESS and _leads_here(ip, index, ifb):
            qdisc.drop_qdisc(ip, index, TC_H_INGRESS)
    if ifb is not None:
        with qdisc.asking(f"remove {applied.ifb}"):
            interface.delete_link(ip, ifb)
    for route in interface.connected_routes(ip, applied.plan.address, index):
        if applied.plan.congestion_control == route.congestion != applied.previous_congestion:
            with qdisc.asking(f"restore the route to {applied.prefix}"):
                interface.set_congestion(ip, route, applied.previous_congestion)


def _counters(ip: IPRoute, applied: Applied) -> LinkCounts:
    def of(index: int | None, where: str) -> qdisc.Counts:
        for held in qdisc.qdiscs(ip, index) if index is not None else []:
            if held.handle == qdisc.TBF_HANDLE and held.parent == TC_H_ROOT:
                return held.counts
        raise RunError(f"the shaping of {where} is gone: something removed it while it was in use")

    return LinkCounts(
        of(applied.index, applied.interface) if applied.plan.egress is not None else None,
        of(interface.index_of(ip, applied.ifb), applied.ifb) if applied.plan.ingress is not None else None,
        tcp_retransmits(),
    )
