"""The router: placement, tickets, tokens, lost nodes and late words of attempts that are over."""

from __future__ import annotations

import itertools

import pytest

from emulator.core.effects import Send
from emulator.core.messages import (
    Abort,
    ClusterLoad,
    Finished,
    Forget,
    Generate,
    Heartbeat,
    Hello,
    KvReady,
    KvReceived,
    NodeFinish,
    NodeLoad,
    Preempted,
    Prefill,
    PrefillDone,
    ReadLoad,
    Rejected,
    Release,
    Reserve,
    Reserved,
    SendKv,
    StepTokens,
    Submit,
    TokenCount,
    Tokens,
    Welcome,
)
from emulator.core.records import RequestTimes
from emulator.core.router import Router
from tests.routers import known_router, submit


def _places(router: Router, *prompts: int) -> list[tuple[str, ...]]:
    """Where requests with these prompts go, one after the other."""
    return [tuple(send.peer for send in submit(router, f"r{n}", prompt)) for n, prompt in enumerate(prompts)]


def _tokens(*request_ids: str, finished: tuple[NodeFinish, ...] = ()) -> StepTokens:
    return StepTokens(tuple(TokenCount(request_id, 1) for request_id in request_ids), finished)


# --- placement ----------------------------------------------------------------------------------------------------


def test_a_request_goes_to_its_decode_and_prefill_node_at_once() -> None:
    router = known_router(prefill=1, decode=1)
    assert submit(router, "a") == [
        Send("decode-0", Reserve("a", 100, 10, source="prefill-0")),
        Send("prefill-0", Prefill("a", 100, 10)),
    ]


def test_a_colocated_request_goes_to_one_node() -> None:
    assert submit(known_router(colocated=1), "a") == [Send("colocated-0", Generate("a", 100, 10))]


def test_round_robin_ignores_load_and_counts_each_role_by_itself() -> None:
    router = known_router(prefill=3, decode=2, routing="round_robin")
    assert _places(router, 9_000, 1, 1, 1) == [
        ("decode-0", "prefill-0"),
        ("decode-1", "prefill-1"),
        ("decode-0", "prefill-2"),
        ("decode-1", "prefill-0"),
    ]


def test_least_loaded_counts_queued_prompt_tokens_at_prefill_and_kv_at_decode() -> None:
    router = known_router(prefill=2, decode=2)
    assert _places(router, 900, 100, 100, 900) == [
        ("decode-0", "prefill-0"),
        ("decode-1", "prefill-1"),
        ("decode-1", "prefill-1"),
        ("decode-1", "prefill-1"),
    ]


def test_a_finished_prefill_is_no_load_any_more_but_its_kv_is() -> None:
    router = known_router(prefill=2, decode=2)
    submit(router, "long", 900)
    router.handle("prefill-0", PrefillDone("long", RequestTimes()), 1.0)
    assert _places(router, 100) == [("decode-1", "prefill-1")], "equal prompt load: the one with fewer requests"
    router.handle("decode-0", KvReceived("long", RequestTimes()), 1.0)
    assert [send.peer for send in submit(router, "b", 1_000)] == ["decode-1", "prefill-0"]


def test_least_loaded_decode_is_the_one_with_most_free_memory_not_the_fewest_tokens() -> None:
    router = known_router(prefill=1, decode=1, blocks=100)
    router.join(Hello("decode-large", "decode", "", 1_000), 16, 0.0)
    assert _places(router, 5_000, 5_000) == [("decode-large", "prefill-0")] * 2


def test_colocated_least_loaded_counts_requests_and_among_equals_prompt_tokens() -> None:
    router = known_router(colocated=2)
    assert _places(router, 9_000, 10) == [("colocated-0",), ("colocated-1",)]
    assert _places(known_router(colocated=2), 10, 9_000, 10) == [("colocated-0",), ("colocated-1",), ("colocated-0",)]


