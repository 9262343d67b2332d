"""HTTP/1.1 as a server reads and writes it, without sockets: bytes in, requests out; heads and chunks as bytes.

Reading is strict and bounded: what two readers could take for two different things (lines that end in LF alone, folded
headers, two lengths) is refused, and so is a body beyond the limit, before it has come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Literal
from urllib.parse import unquote, urlsplit

MAX_HEAD_BYTES = 32 * 1024
MAX_CHUNK_LINE_BYTES = 256
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_END = b"\r\n\r\n"


class BadRequestError(Exception):
    """What is no request that can be answered: an HTTP status and why. The connection is of no use afterwards."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass(slots=True)
class HttpRequest:
    """A request. Names of headers are in small letters; `path` is unquoted and without the query."""

    method: str
    path: str
    headers: dict[str, str]
    keep_alive: bool
    http_1_0: bool = False
    body: bytes = b""


@dataclass(slots=True)
class _Head:
    """A request whose body has not come yet: `length` bytes of it, or chunks."""

    request: HttpRequest
    length: int | None
    expects: bool
    body: bytearray = field(default_factory=bytearray)
    in_chunk: int = 0
    in_trailer: bool = False


class RequestReader:
    """Takes in what a client sends and gives out one request after the other."""

    def __init__(self, max_body_bytes: int) -> None:
        self._most = max_body_bytes
        self._data = bytearray()
        self._searched = 0
        self._head: _Head | None = None
        self.expects_continue = False

    @property
    def buffered(self) -> int:
        """Bytes that have come and belong to no request yet."""
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Take in bytes."""
        self._data += data

    def next_request(self) -> HttpRequest | None:
        """The next request, if all of it has come; raises BadRequestError.

        `expects_continue` then says whether its sender waits for `CONTINUE` before it sends the body.
        """
        if self._head is None:
            self._head = self._read_head()
            if self._head is None:
                return None
            self.expects_continue = self._head.expects
        complete = self._read_chunks(self._head) if self._head.length is None else self._read_length(self._head)
        if not complete:
            return None
        request = self._head.request
        request.body = bytes(self._head.body)
        self._head, self.expects_continue = None, False
        return request

    # --- heads ------------------------------------------------------------------------------------------------

    def _read_head(self) -> _Head | None:
        while self._data[:2] == b"\r\n":  # an empty line before a request is to be ignored
            del self._data[:2]
            self._searched = 0
        end = self._data.find(_END, max(0, self._searched - 3))
        if end > MAX_HEAD_BYTES or (end < 0 and len(self._data) > MAX_HEAD_BYTES):
            raise BadRequestError(431, f"the head of a request must be at most {MAX_HEAD_BYTES} bytes")
        if end < 0:
            self._searched = len(self._data)
            return None
        lines = bytes(self._data[:end]).decode("latin-1").split("\r\n")
        del self._data[: end + len(_END)]
        self._searched = 0
        return self._parse(lines)

    def _parse(self, lines: list[str]) -> _Head:
        parts = lines[0].split(" ")
        if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not parts[1]:
            raise BadRequestError(400, "the first line is no HTTP request")
        method, target, version = parts
        if version not in ("HTTP/1.1", "HTTP/1.0"):
            raise BadRequestError(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
        headers = _headers(lines[1:])
        try:
            path = unquote(urlsplit(target).path)
        except ValueError:
            raise BadRequestError(400, "the target is no path") from None
        wishes = [wish.strip().lower() for wish in headers.get("connection", "").split(",")]
        keep_alive = "close" not in wishes if version == "HTTP/1.1" else "keep-alive" in wishes
        length = _length(headers, version)
        if length is not None and length > self._most:
            raise _too_large(self._most)
        expects = headers.get("expect", "").lower() == "100-continue" and length != 0
        return _Head(HttpRequest(method, path, headers, keep_alive, version == "HTTP/1.0"), length, expects)

    # --- bodies -----------------------------------------------------------------------------------------------

    def _read_length(self, head: _Head) -> bool:
        assert head.length is not None
        if len(self._data) < head.length:
            return False
        head.body += self._data[: head.length]
        del self._data[: head.length]
        return True

    def _read_chunks(self, head: _Head) -> bool:
        """Take whole chunks out of what has come; whether the last one was among them."""
        while True:
            if head.in_chunk:
                if len(self._data) < head.in_chunk:
                    return False
                if self._data[head.in_chunk - 2 : head.in_chunk] != b"\r\n":
                    raise BadRequestError(400, "a chunk is not as long as it says")
                head.body += self._data[: head.in_chunk - 2]
                del self._data[: head.in_chunk]
                head.in_chunk = 0
            line = self._line()
            if line is None:
                return False
            if head.in_trailer:
                if not line:
                    return True
                continue
            size = line.split(b";", 1)[0].strip()
            if not re.fullmatch(rb"[0-9A-Fa-f]{1,8}", size):
                raise BadRequestError(400, "the size of a chunk is no number")
            nbytes = int(size, 16)
            if len(head.body) + nbytes > self._most:
                raise _too_large(self._most)
            head.in_trailer = not nbytes
            head.in_chunk = nbytes + 2 if nbytes else 0

    def _line(self) -> bytes | None:
        end = self._data.find(b"\r\n", 0, MAX_CHUNK_LINE_BYTES)
        if end < 0:
            if len(self._data) > MAX_CHUNK_LINE_BYTES:
                raise BadRequestError(400, "a line between chunks is too long")
            return None
        line = bytes(self._data[:end])
        del self._data[: end + 2]
        return line


def _headers(lines: Iterable[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(name) or any(c in value for c in "\r\n\0"):
            raise BadRequestError(400, "a header is malformed")
        name, value = name.lower(), value.strip(" \t")
        if name in headers and name in ("content-length", "transfer-encoding", "host", "authorization"):
            raise BadRequestError(400, f"{name} is given twice")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _length(headers: dict[str, str], version: str) -> int | None:
    """Bytes of the body; None for one in chunks."""
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if coding is not None:
        if length is not None or coding.lower() != "chunked" or version == "HTTP/1.0":
            raise BadRequestError(400, "a body comes either with its length or in chunks, coded in no other way")
        return None
    if length is None:
        return 0
    if not re.fullmatch(r"[0-9]{1,18}", length):
        raise BadRequestError(400, "content-length is no number")
    return int(length)


def _too_large(most: int) -> BadRequestError:
    return BadRequestError(413, f"the body must be at most {most} bytes")


# --- answers --------------------------------------------------------------------------------------------------------


def head(
    status: int,
    content_type: str,
    length: int | Literal["chunks", "to the end"],
    *,
    keep_alive: bool,
    more: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """The head of an answer of so many bytes, of one in chunks, or of one that ends with the connection."""
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"content-type: {content_type}"]
    if length == "chunks":
        lines.append("transfer-encoding: chunked")
    elif length != "to the end":
        lines.append(f"content-length: {length}")
    if not keep_alive:
        lines.append("connection: close")
    lines += [f"{name}: {value}" for name, value in more.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def chunk(data: bytes) -> bytes:
    """A piece of an answer that comes in chunks."""
    return b"%x\r\n%b\r\n" % (len(data), data)
