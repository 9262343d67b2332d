"""KV memory over time: which rows there are, what they come to, and that none can be impossible."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given

from emulator.core.kv_memory import kv_memory
from emulator.core.physics import violations
from emulator.core.records import MemoryRecord, read_memory, write_rows
from emulator.core.run_spec import RunSpec
from emulator.lab.simulated import simulated_result
from emulator.simulate import Simulation, simulate
from tests.builders import by_id, load_plan, pair, request, run_spec
from tests.examples import drawn_slowly
from tests.test_simulate_properties import runs


def _rows(run: RunSpec) -> list[tuple[object, ...]]:
    return [
        (r.node, pytest.approx(r.at_s), r.used_blocks, r.reserved_blocks, r.held_blocks, r.waiting_for_memory)
        for r in simulate(run).memory
    ]


def _one(max_tokens: int = 3) -> RunSpec:
    """A prompt of 7 blocks: computed from 0 s to 0.1 s, on the wire until 0.2 s, then decoded at 10 ms a token."""
    return run_spec(pair(), load_plan([request(max_tokens=max_tokens)]), payload_bytes_per_s=1e6)


# --- rows ---------------------------------------------------------------------------------------------------------


def test_each_hand_over_event_is_a_row() -> None:
    assert _rows(_one()) == [
        ("decode-0", 0.0, 7, 7, 0, 0),
        ("prefill-0", 0.1, 7, 0, 7, 0),
        ("prefill-0", 0.2, 0, 0, 0, 0),
        ("decode-0", 0.2, 7, 0, 0, 0),
    ]


def test_decode_steps_make_none_but_each_second_tells_what_they_changed() -> None:
    rows = [row for row in simulate(_one(max_tokens=401)).memory if row.node == "decode-0"]
    assert [row.at_s for row in rows] == pytest.approx([0.0, 0.2, 1.0, 2.0, 3.0, 4.0])
    steps = [0.2, 1.0, 2.0, 3.0, 4.0]
    assert [row.used_blocks for row in rows[1:]] == [-(-(101 + round((s - 0.2) * 100)) // 16) for s in steps]


def test_a_second_without_a_change_has_no_row() -> None:
    load = load_plan([request("a"), request("b", at_s=5.5)])
    rows = simulate(run_spec(pair(), load, payload_bytes_per_s=1e6)).memory
    assert [row.at_s for row in rows if row.node == "decode-0"] == pytest.approx([0.0, 0.2, 1.0, 5.5, 5.7])


def test_who_waits_for_memory_and_for_prefill_is_counted() -> None:
    load = load_plan([request(name, max_tokens=30) for name in ("a", "b", "c")])
    nodes = pair(max_num_batched_tokens=100, decode_blocks=14)
    simulated = simulate(run_spec(nodes, load, payload_bytes_per_s=1e6))
    decode = [row for row in simulated.memory if row.node == "decode-0"]
    waits = [row.at_s for row in decode if row.waiting_for_memory]
    granted_s = next(row.at_s for row in decode if row.at_s > waits[-1])
    assert granted_s == by_id(simulated.records)["a"].finish_s, "two prompts fit, c is let in when a has gone"
    held = [row for row in simulated.memory if row.node == "prefill-0" and row.at_s < granted_s]
    assert held[-1].at_s == pytest.approx(0.3)
    assert held[-1].held_blocks == 7, "c has been computed by then"
    assert max(row.waiting_for_prefill for row in held) == 1


def test_rows_are_read_back_as_they_were_written() -> None:
    rows = simulate(_one()).memory
    assert read_memory(write_rows(rows)) == rows


def test_a_run_that_is_cut_tells_how_its_memory_was_left() -> None:
    load = load_plan([request(max_tokens=500)], duration_s=0.5, drain_s=0.25)
    simulated = simulate(run_spec(pair(), load, payload_bytes_per_s=1e6))
    assert [record.outcome for record in simulated.records] == ["unfinished"]
    last = simulated.memory[-1]
    assert (last.node, last.used_blocks) == ("decode-0", 7)
    assert last.at_s == pytest.approx(0.2)


class Watched(Simulation):
    """After every event each node's last row agrees with its parts, or the row that is to come is due."""

    def check_memory(self) -> None:
        self.check_integrity()
        for node in self.nodes.values():
            engine = node.engine
            (_, _, used, reserved, held, waiting, _) = engine._memory._last
            owners = engine.incoming._by_ticket.values()
            assert reserved == sum(engine.pool.held_blocks(o.request.request_id) for o in owners)
            assert reserved == engine.pool.reserved_blocks
            assert held == engine.scheduler.held.blocks
            assert waiting == engine.incoming.waiting
            assert reserved + held <= engine.pool.used_blocks <= engine.pool.num_blocks
            assert reserved + held <= used


