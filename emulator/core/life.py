"""A request's life on one node: the sequence that is computed there, and the instants that the node can tell of it."""

from __future__ import annotations

from dataclasses import dataclass

from emulator.core.records import RequestTimes
from emulator.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class Life:
    """A sequence with the instants of its prefill on this node, model seconds; none where its KV was received.

    `awaits_ticket`: its prefill may not start yet. `streamed_s`: when its first token was made here, if that was after
    its KV had been received.
    """

    sequence: Sequence
    queued_s: float | None = None
    awaits_ticket: bool = False
    admitted_s: float | None = None
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    streamed_s: float | None = None

    @property
    def prefills_here(self) -> bool:
        """Whether its prompt was queued here; recomputing a prompt whose KV was received is not its prefill."""
        return self.queued_s is not None

    def times(self) -> RequestTimes:
        """What this node can say of the request's life so far."""
        return RequestTimes(
            queued_s=self.queued_s,
            admitted_s=self.admitted_s,
            prefill_start_s=self.prefill_start_s,
            prefill_end_s=self.prefill_end_s,
            streamed_s=self.streamed_s,
        )
