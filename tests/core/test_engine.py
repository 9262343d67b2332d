"""One node: what it answers to messages, finished steps and arrived KV, in all three roles."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from emulator.core.deployments import Policy
from emulator.core.effects import CancelTransmit, CloseTicket, Effect, OpenTicket, RecordStep, Reply, RunStep, Transmit
from emulator.core.engine import Engine
from emulator.core.messages import (
    Abort,
    Forget,
    Generate,
    Heartbeat,
    KvReady,
    KvReceived,
    Message,
    NodeFinish,
    Prefill,
    PrefillDone,
    Rejected,
    Release,
    Reserve,
    Reserved,
    SendKv,
    StepTokens,
    TokenCount,
    ToNode,
    Welcome,
)
from emulator.core.records import RequestTimes
from emulator.core.run_spec import NodeSpec
from tests.builders import node_spec
from tests.engines import engine_of, replies


def _engine(node: NodeSpec | None = None) -> Engine:
    """Tickets are 1, 2, 3, …; 1 ms a prompt token, 10 ms a decode step, 1,000 KV bytes a token."""
    return engine_of(node or node_spec())


def _prefill_engine(**changes: object) -> Engine:
    return _engine(msgspec.structs.replace(node_spec("prefill-0", role="prefill"), **changes))


def _decode_engine(**changes: object) -> Engine:
    return _engine(msgspec.structs.replace(node_spec("decode-0", role="decode"), **changes))


def _step(effects: list[Effect]) -> RunStep | None:
    steps = [effect for effect in effects if isinstance(effect, RunStep)]
    assert len(steps) <= 1
    return steps[0] if steps else None


def _others(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, Reply | RunStep | RecordStep)]


def _tokens(*request_ids: str, finished: tuple[NodeFinish, ...] = ()) -> StepTokens:
    return StepTokens(tuple(TokenCount(request_id, 1) for request_id in request_ids), finished)


# --- colocated ----------------------------------------------------------------------------------------------------


def test_a_colocated_node_prefills_decodes_and_ends_a_request() -> None:
    engine = _engine()
    step = _step(engine.handle(Generate("a", 100, 2), 1.0))
    assert step is not None
    assert step.start_s == 1.0
    assert step.planned_s == pytest.approx(0.1)
    first = engine.step_done(1.1)
    assert replies(first) == [_tokens("a")]
    last = engine.step_done(1.11)
    times = RequestTimes(queued_s=1.0, prefill_start_s=1.0, prefill_end_s=1.1)
    assert replies(last) == [_tokens("a", finished=(NodeFinish("a", "length", times),))]
    assert _step(last) is None
    assert engine.idle


def test_lateness_never_accumulates_because_the_next_step_starts_where_the_last_was_to_end() -> None:
    engine = _engine()
    engine.handle(Generate("a", 100, 5), 0.0)
    effects = engine.step_done(0.1004)
    step = _step(effects)
    assert step is not None
    assert step.start_s == pytest.approx(0.1)
    record = next(effect.record for effect in effects if isinstance(effect, RecordStep))
    assert record.lateness_s == pytest.approx(0.0004)
    assert (record.kind, record.prefill_tokens, record.decode_batch, record.requests) == ("prefill", 100, 0, 1)


def test_a_request_aborted_while_its_step_runs_is_not_heard_of_again() -> None:
    engine = _engine()
    engine.handle(Generate("a", 100, 5), 0.0)
    engine.handle(Generate("b", 50, 5), 0.01)
    assert engine.handle(Abort("a"), 0.02) == []
    effects = engine.step_done(0.1)
    assert replies(effects) == []
    step = _step(effects)
    assert step is not None
    assert step.planned_s == pytest.approx(0.05), "b is next"
    engine.check_integrity()
    engine.handle(Abort("b"), 0.12)
    engine.step_done(0.15)
    assert engine.idle


@pytest.mark.parametrize(
    "message", [Abort("nobody"), Release("nobody"), SendKv("nobody", 7, "there"), Welcome()], ids=str
)
def test_messages_about_unknown_requests_do_nothing(message: ToNode) -> None:
    engine = _engine()
    assert engine.handle(message, 0.0) == []
    assert engine.kv_arrived(7, 1_000, 0.0, 0.1, 0.1) == [CloseTicket(7)]
    assert engine.idle


@pytest.mark.parametrize("policy", ["chunked", "prefill_first"])
def test_a_prompt_joins_running_decodes_as_the_policy_says(policy: Policy) -> None:
    engine = _engine(node_spec(policy=policy))
    engine.handle(Generate("a", 100, 5), 0.0)
    engine.handle(Generate("b", 50, 5), 0.05)
    step = _step(engine.step_done(0.1))
    assert step is not None
    assert step.shape.decode_batch == (1 if policy == "chunked" else 0)
    assert [chunk.tokens for chunk in step.shape.chunks] == [50]


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Generate("a", 0, 5), "prompt of 0 and 5 output tokens: both must be at least 1"),
        (Generate("a", 5, -1), "both must be at least 1"),
        (Generate("a", 200, 101), "exceed the context of 300 tokens"),
        (Generate("a", 100, 61), "need KV for 161 tokens, node has room for 160"),
        (Reserve("a", 100, 61), "need KV for 161 tokens, node has room for 160"),
        (Prefill("a", 161, 1), "need KV for 161 tokens, node has room for 160"),
        (Prefill("a", 100, 201), "exceed the context of 300 tokens"),
    ],
    ids=str,
)
def test_what_can_never_be_served_is_refused_with_its_reason(message: ToNode, reason: str) -> None:
    engine = _engine(node_spec("node", kv_blocks=10, block_size=16, max_model_len=300))
    (rejected,) = replies(engine.handle(message, 0.0))
    assert isinstance(rejected, Rejected)
    assert reason in rejected.reason
    assert engine.idle


def test_a_prefill_node_needs_room_for_the_prompt_alone() -> None:
    engine = _engine(node_spec("node", role="prefill", kv_blocks=10, block_size=16))
    assert _step(engine.handle(Prefill("a", 160, 500), 0.0)) is not None


# --- prefill ------------------------------------------------------------------------------------------------------


def test_kv_leaves_as_a_whole_after_the_prefill_once_there_is_a_ticket() -> None:
    engine = _prefill_engine()
    engine.handle(Prefill("a", 100, 5), 0.0)
    assert engine.handle(SendKv("a", 7, "there", "decode-0"), 0.05) == []
    effects = engine.step_done(0.1)
    assert _others(effects) == [Transmit("a", 7, "there", "decode-0", 0, 100_000, 100_000)]
    times = RequestTimes(queued_s=0.0, prefill_start_s=0.0, prefill_end_s=0.1, kv_ready_s=0.1)
    assert replies(effects) == [PrefillDone("a", times)]
    assert engine.pool.used_blocks == 7, "blocks stay until the receiver has them"
    assert engine.handle(Release("a"), 0.2) == [CancelTransmit(7)]
    assert engine.idle


def test_kv_that_waited_for_its_ticket_says_when_it_was_handed_to_the_link() -> None:
    engine = _prefill_engine()
    engine.handle(Prefill("a", 100, 5), 0.0)
    (done,) = replies(engine.step_done(0.1))
    assert done == PrefillDone("a", RequestTimes(queued_s=0.0, prefill_start_s=0.0, prefill_end_s=0.1))
    effects = engine.handle(SendKv("a", 7, "there", "decode-0"), 0.4)
    assert _others(effects) == [Transmit("a", 7, "there", "decode-0", 0, 100_000, 100_000)]
    assert replies(effects) == [KvReady("a", RequestTimes(kv_ready_s=0.4))]


def test_with_overlap_each_chunk_leaves_when_it_is_computed() -> None:
    engine = _prefill_engine(overlap="chunk", max_num_batched_tokens=40)
    engine.handle(Prefill("a", 100, 5), 0.0)
    engine.handle(SendKv("a", 7, "there", "decode-0"), 0.0)
    sent = [_others(engine.step_done(end_s)) for end_s in (0.04, 0.08, 0.1)]
    assert sent == [
        [Transmit("a", 7, "there", "decode-0", 0, 40_000, 100_000)],
        [Transmit("a", 7, "there", "decode-0", 40_000, 40_000, 100_000)],
        [Transmit("a", 7, "there", "decode-0", 80_000, 20_000, 100_000)],
    ]


def test_with_overlap_a_late_ticket_sends_everything_computed_so_far_at_once() -> None:
    engine = _prefill_engine(overlap="chunk", max_num_batched_tokens=40)
    engine.handle(Prefill("a", 100, 5), 0.0)
    engine.step_done(0.04)
    engine.step_done(0.08)
    effects = engine.handle(SendKv("a", 7, "there", "decode-0"), 0.09)
    assert _others(effects) == [Transmit("a", 7, "there", "decode-0", 0, 80_000, 100_000)]
    assert replies(effects) == [], "the last KV has not been handed over yet"


def test_a_prefill_aborted_while_its_step_runs_sends_nothing() -> None:
    engine = _prefill_engine(overlap="chunk", max_num_batched_tokens=40)
    engine.handle(Prefill("a", 100, 5), 0.0)
    engine.handle(SendKv("a", 7, "there", "decode-0"), 0.0)
    engine.step_done(0.04)
    assert engine.handle(Abort("a"), 0.05) == [CancelTransmit(7)]
    effects = engine.step_done(0.08)
    assert _others(effects) == []
    assert replies(effects) == []
    assert engine.idle


def test_held_kv_keeps_further_prompts_waiting_until_it_is_released() -> None:
    engine = _prefill_engine(kv_blocks=10)
    engine.handle(Prefill("a", 100, 5), 0.0)
    engine.handle(Prefill("b", 100, 5), 0.0)
    assert _step(engine.step_done(0.1)) is None, "b does not fit beside what is held of a"
    step = _step(engine.handle(Release("a"), 0.5))
    assert step is not None
    assert step.start_s == 0.5


def test_a_prefill_that_awaits_its_ticket_starts_with_it() -> None:
    engine = _prefill_engine()
    assert engine.handle(Prefill("a", 125, 5, await_ticket=True), 0.0) == []
    assert _step(engine.handle(Prefill("b", 125, 5), 0.0)) is not None, "others do not wait behind it"
    assert engine.handle(SendKv("a", 7, "there", "decode-0"), 0.1) == []
    step = _step(engine.step_done(0.125))
    assert step is not None
    assert step.start_s == 0.125
    effects = engine.step_done(0.25)
    assert _others(effects) == [Transmit("a", 7, "there", "decode-0", 0, 125_000, 125_000)]
    times = RequestTimes(queued_s=0.0, admitted_s=0.1, prefill_start_s=0.125, prefill_end_s=0.25, kv_ready_s=0.25)
    assert replies(effects) == [PrefillDone("a", times)]


def test_a_prefill_that_awaits_its_ticket_can_be_aborted_and_given_up() -> None:
    engine = _prefill_engine(kv_lease_s=10.0)
    engine.handle(Prefill("a", 100, 5, await_ticket=True), 0.0)
    engine.check_integrity()
    assert engine.handle(Abort("a"), 0.1) == []
    assert engine.idle
    assert engine.handle(SendKv("a", 7, "there", "decode-0"), 0.2) == []
    engine.handle(Prefill("b", 100, 5, await_ticket=True), 0.3)
    (rejected, _) = replies(engine.tick(10.4))
    assert isinstance(rejected, Rejected)
    assert rejected.request_id == "b"
    assert engine.idle


def test_a_prefill_node_serves_a_request_for_one_token_by_itself() -> None:
    engine = _prefill_engine()
    engine.handle(Generate("a", 100, 1), 0.0)
    times = RequestTimes(queued_s=0.0, prefill_start_s=0.0, prefill_end_s=0.1)
    effects = engine.step_done(0.1)
    assert replies(effects) == [_tokens("a", finished=(NodeFinish("a", "length", times),))]
    assert _others(effects) == []
    assert engine.idle


# --- decode -------------------------------------------------------------------------------------------------------


def test_a_decode_node_reserves_receives_and_streams_the_first_token_at_once() -> None:
    engine = _decode_engine()
    assert engine.handle(Reserve("a", 100, 2), 0.0) == [
        OpenTicket("a", 1, 100_000),
        Reply(Reserved("a", 1, "here")),
    ]
    assert engine.pool.reserved_blocks == 7
    effects = engine.kv_arrived(1, 100_000, 0.1, 0.2, 0.2)
    received = RequestTimes(kv_start_s=0.1, kv_end_s=0.2, kv_bytes=100_000)
    assert replies(effects) == [_tokens("a"), KvReceived("a", received)]
    assert _step(effects) is not None
    end = engine.step_done(0.21)
    assert replies(end) == [_tokens("a", finished=(NodeFinish("a", "length"),))]
    assert _others(end) == [CloseTicket(1)], "received KV is kept until the request ends"
    assert engine.idle


def test_a_request_for_one_token_ends_when_its_kv_arrives() -> None:
    engine = _decode_engine()
    engine.handle(Reserve("a", 100, 1), 0.0)
    effects = engine.kv_arrived(1, 100_000, 0.1, 0.2, 0.2)
    received = RequestTimes(kv_start_s=0.1, kv_end_s=0.2, kv_bytes=100_000)
    assert replies(effects) == [
        _tokens("a", finished=(NodeFinish("a", "length", received),)),
        KvReceived("a", received),
    ]
    assert _step(effects) is None
    assert engine.idle


RECEIVED = RequestTimes(kv_start_s=0.1, kv_end_s=0.2, kv_bytes=100_000)


def test_where_prefill_has_streamed_the_first_token_the_second_is_the_first_here() -> None:
    engine = _decode_engine()
    engine.handle(Reserve("a", 100, 2, first_token="prefill"), 0.0)
    effects = engine.kv_arrived(1, 100_000, 0.1, 0.2, 0.2)
    assert replies(effects) == [KvReceived("a", RECEIVED)]
    assert _step(effects) is not None
    assert replies(engine.step_done(0.21)) == [_tokens("a", finished=(NodeFinish("a", "length"),))]
    assert engine.idle


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_recomputing_the_last_prompt_token_brings_the_first_one(max_tokens: int) -> None:
    engine = _decode_engine()
    engine.handle(Reserve("a", 100, max_tokens, first_token="recompute"), 0.0)
    effects = engine.kv_arrived(1, 100_000, 0.1, 0.2, 0.2)
    assert replies(effects) == [KvReceived("a", RECEIVED)]
    step = _step(effects)
    assert step is not None
    assert (step.shape.decode_batch, step.shape.decode_context_sum) == (1, 100), "it attends to the prompt alone"
    finished = (NodeFinish("a", "length", RequestTimes(streamed_s=0.2 + 0.01)),)
    told = replies(engine.step_done(0.21))
    if max_tokens == 2:
        assert told == [_tokens("a")]
        told = replies(engine.step_done(0.22))
    assert told == [_tokens("a", finished=finished)]
    assert engine.idle


def test_a_request_preempted_before_its_first_token_gets_it_when_it_is_computed_again() -> None:
    engine = _decode_engine(kv_blocks=4, block_size=10, max_num_seqs=1)
    engine.handle(Reserve("a", 20, 15, first_token="handoff"), 0.0)
    engine.handle(Reserve("b", 20, 5, first_token="recompute"), 0.0)
    engine.kv_arrived(1, 20_000, 0.0, 0.0, 0.0)
    engine.kv_arrived(2, 20_000, 0.0, 0.0, 0.0)
    tokens: Counter[str] = Counter()
    finishes: list[NodeFinish] = []
    now_s = 0.0
    while (until_s := engine.busy_until_s) is not None:
        now_s = until_s
        for message in replies(engine.step_done(now_s)):
            assert isinstance(message, StepTokens)
            tokens.update({t.request_id: t.n for t in message.tokens})
            finishes += message.finished
        engine.check_integrity()
    assert tokens == {"a": 14, "b": 5}
    assert engine.idle
    (of_b,) = [finish.times for finish in finishes if finish.request_id == "b"]
    assert of_b.streamed_s == pytest.approx(now_s - 4 * 0.01), "four tokens follow the first, one a step"


@pytest.mark.parametrize(("reserved_tokens", "blocks"), [(0, 7), (10, 7), (12, 7), (13, 8), (512, 9)])
def test_some_output_is_reserved_with_the_prompt(reserved_tokens: int, blocks: int) -> None:
    engine = _decode_engine(num_reserved_decode_tokens=reserved_tokens)
    engine.handle(Reserve("a", 100, 40), 0.0)
    assert engine.pool.used_blocks == blocks


def test_reservations_that_do_not_fit_wait_first_come_first_served() -> None:
    engine = _decode_engine(kv_blocks=10)
    engine.handle(Reserve("a", 100, 5), 0.0)
    assert engine.handle(Reserve("b", 100, 5), 0.0) == []
    assert engine.handle(Reserve("small", 10, 5), 0.0) == [], "b is first although small would fit"
    effects = engine.handle(Abort("a"), 0.1)
    assert _others(effects) == [CloseTicket(1), OpenTicket("b", 2, 100_000), OpenTicket("small", 3, 10_000)]
    assert engine.handle(Abort("b"), 0.2) == [CloseTicket(2)]
    engine.check_integrity()
    assert engine.handle(Abort("small"), 0.2) == [CloseTicket(3)]
    assert engine.idle


def test_a_waiting_reservation_can_be_aborted() -> None:
    engine = _decode_engine(kv_blocks=10)
    engine.handle(Reserve("a", 100, 5), 0.0)
    engine.handle(Reserve("b", 100, 5), 0.0)
    assert engine.handle(Abort("b"), 0.1) == []
    assert engine.incoming.waiting == 0


def test_kv_that_arrives_after_its_request_was_aborted_is_dropped() -> None:
    engine = _decode_engine()
    engine.handle(Reserve("a", 100, 5), 0.0)
    engine.handle(Abort("a"), 0.1)
    assert engine.kv_arrived(1, 100_000, 0.1, 0.2, 0.2) == [CloseTicket(1)]
    assert engine.idle


def test_freed_memory_goes_to_running_requests_before_new_reservations() -> None:
    engine = _decode_engine(kv_blocks=4, block_size=10)
    engine.handle(Reserve("runs on", 8, 10), 0.0)
    engine.handle(Reserve("ends", 19, 2), 0.0)
    engine.kv_arrived(1, 8_000, 0.0, 0.0, 0.0)
    engine.kv_arrived(2, 19_000, 0.0, 0.0, 0.0)
    engine.handle(Reserve("needs three blocks", 30, 2), 0.0)
    engine.step_done(0.01)
    step = _step(engine.step_done(0.02))
    assert step is not None
    assert step.shape.decode_batch == 1, "its eleventh token takes a second block"
    assert engine.scheduler.num_preemptions == 0
    assert engine.incoming.waiting == 1


def test_a_preempted_request_drops_its_received_kv_and_keeps_the_times_of_its_real_prefill() -> None:
    engine = _decode_engine(kv_blocks=5, block_size=10)
    for request_id in ("a", "b"):
        engine.handle(Reserve(request_id, 15, 10), 0.0)
    engine.kv_arrived(1, 15_000, 0.0, 0.0, 0.0)
    engine.kv_arrived(2, 15_000, 0.0, 0.0, 0.0)
    effects: list[Effect] = []
    told: list[Message] = []
    for n in range(1, 40):
        effects += (done := engine.step_done(n * 0.01))
        told += replies(done)
        engine.check_integrity()
        if _step(done) is None:
            break
    assert engine.scheduler.num_preemptions == 1
    assert engine.idle
    assert [e for e in _others(effects) if isinstance(e, CloseTicket)] == [CloseTicket(2), CloseTicket(1)]
    messages = [m for m in told if isinstance(m, StepTokens)]
    assert sum(t.n for m in messages for t in m.tokens) == 2 * 9, "the first tokens came with the KV"
    finishes = [finish for m in messages for finish in m.finished]
    assert [f.times for f in finishes] == [RequestTimes(), RequestTimes()], "recomputing is not a prefill"


def test_no_new_reservation_is_granted_while_a_preempted_request_waits_for_memory() -> None:
    engine = _decode_engine(kv_blocks=5, block_size=10)
    for request_id in ("a", "b"):
        engine.handle(Reserve(request_id, 15, 10), 0.0)
    engine.kv_arrived(1, 15_000, 0.0, 0.0, 0.0)
    engine.kv_arrived(2, 15_000, 0.0, 0.0, 0.0)
    now_s = 0.0
    while engine.scheduler.num_preemptions == 0:
        now_s += 0.01
        engine.step_done(now_s)
    assert engine.pool.free_blocks > 0
    assert engine.handle(Reserve("c", 5, 2), now_s) == []
    assert engine.incoming.waiting == 1


# --- being alive --------------------------------------------------------------------------------------------------


def test_a_node_tells_its_load_once_a_second() -> None:
    engine = _decode_engine(kv_blocks=10, max_num_seqs=1)
    engine.handle(Generate("a", 30, 5), 0.0)
    engine.handle(Generate("b", 30, 5), 0.0)
    engine.handle(Reserve("c", 100, 5), 0.0)
    engine.handle(Reserve("d", 100, 5), 0.0)
    assert replies(engine.tick(1.0)) == [Heartbeat(kv_blocks_free=1, running=1, waiting=2)]


def test_a_node_whose_router_is_silent_for_a_lease_gives_everything_up_and_says_so() -> None:
    engine = _prefill_engine(kv_lease_s=10.0, kv_blocks=20)
    engine.handle(Prefill("held", 100, 5), 0.0)
    engine.handle(SendKv("held", 7, "there"), 0.0)
    engine.step_done(0.1)
    engine.handle(Prefill("computing", 100, 5), 0.2)
    engine.handle(Reserve("expected", 50, 5), 0.2)
    engine.handle(Reserve("waiting", 250, 5), 0.2)
    assert len(replies(engine.tick(10.2))) == 1
    effects = engine.tick(10.3)
    rejected = {m.request_id: m.cause for m in replies(effects) if isinstance(m, Rejected)}
    assert rejected == dict.fromkeys(["computing", "expected", "held", "waiting"], "unavailable")
    assert "prefill-0 gave it up: the router was silent for 10 s" in str(effects)
    assert CancelTransmit(7) in effects
    assert CloseTicket(1) in effects
    assert engine.pool.used_blocks == 7, "the step still writes what was computing"
    engine.step_done(10.4)
    assert engine.pool.used_blocks == 0
    assert engine.idle


def test_a_node_that_is_to_forget_gives_everything_up_without_a_word() -> None:
    engine = _prefill_engine(kv_blocks=20)
    engine.handle(Prefill("held", 100, 5), 0.0)
    engine.handle(SendKv("held", 7, "there"), 0.0)
    engine.step_done(0.1)
    engine.handle(Prefill("computing", 100, 5), 0.2)
    engine.handle(Reserve("expected", 50, 5), 0.2)
    engine.handle(Reserve("waiting", 250, 5), 0.2)
    effects = engine.handle(Forget(), 0.3)
    assert replies(effects) == []
    assert {CancelTransmit(7), CloseTicket(1)} <= set(effects)
    engine.step_done(0.4)
    assert engine.idle
    engine.check_integrity()


def test_any_word_from_the_router_renews_the_lease() -> None:
    engine = _decode_engine(kv_lease_s=10.0)
    engine.handle(Reserve("a", 100, 5), 0.0)
    for second in range(1, 40):
        assert all(isinstance(m, Heartbeat) for m in replies(engine.tick(float(second))))
        engine.handle(Welcome(), float(second))
    assert engine.pool.reserved_blocks == 7