# --- a request's life -----------------------------------------------------------------------------------------------


def test_a_disaggregated_life_from_ticket_to_end() -> None:
    router = known_router(prefill=1, decode=1)
    submit(router, "a")
    assert router.handle("decode-0", Reserved("a", 7, "there"), 0.1) == [
        Send("prefill-0", SendKv("a", 7, "there", "decode-0"))
    ]
    done = PrefillDone("a", RequestTimes(queued_s=0.0, prefill_start_s=0.1, prefill_end_s=0.2))
    assert router.handle("prefill-0", done, 0.2) == []
    assert router.handle("prefill-0", KvReady("a", RequestTimes(kv_ready_s=0.25)), 0.25) == []
    assert router.handle("decode-0", _tokens("a"), 0.4) == [Send("client", Tokens((TokenCount("a", 1),)))]
    received = KvReceived("a", RequestTimes(kv_start_s=0.25, kv_end_s=0.4, kv_bytes=100))
    assert router.handle("decode-0", received, 0.4) == [Send("prefill-0", Release("a"))]
    ended = router.handle("decode-0", _tokens("a", finished=(NodeFinish("a", "length"),)), 0.5)
    times = RequestTimes(
        queued_s=0.0,
        prefill_start_s=0.1,
        prefill_end_s=0.2,
        kv_ready_s=0.25,
        kv_start_s=0.25,
        kv_end_s=0.4,
        kv_bytes=100,
    )
    assert ended == [
        Send("client", Tokens((TokenCount("a", 1),))),
        Send("client", Finished("a", "length", "", "prefill-0", "decode-0", times)),
    ]
    assert router.live_requests == 0
    router.check_integrity()


def test_a_request_that_ends_with_its_handoff_releases_the_prefill_node() -> None:
    router = known_router(prefill=1, decode=1)
    submit(router, "a", max_tokens=1)
    sends = router.handle("decode-0", _tokens("a", finished=(NodeFinish("a", "length"),)), 0.4)
    assert Send("prefill-0", Release("a")) in sends
    assert router.handle("decode-0", KvReceived("a", RequestTimes()), 0.4) == []
    router.check_integrity()


# --- words that are overtaken ---------------------------------------------------------------------------------------

DONE = RequestTimes(queued_s=0.0, prefill_start_s=0.1, prefill_end_s=0.2)
READY = RequestTimes(kv_ready_s=0.25)
MOVED = RequestTimes(kv_start_s=0.25, kv_end_s=0.4, kv_bytes=100)


def _ended_before_prefill_was_told() -> Router:
    """A router that has passed on the one token of request `a`, but has heard nothing of its prefill."""
    router = known_router(prefill=1, decode=1)
    submit(router, "a", max_tokens=1)
    ended = _tokens("a", finished=(NodeFinish("a", "length", MOVED),))
    assert router.handle("decode-0", ended, 0.4) == [
        Send("client", Tokens((TokenCount("a", 1),))),
        Send("prefill-0", Release("a")),
    ]
    router.check_integrity()
    return router


def _told(sends: list[Send]) -> Finished:
    """The one thing that a client is told: the end of a request."""
    (send,) = sends
    assert isinstance(send.message, Finished)
    return send.message


@pytest.mark.parametrize("turned", [False, True])
def test_the_end_waits_for_the_times_of_the_prefill_node_and_tokens_do_not(turned: bool) -> None:
    router = _ended_before_prefill_was_told()
    words: list[PrefillDone | KvReady] = [PrefillDone("a", DONE), KvReady("a", READY)]
    first, second = reversed(words) if turned else words
    assert router.handle("prefill-0", first, 0.41) == []
    end = _told(router.handle("prefill-0", second, 0.42))
    assert (end.reason, end.times) == ("length", DONE.merged(READY).merged(MOVED))
    assert router.live_requests == 0
    router.check_integrity()


