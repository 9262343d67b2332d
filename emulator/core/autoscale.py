"""Choosing `scale.time` for a machine: the smallest that leaves half of what it can carry idle."""

from __future__ import annotations

import math

from emulator.core.deploy import RunSpec

IDLE_SHARE = 0.5


def peak_payload_bps(run: RunSpec) -> float:
    """The most payload that all KV links of a run can carry at once, in model bits per second, scaled bytes counted.

    Senders and receivers each have one NIC, so the slower side of them bounds the sum.
    """
    if run.link is None:
        return 0.0
    sent = sum(run.link.nic(node.name).egress_bps for node in run.nodes if node.role == "prefill")
    taken_in = sum(run.link.nic(node.name).ingress_bps for node in run.nodes if node.role == "decode")
    return min(sent, taken_in) / run.scale.bytes


def scale_time_for(run: RunSpec, capacity_bps: float) -> int:
    """The smallest whole `scale.time` at which the run's links need at most half of `capacity_bps`, what this machine
    carries between two processes, unshaped."""
    return max(1, math.ceil(peak_payload_bps(run) / (capacity_bps * (1 - IDLE_SHARE))))
