"""Choosing `scale.time` for a machine: the smallest that leaves half of what it can carry idle.

Two things can be short: what one KV link carries, and CPU time; and transfers can be so short that the moment by which
each is late, whatever its size, is too large a share of them. What a run needs of each at its busiest is known from
its links and from a simulation of it; what the machine has is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from emulator.core.records import Record, StepRecord, expand_steps
from emulator.core.run_spec import RunSpec

IDLE_SHARE = 0.5
LATE_SHARE = 0.01
"""Of the time of transfers, by which they may be late: a third of what fidelity allows their links."""
JUDGED_BYTES = 10_000_000
"""Shorter transfers are not judged (`core.fidelity`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a machine carries: one link between two processes in bits per second, and its cores.

    A transfer is `late_s` beyond what its bytes take. The rest is what a run costs in CPU seconds of all its processes:
    each byte on a link, each step of a node, and each token that such a step brings.
    """

    link_bps: float
    cores: int
    byte_cpu_s: float
    step_cpu_s: float
    token_cpu_s: float
    late_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run asks at `scale.time` 1: all its links at once, and the cores that its busiest second needs.

    `transfer_s` is what its transfers of 10 MB and more take on the mean by their bytes; infinite without any.
    """

    link_bps: float
    cpu: float
    transfer_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The smallest whole `scale.time`, and what decides (nothing at 1)."""

    scale_time: int
    limit: str = ""


def peak_payload_bps(run: RunSpec) -> float:
    """The most payload that all KV links of a run can carry at once, in model bits per second, scaled bytes counted.

    Senders and receivers each have one NIC, so the slower side of them bounds the sum.
    """
    if run.link is None:
        return 0.0
    sent = sum(run.link.nic(name).egress_bps for name in run.kv_senders)
    taken_in = sum(run.link.nic(name).ingress_bps for name in run.kv_receivers)
    return min(sent, taken_in) / run.scale.bytes


def demand(run: RunSpec, records: Sequence[Record], steps: Iterable[StepRecord], capacity: Capacity) -> Demand:
    """What a run asks of a machine, by a simulation's records and steps; KV counts when it has arrived."""
    busiest = _busiest_s(
        [(step.start_s, capacity.step_cpu_s) for step in expand_steps(steps)]
        + [(float(at_s), capacity.token_cpu_s) for record in records for at_s in record.times()]
        + [(r.kv_end_s, r.kv_bytes / run.scale.bytes * capacity.byte_cpu_s) for r in records if r.kv_end_s is not None]
    )
    return Demand(link_bps=peak_payload_bps(run), cpu=busiest, transfer_s=_mean_transfer_s(run, records))


def _mean_transfer_s(run: RunSpec, records: Sequence[Record]) -> float:
    """Seconds that judged transfers take on the mean by their bytes; infinite without any."""
    if run.link is None:
        return math.inf
    taken = [
        r.kv_bytes * 8 / run.link.pair_bps(r.prefill_node, r.decode_node)
        for r in records
        if r.prefill_node and r.decode_node and r.kv_bytes / run.scale.bytes >= JUDGED_BYTES
    ]
    return sum(taken) / len(taken) if taken else math.inf


def choose(demands: Iterable[Demand], capacity: Capacity) -> Choice:
    """The smallest whole `scale.time` at which every demand leaves half of the machine idle."""
    found = Choice(scale_time=1)
    for wanted in demands:
        for limit, needed in (
            ("links", wanted.link_bps / (capacity.link_bps * (1 - IDLE_SHARE))),
            ("CPU", wanted.cpu / (capacity.cores * (1 - IDLE_SHARE))),
            ("short transfers", capacity.late_s / (LATE_SHARE * wanted.transfer_s)),
        ):
            if math.ceil(needed) > found.scale_time:
                found = Choice(scale_time=math.ceil(needed), limit=limit)
    return found


def _busiest_s(costs: Sequence[tuple[float, float]]) -> float:
    """The largest sum of costs within one second of the clock."""
    if not costs:
        return 0.0
    at_s, cpu_s = np.array(costs, dtype=np.float64).T
    return float(np.bincount(np.maximum(at_s, 0.0).astype(np.int64), weights=cpu_s).max())