def test_times_that_come_after_the_kv_are_noted_of_a_request_that_goes_on() -> None:
    router = known_router(prefill=1, decode=1)
    submit(router, "a", max_tokens=2)
    router.handle("decode-0", _tokens("a"), 0.4)
    assert router.handle("decode-0", KvReceived("a", MOVED), 0.4) == [Send("prefill-0", Release("a"))]
    assert router.handle("prefill-0", PrefillDone("a", DONE.merged(READY)), 0.41) == []
    (_, end) = router.handle("decode-0", _tokens("a", finished=(NodeFinish("a", "length"),)), 0.5)
    assert _told([end]).times == DONE.merged(READY).merged(MOVED)


def test_the_first_prefills_times_are_noted_of_a_request_that_is_prefilled_again() -> None:
    router = known_router(prefill=1, decode=1, preemption="prefill")
    submit(router, "a", max_tokens=3)
    router.handle("decode-0", KvReceived("a", MOVED), 0.4)
    router.handle("decode-0", _tokens("a"), 0.4)
    router.handle("decode-0", Preempted("a", 1), 0.4)
    assert router.handle("prefill-0", PrefillDone("a", DONE.merged(READY)), 0.41) == []
    router.handle("decode-0", KvReceived("a~1", MOVED), 0.9)
    end = _told(router.handle("decode-0", StepTokens((), (NodeFinish("a~1", "length"),)), 0.9))
    again = RequestTimes(preemptions=1, kv_bytes_again=100)
    assert end.times == DONE.merged(READY).merged(MOVED).merged(again)


def test_the_end_does_not_wait_for_a_prefill_node_that_is_lost() -> None:
    assert _told(_ended_before_prefill_was_told().lost("prefill-0")).reason == "length"


@pytest.mark.parametrize("how", ["abort", "gone", "late"])
def test_a_request_that_has_all_its_tokens_ends_well_whatever_comes_before_that_is_told(how: str) -> None:
    router = _ended_before_prefill_was_told()
    match how:
        case "abort":
            sends = router.handle("client", Abort("a"), 0.5)
        case "gone":
            sends = router.lost("client")
        case _:
            for node in ("prefill-0", "decode-0"):
                router.dismiss(node)
            sends = router.tick(1000.0)
    assert (_told(sends).reason, _told(sends).times) == ("length", MOVED)
    assert router.live_requests == 0
    router.check_integrity()


# --- first token and admission --------------------------------------------------------------------------------------


def test_the_decode_node_is_told_who_streams_the_first_token() -> None:
    for first_token in ("prefill", "recompute"):
        router = known_router(prefill=1, decode=1, first_token=first_token)
        assert submit(router, "a")[0] == Send(
            "decode-0", Reserve("a", 100, 10, first_token=first_token, source="prefill-0")
        )


def test_a_first_token_from_prefill_goes_out_when_the_prompt_is_done() -> None:
    router = known_router(prefill=1, decode=1, first_token="prefill")
    submit(router, "a")
    first = [Send("client", Tokens((TokenCount("a", 1),)))]
    done = PrefillDone("a", RequestTimes(prefill_end_s=0.2, kv_ready_s=0.2))
    assert router.handle("prefill-0", done, 0.2) == first
    assert router.handle("decode-0", KvReceived("a", RequestTimes(kv_end_s=0.4)), 0.4) == [
        Send("prefill-0", Release("a"))
    ]
    ended = router.handle("decode-0", _tokens("a", finished=(NodeFinish("a", "length"),)), 0.5)
    times = RequestTimes(prefill_end_s=0.2, kv_ready_s=0.2, kv_end_s=0.4, streamed_s=0.2)
    assert ended == [*first, Send("client", Finished("a", "length", "", "prefill-0", "decode-0", times))]
    router.check_integrity()


