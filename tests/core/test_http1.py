"""HTTP/1.1 without sockets: requests come out whole wherever the bytes were cut, and what is ambiguous is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core import http1
from emulator.core.http1 import MAX_HEAD_BYTES, BadRequestError, HttpRequest, RequestReader

MOST = 1_000


def read(data: bytes, cuts: list[int] | None = None) -> list[HttpRequest]:
    """All requests in some bytes that come in pieces."""
    reader = RequestReader(MOST)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts or []), len(data)]
    found = []
    for start, end in itertools.pairwise(bounds):
        reader.feed(data[start:end])
        while (request := reader.next_request()) is not None:
            found.append(request)
    return found


def post(body: bytes, path: str = "/v1/completions", *, chunks: int = 0) -> bytes:
    if not chunks:
        return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    pieces = [body[n : n + chunks] for n in range(0, len(body), chunks)]
    coded = b"".join(b"%x;why=not\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + coded + b"0\r\nA: b\r\n\r\n"
    )


@given(
    st.lists(st.tuples(st.binary(max_size=60), st.integers(0, 9)), max_size=5),
    st.lists(st.integers(0, 900), max_size=20),
)
def test_requests_come_out_whole_wherever_the_bytes_were_cut(sent: list[tuple[bytes, int]], cuts: list[int]) -> None:
    data = b"".join(post(body, f"/{n}", chunks=chunks) for n, (body, chunks) in enumerate(sent))
    found = read(data, cuts)
    assert [(request.path, request.body) for request in found] == [(f"/{n}", body) for n, (body, _) in enumerate(sent)]


@given(st.binary(max_size=300))
def test_nothing_but_a_bad_request_comes_of_any_bytes(data: bytes) -> None:
    reader = RequestReader(MOST)
    reader.feed(data)
    try:
        while reader.next_request() is not None:
            pass
    except BadRequestError as error:
        assert 400 <= error.status < 600  # noqa: PT017


def test_a_path_is_unquoted_and_without_its_query() -> None:
    (request,) = read(b"GET /v1/models/a%20b?x=1 HTTP/1.1\r\n\r\n")
    assert (request.method, request.path, request.body) == ("GET", "/v1/models/a b", b"")


@pytest.mark.parametrize(
    ("line", "header", "keeps"),
    [("HTTP/1.1", "", True), ("HTTP/1.1", "Connection: close\r\n", False), ("HTTP/1.0", "", False)],
)
def test_a_connection_is_kept_as_its_version_and_header_say(line: str, header: str, keeps: bool) -> None:
    (request,) = read(f"GET / {line}\r\n{header}\r\n".encode())
    assert request.keep_alive is keeps
    assert request.http_1_0 is (line == "HTTP/1.0")


def test_a_body_is_waited_for_and_its_sender_told_to_go_on() -> None:
    reader = RequestReader(MOST)
    reader.feed(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert reader.next_request() is None
    assert reader.expects_continue
    reader.feed(b"ab")
    request = reader.next_request()
    assert request is not None
    assert request.body == b"ab"
    assert not reader.expects_continue


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfff\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 300, 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA : b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nnonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\nC: d\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * MAX_HEAD_BYTES, 431),
    ],
)
def test_what_is_ambiguous_or_too_large_is_refused(data: bytes, status: int) -> None:
    with pytest.raises(BadRequestError) as caught:
        read(data)
    assert caught.value.status == status


def test_heads_and_chunks_are_written_as_the_standard_has_them() -> None:
    assert http1.head(200, "text/plain", 3, keep_alive=True, more={"a": "b"}) == (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 3\r\na: b\r\n\r\n"
    )
    assert b"transfer-encoding: chunked\r\n" in http1.head(200, "x", "chunks", keep_alive=True)
    to_the_end = http1.head(200, "x", "to the end", keep_alive=False)
    assert b"connection: close\r\n" in to_the_end
    assert b"length" not in to_the_end
    assert http1.chunk(b"x" * 26) == b"1a\r\n" + b"x" * 26 + b"\r\n"
