"""The JSON of `goodput`, as types: what searches found, how deployments compare by it, and what live runs said.

The names of the fields are the keys of the JSON and part of the interface; a value that does not exist is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from emulator.core.compare_summary import StatedFirstToken
from emulator.core.device_use import DeviceUse
from emulator.core.run_summary import Fidelity
from emulator.core.search import Goodput
from emulator.core.slo_scale import SloScale
from emulator.core.specs import Slo
from emulator.core.trace_summary import TraceSummary
from emulator.core.upkeep import COST_BASIS

AdvantageBound = Literal["at least", "at most"]


class Advantage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many times better than the best colocated deployment.

    By goodput per GPU, or by how much tighter the SLO is. `low`…`high` follows from the intervals of both, the worst
    against the best, so it is wide; an end is null where an interval has none. With a `bound`, one of the two is
    known at one side only, and so is `value`.
    """

    baseline: str
    value: float
    low: float | None
    high: float | None
    bound: AdvantageBound | None = None


class LivePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of a search run live: attainment simulated and live, both with the same seed, 0 to 1.

    `rate_per_s` is null where the traffic has no rate, `slo_factor` 1 unless the SLO was scaled. `live` is null when
    the run was not faithful or could not be made, for the reason in `withheld`. `device` is what computed its steps.
    """

    deployment: str
    kv_bandwidth_bps: float | None
    rate_per_s: float | None
    slo_factor: float
    launcher: str
    shaping: str
    seed: int
    simulated: float
    live: float | None
    withheld: str | None
    fidelity: Fidelity | None
    folder: str
    device: DeviceUse = DeviceUse()


class SearchSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole document that `pdemu goodput --json` prints.

    `seeds` is how many runs were asked for at each rate, the first with `seed`; `duration_s` the arrival window of
    each. Either `goodput` or, with --slo-scale, `slo_scale` has a row for each deployment and KV bandwidth, and
    `advantages` has one for each row, null where there is nothing to compare. `first_token` is as in `compare`.
    `traces` has every trace that is replayed, at its own pace.
    """

    topology: str
    first_token: StatedFirstToken | None
    seed: int
    seeds: int
    duration_s: float
    slo: Slo
    tolerance: float
    goodput: tuple[Goodput, ...] = ()
    slo_scale: tuple[SloScale, ...] = ()
    advantages: tuple[Advantage | None, ...] = ()
    live: tuple[LivePoint, ...] = ()
    traces: tuple[TraceSummary, ...] = ()
    cost_basis: str = COST_BASIS


def goodput_advantages(rows: Sequence[Goodput]) -> tuple[Advantage | None, ...]:
    """Each row's goodput per GPU against that of the best colocated one (not against itself)."""
    colocated = [row for row in rows if row.kv_bandwidth_bps is None and row.per_gpu is not None]
    best = max(colocated, key=lambda row: row.per_gpu or 0.0, default=None)
    return tuple(None if best is None or row is best else _goodput_advantage(row, best) for row in rows)


def slo_advantages(rows: Sequence[SloScale]) -> tuple[Advantage | None, ...]:
    """How many times tighter each row's SLO is than that of the best colocated one (not of itself)."""
    colocated = [row for row in rows if row.kv_bandwidth_bps is None and row.factor is not None]
    best = min(colocated, key=lambda row: row.factor or 0.0, default=None)
    return tuple(None if best is None or row is best else _slo_advantage(row, best) for row in rows)


def _goodput_advantage(row: Goodput, best: Goodput) -> Advantage | None:
    if not row.per_gpu or not best.per_gpu:
        return None
    more, best_more = row.next_rate_per_s is None, best.next_rate_per_s is None  # known from below alone
    if more and best_more:
        return None
    bound: AdvantageBound | None = "at least" if more else "at most" if best_more else None
    return Advantage(
        baseline=best.deployment,
        value=row.per_gpu / best.per_gpu,
        low=_quotient(row.low_per_s, row.gpus, best.high_per_s, best.gpus),
        high=_quotient(row.high_per_s, row.gpus, best.low_per_s, best.gpus),
        bound=bound,
    )


def _slo_advantage(row: SloScale, best: SloScale) -> Advantage | None:
    if not row.factor or not best.factor:
        return None
    return Advantage(
        baseline=best.deployment,
        value=best.factor / row.factor,
        low=_quotient(best.low, 1, row.high, 1),
        high=_quotient(best.high, 1, row.low, 1),
    )


def _quotient(above: float | None, above_gpus: int, below: float | None, below_gpus: int) -> float | None:
    if above is None or below is None:
        return None
    return (above / above_gpus) / (below / below_gpus)
