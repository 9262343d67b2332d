"""Where bytes lie, and in which runs they are copied."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.byte_runs import Run, Span, in_blocks, in_ring, ring_pieces, runs_between


def _bytes_of(spans: list[Span]) -> list[int]:
    return [span.address + i for span in spans for i in range(span.nbytes)]


@given(st.integers(1, 9), st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True), st.data())
def test_a_sequence_over_blocks_lies_where_its_blocks_lie(size: int, blocks: list[int], data: st.DataObject) -> None:
    total = size * len(blocks)
    offset = data.draw(st.integers(0, total))
    nbytes = data.draw(st.integers(0, total - offset))
    addresses = [1000 * block for block in blocks]
    whole = [address + i for address in addresses for i in range(size)]
    assert _bytes_of(in_blocks(addresses, size, offset, nbytes)) == whole[offset : offset + nbytes]


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 9), (5, 4), (-1, 2)])
def test_bytes_beyond_the_blocks_are_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="not within 2 blocks of 4 bytes"):
        in_blocks([0, 100], 4, offset, nbytes)


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 40))
def test_a_ring_begins_anew_at_its_end(ring: int, start: int, nbytes: int) -> None:
    expected = [500 + (start + i) % ring for i in range(nbytes)]
    assert _bytes_of(in_ring(500, ring, start, nbytes)) == expected


_LENGTHS = st.lists(st.integers(1, 9), max_size=8)


@given(_LENGTHS, _LENGTHS, st.booleans())
def test_runs_copy_every_byte_once_and_in_order(sources: list[int], targets: list[int], adjacent: bool) -> None:
    nbytes = min(sum(sources), sum(targets))
    gap = 0 if adjacent else 100

    def spans(lengths: list[int], address: int) -> list[Span]:
        found, left = [], nbytes
        for length in lengths:
            if left:
                found.append(Span(address, min(length, left)))
                address, left = address + found[-1].nbytes + gap, left - found[-1].nbytes
        return found

    source, target = spans(sources, 0), spans(targets, 10_000)
    runs = runs_between(source, target)
    copied = [(run.source + i, run.target + i) for run in runs for i in range(run.nbytes)]
    assert copied == list(zip(_bytes_of(source), _bytes_of(target), strict=True))
    if adjacent and nbytes:
        assert runs == [Run(0, 10_000, nbytes)]


def test_copies_of_two_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="as many bytes"):
        runs_between([Span(0, 4)], [Span(10, 5)])


@given(st.integers(1, 50), st.integers(0, 2000), st.integers(1, 20), st.data())
def test_reads_go_round_a_ring_in_pieces(ring: int, nbytes: int, piece: int, data: st.DataObject) -> None:
    unit = 16
    position = data.draw(st.integers(0, ring - 1))
    pieces = ring_pieces(position * unit, nbytes, ring * unit, piece * unit, unit)
    assert all(length % unit == 0 and 0 < length <= piece * unit for _, length in pieces)
    assert all(offset + length <= ring * unit for offset, length in pieces)
    read = [(offset + i) // unit for offset, length in pieces for i in range(0, length, unit)]
    assert read == [(position + i) % ring for i in range(nbytes // unit)]


def test_pieces_of_a_read_are_of_one_size() -> None:
    pieces = ring_pieces(0, 1 << 20, 1 << 30, 1000 * 16, 16)
    lengths = np.array([length for _, length in pieces])
    assert lengths.max() - lengths.min() <= 16
    assert len(pieces) == -(-(1 << 20) // (1000 * 16))
