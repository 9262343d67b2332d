"""The receiving side of KV hand-over on one node: memory reserved before bytes move, and the tickets for them.

Requests that do not fit wait here first come first served; their KV stays at the sender meanwhile, so that pressure
travels back as it does in real stacks. Where this side reads KV instead of being sent it, it says when (`core.reads`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from emulator.core.effects import CloseTicket, Effect, OpenTicket, Reply
from emulator.core.kv_pool import KvPool
from emulator.core.messages import ReadKv, Reserve, Reserved
from emulator.core.reads import Reads


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """Memory set aside for one request under one ticket."""

    request: Reserve
    ticket: int


class Incoming:
    """Reservations by ticket. `new_ticket` gives numbers that nobody can guess (live) or that repeat (simulated)."""

    def __init__(
        self,
        pool: KvPool,
        *,
        endpoint: str,
        bytes_per_token: int,
        num_reserved_decode_tokens: int,
        new_ticket: Callable[[], int],
        max_reads: int = 1,
    ) -> None:
        self._pool = pool
        self._endpoint = endpoint
        self._bytes_per_token = bytes_per_token
        self._reserved_decode_tokens = num_reserved_decode_tokens
        self._new_ticket = new_ticket
        self._waiting: deque[Reserve] = deque()
        self._by_ticket: dict[int, Reservation] = {}
        self._ticket_of: dict[str, int] = {}
        self.reads = Reads(max_reads)

    @property
    def waiting(self) -> int:
        """Requests that wait for memory."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Reservations whose KV has not arrived completely."""
        return len(self._by_ticket)

    def request(self, message: Reserve) -> None:
        """Queue a reservation; `grant` answers it."""
        self._waiting.append(message)
        self.reads.expect(message.request_id, message.source, computed=message.computed)

    def grant(self) -> list[Effect]:
        """Reserve for as many waiting requests as fit, in order."""
        effects: list[Effect] = []
        while self._waiting:
            message = self._waiting[0]
            tokens = message.prompt_tokens + min(message.max_tokens, self._reserved_decode_tokens)
            if not self._pool.reserve(message.request_id, tokens):
                break
            self._waiting.popleft()
            ticket = self._new_ticket()
            self._by_ticket[ticket] = Reservation(message, ticket)
            self._ticket_of[message.request_id] = ticket
            nbytes = message.prompt_tokens * self._bytes_per_token
            blocks = self._pool.blocks(message.request_id)
            effects.append(OpenTicket(message.request_id, ticket, nbytes, message.source, blocks))
            effects.append(Reply(Reserved(message.request_id, ticket, self._endpoint)))
            self.reads.granted(message.request_id)
        return effects

    def read(self, now_s: float) -> list[Effect]:
        """Ask for the KV that is to be read now."""
        return [
            Reply(ReadKv(request_id, self._ticket_of[request_id], self._endpoint, readable_s))
            for request_id, readable_s in self.reads.begin(now_s)
        ]

    def arrived(self, ticket: int) -> Reserve | None:
        """All KV under this ticket is here: the request it belongs to (None when it was aborted meanwhile)."""
        reservation = self._by_ticket.pop(ticket, None)
        if reservation is None:
            return None
        self._pool.claim(reservation.request.request_id)
        self.reads.over(reservation.request.request_id)
        return reservation.request

    def drop(self, request_id: str) -> list[Effect]:
        """The request is over: its ticket is dead, whether KV is on its way, here, or was never asked for."""
        ticket = self._ticket_of.pop(request_id, None)
        self.reads.over(request_id)
        if ticket is None:
            if self._waiting:
                self._waiting = deque(m for m in self._waiting if m.request_id != request_id)
            return []
        if self._by_ticket.pop(ticket, None) is not None:
            self._pool.free(request_id)
        return [CloseTicket(ticket)]

    def forget(self, request_id: str) -> list[Effect]:
        """The KV that had arrived for the request is lost (preemption); what it received can be dropped."""
        ticket = self._ticket_of.pop(request_id, None)
        return [CloseTicket(ticket)] if ticket is not None else []

    def request_ids(self) -> list[str]:
        """Everyone who waits for memory or for KV."""
        return [m.request_id for m in self._waiting] + [r.request.request_id for r in self._by_ticket.values()]

    def check_integrity(self) -> None:
        """Each reservation in flight holds blocks, and nobody waits and holds at once."""
        owners = self._pool.owners()
        for reservation in self._by_ticket.values():
            assert reservation.request.request_id in owners, "a reservation without blocks"
        self.reads.check_integrity()
        for message in self._waiting:
            assert message.request_id not in owners, "a waiting request holds blocks"