@pytest.mark.slow
@drawn_slowly(150)
@given(runs())
def test_rows_are_what_the_parts_say_after_every_event(run: RunSpec) -> None:
    simulation = Watched(run, after_event=lambda s: s.check_memory() if isinstance(s, Watched) else None)
    simulated = simulation.run()
    assert violations(run, simulated.records, simulated.steps, memory=simulated.memory, simulated=True) == []
    for node in run.nodes:
        rows = [row for row in simulated.memory if row.node == node.name]
        assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(rows))
        if node.max_held_blocks is not None:
            longest = max((-(-r.prompt_tokens // node.block_size) for r in simulated.records), default=0)
            assert all(row.held_blocks <= max(node.max_held_blocks, longest) for row in rows)


# --- what they come to --------------------------------------------------------------------------------------------


def test_usage_by_role_is_a_share_of_the_blocks() -> None:
    run = _one(max_tokens=81)
    run = msgspec.structs.replace(run, load=load_plan([request(max_tokens=81)], duration_s=0.5))
    simulated = simulate(run)
    (record,) = simulated.records
    assert record.finish_s == pytest.approx(1.0)
    memory = kv_memory(run, simulated.records, simulated.steps, simulated.memory)
    assert memory.blocks == {"prefill-0": 1_000, "decode-0": 1_000}
    prefill, decode = memory.by_role["prefill"], memory.by_role["decode"]
    assert (prefill.peak_used, prefill.peak_reserved, prefill.peak_held) == (0.007, 0.0, 0.007)
    assert prefill.mean_used == pytest.approx(0.007 * 0.2), "0.1 s of computing and 0.1 s of sending"
    assert (decode.peak_used, decode.peak_reserved, decode.peak_held) == (0.012, 0.007, 0.0), "180 tokens at the end"
    assert decode.mean_used == pytest.approx(0.007), "as reserved; the first second ends with the run"


def test_nodes_of_a_role_count_by_their_size() -> None:
    run = _one()
    small = msgspec.structs.replace(run.nodes[1], name="decode-1", kv_blocks=500)
    run = msgspec.structs.replace(run, nodes=(*run.nodes, small))
    rows = [
        MemoryRecord("decode-0", 0.0, 100, 40),
        MemoryRecord("decode-1", 5.0, 250, 250),
        MemoryRecord("decode-0", 20.0, 1_000),
    ]
    decode = kv_memory(run, [], [], rows).by_role["decode"]
    assert (decode.peak_used, decode.peak_reserved) == (1.0, 0.5)
    assert decode.mean_used == pytest.approx((100 * 10 + 250 * 5) / (1_500 * 10)), "what came after the end is left out"


@pytest.mark.parametrize("first_token", ["handoff", "prefill"])
def test_waits_for_decode_memory_are_told_wherever_first_tokens_come_from(first_token: str) -> None:
    load = load_plan([request(name, max_tokens=30) for name in ("a", "b", "c")])
    run = run_spec(pair(decode_blocks=16), load, payload_bytes_per_s=1e9, first_token=first_token)  # type: ignore[arg-type]
    result = simulated_result(run)
    waits = [r.kv_ready_s - r.prefill_end_s for r in result.records if r.kv_ready_s is not None and r.prefill_end_s]
    memory = result.summary.kv_memory
    assert max(waits) > 0.0
    assert memory.longest_decode_wait_ms == pytest.approx(1e3 * max(waits))
    assert memory.total_decode_wait_ms == pytest.approx(1e3 * sum(waits))


# --- physics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        MemoryRecord("decode-0", 0.5, 1_001),
        MemoryRecord("decode-0", 0.5, 10, 11),
        MemoryRecord("decode-0", 0.5, 10, 6, 5),
        MemoryRecord("decode-0", 0.5, 10, -1, 2),
        MemoryRecord("nobody", 0.5, 0),
    ],
)
def test_memory_that_cannot_be_is_noticed(row: MemoryRecord) -> None:
    run = _one()
    simulated = simulate(run)
    assert violations(run, simulated.records, simulated.steps, memory=simulated.memory, simulated=True) == []
    (found,) = violations(run, simulated.records, simulated.steps, memory=[*simulated.memory, row], simulated=True)
    assert found.startswith(f"KV memory is not conserved: {row.node} at 0.5")
