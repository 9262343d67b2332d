"""Names of KV blocks: each block is free, retired or one owner's, and the lowest is taken first."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from emulator.core.block_table import BlockTable
from tests.examples import examples

BLOCKS = 40
OWNERS = st.sampled_from("abcdefgh")


def test_the_lowest_free_blocks_are_taken_first() -> None:
    table = BlockTable(10)
    table.take("a", 3)
    table.take("b", 2)
    table.take("a", 1)
    assert (table.blocks("a"), table.blocks("b")) == ((0, 1, 2, 5), (3, 4))
    table.free("a")
    table.take("c", 4)
    assert table.blocks("c") == (0, 1, 2, 5)
    table.free("b")
    table.take("c", 3)
    assert table.blocks("c") == (0, 1, 2, 5, 3, 4, 6), "in the order in which it took them"


def test_who_has_no_blocks_has_none_and_frees_none() -> None:
    table = BlockTable(2)
    table.take("a", 0)
    assert table.blocks("a") == table.blocks("nobody") == ()
    table.free("nobody")
    table.retire("nobody")
    table.free_retired()
    table.check_integrity()


def test_no_more_are_taken_than_there_are() -> None:
    table = BlockTable(3)
    table.take("a", 2)
    with pytest.raises(AssertionError, match="than are free"):
        table.take("b", 2)
    table.retire("a")
    with pytest.raises(AssertionError, match="than are free"):
        table.take("b", 2)
    table.free_retired()
    table.take("b", 3)


@pytest.mark.parametrize("damage", ["two owners", "lost", "free and owned", "retired and owned", "beyond the end"])
def test_damage_is_noticed(damage: str) -> None:
    table = BlockTable(4)
    table.take("a", 2)
    table.take("b", 1)
    if damage == "two owners":
        table._of["b"].append(0)
    elif damage == "lost":
        table._of["a"].pop()
    elif damage == "free and owned":
        table._free.append(0)
    elif damage == "retired and owned":
        table._retired.append(0)
    else:
        table._of["b"] += [3, 4]
        table._untouched = 5
    with pytest.raises(AssertionError, match="block"):
        table.check_integrity()


class Tables(RuleBasedStateMachine):
    """A table beside plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(BLOCKS)
        self.of: dict[str, list[int]] = {}
        self.retired: set[int] = set()
        self.free = set(range(BLOCKS))

    @rule(owner=OWNERS, count=st.integers(0, 12))
    def take(self, owner: str, count: int) -> None:
        count = min(count, len(self.free))
        self.table.take(owner, count)
        lowest = sorted(self.free)[:count]
        self.free -= set(lowest)
        self.of.setdefault(owner, []).extend(lowest)

    @rule(owner=OWNERS)
    def give_back(self, owner: str) -> None:
        self.table.free(owner)
        self.free |= set(self.of.pop(owner, []))

    @rule(owner=OWNERS)
    def retire(self, owner: str) -> None:
        self.table.retire(owner)
        self.retired |= set(self.of.pop(owner, []))

    @precondition(lambda self: self.retired)
    @rule()
    def free_retired(self) -> None:
        self.table.free_retired()
        self.free |= self.retired
        self.retired.clear()

    @invariant()
    def agree(self) -> None:
        self.table.check_integrity()
        assert self.table.counts() == {owner: len(blocks) for owner, blocks in self.of.items()}
        assert all(self.table.blocks(owner) == tuple(blocks) for owner, blocks in self.of.items())


TestTables = Tables.TestCase
TestTables.settings = examples(60, stateful_step_count=40)
