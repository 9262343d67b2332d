"""Whether an emulation was faithful: what the machine did against what was asked of it, all in model time.

A run that was not is stamped with what failed and the `scale.time` that would cure it, and no verdict is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from emulator.core.device_use import DeviceUse
from emulator.core.link import Part, expected_ends
from emulator.core.probe import Probe
from emulator.core.records import Record, StepRecord
from emulator.core.run_spec import RunSpec
from emulator.core.run_summary import Fidelity

STEP_LATENESS_MS = 1.0
STEP_LATENESS_SHARE = 0.04
LOOP_LAG_MS = 2.0
STALL_S = 0.5
"""A process whose event loop is so late at once did not run: it was stopped, or starved."""
SCHEDULE_DELAY_MS = 5.0
CLOCK_UNCERTAINTY_MS = 1.0
LINK_TOLERANCE = 0.03
LINK_JUDGED_BYTES = 10_000_000
CPU_BUSY = 0.95


@dataclass(frozen=True, slots=True)
class ObservedTransfer:
    """A transfer on the wire: who to whom, and (start, end, wire bytes) of its parts in model seconds."""

    source: str
    destination: str
    parts: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True, slots=True)
class Observed:
    """What was measured during a run. Lags and delays in model seconds, CPU shares of 1 per core and second.

    `longest_lag_s` is the worst lag of each process, by its name. `impossible` are the laws of physics that the run
    breaks (`core.physics`). Steps of nodes that share a device are not held to their planned time, which they cannot
    keep; that they share it is a reason of its own, unless allowed.
    """

    steps: Sequence[StepRecord]
    records: Sequence[Record]
    loop_lag_s: Sequence[float]
    transfers: Sequence[ObservedTransfer]
    cpu_busy: Sequence[float]
    probes: Sequence[Probe] = ()
    longest_lag_s: Mapping[str, float] = field(default_factory=dict)
    unretained_bytes: int = 0
    dropped_frames: int = 0
    qdisc_drops: int = 0
    clock_uncertainty_s: float = 0.0
    lost_nodes: Sequence[str] = ()
    impossible: Sequence[str] = ()
    device: DeviceUse = field(default_factory=DeviceUse)


def judge(run: RunSpec, observed: Observed) -> Fidelity:
    """Hold every measure against its bound."""
    contending = observed.device.contending
    steps = [step for step in observed.steps if step.node not in contending]
    lateness_ms = _p99([step.lateness_s * 1e3 for step in steps])
    lag_ms = _p99([lag * 1e3 for lag in observed.loop_lag_s])
    delays = [(r.sent_s - r.scheduled_s) * 1e3 for r in observed.records if r.sent_s is not None]
    delay_ms = _p99(delays)
    ratio = link_ratio(run, observed.transfers)
    busy = max(observed.cpu_busy, default=None)
    step_bound_ms = max(STEP_LATENESS_MS, STEP_LATENESS_SHARE * _median_step_ms(steps))
    bounded = [
        ("p99 step lateness", lateness_ms, step_bound_ms),
        ("p99 event loop lag", lag_ms, LOOP_LAG_MS),
        ("p99 schedule delay of the load generator", delay_ms, SCHEDULE_DELAY_MS),
        ("uncertainty of the clocks of several hosts", observed.clock_uncertainty_s * 1e3, CLOCK_UNCERTAINTY_MS),
    ]
    over = [(name, value, bound) for name, value, bound in bounded if value is not None and value > bound]
    stalls = [(name, lag_s) for name, lag_s in observed.longest_lag_s.items() if lag_s > STALL_S]
    reasons = [f"{name} did not run for {lag_s:.2f} s" for name, lag_s in stalls]
    reasons += [f"{name} {value:.2f} ms is above {bound:.2f} ms" for name, value, bound in over]
    cures = [] if stalls else [value / bound for _, value, bound in over]  # slower clocks wake nobody
    reasons += [f"UNSHAPED: {problem}" for probe in observed.probes if (problem := probe.problem())]
    if ratio is not None and abs(ratio - 1) > LINK_TOLERANCE:
        reasons.append(f"KV links reached {ratio:.1%} of the payload rate asked for")
        cures.append(max(2.0, 1 / ratio))
    if busy is not None and busy > CPU_BUSY and observed.device.kind != "numpy":  # which computes on these cores
        reasons.append(f"a core was {busy:.0%} busy for a second")
        cures.append(2.0)
    if observed.unretained_bytes:
        reasons.append(
            f"{observed.unretained_bytes / 1e9:.2f} GB of KV did not fit into the host memory granted; "
            "raise host_memory or scale.bytes"
        )
    if observed.dropped_frames:
        reasons.append(f"{observed.dropped_frames} KV frames were dropped")
    if observed.lost_nodes:
        reasons.append(f"the router lost {', '.join(observed.lost_nodes)}")
    reasons += observed.device.objections()
    reasons += [f"beyond physics: {law}" for law in observed.impossible]
    if observed.qdisc_drops:
        reasons.append(f"the kernel's shaping dropped {observed.qdisc_drops} packets")
    return Fidelity(
        ok=not reasons,
        step_lateness_ms_p99=lateness_ms,
        loop_lag_ms_p99=lag_ms,
        schedule_delay_ms_p99=delay_ms,
        link_ratio=ratio,
        cpu_busy=busy,
        suggested_scale_time=math.ceil(run.scale.time * max(cures)) if cures else None,
        reasons=tuple(reasons),
    )


def link_ratio(run: RunSpec, transfers: Sequence[ObservedTransfer]) -> float | None:
    """Time that transfers of 10 MB and more should have taken over the time they took; None without any.

    What they should have taken comes from the model of the same NICs, shared max-min fairly, with each part ready
    when its first byte was put on the wire, so after what its message cost: contention is part of the model, also
    that of transfers between the same two nodes, a slow machine is not.
    """
    if run.link is None or not transfers:
        return None
    nics = {node.name: run.link.nic(node.name) for node in run.nodes}
    egress = {name: nic.egress_bps / 8 / run.scale.bytes for name, nic in nics.items()}
    ingress = {name: nic.ingress_bps / 8 / run.scale.bytes for name, nic in nics.items()}
    parts = [
        Part(t.source, t.destination, start, nbytes, n) for n, t in enumerate(transfers) for start, _, nbytes in t.parts
    ]
    ends = iter(
        expected_ends(
            parts,
            egress_bytes_per_s=egress,
            ingress_bytes_per_s=ingress,
            delay_s=run.link.delay_s,
            max_in_flight=run.link.max_in_flight,
            order=run.link.order,
        )
    )
    expected_s = taken_s = 0.0
    for transfer in transfers:
        due = [next(ends) for _ in transfer.parts]
        if sum(nbytes for _, _, nbytes in transfer.parts) < LINK_JUDGED_BYTES:
            continue
        for (start, end, _), due_s in zip(transfer.parts, due, strict=True):
            expected_s += due_s - start
            taken_s += end - start
    return expected_s / taken_s if taken_s > 0 else None


def _p99(values: Iterable[float]) -> float | None:
    array = np.asarray(list(values), dtype=np.float64)
    return float(np.percentile(array, 99)) if array.size else None


def _median_step_ms(steps: Sequence[StepRecord]) -> float:
    return float(np.median([step.planned_s for step in steps])) * 1e3 if steps else 0.0
