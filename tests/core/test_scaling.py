"""Model quantities on this machine: nothing is lost in rounding, and times and rates stretch together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.scaling import Scaling
from emulator.core.specs import Scale
from tests.examples import examples


def test_without_scale_everything_is_itself() -> None:
    scaling = Scaling(Scale())
    assert scaling.wall_s(2.5) == 2.5
    assert scaling.wall_bytes_per_s(10e9) == 1.25e9
    assert scaling.wire_bytes(1_000, 655_360_000, 700_000_000) == 655_360_000
    assert scaling.model_bytes(123, 655_360_000) == 123


def test_time_stretches_durations_and_slows_links() -> None:
    scaling = Scaling(Scale(time=4.0))
    assert scaling.wall_s(2.5) == 10.0
    assert scaling.wall_bytes_per_s(10e9) == 1.25e9 / 4
    assert scaling.wire_bytes(0, 1_000, 1_000) == 1_000


def test_bytes_shrink_with_their_rate_so_that_a_transfer_takes_as_long() -> None:
    scaling = Scaling(Scale(bytes=1_000.0))
    assert scaling.wire_bytes(0, 655_360_000, 655_360_000) == 655_360
    assert scaling.wall_bytes_per_s(2e12) == pytest.approx(2.5e8)
    assert 655_360 / scaling.wall_bytes_per_s(2e12) == pytest.approx(655_360_000 / 2.5e11)


@examples(200)
@given(st.lists(st.integers(1, 10_000_000), min_size=1, max_size=12), st.floats(1.0, 5_000.0))
def test_the_parts_of_a_transfer_add_up_to_its_whole(parts: list[int], shrink: float) -> None:
    scaling = Scaling(Scale(bytes=shrink))
    offsets = [0, *itertools.accumulate(parts)]
    total = offsets[-1]
    wire = [scaling.wire_bytes(offset, nbytes, total) for offset, nbytes in zip(offsets, parts, strict=False)]
    whole = scaling.wire_bytes(0, total, total)
    assert sum(wire) == whole
    assert all(nbytes >= 0 for nbytes in wire)
    assert wire[-1] > 0, "KV cannot be complete before its last part"
    assert total / shrink <= whole < total / shrink + 1
    assert scaling.model_bytes(whole, total) == total, "all of a transfer stands for all of its KV, to the byte"
    assert all(0 <= scaling.model_bytes(n, total) <= total for n in itertools.accumulate(wire))


@examples(200)
@given(st.integers(1, 10_000_000), st.integers(1, 50), st.floats(1.0, 5_000.0), st.data())
def test_blocks_hold_their_wire_bytes_and_spans_cover_every_part(
    block_bytes: int, blocks: int, shrink: float, data: st.DataObject
) -> None:
    scaling = Scaling(Scale(bytes=shrink))
    total = data.draw(st.integers(1, blocks * block_bytes))
    assert scaling.wire_bytes(0, total, total) <= blocks * scaling.wire_block_bytes(block_bytes)
    stop = data.draw(st.integers(1, total))
    start = data.draw(st.integers(0, stop - 1))
    before = scaling.wire_bytes(0, start, total)
    first, behind = scaling.wire_span(start, stop)
    assert first <= before
    assert before + scaling.wire_bytes(start, stop - start, total) <= behind


def test_without_scale_blocks_and_spans_are_themselves() -> None:
    scaling = Scaling(Scale())
    assert scaling.wire_block_bytes(5_242_880) == 5_242_880
    assert scaling.wire_span(7, 1_000) == (7, 1_000)
