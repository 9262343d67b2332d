"""Portions of a step: they add up to its work and its KV, whatever it is cut at."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.effects import KvWrite
from emulator.core.scaling import Scaling
from emulator.core.specs import Scale
from emulator.core.step_portions import PORTION_S, portions
from emulator.core.step_work import UnitTimes, work_s

UNITS = UnitTimes(
    gemm_s=((64, 20e-6), (256, 80e-6)),
    fill_s=1e-6,
    fill_launch_s=5e-6,
    read_bytes_per_s=1e12,
    read_launch_s=5e-6,
)


@given(
    st.floats(0.002, 0.5),
    st.floats(0.0, 1.0),
    st.lists(st.floats(0.01, 0.99), max_size=5, unique=True).map(sorted),
)
def test_portions_are_short_and_add_up(seconds: float, prefill: float, progress: list[float]) -> None:
    prefill_s = prefill * seconds
    cut = list(portions(prefill_s, seconds - prefill_s, progress, (), units=UNITS, scaling=Scaling(Scale())))
    assert sum(portion.planned_s for portion in cut) == pytest.approx(seconds)
    assert max(portion.planned_s for portion in cut) <= PORTION_S * (1 + 1e-9)
    assert [portion.passes for portion in cut if portion.passes] == list(range(1, len(progress) + 2))
    assert cut[-1].passes == len(progress) + 1
    missing_s = len(cut) * (UNITS.fill_launch_s + 2 * UNITS.fill_s)
    assert sum(work_s(portion.work, UNITS) for portion in cut) == pytest.approx(seconds, abs=missing_s)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**6)), min_size=1, max_size=3),
    st.sampled_from([1.0, 3.7, 1000.0]),
    st.integers(1, 80).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(1, layers))),
)
def test_by_each_bound_all_kv_is_computed_that_the_link_may_be_handed(
    spans: list[tuple[int, int]], shrink: float, layered: tuple[int, int]
) -> None:
    layers, groups = layered
    scaling = Scaling(Scale(bytes=shrink))
    writes = [KvWrite(f"r{n}", offset, nbytes, (0,)) for n, (offset, nbytes) in enumerate(spans)]
    boundaries = [group * layers // groups for group in range(1, groups)]
    progress = [boundary / layers for boundary in boundaries]
    reached = [write.offset for write in writes]
    behind = [scaling.wire_span(write.offset, write.offset)[0] for write in writes]
    for portion in portions(0.05, 0.01, progress, writes, units=UNITS, scaling=scaling):
        for write, start, stop in portion.writes:
            n = writes.index(write)
            assert start <= behind[n], "no gap"
            behind[n] = max(behind[n], stop)
        if 0 < portion.passes <= len(boundaries):
            reached = [w.offset + w.nbytes * boundaries[portion.passes - 1] // layers for w in writes]
            assert all(got >= scaling.wire_bytes(0, to, 10**9) for got, to in zip(behind, reached, strict=True))
    assert behind == [scaling.wire_span(0, write.offset + write.nbytes)[1] for write in writes]


def test_writing_kv_takes_the_place_of_arithmetic() -> None:
    writes = [KvWrite("r0", 0, 10**9, (0,))]
    cut = portions(0.012, 0.004, (), writes, units=UNITS, scaling=Scaling(Scale()))
    assert sum(work_s(portion.work, UNITS) for portion in cut) == pytest.approx(0.014, rel=0.01)


def test_kv_is_spread_over_the_portions() -> None:
    writes = [KvWrite("r0", 0, 10_000, (0,))]
    cut = list(portions(0.09, 0.01, (), writes, units=UNITS, scaling=Scaling(Scale())))
    spans = [span for portion in cut for span in portion.writes]
    assert len(spans) == len(cut) == 5
    assert all(one.stop == other.start for one, other in itertools.pairwise(spans))
