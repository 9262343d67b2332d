"""KV memory over a run, from its rows: how full the nodes of each role were, and of what nobody computed with.

A row holds from its instant to the node's next one. Hand-over makes rows, and each second in which anything changed;
between them steps with prefills say what they used. Where nothing but decode steps run, the mean of what is used is so
sampled once a second. Peaks are exact, since every step counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from emulator.core.metrics import Floats
from emulator.core.records import MemoryRecord, Record, StepRecord
from emulator.core.roles import Role
from emulator.core.run_spec import RunSpec

_MS = 1e3


class RoleMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shares of the KV blocks, 0 to 1: the peaks of the fullest node of a role, and the mean of all of them over time.

    `reserved` is set aside for KV that has not arrived, `held` has KV computed there that nobody has fetched.
    """

    peak_used: float
    mean_used: float
    peak_reserved: float
    peak_held: float


class KvMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KV memory of one run: by role, the blocks that each node has, and how long requests waited for decode memory.

    The waits are those of requests that got it, those for messages that ask for it and grant it included, whether they
    are part of TTFT or not; null where nobody asked.
    """

    by_role: dict[Role, RoleMemory] = {}
    blocks: dict[str, int] = {}
    longest_decode_wait_ms: float | None = None
    total_decode_wait_ms: float | None = None


def kv_memory(
    run: RunSpec, records: Sequence[Record], steps: Iterable[StepRecord], rows: Iterable[MemoryRecord]
) -> KvMemory:
    """What the rows of a run come to, from its start to the last finish or the end of its arrivals."""
    end_s = max([run.load.duration_s, *[record.finish_s or 0.0 for record in records]])
    of_node: dict[str, list[MemoryRecord]] = {node.name: [] for node in run.nodes}
    for row in rows:
        of_node[row.node].append(row)
    steps_of: dict[str, list[StepRecord]] = {node.name: [] for node in run.nodes}
    for step in steps:
        steps_of[step.node].append(step)
    of_role: dict[Role, list[_Usage]] = {}
    for node in run.nodes:
        usage = _usage(of_node[node.name], steps_of[node.name], node.kv_blocks, end_s)
        of_role.setdefault(node.role, []).append(usage)
    waits_ms = [_decode_wait_s(record) * _MS for record in records if record.kv_ready_s is not None]
    return KvMemory(
        by_role={role: _role_memory(usages, end_s) for role, usages in of_role.items()},
        blocks={node.name: node.kv_blocks for node in run.nodes},
        longest_decode_wait_ms=max(waits_ms, default=None),
        total_decode_wait_ms=sum(waits_ms) if waits_ms else None,
    )


class _Usage(NamedTuple):
    """One node's blocks, the most of them in use, reserved and held, and those in use times how long."""

    blocks: int
    used: int
    reserved: int
    held: int
    used_block_s: float


def used_over_time(rows: Sequence[MemoryRecord], steps: Sequence[StepRecord]) -> tuple[Floats, Floats]:
    """Instants, and how many blocks of one node are used from each to the next: as rows and steps with prefills say."""
    prefills = [step for step in steps if step.prefill_tokens]
    at_s = np.array([row.at_s for row in rows] + [step.start_s for step in prefills], dtype=np.float64)
    used = np.array([row.used_blocks for row in rows] + [step.kv_blocks_used for step in prefills], dtype=np.float64)
    order = np.argsort(at_s, kind="stable")
    return at_s[order], used[order]


def _usage(rows: Sequence[MemoryRecord], steps: Sequence[StepRecord], blocks: int, end_s: float) -> _Usage:
    """What is used last counts up to the end; what comes after it for peaks alone."""
    at_s, used = used_over_time(rows, steps)
    return _Usage(
        blocks=blocks,
        used=max(int(used.max(initial=0.0)), max([step.kv_blocks_used for step in steps], default=0)),
        reserved=max([row.reserved_blocks for row in rows], default=0),
        held=max([row.held_blocks for row in rows], default=0),
        used_block_s=float(used @ np.diff(np.minimum(np.append(at_s, end_s), end_s))),
    )


def _role_memory(usages: Sequence[_Usage], end_s: float) -> RoleMemory:
    return RoleMemory(
        peak_used=max(node.used / node.blocks for node in usages),
        mean_used=sum(node.used_block_s for node in usages) / (sum(node.blocks for node in usages) * end_s),
        peak_reserved=max(node.reserved / node.blocks for node in usages),
        peak_held=max(node.held / node.blocks for node in usages),
    )


def _decode_wait_s(record: Record) -> float:
    """From the end of the prefill to the ticket, and before the prefill where that had to wait for it."""
    before = after = 0.0
    if record.admitted_s is not None and record.queued_s is not None:
        before = record.admitted_s - record.queued_s
    if record.kv_ready_s is not None and record.prefill_end_s is not None:
        after = max(0.0, record.kv_ready_s - record.prefill_end_s)
    return before + after
