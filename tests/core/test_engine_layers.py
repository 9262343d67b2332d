"""A prefill node that hands KV over by groups of layers: what leaves within a step, at its end, and for whom."""

from __future__ import annotations

import pytest

from emulator.core.effects import CancelTransmit, Effect, RunStep, Transmit
from emulator.core.engine import Engine
from emulator.core.messages import Abort, Generate, KvReady, Prefill, PrefillDone, SendKv
from tests.builders import node_spec
from tests.engines import engine_of, replies

TICKET = 7


def _engine(*, layers: int = 4, layer_groups: int = 4, max_num_batched_tokens: int = 2_048) -> Engine:
    """1 ms a prompt token, 1,000 KV bytes a token."""
    node = node_spec(
        "prefill-0",
        role="prefill",
        overlap="layer",
        layers=layers,
        layer_groups=layer_groups,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return engine_of(node)


def _send_kv(request_id: str, ticket: int = TICKET) -> SendKv:
    return SendKv(request_id, ticket, "there", "decode-0")


def _step(effects: list[Effect]) -> RunStep:
    (step,) = [effect for effect in effects if isinstance(effect, RunStep)]
    return step


def _sent(effects: list[Effect]) -> list[tuple[str, int, int]]:
    """Whose KV leaves, from which byte on, and how many."""
    return [(e.request_id, e.offset, e.nbytes) for e in effects if isinstance(e, Transmit)]


# --- groups ---------------------------------------------------------------------------------------------------------


def test_each_group_leaves_while_the_next_one_computes_and_the_last_with_the_step() -> None:
    engine = _engine()
    step = _step(engine.handle(Prefill("a", 100, 5), 2.0))
    assert step.progress == (0.25, 0.5, 0.75)
    assert step.progress_s() == pytest.approx([2.025, 2.05, 2.075])
    engine.handle(_send_kv("a"), 2.0)
    within = [engine.step_progress(groups) for groups in (1, 2, 3)]
    assert within == [
        [Transmit("a", TICKET, "there", "decode-0", offset, 25_000, 100_000)] for offset in (0, 25_000, 50_000)
    ]
    end = engine.step_done(2.1)
    assert _sent(end) == [("a", 75_000, 25_000)]
    (done,) = replies(end)
    assert isinstance(done, PrefillDone)
    assert done.times.kv_ready_s == pytest.approx(2.1), "when the last group was handed over"


@pytest.mark.parametrize(
    ("layers", "groups", "shares", "parts"),
    [
        (5, 2, (0.4,), [400, 600]),
        (7, 3, (2 / 7, 4 / 7), [285, 286, 429]),  # 1,000 bytes do not divide into 7 layers
        (3, 3, (1 / 3, 2 / 3), [333, 333, 334]),
        (32, 1, (), [1_000]),
    ],
)
def test_groups_are_of_whole_layers_and_the_last_one_brings_the_rest(
    layers: int, groups: int, shares: tuple[float, ...], parts: list[int]
) -> None:
    engine = _engine(layers=layers, layer_groups=groups)
    assert _step(engine.handle(Prefill("a", 1, 5), 0.0)).progress == shares
    effects = engine.handle(_send_kv("a"), 0.0)
    for number in range(1, groups):
        effects += engine.step_progress(number)
    effects += engine.step_done(0.001)
    assert [nbytes for _, _, nbytes in _sent(effects)] == parts


def test_a_group_of_less_than_a_byte_leaves_with_a_later_one() -> None:
    node = node_spec("prefill-0", role="prefill", overlap="layer", layers=2_000, layer_groups=2_000)
    engine = engine_of(node)
    engine.handle(Prefill("a", 1, 5), 0.0)
    engine.handle(_send_kv("a"), 0.0)
    assert [len(engine.step_progress(number)) for number in (1, 2, 3, 4)] == [0, 1, 0, 1]


def test_a_prompt_in_chunks_brings_each_chunk_by_its_groups() -> None:
    engine = _engine(layers=2, layer_groups=2, max_num_batched_tokens=60)
    engine.handle(Prefill("a", 100, 5), 0.0)
    engine.handle(_send_kv("a"), 0.0)
    assert _sent(engine.step_progress(1)) == [("a", 0, 30_000)]
    assert _sent(engine.step_done(0.06)) == [("a", 30_000, 30_000)]
    assert _sent(engine.step_progress(1)) == [("a", 60_000, 20_000)]
    assert _sent(engine.step_done(0.1)) == [("a", 80_000, 20_000)]


def test_every_request_in_a_step_hands_over_its_part_of_each_group() -> None:
    engine = _engine(layers=5, layer_groups=2, max_num_batched_tokens=50)
    engine.handle(Prefill("a", 20, 5), 0.0)
    engine.handle(Prefill("b", 40, 5), 0.0)
    engine.handle(_send_kv("a"), 0.0)
    engine.handle(_send_kv("b", 8), 0.0)
    assert _sent(engine.step_progress(1)) == [("a", 0, 8_000)], "a had the first step for itself"
    effects = engine.step_done(0.02)
    assert _sent(effects) == [("a", 8_000, 12_000)]
    engine.handle(Prefill("c", 30, 5), 0.03)
    engine.handle(_send_kv("c", 9), 0.03)
    assert _sent(engine.step_progress(1)) == [("b", 0, 16_000)]
    engine.handle(Prefill("d", 15, 5), 0.03)
    engine.handle(_send_kv("d", 10), 0.03)
    assert _step(engine.step_done(0.06)).shape.chunks[1].tokens == 15
    assert _sent(engine.step_progress(1)) == [("c", 0, 12_000), ("d", 0, 6_000)]


# --- tickets and ends -----------------------------------------------------------------------------------------------


def test_without_a_ticket_nothing_leaves_and_one_within_a_step_takes_all_that_is_computed_by_then() -> None:
    engine = _engine(max_num_batched_tokens=60)
    engine.handle(Prefill("a", 100, 5), 0.0)
    assert [engine.step_progress(groups) for groups in (1, 2, 3)] == [[], [], []]
    assert _sent(engine.step_done(0.06)) == []
    assert engine.step_progress(1) == []
    assert engine.step_progress(2) == []
    effects = engine.handle(_send_kv("a"), 0.081)
    assert _sent(effects) == [("a", 0, 60_000 + 20_000)], "one message: the chunk before and two of four groups"
    assert replies(effects) == [], "the last KV has not been handed over yet"
    assert _sent(engine.step_progress(3)) == [("a", 80_000, 10_000)]
    assert _sent(engine.step_done(0.1)) == [("a", 90_000, 10_000)]


def test_a_ticket_after_the_prefill_takes_the_whole_prompt_at_once() -> None:
    engine = _engine()
    engine.handle(Prefill("a", 100, 5), 0.0)
    for groups in (1, 2, 3):
        engine.step_progress(groups)
    engine.step_done(0.1)
    effects = engine.handle(_send_kv("a"), 0.4)
    assert _sent(effects) == [("a", 0, 100_000)]
    (ready,) = replies(effects)
    assert isinstance(ready, KvReady)
    assert ready.times.kv_ready_s == 0.4


def test_a_request_aborted_within_a_step_sends_nothing_more_and_others_go_on() -> None:
    engine = _engine(max_num_batched_tokens=50)
    engine.handle(Generate("first", 10, 1), 0.0)
    for request_id, ticket in (("a", 7), ("b", 8)):
        engine.handle(Prefill(request_id, 25, 5), 0.0)
        engine.handle(_send_kv(request_id, ticket), 0.0)
    assert _step(engine.step_done(0.01)).progress
    assert _sent(engine.step_progress(1)) == [("a", 0, 6_250), ("b", 0, 6_250)]
    assert engine.handle(Abort("a"), 0.03) == [CancelTransmit(7)]
    assert _sent(engine.step_progress(2)) == [("b", 6_250, 6_250)]
    assert engine.handle(Abort("b"), 0.04) == [CancelTransmit(8)]
    assert engine.step_progress(3) == []
    assert _sent(engine.step_done(0.06)) == []
    assert engine.idle
    engine.check_integrity()


def test_only_steps_that_hand_kv_over_ask_for_progress() -> None:
    engine = _engine()
    assert _step(engine.handle(Generate("stays", 10, 2), 0.0)).progress == ()
    assert _step(engine.step_done(0.01)).progress == (), "a decode step"
    engine.handle(Prefill("leaves", 10, 2), 0.015)
    assert _step(engine.step_done(0.02)).progress == (0.25, 0.5, 0.75)
    chunk = Engine(node_spec("prefill-0", role="prefill", overlap="chunk"), new_ticket=lambda: 1)
    assert _step(chunk.handle(Prefill("leaves", 10, 2), 0.0)).progress == ()
