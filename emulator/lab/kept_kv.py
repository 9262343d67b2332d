"""How much KV a run's nodes will keep in real memory, and whether they may: foreseen by a simulation of the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter

import msgspec
import psutil

from emulator.core.errors import CapacityError
from emulator.core.kv_memory import kv_memory
from emulator.core.quantities import Bytes
from emulator.core.run_spec import NodeSpec, RunSpec
from emulator.core.scaling import sufficient_bytes_scale
from emulator.simulate import simulate

RETAINED_MARGIN = 1.25
"""What a simulation foresees of the KV that nodes keep is exceeded by at most this factor, or by one more request."""
SLAB_SHARE = 1 / 16
"""Of the memory granted to a NumPy device, that may be left over beside its slabs, which are whole."""


def granted_memory_bytes(run: RunSpec) -> int:
    """What all nodes that keep KV here may keep together: as the topology says, else half of the free memory."""
    return run.host_memory_bytes or psutil.virtual_memory().available // 2


def foresee_kv_bytes(run: RunSpec, granted: int) -> int:
    """Bytes of KV that a node will hold at most, as a simulation foresees; they are real memory here.

    Nodes that compute hold all of theirs, others what came from elsewhere. Refuses before the run what all of them
    together would not be `granted` during it, or one of them by its device.
    """
    holders = len(run.kv_holders)
    if not holders:
        return 0
    kept_bytes = _kept_bytes(run)
    expected = kept_bytes(run.scale.bytes)
    limits = {"host_memory": float(granted)} if run.device.kind != "cuda" else {}
    if run.device.memory_bytes is not None:
        limits["memory of [device]"] = float(run.device.memory_bytes * holders)
    limit, least = min(limits.items(), key=itemgetter(1), default=("", math.inf))
    usable = least * (1 - SLAB_SHARE) if run.device.kind == "numpy" else least
    if expected * holders > usable:
        scale = sufficient_bytes_scale(lambda scale: kept_bytes(scale) * holders, usable, run.scale.bytes)
        cure = f"set scale.bytes = {scale}" if scale is not None else "send fewer requests at a time"
        raise CapacityError(
            f"{run.topology}, {run.label}: up to {Bytes(expected * holders)} of KV would be held on this machine "
            f"at a time, {Bytes(least)} are granted; {cure}, or raise {limit}"
        )
    return int(expected)


def _kept_bytes(run: RunSpec) -> Callable[[float], float]:
    """The most KV that any node may keep in real memory at each `scale.bytes`, by a simulation of the run."""
    simulated = simulate(run)
    if not run.device.computes:
        return lambda scale: simulated.peak_retained_bytes * RETAINED_MARGIN / scale
    by_role = kv_memory(run, simulated.records, simulated.steps, simulated.memory).by_role
    lengths = [record.prompt_tokens + record.output_tokens for record in simulated.records]

    def blocks(node: NodeSpec) -> float:
        sizes = [-(-tokens // node.block_size) for tokens in lengths]
        peak = by_role[node.role].peak_used * node.kv_blocks
        return max(peak * RETAINED_MARGIN, min(peak + max(sizes, default=0), sum(sizes)))

    most = {node.name: blocks(node) for node in run.nodes}

    def kept_bytes(scale: float) -> float:
        scaled = msgspec.structs.replace(run, scale=msgspec.structs.replace(run.scale, bytes=scale))
        return max(most[node.name] * scaled.wire_block_bytes(node) for node in run.nodes)

    return kept_bytes
