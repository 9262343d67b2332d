"""KV memory of one node in blocks of `block_size` tokens, each block owned by at most one request.

A request's blocks are *held*; those set aside for KV that is still to arrive are held and counted as *reserved*
until they are claimed. Growing, reserving and freeing either happen entirely or not at all. Blocks are alike, so they
are counted, not named.
"""

from __future__ import annotations

from collections.abc import Iterable


class KvPool:
    """`num_blocks` blocks of `block_size` tokens; owners are request ids.

    Nobody holds `free_blocks` of them, `reserved_blocks` are held for KV that has not arrived yet.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_blocks = num_blocks
        self._held: dict[str, int] = {}
        self._reserved: set[str] = set()
        self.reserved_blocks = 0

    @property
    def used_blocks(self) -> int:
        """Blocks held, reservations included."""
        return self.num_blocks - self.free_blocks

    def blocks_for(self, tokens: int) -> int:
        """How many blocks `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def missing(self, owner: str, tokens: int) -> int:
        """How many more blocks `owner` needs to hold `tokens` tokens."""
        need = -(-tokens // self.block_size) - self._held.get(owner, 0)
        return need if need > 0 else 0

    def held_blocks(self, owner: str) -> int:
        """How many blocks `owner` holds."""
        return self._held.get(owner, 0)

    def held_tokens(self, owner: str) -> int:
        """How many tokens the blocks of `owner` hold."""
        return self._held.get(owner, 0) * self.block_size

    def room_for(self, holdings: Iterable[tuple[str, int]]) -> bool:
        """Whether each of these owners could hold so many tokens, all at the same time."""
        return sum([self.missing(owner, tokens) for owner, tokens in holdings]) <= self.free_blocks

    def grow(self, owner: str, tokens: int) -> bool:
        """Let `owner` hold at least `tokens` tokens; False, and nothing changed, when too few blocks are free."""
        held = self._held.get(owner, 0)
        need = -(-tokens // self.block_size) - held
        if need <= 0:
            return True
        if need > self.free_blocks:
            return False
        self._held[owner] = held + need
        self.free_blocks -= need
        if owner in self._reserved:
            self.reserved_blocks += need
        return True

    def reserve(self, owner: str, tokens: int) -> bool:
        """Set blocks for `tokens` tokens aside for KV that will arrive; False when too few are free."""
        assert owner not in self._held, f"{owner} holds blocks already"
        if not self.grow(owner, tokens):
            return False
        self.reserved_blocks += self._held.setdefault(owner, 0)
        self._reserved.add(owner)
        return True

    def claim(self, owner: str) -> None:
        """The KV of a reservation has arrived: its blocks are ordinary blocks from now on."""
        self._reserved.remove(owner)
        self.reserved_blocks -= self._held[owner]

    def free(self, owner: str) -> int:
        """Take all blocks of `owner` back; returns how many (0 when it holds none)."""
        blocks = self._held.pop(owner, 0)
        if owner in self._reserved:
            self._reserved.remove(owner)
            self.reserved_blocks -= blocks
        self.free_blocks += blocks
        return blocks

    def owners(self) -> frozenset[str]:
        """Everyone who holds blocks."""
        return frozenset(self._held)

    def check_integrity(self) -> None:
        """Every block is free or held, none twice, and reservations are held."""
        assert self.free_blocks >= 0, "more KV blocks are held than there are"
        assert all(blocks >= 0 for blocks in self._held.values()), "an owner holds fewer than no blocks"
        assert sum(self._held.values()) + self.free_blocks == self.num_blocks, "a KV block is lost or held twice"
        assert self._reserved <= self._held.keys(), "a reservation without blocks"
        assert self.reserved_blocks == sum(self._held[o] for o in self._reserved), "reserved blocks are miscounted"
