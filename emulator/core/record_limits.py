"""How much a served cluster records: what is kept of every request would otherwise grow for as long as it is up."""

from __future__ import annotations

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