def test_a_first_token_from_prefill_is_streamed_once_even_if_word_of_it_is_overtaken() -> None:
    router = known_router(prefill=1, decode=1, first_token="prefill")
    submit(router, "a")
    assert router.handle("decode-0", KvReceived("a", RequestTimes()), 0.4) == [
        Send("client", Tokens((TokenCount("a", 1),))),
        Send("prefill-0", Release("a")),
    ]
    assert router.handle("prefill-0", PrefillDone("a", RequestTimes()), 0.41) == []


def test_a_request_for_the_first_token_alone_never_meets_a_decode_node_where_prefill_streams_it() -> None:
    router = known_router(prefill=2, decode=1, first_token="prefill")
    assert submit(router, "a", max_tokens=1) == [Send("prefill-0", Generate("a", 100, 1))]
    assert submit(router, "b", max_tokens=1) == [Send("prefill-1", Generate("b", 100, 1))]
    assert router.handle("prefill-0", _tokens("a", finished=(NodeFinish("a", "length"),)), 0.1) == [
        Send("client", Tokens((TokenCount("a", 1),))),
        Send("client", Finished("a", "length", "", "prefill-0", "prefill-0")),
    ]
    router.check_integrity()
    assert router.lost("prefill-1") == [Send("prefill-0", Generate("b~1", 100, 1))]
    (*_, finished) = router.lost("prefill-0")
    assert isinstance(finished.message, Finished)
    assert finished.message.detail == "no prefill node is left"


def test_a_lost_decode_node_fails_a_request_whose_first_token_prefill_has_streamed() -> None:
    router = known_router(prefill=1, decode=2, first_token="prefill")
    submit(router, "a")
    router.handle("prefill-0", PrefillDone("a", RequestTimes()), 0.2)
    (*_, finished) = router.lost("decode-0")
    assert isinstance(finished.message, Finished)
    assert finished.message.detail == "node decode-0 was lost after 1 tokens"


def test_reserving_first_prefill_is_told_to_wait_for_the_ticket() -> None:
    router = known_router(prefill=1, decode=1, admission="decode_reserve_first")
    assert submit(router, "a") == [
        Send("decode-0", Reserve("a", 100, 10, source="prefill-0")),
        Send("prefill-0", Prefill("a", 100, 10, await_ticket=True)),
    ]
    assert router.handle("decode-0", Reserved("a", 7, "there"), 0.1) == [
        Send("prefill-0", SendKv("a", 7, "there", "decode-0"))
    ]


def test_prefilling_first_a_decode_node_is_chosen_and_asked_when_the_prompt_is_done() -> None:
    router = known_router(prefill=1, decode=2, admission="prefill_first")
    assert submit(router, "a", 500) == [Send("prefill-0", Prefill("a", 500, 10))]
    assert submit(router, "b", 100) == [Send("prefill-0", Prefill("b", 100, 10))]
    assert router.lost("decode-0") == [], "nobody waits for it"
    router.join(Hello("decode-2", "decode", "", 1_000), 16, 0.0)
    assert router.handle("prefill-0", PrefillDone("a", RequestTimes()), 0.5) == [
        Send("decode-1", Reserve("a", 500, 10, source="prefill-0"))
    ]
    router.check_integrity()
    assert router.handle("prefill-0", PrefillDone("b", RequestTimes()), 0.6) == [
        Send("decode-2", Reserve("b", 100, 10, source="prefill-0"))
    ]
    router.check_integrity()


def test_prefilling_first_a_request_fails_when_no_decode_node_is_left_then() -> None:
    router = known_router(prefill=1, decode=1, admission="prefill_first")
    submit(router, "a")
    router.lost("decode-0")
    assert router.handle("prefill-0", PrefillDone("a", RequestTimes()), 0.5) == [
        Send("prefill-0", Abort("a")),
        Send("client", Finished("a", "error", "no decode node is left", "prefill-0", None, cause="unavailable")),
    ]
    router.check_integrity()


# --- tokens and endings ---------------------------------------------------------------------------------------------


