"""Server-sent events over bytes that arrive in any pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.bench.sse import MAX_EVENT_BYTES, SseParser
from emulator.core.errors import ProtocolError


def _read(*pieces: bytes) -> list[bytes]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.end()


def test_an_event_ends_at_a_blank_line() -> None:
    parser = SseParser()
    assert parser.feed(b"data: one\n") == []
    assert parser.feed(b"\ndata: two\n\n") == [b"one", b"two"]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_lines_end_in_any_of_three_ways(ending: bytes) -> None:
    assert _read(ending.join([b"data: a", b"data: b", b"", b"data: c", b"", b""])) == [b"a\nb", b"c"]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_bytes_may_come_one_by_one(ending: bytes) -> None:
    whole = ending.join([b"data: a", b"data: b", b"", b"data: c", b"", b""])
    assert _read(*(bytes([byte]) for byte in whole)) == [b"a\nb", b"c"]


def test_only_one_space_after_the_colon_goes() -> None:
    assert _read(b"data:  a\n\ndata:b\n\ndata\n\n") == [b" a", b"b", b""]


def test_comments_are_counted_and_other_fields_skipped() -> None:
    parser = SseParser()
    assert parser.feed(b": ping\n\nevent: x\nid: 7\nretry: 10\ndata: a\n: in between\ndata: b\n\n") == [b"a\nb"]
    assert parser.comments == 2


def test_a_last_event_needs_no_blank_line() -> None:
    assert _read(b"data: a\n\ndata: [DONE]") == [b"a", b"[DONE]"]
    assert _read(b"data: a\n\ndata: [DONE]\n") == [b"a", b"[DONE]"]


def test_a_byte_order_mark_is_skipped_at_the_start_alone() -> None:
    assert _read(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n") == [b"a"]


def test_an_event_without_end_is_refused() -> None:
    with pytest.raises(ProtocolError, match="more than"):
        _read(b"data: ", *([b"x" * (1 << 16)] * (MAX_EVENT_BYTES // (1 << 16) + 1)))
    with pytest.raises(ProtocolError, match="more than"):
        _read(*([b"data: " + b"x" * 1000 + b"\n"] * (MAX_EVENT_BYTES // 1000 + 1)))


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


line_text = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
cuts = st.lists(st.integers(0, 300), max_size=40)


@given(
    events=st.lists(st.lists(line_text, min_size=1, max_size=3), max_size=6),
    ending=st.sampled_from(["\n", "\r\n", "\r"]),
    comment=st.booleans(),
    cuts=cuts,
)
def test_what_was_written_is_read_however_it_is_cut(
    events: list[list[str]], ending: str, comment: bool, cuts: list[int]
) -> None:
    text = ""
    for lines in events:
        text += f": ping{ending}" if comment else ""
        text += "".join(f"data: {line}{ending}" for line in lines) + ending
    found = _read(*_pieces(text.encode(), cuts))
    assert [event.decode() for event in found] == ["\n".join(lines) for lines in events]


@given(data=st.lists(st.sampled_from([b"\r", b"\n", b"data", b":", b" ", b"x", "é".encode()]), max_size=40), cuts=cuts)
def test_any_bytes_are_read_the_same_however_they_are_cut(data: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(data)
    assert _read(*_pieces(whole, cuts)) == _read(whole)
