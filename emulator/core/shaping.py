"""What shaping a network interface means, decided without touching one.

The kernel's token bucket (tbf) counts whole Ethernet frames, its bucket has to hold one offloaded packet of about
68 kB, and a large bucket gives every transfer that many bytes for free: these rules, and the commands that a
person would type to the same effect, are settled here, so that the part that talks to the kernel only sets and
compares.
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Literal

from emulator.core.errors import ConfigError
from emulator.core.pacing import LINE_BYTES_PER_SEGMENT, PAYLOAD_BYTES_PER_SEGMENT
from emulator.core.specs import RateBasis

PACKET_BYTES = 73728
"""One offloaded packet, 64 KiB of payload and a header per segment: a smaller bucket collapses the rate."""
BURST_S = 250e-6
"""On top of that this much of the rate, which comes in while the kernel's clock and softirqs are late."""
LIMIT_BYTES = 64 * 1024 * 1024
"""What may queue before the kernel drops: more than TCP puts in flight, so that a transfer meets no loss."""
CONGESTION_CONTROL = "cubic"
"""BBR takes a token bucket for a link of changing speed; cubic fills it."""

QDISC_MAJOR = 0x7064
"""Major number ("pd") of the token buckets set here, by which they are known again."""
NETEM_MAJOR = 0x7065
"""Major number of the delay set here."""
_IFB_PREFIX = "pdemu-ifb"
_NETEM_ORDERED_BYTES_PER_S = 2**32 - 2

DelayBy = Literal["none", "kernel", "receiver"]
"""Who delays: nobody, netem on egress, or the receiver, who is to hold each frame, since netem is missing."""


class ShapingError(ConfigError):
    """The kernel does not shape as asked: a part is missing, something is in the way, or it set something else."""


class ShapingNotPermittedError(ShapingError):
    """This process may not shape in its network namespace."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One token bucket: bytes per second of whole Ethernet frames, bytes of burst, and bytes that may queue."""

    rate_bytes_per_s: int
    burst_bytes: int
    limit_bytes: int = LIMIT_BYTES

    @classmethod
    def of(cls, rate_bps: float) -> Bucket:
        """The bucket for a line rate in bits per second; burst 73728 B and 250 µs of the rate."""
        rate = round(rate_bps / 8)
        return cls(rate, PACKET_BYTES + math.ceil(rate * BURST_S))


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """What the interface that carries the local `address` shall become.

    `egress_bps` and `ingress_bps` are line rates in bits per second (None: that direction stays as it is);
    `delay_s` ± `jitter_s` is added one way, on egress. TCP through the connected route uses `congestion_control`.
    Raises ConfigError for an address, a rate or a time that cannot be.
    """

    address: str
    egress_bps: float | None = None
    ingress_bps: float | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0
    congestion_control: str = CONGESTION_CONTROL

    def __post_init__(self) -> None:
        """Check the fields."""
        try:
            parsed = ipaddress.ip_address(self.address)
        except ValueError:
            raise ConfigError(
                f"cannot shape at {self.address!r}: give the IP address of an interface here, such as 10.0.0.2"
            ) from None
        if parsed.is_loopback:
            raise ConfigError(
                f"cannot shape at {self.address}: loopback carries control messages too and has no line; "
                "use an address of the KV network, or --shaping paced"
            )
        rates = [rate for rate in (self.egress_bps, self.ingress_bps) if rate is not None]
        for rate in rates:
            if not 8 <= rate < math.inf:
                raise ConfigError(
                    f"cannot shape {self.address} to {rate} bits/s: a rate is finite and at least 8 bits/s"
                )
        if not 0 <= self.jitter_s <= self.delay_s < math.inf:
            raise ConfigError(
                f"cannot delay {self.address} by {self.delay_s} s ± {self.jitter_s} s: "
                "both are finite, not negative, and the jitter is at most the delay"
            )

    @property
    def egress(self) -> Bucket | None:
        """The bucket on the interface itself."""
        return None if self.egress_bps is None else Bucket.of(self.egress_bps)

    @property
    def ingress(self) -> Bucket | None:
        """The bucket on the ifb device that what arrives is led through."""
        return None if self.ingress_bps is None else Bucket.of(self.ingress_bps)


@dataclass(frozen=True, slots=True)
class DelayLine:
    """netem's parameters: times in whole microseconds, packets that may wait, and bytes per second or 0.

    With jitter alone netem reorders packets; with a rate, here above any link's, it keeps their order.
    """

    delay_us: int
    jitter_us: int
    limit_packets: int
    ordered_bytes_per_s: int


def delay_line(plan: ShapePlan) -> DelayLine | None:
    """What netem is to do for a plan; None if there is no delay, or one that netem cannot do well.

    It cannot keep the order under jitter where egress is unlimited or above the 34 Gbit/s of its rate.
    """
    if plan.delay_s == 0:
        return None
    jitter_us = round(plan.jitter_s * 1e6)
    bucket = plan.egress
    if jitter_us and (bucket is None or bucket.rate_bytes_per_s > _NETEM_ORDERED_BYTES_PER_S):
        return None
    packets = LIMIT_BYTES // LINE_BYTES_PER_SEGMENT
    return DelayLine(
        max(round(plan.delay_s * 1e6), 1), jitter_us, packets, _NETEM_ORDERED_BYTES_PER_S if jitter_us else 0
    )