def test_one_steps_tokens_reach_each_client_in_one_message() -> None:
    router = known_router(colocated=1)
    for client, request_id in (("client", "a"), ("other", "b"), ("client", "c")):
        router.handle(client, Submit(request_id, 10, 5), 0.0)
    assert router.handle("colocated-0", _tokens("a", "b", "c"), 0.1) == [
        Send("client", Tokens((TokenCount("a", 1), TokenCount("c", 1)))),
        Send("other", Tokens((TokenCount("b", 1),))),
    ]


def test_a_refused_request_ends_at_once_with_the_reason_and_leaves_no_trace_at_the_other_node() -> None:
    router = known_router(prefill=1, decode=1)
    submit(router, "a")
    sends = router.handle("decode-0", Rejected("a", "too long"), 0.1)
    assert sends == [
        Send("decode-0", Abort("a")),
        Send("prefill-0", Abort("a")),
        Send("client", Finished("a", "error", "too long", "prefill-0", "decode-0", cause="impossible")),
    ]
    assert router.handle("prefill-0", Rejected("a", "too long"), 0.1) == []
    router.check_integrity()


def test_an_abort_frees_both_nodes_and_is_confirmed() -> None:
    router = known_router(prefill=1, decode=1)
    submit(router, "a")
    assert [send.peer for send in router.handle("client", Abort("a"), 0.1)] == ["decode-0", "prefill-0", "client"]
    assert router.handle("client", Abort("a"), 0.1) == []
    router.check_integrity()


def test_a_client_cannot_abort_what_another_has_submitted() -> None:
    router = known_router(colocated=1)
    submit(router, "a")
    assert router.handle("other", Abort("a"), 0.1) == []
    assert router.live_requests == 1


def test_a_request_past_its_deadline_fails() -> None:
    router = known_router(colocated=1)
    submit(router, "a")
    router.handle("colocated-0", Heartbeat(1, 1, 0), 59.0)
    assert router.tick(60.0) == []
    assert router.tick(60.1) == [
        Send("colocated-0", Abort("a")),
        Send(
            "client",
            Finished("a", "error", "not finished within 60 s", "colocated-0", "colocated-0", cause="timeout"),
        ),
    ]
    router.check_integrity()


# --- request ids ----------------------------------------------------------------------------------------------------


def test_an_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    router = known_router(colocated=1)
    submit(router, "a")
    assert router.handle("other", Submit("a", 5, 5), 0.1) == [
        Send("other", Finished("a", "error", "this request id is in use", cause="impossible"))
    ]
    assert router.handle("colocated-0", _tokens("a"), 0.2) == [Send("client", Tokens((TokenCount("a", 1),)))]


def test_an_id_that_could_be_another_requests_second_attempt_is_refused() -> None:
    router = known_router(colocated=1)
    refused = Finished("a~1", "error", "a request id must not contain ~", cause="impossible")
    assert submit(router, "a~1") == [Send("client", refused)]


def test_an_id_may_be_used_again_only_when_nodes_have_stopped_talking_about_the_first() -> None:
    router = known_router(colocated=1)
    submit(router, "a")
    router.handle("client", Abort("a"), 0.1)
    (refused,) = submit(router, "a")
    why = "this request id was in use until just now"
    assert refused == Send("client", Finished("a", "error", why, cause="impossible"))
    for now_s in (5.0, 10.0, 15.0):
        router.handle("colocated-0", Heartbeat(1, 0, 0), now_s)
        router.tick(now_s)
    assert submit(router, "a") == [Send("colocated-0", Generate("a", 100, 10))]


# --- lost nodes -----------------------------------------------------------------------------------------------------


