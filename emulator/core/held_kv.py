"""What prompts that are handed over keep of a node's memory: from their first step until the receiver has their KV.

DistServe leaves KV in prefill memory until decode has room for it, counts how far that fills up, and prefill stalls
for it. `max_blocks` bounds it: no prompt is started that would let those computed and those held take more.
"""

from __future__ import annotations


class HeldKv:
    """Blocks by request: of computed prompts whose KV waits to be fetched, `blocks` in all; and of those before it.

    Prompts that are being computed count, where there is a bound, from their first step on, preempted or not.
    """

    def __init__(self, max_blocks: int | None = None) -> None:
        self.max_blocks = max_blocks
        self.blocks = 0
        self._held: dict[str, int] = {}
        self._computing: dict[str, int] = {}
        self._computing_blocks = 0

    def may_start(self, blocks: int) -> bool:
        """Whether a prompt of so many blocks may be started; one always may where there is no other."""
        taken = self.blocks + self._computing_blocks
        return self.max_blocks is None or not taken or taken + blocks <= self.max_blocks

    def start(self, request_id: str, blocks: int) -> None:
        """A prompt is computed for the first time."""
        if self.max_blocks is not None:
            self._computing[request_id] = blocks
            self._computing_blocks += blocks

    def hold(self, request_id: str, blocks: int) -> None:
        """The prompt is computed, its KV waits to be fetched."""
        self._computing_blocks -= self._computing.pop(request_id, 0)
        self._held[request_id] = blocks
        self.blocks += blocks

    def end(self, request_id: str) -> bool:
        """Its blocks are free again, however that came; whether its KV was held until now."""
        held = self._held.pop(request_id, None)
        if held is None:
            self._computing_blocks -= self._computing.pop(request_id, 0)
            return False
        self.blocks -= held
        return True

    def check_integrity(self) -> None:
        """The counters are what the requests add up to, and only a single prompt may be above the bound."""
        assert self.blocks == sum(self._held.values()), "held blocks are miscounted"
        assert self._computing_blocks == sum(self._computing.values()), (
            "blocks of prompts in computation are miscounted"
        )
        alone = len(self._held) + len(self._computing) <= 1
        within = self.max_blocks is None or self.blocks + self._computing_blocks <= self.max_blocks
        assert within or alone, "more KV is held than may be"

    def held(self) -> dict[str, int]:
        """The blocks of each prompt that waits to be fetched."""
        return dict(self._held)
