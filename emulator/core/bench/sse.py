"""Server-sent events as a state machine over bytes, however a network cuts them up.

Lines end in LF, CRLF or CR (WHATWG HTML, 9.2). Bytes are split into lines before anything is decoded, so a character
of UTF-8 that comes in two reads is whole again when its line is.
"""

from __future__ import annotations

from emulator.core.errors import ProtocolError

MAX_EVENT_BYTES = 4 << 20
_BOM = b"\xef\xbb\xbf"


class SseParser:
    """Bytes in, the data of whole events out; `comments` counts lines that clients must skip."""

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        self._partial_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._after_cr = False
        self._first = True
        self.comments = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that these bytes complete; raises ProtocolError for one above MAX_EVENT_BYTES."""
        if not data:
            return []
        ends_in_cr = data.endswith(b"\r")
        if self._after_cr:
            data = data.removeprefix(b"\n")
        self._after_cr = ends_in_cr
        events: list[bytes] = []
        for line in data.splitlines(keepends=True):
            ended = line.endswith((b"\n", b"\r"))
            self._partial.append(line.rstrip(b"\r\n") if ended else line)
            self._partial_bytes += len(line)
            if self._partial_bytes + self._data_bytes > MAX_EVENT_BYTES:
                raise ProtocolError(f"an event of more than {MAX_EVENT_BYTES} bytes")
            if ended:
                self._line(b"".join(self._partial), events)
                self._partial.clear()
                self._partial_bytes = 0
        return events

    def end(self) -> list[bytes]:
        """The stream has ended: the data of a last event that no blank line followed, as some servers end."""
        events: list[bytes] = []
        if self._partial:
            self._line(b"".join(self._partial), events)
            self._partial.clear()
        self._dispatch(events)
        return events

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if self._first:
            self._first = False
            line = line.removeprefix(_BOM)
        if not line:
            self._dispatch(events)
        elif line.startswith(b":"):
            self.comments += 1
        else:
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
                self._data_bytes += len(value) + 1

    def _dispatch(self, events: list[bytes]) -> None:
        if self._data:
            events.append(b"\n".join(self._data))
            self._data.clear()
            self._data_bytes = 0
