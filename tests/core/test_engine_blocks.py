"""One node whose KV blocks have names: which it says with its effects, and how long they stay who has left's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec
import pytest

from emulator.core.deployments import Policy
from emulator.core.effects import CancelTransmit, CloseTicket, Effect, KvWrite, OpenTicket, RunStep, Transmit
from emulator.core.engine import Engine
from emulator.core.messages import Abort, Generate, Heartbeat, Preempted, Prefill, Release, Reserve, Reserved, SendKv
from emulator.core.roles import Role
from tests.builders import KV_BYTES_PER_TOKEN, node_spec
from tests.engines import engine_of, replies

E = TypeVar("E", bound=Effect)


def _engine(role: Role = "colocated", **changes: object) -> Engine:
    return engine_of(msgspec.structs.replace(node_spec(role=role), **changes), name_blocks=True)


def _only(kind: type[E], effects: Iterable[Effect]) -> E:
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def _nothing_starts(effects: Iterable[Effect]) -> bool:
    return not any(isinstance(effect, RunStep) for effect in effects)


def _end_step(engine: Engine) -> list[Effect]:
    until_s = engine.busy_until_s
    assert until_s is not None
    effects = engine.step_done(until_s)
    engine.check_integrity()
    return effects


# --- names ----------------------------------------------------------------------------------------------------------


def test_a_step_writes_its_chunks_where_their_requests_have_their_blocks() -> None:
    engine = _engine(max_num_batched_tokens=60)
    step = _only(RunStep, engine.handle(Generate("a", 100, 5), 0.0))
    assert step.writes == (KvWrite("a", 0, 60_000, (0, 1, 2, 3)),)
    engine.handle(Generate("b", 30, 5), 0.01)
    step = _only(RunStep, _end_step(engine))
    assert step.writes == (
        KvWrite("a", 60_000, 40_000, (0, 1, 2, 3, 4, 5, 6)),
        KvWrite("b", 0, 20_000, (7, 8)),
    )
    assert [write.nbytes // KV_BYTES_PER_TOKEN for write in step.writes] == [c.tokens for c in step.shape.chunks]
    step = _only(RunStep, _end_step(engine))
    assert step.writes == (KvWrite("b", 20_000, 10_000, (7, 8)),), "decodes beside it write no prompt"


def test_nothing_has_a_name_without_being_asked_for_it() -> None:
    engine = engine_of(node_spec(role="prefill"))
    assert _only(RunStep, engine.handle(Prefill("a", 100, 5), 0.0)).writes == ()
    engine.handle(SendKv("a", 7, "there", "decode-0"), 0.05)
    assert _only(Transmit, _end_step(engine)).blocks == ()
    assert _only(OpenTicket, engine_of(node_spec(role="decode")).handle(Reserve("a", 100, 5), 0.0)).blocks == ()


def test_kv_leaves_from_the_blocks_of_its_request() -> None:
    engine = _engine("prefill", overlap="chunk", max_num_batched_tokens=40)
    engine.handle(Prefill("a", 70, 5), 0.0)
    engine.handle(SendKv("a", 7, "there", "decode-0"), 0.0)
    sent = [_only(Transmit, _end_step(engine)) for _ in range(2)]
    assert [(part.offset, part.nbytes, part.blocks) for part in sent] == [
        (0, 40_000, (0, 1, 2, 3, 4)),
        (40_000, 30_000, (0, 1, 2, 3, 4)),
    ]


def test_kv_arrives_in_the_blocks_that_are_reserved_for_it() -> None:
    engine = _engine("decode", num_reserved_decode_tokens=20)
    assert _only(OpenTicket, engine.handle(Reserve("a", 40, 50), 0.0)).blocks == (0, 1, 2, 3)
    assert _only(OpenTicket, engine.handle(Reserve("b", 10, 1), 0.0)).blocks == (4,)
    engine.handle(Abort("a"), 0.1)
    assert _only(OpenTicket, engine.handle(Reserve("c", 50, 50), 0.2)).blocks == (0, 1, 2, 3, 5)


def test_a_prompt_that_was_preempted_is_written_again_with_what_was_generated() -> None:
    engine = _engine(kv_blocks=4, block_size=10)
    for request_id in ("a", "b"):
        engine.handle(Generate(request_id, 15, 10), 0.0)
    effects = _end_step(engine)
    while not any(isinstance(message, Preempted) for message in replies(effects)):
        effects = _end_step(engine)
    generated = next(message.generated for message in replies(effects) if isinstance(message, Preempted))
    writes: tuple[KvWrite, ...] = ()
    while not writes:
        writes = _only(RunStep, _end_step(engine)).writes
    (again,) = writes
    assert (again.request_id, again.offset, again.nbytes) == ("b", 0, (15 + generated) * KV_BYTES_PER_TOKEN)
    assert generated > 0


# --- who leaves within a step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name_blocks", [True, False])
@pytest.mark.parametrize("policy", ["chunked", "prefill_first"])
def test_blocks_of_who_is_aborted_stay_until_the_step_has_ended(policy: Policy, name_blocks: bool) -> None:
    engine = engine_of(node_spec(kv_blocks=10, policy=policy), name_blocks=name_blocks)
    engine.handle(Generate("a", 100, 5), 0.0)
    engine.handle(Generate("b", 100, 5), 0.0)
    assert engine.handle(Abort("a"), 0.05) == []
    assert (engine.pool.used_blocks, engine.pool.owners()) == (7, frozenset())
    assert not engine.idle
    assert replies(engine.tick(0.06))[-1] == Heartbeat(3, 0, 1)
    step = _only(RunStep, _end_step(engine))
    assert step.start_s == 0.1
    assert (engine.pool.used_blocks, engine.pool.owners()) == (7, frozenset({"b"}))
    if name_blocks:
        assert step.writes == (KvWrite("b", 0, 100_000, (0, 1, 2, 3, 4, 5, 6)),)


def test_who_is_aborted_between_its_steps_frees_its_blocks_at_once() -> None:
    engine = _engine(max_num_batched_tokens=100)
    engine.handle(Generate("a", 100, 5), 0.0)
    engine.handle(Generate("b", 100, 5), 0.0)
    engine.handle(Abort("b"), 0.05)
    assert engine.pool.used_blocks == 7
    _end_step(engine)
    engine.handle(Abort("a"), 0.105)
    assert engine.pool.used_blocks == 7, "it is in the step"
    _end_step(engine)
    assert engine.idle


def test_held_kv_that_is_released_is_free_at_once_though_another_computes() -> None:
    engine = _engine("prefill")
    engine.handle(Prefill("a", 100, 5), 0.0)
    engine.handle(SendKv("a", 7, "there", "decode-0"), 0.0)
    engine.handle(Prefill("b", 100, 5), 0.05)
    _end_step(engine)
    assert engine.handle(Release("a"), 0.15) == [CancelTransmit(7)]
    assert engine.pool.owners() == {"b"}
    assert engine.pool.used_blocks == 7


def test_kv_on_its_way_is_cancelled_at_once_and_its_blocks_stay_for_the_step() -> None:
    engine = _engine("prefill", overlap="chunk", max_num_batched_tokens=40, kv_blocks=7)
    engine.handle(Prefill("a", 100, 5), 0.0)
    engine.handle(Prefill("b", 100, 5), 0.0)
    engine.handle(SendKv("a", 7, "there", "decode-0"), 0.0)
    _end_step(engine)
    assert engine.handle(Abort("a"), 0.05) == [CancelTransmit(7)]
    assert engine.pool.free_blocks == 0
    assert _only(RunStep, _end_step(engine)).writes[0].request_id == "b"


def test_a_reservation_waits_for_the_step_in_which_memory_was_left() -> None:
    engine = _engine("decode", kv_blocks=8)
    ticket = _only(OpenTicket, engine.handle(Reserve("a", 100, 20), 0.0)).ticket
    engine.kv_arrived(ticket, 100_000, 0.0, 0.1, 0.1)
    assert replies(engine.handle(Reserve("b", 100, 20), 0.1)) == []
    assert engine.handle(Abort("a"), 0.105) == [CloseTicket(ticket)], "no memory for b yet"
    assert engine.incoming.waiting == 1
    effects = _end_step(engine)
    assert _only(OpenTicket, effects).blocks == (0, 1, 2, 3, 4, 5, 6)
    assert replies(effects) == [Reserved("b", 2, "here")]
    assert _nothing_starts(effects)


def test_an_id_that_comes_again_before_the_step_has_ended_gets_blocks_of_its_own() -> None:
    engine = _engine(kv_blocks=20)
    engine.handle(Generate("a", 100, 5), 0.0)
    engine.handle(Abort("a"), 0.05)
    engine.handle(Reserve("a", 100, 5), 0.06)
    assert engine.pool.blocks("a") == (7, 8, 9, 10, 11, 12, 13)
    _end_step(engine)
    assert engine.pool.used_blocks == 7


def test_a_merged_step_that_somebody_leaves_keeps_the_blocks_of_that_moment_until_it_ends() -> None:
    single, merged = engine_of(node_spec(block_size=1)), engine_of(node_spec(block_size=1), merge_steps=True)
    for engine in (single, merged):
        for request_id in ("a", "b"):
            engine.handle(Generate(request_id, 50, 40), 0.0)
        while engine.busy_until_s is not None and engine.busy_until_s < 0.155:
            _end_step(engine)
    assert merged.busy_until_s != single.busy_until_s
    merged.device.settle(0.155, inclusive=True)
    for engine in (single, merged):
        engine.handle(Abort("a"), 0.155)
        engine.check_integrity()
    assert merged.busy_until_s == pytest.approx(single.busy_until_s)
    assert merged.pool.retired_blocks == single.pool.retired_blocks > 50 + 1, "several of them had been merged"
    assert merged.pool.used_blocks == single.pool.used_blocks
    for engine in (single, merged):
        _end_step(engine)
        assert engine.pool.retired_blocks == 0
    assert merged.pool.used_blocks == single.pool.used_blocks


# --- KV that is on its way --------------------------------------------------------------------------------------------


def test_a_prompt_whose_kv_leaves_in_parts_has_all_its_memory_at_once_and_keeps_it() -> None:
    """Where a's memory is short with its third token, b has been sent in part and could not be computed anew."""
    engine = _engine("mixed", overlap="chunk", kv_blocks=10, max_num_batched_tokens=20)
    engine.handle(Generate("a", 62, 60), 0.0)
    for _ in range(3):
        _end_step(engine)
    engine.handle(Prefill("b", 90, 5), 0.0)
    engine.handle(SendKv("b", 7, "there", "decode-0"), 0.0)
    effects = _end_step(engine)
    assert engine.pool.held_blocks("b") == 6
    sent, preempted = 0, []
    while sent < 90_000:
        preempted += [message for message in replies(effects) if isinstance(message, Preempted)]
        for part in [effect for effect in effects if isinstance(effect, Transmit)]:
            assert part.offset == sent, "never computed again"
            sent += part.nbytes
        effects = _end_step(engine) if sent < 90_000 else []
    assert [message.request_id for message in preempted] == ["a"]
