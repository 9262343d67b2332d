"""KV memory of one node in blocks of `block_size` tokens, each block owned by at most one request.

A request's blocks are *held*; those set aside for KV that is still to arrive are held and counted as *reserved*
until they are claimed. Growing, reserving and freeing either happen entirely or not at all.
"""

from __future__ import annotations


class KvPool:
    """`num_blocks` blocks of `block_size` tokens; owners are request ids."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: dict[str, list[int]] = {}
        self._reserved: set[str] = set()

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks held, reservations included."""
        return self.num_blocks - len(self._free)

    @property
    def reserved_blocks(self) -> int:
        """Blocks held for KV that has not arrived yet."""
        return sum(len(self._held[owner]) for owner in self._reserved)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def missing(self, owner: str, tokens: int) -> int:
        """How many more blocks `owner` needs to hold `tokens` tokens."""
        held = self._held.get(owner)
        return max(0, self.blocks_for(tokens) - (len(held) if held else 0))

    def grow(self, owner: str, tokens: int) -> bool:
        """Let `owner` hold at least `tokens` tokens; False, and nothing changed, when too few blocks are free."""
        need = self.missing(owner, tokens)
        if need > len(self._free):
            return False
        if need:
            split = len(self._free) - need
            self._held.setdefault(owner, []).extend(self._free[split:])
            del self._free[split:]
        return True

    def reserve(self, owner: str, tokens: int) -> bool:
        """Set blocks for `tokens` tokens aside for KV that will arrive; False when too few are free."""
        assert owner not in self._held, f"{owner} holds blocks already"
        if not self.grow(owner, tokens):
            return False
        self._held.setdefault(owner, [])
        self._reserved.add(owner)
        return True

    def claim(self, owner: str) -> None:
        """The KV of a reservation has arrived: its blocks are ordinary blocks from now on."""
        self._reserved.remove(owner)

    def free(self, owner: str) -> int:
        """Take all blocks of `owner` back; returns how many (0 when it holds none)."""
        blocks = self._held.pop(owner, [])
        self._reserved.discard(owner)
        self._free.extend(reversed(blocks))
        return len(blocks)

    def owners(self) -> frozenset[str]:
        """Everyone who holds blocks."""
        return frozenset(self._held)

    def check_integrity(self) -> None:
        """Every block is free or held by exactly one owner, and reservations are held."""
        held = [block for blocks in self._held.values() for block in blocks]
        everything = sorted(held + self._free)
        assert everything == list(range(self.num_blocks)), "a KV block is lost, shared or held twice"
        assert self._reserved <= self._held.keys(), "a reservation without blocks"
