"""Requests that lose their memory and are prefilled anew: what a decode node gives up, and how the router goes on."""

from __future__ import annotations

import msgspec
import pytest

from emulator.core.deployments import FirstToken
from emulator.core.effects import CloseTicket, Effect, OpenTicket, Send, TokenRun
from emulator.core.engine import Engine
from emulator.core.kv_pool import KvPool
from emulator.core.messages import (
    Abort,
    Finished,
    Generate,
    KvReceived,
    NodeFinish,
    Preempted,
    Prefill,
    PrefillDone,
    Rejected,
    Release,
    Reserve,
    Reserved,
    StepTokens,
    TokenCount,
    Tokens,
)
from emulator.core.records import RequestTimes
from emulator.core.router import MAX_ATTEMPTS, Router
from emulator.core.scheduler import Scheduler, SchedulerConfig
from emulator.core.sequence import Sequence
from tests.builders import node_spec
from tests.drawn import EVERY_FIRST_TOKEN
from tests.engines import engine_of, replies
from tests.routers import known_router, submit

# --- nodes ----------------------------------------------------------------------------------------------------------


def _engine(*, merge_steps: bool = False, **changes: object) -> Engine:
    node = msgspec.structs.replace(node_spec("decode-0", role="decode"), preemption="prefill", **changes)
    return engine_of(node, merge_steps=merge_steps)


def _two_received(engine: Engine, first_token: FirstToken = "handoff") -> None:
    """Requests a and b of 15 and 10 tokens with two blocks of ten each."""
    for ticket, request_id in enumerate(("a", "b"), start=1):
        engine.handle(Reserve(request_id, 15, 10, first_token=first_token), 0.0)
        engine.kv_arrived(ticket, 15_000, 0.0, 0.0, 0.0)


def _until_preempted(engine: Engine) -> list[Effect]:
    """What the step brings after which there is no memory for another one."""
    while (until_s := engine.busy_until_s) is not None:
        effects = engine.step_done(until_s)
        engine.check_integrity()
        if engine.scheduler.num_preemptions:
            return effects
    raise AssertionError("there was memory for everybody")


@pytest.mark.parametrize("merge_steps", [False, True])
def test_a_node_gives_up_what_it_has_no_memory_for_and_says_what_it_has_streamed(merge_steps: bool) -> None:
    engine = _engine(kv_blocks=4, block_size=10, merge_steps=merge_steps)
    _two_received(engine)
    effects = _until_preempted(engine)
    assert CloseTicket(2) in effects
    (preempted,) = [message for message in replies(effects) if isinstance(message, Preempted)]
    # a, a step ahead, needs a third block for its 21st token when b has computed its 19th; b's first came with the KV.
    assert preempted == Preempted("b", 1 + 4)
    runs = [effect for effect in effects if isinstance(effect, TokenRun)]
    assert sum(run.tokens for run in runs if run.request_id == "b") == (4 if merge_steps else 0), "before it is over"
    assert not engine.scheduler.waiting, "it does not wait to be computed here"
    assert engine.pool.owners() == {"a"}
    assert engine.handle(Abort("b"), 1.0) == [], "the node has forgotten it"


def test_freed_memory_goes_to_reservations_that_wait() -> None:
    engine = _engine(kv_blocks=4, block_size=10)
    _two_received(engine)
    engine.handle(Reserve("c", 5, 2), 0.0)
    assert OpenTicket("c", 3, 5_000) in _until_preempted(engine)


def test_the_first_token_of_the_first_attempt_keeps_its_instant() -> None:
    engine = _engine(kv_blocks=4, block_size=10)
    _two_received(engine, "recompute")
    (preempted,) = [message for message in replies(_until_preempted(engine)) if isinstance(message, Preempted)]
    assert preempted.generated > 0
    assert preempted.times == RequestTimes(streamed_s=0.02), "made in the step after a's first"


def test_what_is_given_up_before_its_first_token_has_none_due() -> None:
    engine = _engine(kv_blocks=4, block_size=10, max_num_seqs=1)
    engine.handle(Reserve("a", 20, 15, first_token="handoff"), 0.0)
    engine.handle(Reserve("b", 20, 5, first_token="recompute"), 0.0)
    engine.kv_arrived(1, 20_000, 0.0, 0.0, 0.0)
    effects = engine.kv_arrived(2, 20_000, 0.0, 0.0, 0.0)
    assert Preempted("b", 0) in replies(effects), "its KV fills the memory in which a would begin"
    engine.check_integrity()


