"""KV blocks: every block is free or has one owner, and nothing happens by halves."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from emulator.core.kv_pool import KvPool, NamedKvPool
from tests.examples import examples

OWNERS = st.sampled_from("abcd")
TOKENS = st.integers(0, 90)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3), (2_000, 125)]
)
def test_tokens_take_whole_blocks(tokens: int, blocks: int) -> None:
    assert KvPool(200, 16).blocks_for(tokens) == blocks


def test_growing_adds_only_what_is_missing() -> None:
    pool = KvPool(10, 16)
    assert pool.grow("a", 20)
    assert pool.used_blocks == 2
    assert pool.missing("a", 32) == 0
    assert pool.missing("a", 33) == 1
    assert pool.grow("a", 33)
    assert pool.used_blocks == 3
    assert pool.grow("a", 1), "fewer tokens than it holds change nothing"
    assert pool.used_blocks == 3


def test_what_does_not_fit_changes_nothing() -> None:
    pool = KvPool(4, 16)
    assert pool.grow("a", 40)
    assert not pool.grow("a", 65)
    assert not pool.grow("b", 17)
    assert not pool.reserve("b", 17)
    assert (pool.used_blocks, pool.free_blocks) == (3, 1)
    assert pool.owners() == {"a"}
    pool.check_integrity()


def test_a_reservation_becomes_ordinary_when_it_is_claimed() -> None:
    pool = KvPool(8, 16)
    assert pool.reserve("a", 50)
    assert (pool.reserved_blocks, pool.used_blocks) == (4, 4)
    pool.claim("a")
    assert (pool.reserved_blocks, pool.used_blocks) == (0, 4)
    assert pool.free("a") == 4
    assert pool.free("a") == 0, "freeing twice takes nothing from others"
    assert pool.free_blocks == 8


def test_freeing_an_unclaimed_reservation_ends_it() -> None:
    pool = KvPool(8, 16)
    pool.reserve("a", 50)
    pool.free("a")
    assert pool.reserved_blocks == 0
    assert pool.reserve("a", 128), "the same owner may reserve again"


@pytest.mark.parametrize("damage", ["lost", "held twice", "below none", "reserved without blocks", "retired and free"])
def test_damage_is_noticed(damage: str) -> None:
    pool = KvPool(8, 16)
    pool.grow("a", 40)
    pool.grow("b", 40)
    if damage == "lost":
        pool._held["a"] -= 1
    elif damage == "held twice":
        pool._held["a"] += 1
    elif damage == "below none":
        pool._held["a"], pool._held["b"] = -1, 7
    elif damage == "retired and free":
        pool.retired_blocks += 1
    else:
        pool._reserved.add("nobody")
    with pytest.raises(AssertionError, match="block"):
        pool.check_integrity()


def test_what_is_retired_is_nobodys_but_not_free_before_its_step_is_over() -> None:
    pool = KvPool(8, 16)
    pool.grow("a", 50)
    pool.retire("a")
    assert (pool.held_blocks("a"), pool.used_blocks, pool.retired_blocks) == (0, 4, 4)
    assert not pool.grow("b", 70)
    assert pool.reserve("a", 64), "the same owner may come again"
    pool.free_retired()
    assert (pool.free_blocks, pool.used_blocks, pool.retired_blocks) == (4, 4, 0)
    pool.check_integrity()


def test_reserved_blocks_are_freed_and_not_retired() -> None:
    pool = KvPool(8, 16)
    pool.reserve("a", 50)
    with pytest.raises(AssertionError, match="no KV"):
        pool.retire("a")


def test_blocks_have_names_where_they_are_asked_for() -> None:
    counted, named = KvPool(8, 16), NamedKvPool(8, 16)
    for pool in (counted, named):
        pool.grow("a", 20)
        pool.reserve("b", 20)
        pool.grow("a", 33)
    assert (counted.blocks("a"), counted.blocks("b")) == ((), ())
    assert (named.blocks("a"), named.blocks("b")) == ((0, 1, 4), (2, 3))
    named.retire("a")
    named.grow("c", 16)
    assert named.blocks("c") == (5,)
    named.free_retired()
    named.grow("c", 48)
    assert named.blocks("c") == (5, 0, 1)


def test_a_block_without_its_name_is_noticed() -> None:
    pool = NamedKvPool(8, 16)
    pool.grow("a", 40)
    pool._table.free("a")
    with pytest.raises(AssertionError, match="without its name"):
        pool.check_integrity()


class Pools(RuleBasedStateMachine):
    """A pool beside plain counts."""

    @initialize(kind=st.sampled_from([KvPool, NamedKvPool]), blocks=st.integers(1, 12), block_size=st.integers(1, 16))
    def begin(self, kind: type[KvPool], blocks: int, block_size: int) -> None:
        self.pool = kind(blocks, block_size)
        self.held: dict[str, int] = {}
        self.reserved: set[str] = set()
        self.retired = 0

    def _fits(self, owner: str, tokens: int) -> tuple[bool, int]:
        """Whether an owner may hold so many tokens, and the blocks that it has then."""
        held = self.held.get(owner, 0)
        need = max(-(-tokens // self.pool.block_size), held)
        return need - held <= self.pool.num_blocks - self.retired - sum(self.held.values()), need

    @rule(owner=OWNERS, tokens=TOKENS)
    def grow(self, owner: str, tokens: int) -> None:
        fits, need = self._fits(owner, tokens)
        assert self.pool.grow(owner, tokens) is fits
        if fits:
            self.held[owner] = need

    @rule(owner=OWNERS, tokens=TOKENS)
    def reserve(self, owner: str, tokens: int) -> None:
        if owner in self.pool.owners():
            return
        fits, need = self._fits(owner, tokens)
        assert self.pool.reserve(owner, tokens) is fits
        if fits:
            self.held[owner] = need
            self.reserved.add(owner)

    @rule(owner=OWNERS)
    def claim(self, owner: str) -> None:
        if owner in self.reserved:
            self.pool.claim(owner)
            self.reserved.remove(owner)

    @rule(owner=OWNERS)
    def free(self, owner: str) -> None:
        assert self.pool.free(owner) == self.held.pop(owner, 0)
        self.reserved.discard(owner)

    @rule(owner=OWNERS)
    def retire(self, owner: str) -> None:
        if owner not in self.reserved:
            self.pool.retire(owner)
            self.retired += self.held.pop(owner, 0)

    @rule()
    def free_retired(self) -> None:
        self.pool.free_retired()
        self.retired = 0

    @invariant()
    def agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool.used_blocks == self.retired + sum(self.held.values())
        assert self.pool.reserved_blocks == sum(self.held[owner] for owner in self.reserved)


TestPools = Pools.TestCase
TestPools.settings = examples(150, stateful_step_count=40)
