"""A node's emulated NIC on the KV network: paced in user space, or shaped by the kernel at the node's own interface.

Paced, sender and receiver keep the rate themselves. Shaped by the kernel, they send as fast as the socket takes it and
a token bucket on the interface that carries the node's KV address keeps the rate, in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emulator.core.pacing import LINE_BYTES_PER_SEGMENT, PAYLOAD_BYTES_PER_SEGMENT, frame_bytes_for
from emulator.core.run_spec import LinkSpec, RunSpec
from emulator.core.scaling import Scaling
from emulator.live.status import Assignment

if TYPE_CHECKING:
    from emulator.live.shaping import Applied


@dataclass(frozen=True, slots=True)
class NicCounts:
    """Packets that the token buckets dropped, and TCP segments sent again, both since the NIC was set up."""

    dropped_packets: int = 0
    retransmitted_segments: int = 0


class EmulatedNic:
    """`egress_bytes_per_s` and `ingress_bytes_per_s` are what sender and receiver keep themselves (None: the kernel
    does), wall bytes per second; `hold_s` ± `hold_jitter_s` the delay that the receiver adds, wall seconds;
    `frame_bytes` what suits the fastest of the node's pairs. With `leave_shaped` the kernel's shaping stays when the
    NIC is closed: it goes with its network namespace."""

    def __init__(
        self, run: RunSpec, link: LinkSpec, node: str, address: str, *, kernel: bool, leave_shaped: bool = False
    ) -> None:
        scaling = Scaling(run.scale)
        nic = link.nic(node)
        fastest = scaling.wall_bytes_per_s(_fastest_pair_bps(run, link, node))
        self.frame_bytes = frame_bytes_for(fastest, kernel_shaped=kernel)
        self.egress_bytes_per_s: float | None = scaling.wall_bytes_per_s(nic.egress_bps)
        self.ingress_bytes_per_s: float | None = scaling.wall_bytes_per_s(nic.ingress_bps)
        self.delay_s = self.hold_s = scaling.wall_s(link.delay_s)
        self.jitter_s = self.hold_jitter_s = scaling.wall_s(link.jitter_s)
        self.shaped_by_kernel = kernel
        self._leave_shaped = leave_shaped
        self._applied: Applied | None = None
        self._retransmits_before = 0
        if kernel:
            self._shape(address, _line_bps(self.egress_bytes_per_s), _line_bps(self.ingress_bytes_per_s))

    @classmethod
    def of(cls, task: Assignment, *, leave_shaped: bool = False) -> EmulatedNic | None:
        """The NIC that an assignment asks for, shaped; None when no KV crosses a network in its run."""
        if task.run.link is None:
            return None
        run = task.run
        return cls(
            run, task.run.link, task.name, task.kv_address, kernel=task.kernel_shaping, leave_shaped=leave_shaped
        )

    def _shape(self, address: str, egress_bps: float, ingress_bps: float) -> None:
        """Have the kernel shape both directions; raises ConfigError when it cannot."""
        from emulator.core.shaping import ShapePlan  # noqa: PLC0415 - only on Linux, and pyroute2 is slow to load
        from emulator.live import shaping  # noqa: PLC0415

        plan = ShapePlan(address, egress_bps, ingress_bps, self.delay_s, self.jitter_s)
        self._applied = shaping.apply(plan)
        self._retransmits_before = shaping.tcp_retransmits()
        self.egress_bytes_per_s = self.ingress_bytes_per_s = None
        if self._applied.delay_by == "kernel":
            self.hold_s = self.hold_jitter_s = 0.0

    def close(self) -> NicCounts:
        """Take the shaping back; what it counted."""
        if self._applied is None:
            return NicCounts()
        from emulator.live import shaping  # noqa: PLC0415

        counts = shaping.counters(self._applied)
        if not self._leave_shaped:
            shaping.undo(self._applied)
        self._applied = None
        dropped = sum(side.drops for side in (counts.egress, counts.ingress) if side is not None)
        return NicCounts(dropped, counts.retransmitted_segments - self._retransmits_before)


def _line_bps(payload_bytes_per_s: float) -> float:
    """The line rate in bits per second that carries so much payload."""
    return payload_bytes_per_s * 8 * LINE_BYTES_PER_SEGMENT / PAYLOAD_BYTES_PER_SEGMENT


def _fastest_pair_bps(run: RunSpec, link: LinkSpec, node: str) -> float:
    return max(link.pair_bps(*pair) for pair in run.kv_pairs if node in pair)
