"""The wire: every message survives it unchanged, and nothing that is not a message gets through."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Callable

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core import messages
from emulator.core.errors import ProtocolError
from emulator.core.message_codec import MAX_MESSAGE_BYTES, decode_to_client, decode_to_node, decode_to_router, encode
from emulator.core.messages import (
    Abort,
    Admit,
    Assembled,
    Begin,
    ClockReading,
    ClusterLoad,
    EndRecord,
    Finished,
    Forget,
    Generate,
    Heartbeat,
    Hello,
    KvComputed,
    KvReady,
    KvReceived,
    LinkProbe,
    Message,
    NodeBack,
    NodeFinish,
    NodeLoad,
    NodeLost,
    OpenProbe,
    Preempted,
    Prefill,
    PrefillDone,
    ProbeDone,
    ProbeOpened,
    ReadClock,
    ReadKv,
    ReadLoad,
    Rejected,
    Release,
    Report,
    Reserve,
    Reserved,
    SendKv,
    SendProbe,
    StepTokens,
    Stop,
    Submit,
    TokenCount,
    Tokens,
    Welcome,
)
from emulator.core.records import RequestTimes
from tests.examples import examples

TIMES = RequestTimes(queued_s=0.0, prefill_start_s=0.25, kv_end_s=1.5, kv_bytes=655_360_000)
TOKENS = (TokenCount("a", 1), TokenCount("b", 3))

TO_ROUTER: tuple[Message, ...] = (
    Hello("prefill-0", "prefill", "secret", 1_000),
    Hello("client", "client", "secret"),
    Submit("a", 2_000, 150),
    Abort("a"),
    ReadLoad(),
    ReadClock(3.5),
    PrefillDone("a", TIMES),
    KvReady("a", TIMES),
    Reserved("a", 2**63 - 1, "tcp://127.0.0.1:4711"),
    ReadKv("a", 7, "tcp://127.0.0.1:4711", 1.5),
    Preempted("a", 12),
    Preempted("a", 12, TIMES, recomputes=True),
    KvReceived("a", RequestTimes()),
    StepTokens(TOKENS, (NodeFinish("a", "length", TIMES), NodeFinish("b", "error"))),
    StepTokens(()),
    Rejected("a", "prompt of 0 and 5 output tokens: both must be at least 1"),
    Rejected("a", "given up", "unavailable"),
    Heartbeat(1, 2, 3),
    Begin(12.5),
    Stop(),
    Report("decode-0", b"\x00\xff{", False),
    ProbeOpened("tcp://127.0.0.1:4711", (1, 2**62)),
    ProbeDone(0.2, (0.001, 0.002)),
)
TO_NODE: tuple[Message, ...] = (
    Welcome(),
    ClockReading(3.5, 1_000.25),
    Begin(12.5),
    EndRecord(),
    Stop(),
    Generate("a", 1, 2),
    Prefill("a", 1, 2),
    Prefill("a", 1, 2, await_ticket=True),
    Reserve("a", 1, 2, first_token="recompute"),
    Reserve("ä ~ 漢", 1, 2),
    Admit("a"),
    Reserve("a", 1, 2, computed=True, source="prefill-0"),
    KvComputed("a"),
    SendKv("a", 7, "tcp://127.0.0.1:4711", "decode-0"),
    SendKv("a", 7, "tcp://127.0.0.1:4711", "decode-0", 1.5),
    Release("a"),
    Abort("a"),
    Forget(),
    OpenProbe(7, 20_000_000),
    SendProbe("tcp://127.0.0.1:4711", (1, 2), 20_000_000),
)
TO_CLIENT: tuple[Message, ...] = (
    Welcome(),
    ClockReading(3.5, 1_000.25),
    Begin(12.5),
    EndRecord(),
    EndRecord(7),
    Stop(),
    Tokens(TOKENS),
    Finished("a", "length"),
    Finished("a", "error", "node was lost", "prefill-0", "decode-0", TIMES, "unavailable"),
    NodeLost("decode-0"),
    NodeBack("decode-0"),
    ClusterLoad(()),
    ClusterLoad((NodeLoad("decode-0", Heartbeat(900, 3, 1)),)),
    Assembled(),
    Assembled((LinkProbe("prefill-0", "decode-0", 20_000_000, 0.2, (0.001,)),)),
    Report("router", b"", True),
)
Decode = Callable[[bytes], Message]
RECEIVERS: tuple[tuple[Decode, tuple[Message, ...], object], ...] = (
    (decode_to_router, TO_ROUTER, messages.ToRouter),
    (decode_to_node, TO_NODE, messages.ToNode),
    (decode_to_client, TO_CLIENT, messages.ToClient),
)
BOTH = [(decode, message) for decode, sent, _ in RECEIVERS for message in sent]
DECODERS: tuple[Decode, ...] = (decode_to_router, decode_to_node, decode_to_client)


def _id(value: Decode | Message) -> str:
    """The same in every process, as a function's `str` is not."""
    return str(value) if isinstance(value, Message) else value.__name__


