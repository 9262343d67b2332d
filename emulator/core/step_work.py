"""How much real work fills a step on a device that computes: whole GEMMs, a small kernel for the rest, and reads.

Prefill occupies compute units and decode memory bandwidth, so a step is `prefill_s` of arithmetic and `decode_s` of
reading, one after the other. The work is fixed by what one unit of it takes alone on the device: whoever else uses the
device meanwhile makes the step longer, and that is what contention is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

MOST_GEMM_S = 200e-6
"""Longer GEMMs are left out where there are shorter ones: a kernel that runs is not interrupted, so work on another
stream may have to wait for so long."""

LEAST_UNIT_S = 1e-9
MOST_READ_BYTES_PER_S = 1e15
"""No unit of work is shorter, and no device reads faster."""


class UnitTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one unit of work takes alone on a device, back to back with others, in seconds.

    `gemm_s` are (K, seconds) of an (M × K) by (K × N) product, M and N being the device's; `fill_s` is one iteration of
    the arithmetic kernel that makes up the rest, `fill_launch_s` and `read_launch_s` what their launches cost beside,
    `read_bytes_per_s` the rate at which device memory is read. ValueError for times that nothing can take.
    """

    gemm_s: tuple[tuple[int, float], ...]
    fill_s: float
    fill_launch_s: float
    read_bytes_per_s: float
    read_launch_s: float

    def __post_init__(self) -> None:
        if not all(
            LEAST_UNIT_S <= unit_s < math.inf for unit_s in (self.fill_s, *(seconds for _, seconds in self.gemm_s))
        ):
            raise ValueError(f"units of work must take {LEAST_UNIT_S:g} s or longer")
        if not 0 < self.read_bytes_per_s <= MOST_READ_BYTES_PER_S:
            raise ValueError(f"reads must be faster than 0 B/s, and no faster than {MOST_READ_BYTES_PER_S:g} B/s")
        if not all(0 <= launch_s < math.inf for launch_s in (self.fill_launch_s, self.read_launch_s)):
            raise ValueError("launches must not take less than 0 s")


class StepWork(NamedTuple):
    """Work of a step or a part of one: (K, how many) of GEMMs, iterations of the small kernel, and bytes to read."""

    gemms: tuple[tuple[int, int], ...] = ()
    fill_iterations: int = 0
    read_bytes: int = 0


def plan_work(prefill_s: float, decode_s: float, units: UnitTimes) -> StepWork:
    """The work that takes `prefill_s` of arithmetic and then `decode_s` of reading.

    Their sum is met within half an iteration of the small kernel, and to the byte where anything is read: arithmetic
    that is too short to be launched is read, and a read that is too short is computed. Where either would be too short
    for the whole sum nothing is planned, so that so much is missing: a launch and half an iteration.
    """
    total_s = prefill_s + decode_s
    reads = decode_s > units.read_launch_s + units.fill_s / 2
    arithmetic = StepWork()
    if prefill_s > 0.0:
        arithmetic = _plan_arithmetic(prefill_s if reads else total_s, units)
    if not reads:
        return arithmetic
    read_s = total_s - work_s(arithmetic, units) - units.read_launch_s
    return arithmetic._replace(read_bytes=max(1, round(read_s * units.read_bytes_per_s)))


def _plan_arithmetic(seconds: float, units: UnitTimes) -> StepWork:
    """GEMMs, the longest first, as far as they leave at least one iteration to the small kernel."""
    left_s = seconds - units.fill_launch_s - units.fill_s / 2
    if left_s < 0.0:
        return StepWork()
    gemms = []
    for k, gemm_s in usable_gemms(units.gemm_s):
        times, left_s = divmod(left_s, gemm_s)
        if times:
            gemms.append((k, int(times)))
    return StepWork(tuple(gemms), max(1, round(left_s / units.fill_s + 0.5)))


def usable_gemms(gemm_s: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """The (K, seconds) that steps use, longest first: those of at most `MOST_GEMM_S`, failing these the shortest."""
    longest_first = sorted(gemm_s, key=lambda unit: unit[1], reverse=True)
    return [unit for unit in longest_first if unit[1] <= MOST_GEMM_S] or longest_first[-1:]


def work_s(work: StepWork, units: UnitTimes) -> float:
    """What work takes alone on the device, in seconds."""
    gemm_s = dict(units.gemm_s)
    seconds = sum([times * gemm_s[k] for k, times in work.gemms])
    if work.fill_iterations:
        seconds += units.fill_launch_s + work.fill_iterations * units.fill_s
    if work.read_bytes:
        seconds += units.read_launch_s + work.read_bytes / units.read_bytes_per_s
    return seconds
