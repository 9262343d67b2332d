"""Whole clusters whose KV blocks have names, against a model of their memory: what is in use nobody else writes.

Who writes a block signs it, and whoever has used some looks in the end whether the same request still signs them: a
step when it has ended, a transfer when it is cancelled (all that tells a node of its end), a ticket when it is closed.
A step also looks at what it attends to when it starts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.effects import CancelTransmit, CloseTicket, Effect, OpenTicket, RecordStep, RunStep, Transmit
from emulator.core.engine import Engine
from emulator.core.run_spec import RunSpec
from emulator.simulate import SimulatedNode, simulate
from tests import test_simulate_properties as properties
from tests import test_simulate_roles as roles
from tests.builders import KV_BYTES_PER_TOKEN, load_plan, node_spec, request, run_spec
from tests.disturbed import ABORTS, DELAYS_S, LOSSES, SlowControl, assert_nothing_is_held, lost, run_disturbed
from tests.examples import drawn_slowly

Use = tuple[str, tuple[int, ...]]
"""A request, and blocks that are to be signed by it."""


class BlockMemory:
    """Who signed each of one node's blocks; and what is in use, by the step that runs, transfers and tickets."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens = engine.pool.block_size
        self._signed: dict[int, str] = {}
        self._step: list[Use] = []
        self._transfers: dict[int, list[Use]] = {}
        self._tickets: dict[int, Use] = {}
        self.verified = 0

    def note(self, effect: Effect) -> None:
        """Effects in the order in which they are carried out."""
        match effect:
            case RecordStep():
                self._verify(self._step)
                self._step = []
            case RunStep():
                self._run(effect)
            case Transmit():
                use = self._upto(effect.request_id, effect.blocks, effect.offset + effect.nbytes)
                self._verify([use])
                self._transfers.setdefault(effect.ticket, []).append(use)
            case CancelTransmit():
                self._verify(self._transfers.pop(effect.ticket, []))
            case OpenTicket():
                self._tickets[effect.ticket] = use = self._upto(effect.request_id, effect.blocks, effect.nbytes)
                self._sign(use)
            case CloseTicket():
                if effect.ticket in self._tickets:
                    self._verify([self._tickets.pop(effect.ticket)])

    def _run(self, effect: RunStep) -> None:
        assert not self._step, "two steps at a time"
        running = self._engine.device.running
        assert running is not None
        assert [write.request_id for write in effect.writes] == [s.request_id for s, _ in running.step.chunks]
        parts = [(w.request_id, w.offset, w.nbytes, w.blocks) for w in effect.writes]
        for sequence in running.step.decodes:
            before, blocks = sequence.computed * KV_BYTES_PER_TOKEN, self._engine.pool.blocks(sequence.request_id)
            parts.append((sequence.request_id, before, KV_BYTES_PER_TOKEN, blocks))
        for request_id, offset, nbytes, blocks in parts:
            attended = self._upto(request_id, blocks, offset)
            self._verify([attended])
            used = self._upto(request_id, blocks, offset + nbytes)
            self._sign((request_id, used[1][offset // KV_BYTES_PER_TOKEN // self._tokens :]))
            self._step.append(used)

    def _upto(self, request_id: str, blocks: tuple[int, ...], nbytes: int) -> Use:
        """The blocks that have the first bytes of a request."""
        assert len(set(blocks)) == len(blocks)
        count = -(-nbytes // (KV_BYTES_PER_TOKEN * self._tokens))
        assert len(blocks) >= count, "more KV than the blocks hold"
        return request_id, blocks[:count]

    def _sign(self, use: Use) -> None:
        self._signed.update(dict.fromkeys(use[1], use[0]))

    def _verify(self, uses: Iterable[Use]) -> None:
        for request_id, blocks in uses:
            self.verified += len(blocks)
            wrong = {block: self._signed.get(block) for block in blocks if self._signed.get(block) != request_id}
            assert not wrong, f"blocks of {request_id} were overwritten: {wrong}"


class NamedBlocks(SlowControl):
    """A simulation whose nodes name their blocks, with a model of each one's memory."""

    def __init__(self, run: RunSpec, delays_s: Iterable[float] = (0.0,)) -> None:
        super().__init__(run, delays_s)
        new_ticket = partial(next, itertools.count(1))
        for node in self.nodes.values():
            node.engine = Engine(node.engine.node, new_ticket=new_ticket, kv_endpoint=node.name, name_blocks=True)
        self.memory_of = {name: BlockMemory(node.engine) for name, node in self.nodes.items()}

    def _apply(self, node: SimulatedNode, effects: Iterable[Effect]) -> None:
        effects = list(effects)
        for effect in effects:
            self.memory_of[node.name].note(effect)
        super()._apply(node, effects)


@pytest.mark.slow
@drawn_slowly(250)
@given(st.one_of(roles.runs(), properties.runs()), DELAYS_S, ABORTS, LOSSES)
def test_no_block_in_use_is_given_to_another_request_whatever_is_aborted_or_lost(
    run: RunSpec, delays_s: list[float], aborts: list[tuple[float, int]], losses: list[tuple[float, int, bool]]
) -> None:
    simulation = NamedBlocks(run, delays_s)
    run_disturbed(simulation, aborts, losses)
    simulation.settle()
    assert_nothing_is_held(simulation, lost=lost(simulation))


@drawn_slowly(40)
@given(roles.runs(), ABORTS)
def test_no_block_in_use_is_given_to_another_request(run: RunSpec, aborts: list[tuple[float, int]]) -> None:
    simulation = NamedBlocks(run)
    simulated = run_disturbed(simulation, aborts)
    simulation.settle()
    assert_nothing_is_held(simulation)
    verified = sum(memory.verified for memory in simulation.memory_of.values())
    assert verified > 0 or not any(record.output_tokens for record in simulated.records)


@drawn_slowly(40)
@given(properties.runs())
def test_names_change_nothing_that_is_decided(run: RunSpec) -> None:
    named, counted = NamedBlocks(run).run(), simulate(run, exact_steps=True)
    assert (named.records, named.steps) == (counted.records, counted.steps)
    assert named.memory == counted.memory


@pytest.mark.parametrize("seed", [26, 32, 43, 162, 165, 176, 190, 192, 193])
def test_a_prompt_that_has_left_in_part_keeps_its_blocks_however_short_memory_is(seed: int) -> None:
    """Those of 200 such clusters in which one was overwritten when nothing kept it from being preempted."""
    rng = random.Random(seed)
    blocks, budget, bytes_per_s = rng.randint(10, 20), rng.choice([8, 20]), rng.choice([1e5, 1e6])
    shape = node_spec(role="mixed", overlap="chunk", kv_blocks=blocks, max_num_batched_tokens=budget)
    nodes = [msgspec.structs.replace(shape, name=f"mixed-{n}") for n in range(2)]
    requests = [
        request(f"r{n}", at_s=rng.uniform(0, 2), prompt_tokens=rng.randint(20, 90), max_tokens=rng.randint(10, 60))
        for n in range(14)
    ]
    simulated = NamedBlocks(run_spec(nodes, load_plan(requests), payload_bytes_per_s=bytes_per_s)).run()
    assert {record.outcome for record in simulated.records} == {"completed"}
    assert any(record.kv_bytes for record in simulated.records)
    assert simulated.preemptions > 0
