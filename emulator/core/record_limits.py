"""How much a served cluster records: what is kept of every request would otherwise grow for as long as it is up."""

from __future__ import annotations

from collections import Counter

import msgspec


class RecordLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first requests are recorded, and output tokens (None: whatever their number) up to the message that is too
    much. What steps, transfers and memory leave is bounded with them."""

    requests: int = 100_000
    tokens: int | None = 5_000_000

    def exceeded(self, requests: int, tokens: int) -> str:
        """Which limit so much is beyond; empty for none."""
        if requests > self.requests:
            return f"{self.requests:,} requests"
        if self.tokens is not None and tokens > self.tokens:
            return f"{self.tokens:,} output tokens"
        return ""


class RecordCount:
    """What a cluster has recorded, whoever asked for it. It ends, once, with what is more than `limits` allow."""

    def __init__(self, limits: RecordLimits) -> None:
        self._limits = limits
        self._requests: Counter[str] = Counter()
        self._tokens = 0
        self.over = False

    @property
    def requests(self) -> int:
        """How many are in the record."""
        return self._requests.total()

    def requests_of(self, client: str) -> int:
        """How many of these a client has sent: its first ones."""
        return self._requests[client]

    def request(self, client: str) -> str:
        """A client's next request comes. The limit that the record ends at, before it; empty where it goes on."""
        if limit := self._ends(self.requests + 1):
            return limit
        if not self.over:
            self._requests[client] += 1
        return ""

    def tokens(self, n: int) -> str:
        """Output tokens were passed on. The limit that the record ends at, with them; empty where it goes on."""
        self._tokens += n
        return self._ends(self.requests)

    def _ends(self, requests: int) -> str:
        limit = "" if self.over else self._limits.exceeded(requests, self._tokens)
        self.over = self.over or limit != ""
        return limit
