"""Which KV blocks of a device's memory belong to whom: the names behind the counts of `core.kv_pool`.

The lowest free block is taken first, so that a device's memory is used only as far up as is needed at a time.
"""

from __future__ import annotations

import heapq


class BlockTable:
    """`num_blocks` blocks, numbered from 0. An owner's blocks stand in the order in which it took them.

    Taking or freeing a block costs the logarithm of how many are free below the highest that was ever taken.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._of: dict[str, list[int]] = {}
        self._retired: list[int] = []
        self._free: list[int] = []  # a heap of those below `_untouched`
        self._untouched = 0

    def blocks(self, owner: str) -> tuple[int, ...]:
        """The blocks of an owner, in order; none when it has none."""
        return tuple(self._of.get(owner, ()))

    def take(self, owner: str, count: int) -> None:
        """Give an owner `count` more blocks, the lowest that are free; there must be so many."""
        assert count <= len(self._free) + self.num_blocks - self._untouched, "more KV blocks are taken than are free"
        taken = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        fresh = count - len(taken)
        taken += range(self._untouched, self._untouched + fresh)
        self._untouched += fresh
        self._of.setdefault(owner, []).extend(taken)

    def free(self, owner: str) -> None:
        """Take all blocks of an owner back."""
        for block in self._of.pop(owner, ()):
            heapq.heappush(self._free, block)

    def retire(self, owner: str) -> None:
        """An owner leaves its blocks, which stay as they are until `free_retired`."""
        self._retired += self._of.pop(owner, ())

    def free_retired(self) -> None:
        """Take back what was retired."""
        for block in self._retired:
            heapq.heappush(self._free, block)
        self._retired.clear()

    def check_integrity(self) -> None:
        """Every block is free, retired or one owner's."""
        known = [*self._free, *self._retired, *(block for blocks in self._of.values() for block in blocks)]
        assert sorted(known) == list(range(self._untouched)), "a KV block is lost or has two owners"
        assert self._untouched <= self.num_blocks, "more KV blocks are named than there are"

    def counts(self) -> dict[str, int]:
        """How many blocks each owner has."""
        return {owner: len(blocks) for owner, blocks in self._of.items()}