def test_a_sequence_that_is_given_up_has_left_the_scheduler() -> None:
    scheduler = Scheduler(SchedulerConfig("chunked", 100, 8), KvPool(4, 10))
    sequences = [Sequence(name, 15, 10, gives_up=name == "b") for name in ("a", "b")]
    for sequence in sequences:
        scheduler.add(sequence)
    while not scheduler.preempted:
        step = scheduler.next_step()
        assert step is not None
        scheduler.complete(step)
    (victim,) = scheduler.preempted
    assert victim is sequences[1]
    assert victim.ended
    assert not scheduler.waiting
    scheduler.check_integrity()


def test_what_was_prefilled_on_the_node_is_computed_again_there() -> None:
    engine = _engine(kv_blocks=4, block_size=10)
    for request_id in ("a", "b"):
        engine.handle(Generate(request_id, 15, 10), 0.0)
    (preempted,) = [message for message in replies(_until_preempted(engine)) if isinstance(message, Preempted)]
    assert preempted == Preempted("b", preempted.generated, recomputes=True)
    while (until_s := engine.busy_until_s) is not None:
        engine.step_done(until_s)
    assert engine.idle


def test_a_prefill_node_must_hold_what_may_be_prefilled_anew() -> None:
    node = node_spec("prefill-0", role="prefill", kv_blocks=10, block_size=10)
    alone = Engine(node, new_ticket=int)
    assert replies(alone.handle(Prefill("a", 90, 20), 0.0)) == []
    anew = Engine(msgspec.structs.replace(node, preemption="prefill"), new_ticket=int)
    assert replies(anew.handle(Prefill("a", 80, 20), 0.0)) == []
    (rejected,) = replies(anew.handle(Prefill("b", 90, 20), 0.0))
    assert isinstance(rejected, Rejected)
    assert rejected.reason.endswith("need KV for 110 tokens, prefill-0 has room for 100")


# --- the router -----------------------------------------------------------------------------------------------------


def _router(first_token: FirstToken = "handoff", *, max_tokens: int = 10) -> Router:
    """Two prefill and two decode nodes, and request a of 100 tokens submitted: on prefill-0 and decode-0."""
    router = known_router(prefill=2, decode=2, routing="round_robin", first_token=first_token, preemption="prefill")
    submit(router, "a", max_tokens=max_tokens)
    return router


def _handed_over(router: Router, attempt_id: str, n: int, tokens: int = 0) -> list[Send]:
    """The attempt's KV goes from prefill node to decode node `n`, which streams some tokens of it."""
    sends = router.handle(f"decode-{n}", Reserved(attempt_id, 7, "there"), 0.1)
    times = RequestTimes(queued_s=0.0 + n, prefill_start_s=0.1 + n, prefill_end_s=0.2 + n, kv_ready_s=0.2 + n)
    sends += router.handle(f"prefill-{n}", PrefillDone(attempt_id, times), 0.2)
    prompt_bytes = 100_000 + 5_000 * n
    received = KvReceived(attempt_id, RequestTimes(kv_start_s=0.2 + n, kv_end_s=0.3 + n, kv_bytes=prompt_bytes))
    sends += router.handle(f"decode-{n}", received, 0.3)
    for _ in range(tokens):
        sends += router.handle(f"decode-{n}", StepTokens((TokenCount(attempt_id, 1),)), 0.3)
    router.check_integrity()
    return sends


def _streamed(sends: list[Send]) -> int:
    return sum(t.n for send in sends if isinstance(send.message, Tokens) for t in send.message.tokens)


