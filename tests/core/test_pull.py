"""Pulled KV: what a decode node reads when, and what router, prefill and decode node say to each other about it."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.deployments import Admission
from emulator.core.effects import CloseTicket, OpenTicket, Reply, Send, Transmit
from emulator.core.engine import Engine
from emulator.core.messages import (
    Abort,
    Admit,
    KvComputed,
    KvReady,
    Prefill,
    PrefillDone,
    ReadKv,
    Reserve,
    Reserved,
    SendKv,
)
from emulator.core.reads import Reads
from emulator.core.records import RequestTimes
from emulator.core.router import Router
from tests.builders import node_spec
from tests.engines import engine_of, replies
from tests.routers import known_router, submit

# --- which prompts are read -----------------------------------------------------------------------------------------


def _expect(reads: Reads, *request_ids: str, source: str = "p0") -> None:
    for request_id in request_ids:
        reads.expect(request_id, source, computed=False)


def _begun(reads: Reads) -> list[str]:
    return [request_id for request_id, _ in reads.begin(0.0)]


def _readable(reads: Reads, *request_ids: str) -> None:
    for request_id in request_ids:
        reads.granted(request_id)
        reads.computed(request_id)


def test_a_prompt_is_read_once_it_has_memory_and_is_computed_whichever_comes_first() -> None:
    reads = Reads(5)
    _expect(reads, "a", "b")
    reads.granted("a")
    reads.computed("b")
    assert _begun(reads) == []
    reads.granted("b")
    reads.computed("a")
    assert _begun(reads) == ["b", "a"], "in the order in which they became readable"
    assert _begun(reads) == [], "once"


def test_a_prompt_that_is_computed_when_memory_is_asked_for_needs_memory_alone() -> None:
    reads = Reads(1)
    reads.expect("a", "p0", computed=True)
    assert _begun(reads) == []
    reads.granted("a")
    assert _begun(reads) == ["a"]


def test_a_source_is_read_from_only_so_often_at_a_time_and_stops_no_other() -> None:
    reads = Reads(2)
    _expect(reads, "a", "b", "c", "d")
    _expect(reads, "other", source="p1")
    _readable(reads, "a", "b", "c", "d", "other")
    assert _begun(reads) == ["a", "b", "other"]
    reads.over("b")
    assert _begun(reads) == ["c"]
    reads.over("d")
    reads.over("a")
    assert _begun(reads) == [], "d is not wanted any more"


def test_nobody_wants_to_know_of_a_prompt_whose_request_has_left() -> None:
    reads = Reads(1)
    _expect(reads, "a")
    reads.over("a")
    reads.computed("a")
    reads.over("stranger")
    assert _begun(reads) == []


STEPS = st.lists(
    st.tuples(st.sampled_from(["expect", "granted", "computed", "over", "over"]), st.integers(0, 7)), max_size=60
)


@given(st.integers(1, 3), STEPS)
def test_reads_begin_as_soon_as_they_may_in_order_and_none_twice(most: int, steps: list[tuple[str, int]]) -> None:
    reads, alive, granted, computed = Reads(most), set[int](), set[int](), set[int]()
    order: list[int] = []
    reading: set[int] = set()
    for what, n in steps:
        if what == "expect" and n not in alive:
            reads.expect(str(n), f"p{n % 2}", computed=False)
            alive.add(n)
        elif what == "granted" and n in alive - granted:
            reads.granted(str(n))
            granted.add(n)
        elif what == "computed" and n not in computed:
            reads.computed(str(n))
            if n in alive:
                computed.add(n)
        elif what == "over":
            reads.over(str(n))
            for those in (alive, granted, computed, reading):
                those.discard(n)
        order = [m for m in order if m in alive] + sorted((granted & computed) - set(order))
        expected = []
        for m in order:
            if m not in reading and sum(m % 2 == other % 2 for other in reading) < most:
                reading.add(m)
                expected.append(str(m))
        assert reads.due or not expected, "nobody would ask"
        assert _begun(reads) == expected
        reads.check_integrity()


# --- nodes ----------------------------------------------------------------------------------------------------------


def _engine(role: str = "decode", **changes: object) -> Engine:
    node = node_spec(f"{role}-0", role="decode" if role == "decode" else "prefill")
    node = msgspec.structs.replace(node, transfer_mode="pull", **changes)
    return engine_of(node)


def _reserve(request_id: str, *, source: str = "prefill-0", computed: bool = False) -> Reserve:
    return Reserve(request_id, 100, 5, source=source, computed=computed)


def test_a_decode_node_reserves_and_asks_for_kv_when_it_is_computed() -> None:
    engine = _engine()
    reserved = engine.handle(_reserve("a"), 0.0)
    assert reserved == [OpenTicket("a", 1, 100_000, "prefill-0"), Reply(Reserved("a", 1, "here"))]
    assert engine.handle(KvComputed("a"), 0.1) == [Reply(ReadKv("a", 1, "here", 0.1))]
    engine.check_integrity()


def test_kv_that_is_computed_already_is_asked_for_with_the_ticket() -> None:
    assert replies(_engine().handle(_reserve("a", computed=True), 0.0)) == [
        Reserved("a", 1, "here"),
        ReadKv("a", 1, "here", 0.0),
    ]


def test_kv_that_is_computed_before_there_is_memory_is_asked_for_when_there_is() -> None:
    engine = _engine(kv_blocks=10)
    engine.handle(_reserve("a"), 0.0)
    assert engine.handle(_reserve("b"), 0.0) == []
    assert engine.handle(KvComputed("b"), 0.1) == []
    assert engine.handle(Abort("a"), 0.2) == [
        CloseTicket(1),
        OpenTicket("b", 2, 100_000, "prefill-0"),
        Reply(Reserved("b", 2, "here")),
        Reply(ReadKv("b", 2, "here", 0.2)),
    ]
    engine.check_integrity()


def test_reads_from_one_node_follow_each_other_whether_they_end_or_are_aborted() -> None:
    engine = _engine()
    for request_id in ("a", "b", "c"):
        engine.handle(_reserve(request_id), 0.0)
    engine.handle(_reserve("other", source="prefill-1"), 0.0)
    asked = [replies(engine.handle(KvComputed(request_id), 0.1)) for request_id in ("a", "c", "b", "other")]
    assert asked == [[ReadKv("a", 1, "here", 0.1)], [], [], [ReadKv("other", 4, "here", 0.1)]]
    assert ReadKv("c", 3, "here", 0.1) in replies(engine.kv_arrived(1, 100_000, 0.1, 0.2, 0.2))
    assert replies(engine.handle(Abort("c"), 0.25)) == [ReadKv("b", 2, "here", 0.1)], (
        "and each says since when it could have been read"
    )
    engine.check_integrity()


def test_word_that_the_kv_of_an_aborted_request_is_computed_comes_to_nothing() -> None:
    engine = _engine()
    engine.handle(_reserve("a"), 0.0)
    engine.handle(Abort("a"), 0.1)
    assert engine.handle(KvComputed("a"), 0.2) == []
    assert engine.idle


def test_a_prefill_node_starts_when_it_is_admitted_and_sends_when_it_is_asked() -> None:
    engine = _engine("prefill")
    assert engine.handle(Prefill("a", 100, 5, await_ticket=True), 0.0) == []
    engine.handle(Admit("a"), 0.3)
    (done,) = replies(engine.step_done(0.4))
    times = RequestTimes(queued_s=0.0, admitted_s=0.3, prefill_start_s=0.3, prefill_end_s=0.4)
    assert done == PrefillDone("a", times)
    assert engine.handle(SendKv("a", 7, "there", "decode-0"), 0.5) == [
        Transmit("a", 7, "there", "decode-0", 0, 100_000, 100_000),
        Reply(KvReady("a", RequestTimes(kv_ready_s=0.5))),
    ]
    assert engine.handle(Admit("a"), 0.6) == [], "late word changes nothing"
    assert engine.handle(Admit("stranger"), 0.6) == []


# --- the router -----------------------------------------------------------------------------------------------------


def _router(admission: Admission = "dispatch") -> Router:
    """One prefill and one decode node, and request a of 100 and 10 tokens submitted."""
    router = known_router(prefill=1, decode=1, admission=admission, transfer_mode="pull")
    submit(router, "a")
    return router


def _done(router: Router) -> list[Send]:
    return router.handle("prefill-0", PrefillDone("a", RequestTimes(prefill_end_s=0.2)), 0.2)


def test_the_ticket_goes_on_to_the_prefill_node_when_the_decode_node_asks() -> None:
    router = _router()
    assert router.handle("decode-0", Reserved("a", 7, "there"), 0.1) == []
    assert _done(router) == [Send("decode-0", KvComputed("a"))]
    assert router.handle("decode-0", ReadKv("a", 7, "there", 0.15), 0.2) == [
        Send("prefill-0", SendKv("a", 7, "there", "decode-0", 0.15))
    ]


def test_a_prefill_that_waits_for_decode_memory_is_admitted_when_there_is_some() -> None:
    router = _router("decode_reserve_first")
    assert router.handle("decode-0", Reserved("a", 7, "there"), 0.1) == [Send("prefill-0", Admit("a"))]
    assert _done(router) == [Send("decode-0", KvComputed("a"))]


def test_a_decode_node_that_is_asked_after_the_prefill_knows_that_it_may_read() -> None:
    router = _router("prefill_first")
    assert _done(router) == [Send("decode-0", Reserve("a", 100, 10, computed=True, source="prefill-0"))]
    assert router.handle("decode-0", Reserved("a", 7, "there"), 0.2) == [], "the same node asks by itself"


def test_kv_of_a_request_that_has_left_is_not_read() -> None:
    router = _router()
    _done(router)
    router.handle("client", Abort("a"), 0.2)
    assert router.handle("decode-0", ReadKv("a", 7, "there", 0.3), 0.3) == []
    assert router.ignored == 0