@pytest.mark.parametrize(("decode", "message"), BOTH, ids=_id)
def test_every_message_survives_the_wire(decode: Decode, message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(("_decode", "sent", "union"), RECEIVERS)
def test_the_samples_above_cover_every_message_a_receiver_knows(
    _decode: Decode, sent: tuple[Message, ...], union: object
) -> None:
    assert {type(message) for message in sent} == set(typing.get_args(union))


def test_every_message_has_a_receiver() -> None:
    declared = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    }
    assert declared == {type(message) for _, sent, _ in RECEIVERS for message in sent}


@pytest.mark.parametrize(("decode", "message"), BOTH, ids=_id)
def test_an_unknown_field_is_refused(decode: Decode, message: Message) -> None:
    with pytest.raises(ProtocolError, match="unknown field `surprise`"):
        decode(msgpack.packb({**msgspec.to_builtins(message), "surprise": 1}))


@pytest.mark.parametrize(("decode", "message"), BOTH, ids=_id)
def test_a_message_cut_short_or_with_more_behind_it_is_refused(decode: Decode, message: Message) -> None:
    data = encode(message)
    for wrong in (data[:-1], data + b"\x00"):
        with pytest.raises(ProtocolError):
            decode(wrong)


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (decode_to_router, Generate("a", 1, 2)),
        (decode_to_router, Tokens(TOKENS)),
        (decode_to_node, Submit("a", 1, 2)),
        (decode_to_node, StepTokens(TOKENS)),
        (decode_to_client, Release("a")),
        (decode_to_client, Heartbeat(1, 2, 3)),
    ],
    ids=_id,
)
def test_a_message_for_another_receiver_is_refused(decode: Decode, message: Message) -> None:
    with pytest.raises(ProtocolError, match="Invalid value"):
        decode(encode(message))


@pytest.mark.parametrize(
    "content",
    [
        None,
        7,
        "Stop",
        [],
        {},
        {"type": None},
        {"type": "Nonsense"},
        {"type": ["Stop"]},
        {"type": "Submit"},
        {"type": "Submit", "request_id": "a", "prompt_tokens": "12", "max_tokens": 1},
        {"type": "Submit", "request_id": "a", "prompt_tokens": 1.5, "max_tokens": 1},
        {"type": "Submit", "request_id": "a", "prompt_tokens": True, "max_tokens": 1},
        {"type": "Submit", "request_id": b"a", "prompt_tokens": 1, "max_tokens": 1},
        {"type": "Submit", "request_id": None, "prompt_tokens": 1, "max_tokens": 1},
        {"type": "Hello", "name": "a", "role": "admin", "secret": "x"},
        {"type": "StepTokens", "tokens": [["a"]]},
        {"type": "StepTokens", "tokens": [["a", 1, 2]]},
        {"type": "StepTokens", "tokens": [{"request_id": "a", "n": 1}]},
        {"type": "PrefillDone", "request_id": "a", "times": {"queued_s": "now"}},
        {"type": "PrefillDone", "request_id": "a", "times": {"surprise": 1.0}},
        {"type": "Abort", "request_id": msgpack.Timestamp(1)},
        {"type": "Abort", "request_id": msgpack.ExtType(3, b"x")},
        {1: 2},
    ],
    ids=str,
)
def test_well_formed_data_that_is_no_message_is_refused(content: object) -> None:
    data = msgpack.packb(content)
    for decode in DECODERS:
        with pytest.raises(ProtocolError, match="not a control message"):
            decode(data)


def test_a_message_beyond_the_bound_is_refused_before_it_is_decoded() -> None:
    largest = encode(Abort("a" * (MAX_MESSAGE_BYTES - 40)))
    assert isinstance(decode_to_router(largest), Abort)
    with pytest.raises(ProtocolError, match=f"is above {MAX_MESSAGE_BYTES}"):
        decode_to_router(b"\xc1" * (MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 5_000, b"\xdd\xff\xff\xff\xff", b"\xd6\xff\x00", b"\xa1\xff"])
def test_garbage_is_refused(data: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(ProtocolError):
            decode(data)


@examples(200)
@given(st.sampled_from(BOTH), st.data())
def test_damaged_messages_are_decoded_or_refused_but_never_break_the_receiver(
    pair: tuple[Decode, Message], data: st.DataObject
) -> None:
    decode, message = pair
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        decode(bytes(damaged))
