"""How much real work fills a step on a device that computes: whole GEMMs, a small kernel for the rest, and reads.

Prefill occupies compute units and decode memory bandwidth, so a step is `prefill_s` of arithmetic and `decode_s` of
reading, one after the other. The work is fixed by what one unit of it takes alone on the device: whoever else uses the
device meanwhile makes the step longer, and that is what contention is.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class UnitTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one unit of work takes alone on a device, back to back with others, in seconds.

    `gemm_s` are (K, seconds) of an (M × K) by (K × N) product, M and N being the device's; `fill_s` is one iteration of
    the arithmetic kernel that makes up the rest, `fill_launch_s` and `read_launch_s` what their launches cost beside,
    `read_bytes_per_s` the rate at which device memory is read.
    """

    gemm_s: tuple[tuple[int, float], ...]
    fill_s: float
    fill_launch_s: float
    read_bytes_per_s: float
    read_launch_s: float


class StepWork(NamedTuple):
    """Work of a step or a part of one: (K, how many) of GEMMs, iterations of the small kernel, and bytes to read."""

    gemms: tuple[tuple[int, int], ...] = ()
    fill_iterations: int = 0
    read_bytes: int = 0


def plan_work(prefill_s: float, decode_s: float, units: UnitTimes) -> StepWork:
    """The work that takes `prefill_s` of arithmetic and then `decode_s` of reading."""
    raise NotImplementedError


def work_s(work: StepWork, units: UnitTimes) -> float:
    """What work takes alone on the device, in seconds."""
    raise NotImplementedError