def plan_as_held(
    address: str, egress: Bucket | None, ingress: Bucket | None, delay: DelayLine | None, congestion: str | None
) -> ShapePlan:
    """The plan that leads to what a kernel was found to hold; None for what it does not."""
    return ShapePlan(
        address,
        None if egress is None else egress.rate_bytes_per_s * 8.0,
        None if ingress is None else ingress.rate_bytes_per_s * 8.0,
        0.0 if delay is None else delay.delay_us / 1e6,
        0.0 if delay is None else delay.jitter_us / 1e6,
        congestion or CONGESTION_CONTROL,
    )


def line_rate_bps(bandwidth_bps: float, basis: RateBasis) -> float:
    """The line rate in bits per second, which a shaper counts, for a bandwidth given on either basis.

    "line": as given. "payload": × 1514/1448, so that TCP at MTU 1500 carries the bandwidth as payload.
    """
    if basis == "line":
        return bandwidth_bps
    return bandwidth_bps * LINE_BYTES_PER_SEGMENT / PAYLOAD_BYTES_PER_SEGMENT


def ifb_name(interface_index: int) -> str:
    """The name of the device that an interface's ingress is led through; at most 15 characters, the kernel's limit."""
    return f"{_IFB_PREFIX}{interface_index % 10**6}"


def tc_commands(plan: ShapePlan, interface: str, ifb: str, *, prefix: str, delay_by: DelayBy) -> list[str]:
    """The `ip` and `tc` commands that do to `interface` what the plan asks, for a user to read or to type.

    `ifb` is the device for ingress, `prefix` the network of the connected route, such as 10.0.0.0/24.
    """
    commands: list[str] = []
    if plan.egress is not None:
        commands.append(f"tc qdisc add dev {interface} root handle {QDISC_MAJOR:x}: {_tbf_text(plan.egress)}")
    line = delay_line(plan) if delay_by == "kernel" else None
    if line is not None:
        parent = "root" if plan.egress is None else f"parent {QDISC_MAJOR:x}:1"
        commands.append(f"tc qdisc add dev {interface} {parent} handle {NETEM_MAJOR:x}: {_netem_text(line)}")
    if plan.ingress is not None:
        commands += [
            f"ip link add {ifb} type ifb",
            f"ip link set {ifb} up",
            f"tc qdisc add dev {ifb} root handle {QDISC_MAJOR:x}: {_tbf_text(plan.ingress)}",
            f"tc qdisc add dev {interface} handle ffff: ingress",
            f"tc filter add dev {interface} parent ffff: protocol all prio 1 "
            f"u32 match u32 0 0 action mirred egress redirect dev {ifb}",
        ]
    commands.append(_route_text(plan, interface, prefix) + f" congctl {plan.congestion_control}")
    return commands


def undo_commands(plan: ShapePlan, interface: str, ifb: str, *, prefix: str, delay_by: DelayBy) -> list[str]:
    """The commands that take back what `tc_commands` with the same arguments does."""
    commands: list[str] = []
    if plan.egress is not None or delay_by == "kernel":
        commands.append(f"tc qdisc del dev {interface} root")
    if plan.ingress is not None:
        commands += [f"tc qdisc del dev {interface} ingress", f"ip link del {ifb}"]
    commands.append(_route_text(plan, interface, prefix))
    return commands


def retransmitted_segments(snmp: str) -> int:
    """TCP segments that a namespace has retransmitted, from the text of its /proc/net/snmp.

    Raises ValueError if the text has no such counter.
    """
    rows = [line.split()[1:] for line in snmp.splitlines() if line.startswith("Tcp:")]
    if len(rows) != 2 or "RetransSegs" not in rows[0]:
        raise ValueError("no TCP counters in /proc/net/snmp")
    return int(rows[1][rows[0].index("RetransSegs")])


def _tbf_text(bucket: Bucket) -> str:
    return f"tbf rate {bucket.rate_bytes_per_s * 8}bit burst {bucket.burst_bytes} limit {bucket.limit_bytes}"


def _netem_text(line: DelayLine) -> str:
    text = f"netem limit {line.limit_packets} delay {line.delay_us}us"
    if line.jitter_us:
        text += f" {line.jitter_us}us rate {line.ordered_bytes_per_s * 8}bit"
    return text


def _route_text(plan: ShapePlan, interface: str, prefix: str) -> str:
    if ipaddress.ip_address(plan.address).version == 6:
        return f"ip -6 route replace {prefix} dev {interface} proto kernel metric 256"
    return f"ip route replace {prefix} dev {interface} proto kernel scope link src {plan.address}"
