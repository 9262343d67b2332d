"""How long each unit of a device's work takes, measured at a node's start in about half a second.

Steps are planned from what units take alone. So no two processes measure on one device at a time, and a disturbed
measurement counts for less than the quicker ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from emulator.core.step_work import UnitTimes
from emulator.live.backend import Backend

BATCH_S = 5e-3
REPEATS = 9
_QUICK = 0.25  # of repeats what a quarter undercuts: alone on the device, without the luck of the very best
_FEW_GEMMS = 2
_FEW_ITERATIONS = 64
_FEW_READS = 64  # that make up all of the memory at hand


def measure_units(backend: Backend) -> UnitTimes:
    """Time each kind of work on a device that has nothing else to do, in small and in large batches."""
    gemm_s = tuple((k, _unit_s(backend, partial(backend.gemm, k), _FEW_GEMMS)[0]) for k in backend.gemm_ks)
    fill_s, fill_launch_s = _unit_s(backend, backend.fill, _FEW_ITERATIONS)
    byte_s, read_launch_s = _unit_s(backend, backend.read, backend.read_bytes_at_hand // _FEW_READS)
    return UnitTimes(
        gemm_s=gemm_s,
        fill_s=fill_s,
        fill_launch_s=fill_launch_s,
        read_bytes_per_s=1 / byte_s,
        read_launch_s=read_launch_s,
    )


def _unit_s(backend: Backend, enqueue: Callable[[int], None], few: int) -> tuple[float, float]:
    """What one unit takes and what a batch costs beside: batches of `few` units, and of as many as take `BATCH_S`."""
    backend.time_s(lambda: enqueue(few))  # the first use costs more
    (roughly_s,) = backend.time_s(lambda: enqueue(few))
    many = max(2 * few, round(few * BATCH_S / roughly_s))
    few_s, many_s = (_quick_s(backend, partial(enqueue, units)) for units in (few, many))
    unit_s = (many_s - few_s) / (many - few)
    if unit_s <= 0:  # nothing but noise: the large batch says more
        return many_s / many, 0.0
    return unit_s, max(0.0, few_s - few * unit_s)


def _quick_s(backend: Backend, enqueue: Callable[[], None]) -> float:
    return float(np.quantile(backend.time_s(enqueue, REPEATS), _QUICK))