def test_a_request_without_tokens_goes_to_another_node_when_its_node_is_lost() -> None:
    router = known_router(prefill=2, decode=2)
    submit(router, "a")
    assert router.lost("decode-0") == [
        Send("prefill-0", Abort("a")),
        Send("decode-1", Reserve("a~1", 100, 10, source="prefill-0")),
        Send("prefill-0", Prefill("a~1", 100, 10)),
    ]
    router.check_integrity()
    assert router.handle("prefill-0", _tokens("a~1"), 0.2) == [], "tokens come from the decode node alone"
    assert router.handle("decode-1", _tokens("a~1"), 0.2) == [Send("client", Tokens((TokenCount("a", 1),)))]


def test_what_a_lost_attempt_still_says_is_not_taken_for_the_present_one() -> None:
    router = known_router(prefill=1, decode=2)
    submit(router, "a")
    router.lost("decode-0")
    old = RequestTimes(prefill_end_s=99.0, kv_ready_s=99.0, kv_bytes=99)
    for peer, message in (
        ("prefill-0", PrefillDone("a", old)),
        ("prefill-0", KvReady("a", old)),
        ("decode-1", Reserved("a", 7, "there")),
        ("decode-1", _tokens("a", finished=(NodeFinish("a", "length"),))),
        ("prefill-0", Rejected("a", "old")),
    ):
        assert router.handle(peer, message, 0.2) == []
    router.handle("decode-1", _tokens("a~1", finished=(NodeFinish("a~1", "length"),)), 0.3)
    own = RequestTimes(prefill_end_s=0.2, kv_ready_s=0.2)
    assert router.handle("prefill-0", PrefillDone("a~1", own), 0.3) == [
        Send("client", Finished("a", "length", "", "prefill-0", "decode-1", own))
    ]


def test_a_lost_node_itself_is_not_listened_to() -> None:
    router = known_router(colocated=2)
    submit(router, "a")
    router.lost("colocated-0")
    assert router.handle("colocated-0", _tokens("a"), 0.2) == []
    assert router.ignored == 1


def test_a_lost_node_that_speaks_again_forgets_what_it_had_and_serves_on() -> None:
    router = known_router(prefill=1, decode=1)
    submit(router, "a")
    router.handle("decode-0", _tokens("a"), 0.2)
    router.lost("prefill-0")
    assert list(router.away) == ["prefill-0"]
    assert router.handle("prefill-0", Heartbeat(1, 2, 3), 6.0) == [
        Send("prefill-0", Forget()),
        Send("prefill-0", Welcome()),
    ]
    assert (list(router.away), router.lost_nodes) == ([], ["prefill-0"])
    assert NodeLoad("prefill-0", Heartbeat(1, 2, 3)) in router.loads
    assert _places(router, 100) == [("decode-0", "prefill-0")]
    assert router.handle("prefill-0", PrefillDone("a", RequestTimes()), 6.1) == [], "that is over"
    router.handle("decode-0", Heartbeat(1, 2, 3), 10.0)
    assert router.tick(10.9) == [], "its silence counts anew"
    router.check_integrity()


def test_a_request_that_has_streamed_tokens_fails_with_its_node() -> None:
    router = known_router(prefill=1, decode=2)
    submit(router, "a")
    router.handle("decode-0", _tokens("a"), 0.2)
    router.handle("decode-0", KvReceived("a", RequestTimes()), 0.2)
    (finished,) = router.lost("decode-0")
    assert finished == Send(
        "client",
        Finished("a", "error", "node decode-0 was lost after 1 tokens", "prefill-0", "decode-0", cause="unavailable"),
    )


def test_a_prefill_node_lost_after_the_handover_costs_nothing() -> None:
    router = known_router(prefill=1, decode=1)
    submit(router, "a")
    router.handle("decode-0", _tokens("a"), 0.2)
    router.handle("decode-0", KvReceived("a", RequestTimes()), 0.2)
    assert router.lost("prefill-0") == []
    assert router.live_requests == 1


