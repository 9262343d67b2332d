"""KV memory of one node in blocks of `block_size` tokens, each block owned by at most one request.

A request's blocks are *held*; those set aside for KV that is still to arrive are held and counted as *reserved*
until they are claimed. Growing, reserving and freeing either happen entirely or not at all. What an owner leaves while
the device still works on it is *retired*: nobody's, and not free either. Blocks are alike, so they are counted; only
where a device holds KV have they names as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from emulator.core.block_table import BlockTable


class KvPool:
    """`num_blocks` blocks of `block_size` tokens; owners are request ids.

    Nobody holds `free_blocks` of them, `reserved_blocks` are held for KV that has not arrived yet, `retired_blocks` are
    nobody's any more and wait for `free_retired`.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_blocks = num_blocks
        self._held: dict[str, int] = {}
        self._reserved: set[str] = set()
        self.reserved_blocks = 0
        self.retired_blocks = 0

    @property
    def used_blocks(self) -> int:
        """Blocks held, those that are reserved or retired included."""
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

    def blocks(self, _owner: str, /) -> tuple[int, ...]:
        """The blocks of an owner in the order of its tokens, where blocks have names; else none."""
        return ()

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

    def retire(self, owner: str) -> None:
        """`owner` is gone, but its blocks, whose KV has arrived, are in use until `free_retired`."""
        assert owner not in self._reserved, f"{owner} has no KV that could be in use"
        self.retired_blocks += self._held.pop(owner, 0)

    def free_retired(self) -> None:
        """What was retired is no longer in use."""
        self.free_blocks += self.retired_blocks
        self.retired_blocks = 0

    def owners(self) -> frozenset[str]:
        """Everyone who holds blocks."""
        return frozenset(self._held)

    def check_integrity(self) -> None:
        """Every block is free, retired or held, none twice, and reservations are held."""
        assert self.free_blocks >= 0, "more KV blocks are held than there are"
        assert self.retired_blocks >= 0, "fewer than no KV blocks are retired"
        assert all(blocks >= 0 for blocks in self._held.values()), "an owner holds fewer than no blocks"
        here = sum(self._held.values()) + self.retired_blocks
        assert here + self.free_blocks == self.num_blocks, "a KV block is lost or held twice"
        assert self._reserved <= self._held.keys(), "a reservation without blocks"
        assert self.reserved_blocks == sum(self._held[o] for o in self._reserved), "reserved blocks are miscounted"


class NamedKvPool(KvPool):
    """A pool whose blocks have names, for a device that holds KV; simulations need none and do without their cost."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._table = BlockTable(num_blocks)

    def blocks(self, owner: str, /) -> tuple[int, ...]:
        """The blocks of an owner in the order of its tokens."""
        return self._table.blocks(owner)

    def grow(self, owner: str, tokens: int) -> bool:
        """As `KvPool.grow`."""
        held = self.held_blocks(owner)
        if not super().grow(owner, tokens):
            return False
        self._table.take(owner, self.held_blocks(owner) - held)
        return True

    def free(self, owner: str) -> int:
        """As `KvPool.free`."""
        self._table.free(owner)
        return super().free(owner)

    def retire(self, owner: str) -> None:
        """As `KvPool.retire`."""
        self._table.retire(owner)
        super().retire(owner)

    def free_retired(self) -> None:
        """As `KvPool.free_retired`."""
        self._table.free_retired()
        super().free_retired()

    def check_integrity(self) -> None:
        """As `KvPool.check_integrity`; and there are as many names as blocks."""
        super().check_integrity()
        self._table.check_integrity()
        counts = {owner: count for owner, count in self._table.counts().items() if count}
        assert counts == {owner: count for owner, count in self._held.items() if count}, "a KV block without its name"
