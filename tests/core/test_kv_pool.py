"""KV blocks: every block is free or has one owner, and nothing happens by halves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.core.kv_pool import KvPool

OWNERS = ("a", "b", "c", "d")
CALLS = st.tuples(st.sampled_from(["grow", "reserve", "claim", "free"]), st.sampled_from(OWNERS), st.integers(0, 90))


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


@pytest.mark.parametrize("damage", ["lost", "held twice", "below none", "reserved without blocks"])
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
    else:
        pool._reserved.add("nobody")
    with pytest.raises(AssertionError, match="block"):
        pool.check_integrity()


@settings(max_examples=150, deadline=None)
@given(st.lists(CALLS, max_size=40), st.integers(1, 12), st.integers(1, 16))
def test_any_sequence_of_calls_agrees_with_counting(
    calls: list[tuple[str, str, int]], blocks: int, block_size: int
) -> None:
    pool = KvPool(blocks, block_size)
    held: dict[str, int] = {}
    reserved: set[str] = set()
    for call, owner, tokens in calls:
        need = -(-tokens // block_size)
        if call == "free":
            assert pool.free(owner) == held.pop(owner, 0)
            reserved.discard(owner)
        elif call == "claim":
            if owner in reserved:
                pool.claim(owner)
                reserved.discard(owner)
        elif call == "grow":
            fits = max(need, held.get(owner, 0)) - held.get(owner, 0) <= blocks - sum(held.values())
            assert pool.grow(owner, tokens) is fits
            if fits:
                held[owner] = max(need, held.get(owner, 0))
        elif owner not in pool.owners():
            fits = need <= blocks - sum(held.values())
            assert pool.reserve(owner, tokens) is fits
            if fits:
                held[owner] = need
                reserved.add(owner)
        pool.check_integrity()
        assert pool.used_blocks == sum(held.values())
        assert pool.reserved_blocks == sum(held[o] for o in reserved)