def test_a_request_fails_after_three_attempts() -> None:
    router = known_router(colocated=4)
    submit(router, "a")
    assert [s.message for s in router.lost("colocated-0")] == [Generate("a~1", 100, 10)]
    assert [s.message for s in router.lost("colocated-1")] == [Generate("a~2", 100, 10)]
    (finished,) = router.lost("colocated-2")
    assert isinstance(finished.message, Finished)
    assert finished.message.detail == "node colocated-2 was lost, and 3 attempts failed"
    assert finished.message.cause == "unavailable"


@pytest.mark.parametrize(("lost", "left"), [("prefill-0", "prefill"), ("decode-0", "decode")])
def test_without_a_node_of_a_role_requests_fail_at_once(lost: str, left: str) -> None:
    router = known_router(prefill=1, decode=1)
    submit(router, "a")
    *aborts, finished = router.lost(lost)
    assert [send.message for send in aborts] == [Abort("a")]
    assert isinstance(finished.message, Finished)
    assert finished.message.detail == f"no {left} node is left"
    assert finished.message.cause == "unavailable"
    (again,) = submit(router, "b")
    assert isinstance(again.message, Finished)


def test_a_lost_clients_requests_are_aborted_and_that_is_said_for_whoever_keeps_records() -> None:
    router = known_router(colocated=1)
    submit(router, "a")
    router.handle("other", Submit("b", 10, 5), 0.0)
    abort, finished = router.lost("client")
    assert abort == Send("colocated-0", Abort("a"))
    assert finished.peer == "client"
    assert isinstance(finished.message, Finished)
    assert (finished.message.request_id, finished.message.reason) == ("a", "aborted")
    assert router.live_requests == 1
    router.check_integrity()


def test_a_heartbeat_is_answered_and_silence_is_loss() -> None:
    router = known_router(colocated=2)
    submit(router, "a")
    assert router.handle("colocated-1", Heartbeat(1, 0, 0), 4.0) == [Send("colocated-1", Welcome())]
    assert router.tick(5.0) == []
    assert router.tick(5.1) == [Send("colocated-1", Generate("a~1", 100, 10))]


def test_the_silence_of_a_node_that_has_nothing_more_to_say_is_no_loss() -> None:
    router = known_router(colocated=2)
    router.dismiss("colocated-0")
    router.dismiss("client")
    router.tick(100.0)
    assert router.lost_nodes == ["colocated-1"]


# --- strangers and nonsense -------------------------------------------------------------------------------------------


def test_what_a_peer_may_not_say_is_counted_and_ignored() -> None:
    router = known_router(colocated=1)
    submit(router, "a")
    counts = itertools.count(1)
    for peer, message in (
        ("stranger", Submit("b", 10, 5)),
        ("client", _tokens("a")),
        ("client", Heartbeat(1, 1, 1)),
        ("colocated-0", Submit("b", 10, 5)),
    ):
        assert router.handle(peer, message, 0.1) == []
        assert router.ignored == next(counts)


def test_a_node_cannot_speak_for_requests_of_another() -> None:
    router = known_router(colocated=2)
    submit(router, "a")
    assert router.handle("colocated-1", _tokens("a", finished=(NodeFinish("a", "length"),)), 0.1) == []
    assert router.handle("colocated-1", Rejected("a", "mine"), 0.1) == []
    assert router.live_requests == 1


def test_a_client_hears_what_each_node_said_last_of_its_load() -> None:
    router = known_router(prefill=1, decode=1)
    assert router.handle("client", ReadLoad(), 0.0) == [Send("client", ClusterLoad(()))]
    for load in (Heartbeat(900, 1, 0), Heartbeat(800, 2, 1)):
        assert router.handle("decode-0", load, 1.0) == [Send("decode-0", Welcome())]
    assert router.handle("client", ReadLoad(), 1.0) == [
        Send("client", ClusterLoad((NodeLoad("decode-0", Heartbeat(800, 2, 1)),)))
    ]
    router.lost("decode-0")
    assert router.handle("client", ReadLoad(), 2.0) == [Send("client", ClusterLoad(()))]
