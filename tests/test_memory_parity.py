"""The same rows of memory from both drivers: live processes under a virtual clock, and the simulator."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from emulator.core.records import MemoryRecord
from emulator.core.run_spec import RunSpec
from emulator.simulate import simulate
from tests.test_driver_parity import MICROSECOND, _handed_over, _id, _runs, _short_of_memory
from tests.virtual_live import run_live


def _bounded(run: RunSpec) -> RunSpec:
    nodes = [msgspec.structs.replace(n, max_held_blocks=200 if n.role == "prefill" else None) for n in run.nodes]
    return msgspec.structs.replace(run, nodes=tuple(nodes), deployment=f"{run.deployment}-bounded")


SHORT = [_short_of_memory(run) for run in _runs("quickstart", duration_s=4.0) if run.link is not None]


@pytest.mark.parametrize(
    "run",
    [SHORT[0], _bounded(SHORT[0]), _bounded(_handed_over(SHORT[0], "prefill", "dispatch"))],
    ids=_id,
)
def test_both_drivers_see_the_same_memory_change_hands(run: RunSpec) -> None:
    live = [row for node in run_live(run).nodes for row in node.memory]
    simulated = simulate(run, exact_steps=True).memory
    for node in run.nodes:
        seen, expected = _hand_overs(live, node.name), _hand_overs(simulated, node.name)
        assert len(expected) > 10
        assert [row[1:] for row in seen] == [row[1:] for row in expected]
        assert [row[0] for row in seen] == pytest.approx([row[0] for row in expected], abs=MICROSECOND)
        if node.max_held_blocks is not None:
            assert max(row[2] for row in seen) <= node.max_held_blocks


def _hand_overs(rows: Iterable[MemoryRecord], node: str) -> list[tuple[float, int, int, int]]:
    """Instants, blocks reserved and held, and who waits for memory, wherever one of them changed."""
    found: list[tuple[float, int, int, int]] = [(0.0, 0, 0, 0)]
    for row in rows:
        state = (row.reserved_blocks, row.held_blocks, row.waiting_for_memory)
        if row.node == node and state != found[-1][1:]:
            found.append((row.at_s, *state))
    return found
