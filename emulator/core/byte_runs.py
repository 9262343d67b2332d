"""Which bytes lie where: KV in blocks, a pattern in a ring, a message in one piece, and how they are copied in runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """`nbytes` bytes from `address` on."""

    address: int
    nbytes: int


class Run(NamedTuple):
    """`nbytes` bytes that lie together at both addresses."""

    source: int
    target: int
    nbytes: int


def in_blocks(addresses: Sequence[int], block_bytes: int, offset: int, nbytes: int) -> list[Span]:
    """Bytes `offset` … `offset + nbytes` of a sequence over blocks, given the blocks' addresses in their order.

    Raises ValueError where the blocks end before.
    """
    if offset < 0 or offset + nbytes > len(addresses) * block_bytes:
        raise ValueError(
            f"{nbytes} bytes from {offset} on are not within {len(addresses)} blocks of {block_bytes} bytes"
        )
    spans, end = [], offset + nbytes
    while offset < end:
        number, within = divmod(offset, block_bytes)
        length = min(block_bytes - within, end - offset)
        spans.append(Span(addresses[number] + within, length))
        offset += length
    return spans


def in_ring(address: int, ring_bytes: int, start: int, nbytes: int) -> list[Span]:
    """`nbytes` bytes from byte `start` on of a ring of `ring_bytes` that lies at `address`."""
    spans, start = [], start % ring_bytes
    while nbytes > 0:
        length = min(ring_bytes - start, nbytes)
        spans.append(Span(address + start, length))
        start, nbytes = 0, nbytes - length
    return spans


def runs_between(sources: Iterable[Span], targets: Iterable[Span]) -> list[Run]:
    """The copies, in as few runs as they can be, from one sequence of bytes to another of the same length.

    Raises ValueError where they are not of one length.
    """
    runs: list[Run] = []
    ahead, behind = iter(sources), iter(targets)
    source, target = Span(0, 0), Span(0, 0)
    while True:
        source = source if source.nbytes else next(ahead, source)
        target = target if target.nbytes else next(behind, target)
        length = min(source.nbytes, target.nbytes)
        if not length:
            break
        run = Run(source.address, target.address, length)
        if runs and _goes_on(runs[-1], run):
            runs[-1] = runs[-1]._replace(nbytes=runs[-1].nbytes + length)
        else:
            runs.append(run)
        source = Span(source.address + length, source.nbytes - length)
        target = Span(target.address + length, target.nbytes - length)
    if source.nbytes or target.nbytes:
        raise ValueError("copies need as many bytes as there is room for")
    return runs


def _goes_on(last: Run, run: Run) -> bool:
    return (last.source + last.nbytes, last.target + last.nbytes) == (run.source, run.target)


def ring_pieces(
    position: int, nbytes: int, ring_bytes: int, piece_bytes: int, unit_bytes: int
) -> list[tuple[int, int]]:
    """(offset, bytes) of reads that go on at `position` of a ring, of about one size and `piece_bytes` at most.

    All are multiples of `unit_bytes`, as ring and position are; what is less than a unit is left out.
    """
    units = nbytes // unit_bytes
    count = -(-units * unit_bytes // piece_bytes)
    pieces = []
    for number in range(count):
        length = (units * (number + 1) // count - units * number // count) * unit_bytes
        for offset, part in in_ring(0, ring_bytes, position, length):
            pieces.append((offset, part))
            position = (offset + part) % ring_bytes
    return pieces
