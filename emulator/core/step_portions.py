"""A step of a computing device in portions of work: what is enqueued at a time, so that none of it runs too long.

Each portion has its share of the step's arithmetic, of its reads and of the KV that it computes. The bounds between
groups of layers are bounds of portions too, because the step's progress is told there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from emulator.core.effects import KvWrite
from emulator.core.scaling import Scaling
from emulator.core.step_work import StepWork, UnitTimes, plan_work

PORTION_S = 0.02


class WireWrite(NamedTuple):
    """Bytes `start` … `stop` on the wire of the KV that is written into `write.blocks`."""

    write: KvWrite
    start: int
    stop: int


class Portion(NamedTuple):
    """Work that alone takes `planned_s`, with the KV that is computed by its end.

    With it the step gets to its instant of progress number `passes` (from 1; the one after the last is the step's end);
    0 within a part between two of them.
    """

    work: StepWork
    writes: tuple[WireWrite, ...]
    planned_s: float
    passes: int = 0


def portions(
    prefill_s: float,
    decode_s: float,
    progress: Sequence[float],
    writes: Sequence[KvWrite],
    *,
    units: UnitTimes,
    scaling: Scaling,
) -> Iterator[Portion]:
    """The portions of work that takes `prefill_s` of arithmetic and `decode_s` of reading, cut at shares `progress`.

    Writing KV is work too, by the rate at which memory is read, and counts as part of the arithmetic.
    """
    bounds = [0.0, *progress, 1.0]
    for passes, (first, last) in enumerate(itertools.pairwise(bounds), start=1):
        count = max(1, math.ceil((last - first) * (prefill_s + decode_s) / PORTION_S))
        for n in range(count):
            start = first + (last - first) * n / count
            stop = last if n == count - 1 else first + (last - first) * (n + 1) / count
            written = tuple(_written(writes, start, stop, scaling))
            nbytes = sum(write.stop - write.start for write in written)
            share, write_s = stop - start, 2 * nbytes / units.read_bytes_per_s  # read and written
            work = plan_work(max(0.0, share * prefill_s - write_s), share * decode_s, units)
            yield Portion(work, written, share * (prefill_s + decode_s), passes if n == count - 1 else 0)


def _written(writes: Sequence[KvWrite], first: float, last: float, scaling: Scaling) -> Iterator[WireWrite]:
    """What of each write is done from one share of the step to another, rounded outward."""
    for write in writes:
        start = write.offset + math.ceil(write.nbytes * first)
        stop = write.offset + math.ceil(write.nbytes * last)
        if stop > start:
            yield WireWrite(write, *scaling.wire_span(start, stop))