@pytest.mark.parametrize("first_token", EVERY_FIRST_TOKEN)
@pytest.mark.parametrize("told", [True, False], ids=["every step told", "merged steps"])
def test_a_request_that_was_given_up_starts_anew_with_all_that_it_has(first_token: FirstToken, told: bool) -> None:
    router = _router(first_token)
    by_prefill = 1 if first_token == "prefill" else 0
    assert _streamed(_handed_over(router, "a", 0, 5 - by_prefill if told else 0)) == (5 if told else by_prefill)
    sends = router.handle("decode-0", Preempted("a", 5), 0.5)
    assert sends == [
        Send("decode-1", Reserve("a~1", 105, 5, first_token=first_token, source="prefill-1")),
        Send("prefill-1", Prefill("a~1", 105, 5)),
    ]
    router.check_integrity()
    assert _streamed(_handed_over(router, "a~1", 1)) == by_prefill, "the next token, not the first again"
    (failed,) = [send.message for send in router.lost("decode-1") if isinstance(send.message, Finished)]
    assert failed.detail == f"node decode-1 was lost after {5 + by_prefill} tokens"


def test_the_record_has_the_first_hand_over_and_counts_what_followed() -> None:
    router = _router("recompute")
    _handed_over(router, "a", 0, 5)
    router.handle("decode-0", Preempted("a", 5, RequestTimes(streamed_s=0.4)), 0.5)
    _handed_over(router, "a~1", 1, 4)
    finish = NodeFinish("a~1", "length", RequestTimes(streamed_s=1.4))
    sends = router.handle("decode-1", StepTokens((TokenCount("a~1", 1),), (finish,)), 1.5)
    (finished,) = [send.message for send in sends if isinstance(send.message, Finished)]
    assert (finished.reason, finished.prefill_node, finished.decode_node) == ("length", "prefill-0", "decode-0")
    assert finished.times == RequestTimes(
        queued_s=0.0,
        prefill_start_s=0.1,
        prefill_end_s=0.2,
        kv_ready_s=0.2,
        kv_start_s=0.2,
        kv_end_s=0.3,
        streamed_s=0.4,
        kv_bytes=100_000,
        preemptions=1,
        kv_bytes_again=105_000,
    )
    assert router.live_requests == 0


def test_a_last_token_that_prefill_streams_needs_no_decode_node() -> None:
    router = _router("prefill", max_tokens=6)
    _handed_over(router, "a", 0, 4)
    assert router.handle("decode-0", Preempted("a", 5), 0.5) == [Send("prefill-1", Generate("a~1", 105, 1))]
    router.check_integrity()
    ended = StepTokens((TokenCount("a~1", 1),), (NodeFinish("a~1", "length"),))
    assert [type(send.message) for send in router.handle("prefill-1", ended, 0.7)] == [Tokens, Finished]


def test_a_node_that_computes_again_by_itself_is_counted_and_no_more() -> None:
    router = _router()
    _handed_over(router, "a", 0, 5)
    assert router.handle("decode-0", Preempted("a", 5, recomputes=True), 0.5) == []
    finish = StepTokens((TokenCount("a", 5),), (NodeFinish("a", "length"),))
    (finished,) = [
        send.message for send in router.handle("decode-0", finish, 0.6) if isinstance(send.message, Finished)
    ]
    assert finished.times.preemptions == 1


def test_losing_memory_is_no_failed_attempt() -> None:
    router = _router(max_tokens=20)
    attempt_id = "a"
    for n in range(3 * MAX_ATTEMPTS):
        _handed_over(router, attempt_id, n % 2, 1)
        assert router.handle(f"decode-{n % 2}", Preempted(attempt_id, 1), 0.5)
        attempt_id = f"a~{n + 1}"
    assert router.live_requests == 1


def test_word_of_an_attempt_that_was_given_up_comes_to_nothing() -> None:
    router = _router()
    _handed_over(router, "a", 0, 5)
    router.handle("decode-0", Preempted("a", 5), 0.5)
    assert router.handle("decode-0", StepTokens((TokenCount("a", 1),)), 0.6) == []
    assert router.handle("decode-0", Preempted("a", 5), 0.6) == []
    assert router.handle("client", Abort("a"), 0.7)[:2] == [
        Send("decode-1", Abort("a~1")),
        Send("prefill-1", Abort("a~1")),
    ]
    assert router.handle("decode-1", Preempted("a~1", 2), 0.8) == []
    router.check_integrity()


def test_the_prefill_node_is_released_before_another_one_is_asked() -> None:
    router = _router()
    router.handle("decode-0", Reserved("a", 7, "there"), 0.1)
    sends = router.handle("decode-0", Preempted("a", 1), 0.2)
    assert sends[0] == Send("prefill-0", Release("a"))
