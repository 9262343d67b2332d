"""What KV memory cannot be: more in use than there is, or more set aside and held than is in use."""

from __future__ import annotations

from collections.abc import Iterable

from emulator.core.physics_rules import said
from emulator.core.records import MemoryRecord
from emulator.core.run_spec import RunSpec


def memory_violations(run: RunSpec, rows: Iterable[MemoryRecord]) -> list[str]:
    """A sentence if a row breaks this, with the first case; none for memory that could be."""
    blocks = {node.name: node.kv_blocks for node in run.nodes}
    cases = [
        f"{row.node} at {row.at_s:.6f} s, {row.reserved_blocks} blocks reserved and {row.held_blocks} held of "
        f"{row.used_blocks} in use, {blocks.get(row.node, 0)} in all"
        for row in rows
        if not (
            row.reserved_blocks >= 0 <= row.held_blocks
            and row.reserved_blocks + row.held_blocks <= row.used_blocks <= blocks.get(row.node, -1)
        )
    ]
    return said("KV memory is not conserved", cases)
