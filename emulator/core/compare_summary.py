"""The JSON of `compare`, as types: what its runs come to, and what was concluded from them.

The names of the fields are the keys of the JSON and part of the interface; a value that does not exist (a percentile
of nothing, a rate of no transfer) is null, never NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from emulator.core.deployments import FirstToken
from emulator.core.device_spec import DeviceName
from emulator.core.run_summary import RunSummary
from emulator.core.specs import Scale, Slo, VerdictOutcome
from emulator.core.trace_summary import ReplayedTrace
from emulator.core.upkeep import COST_BASIS

DecidingMetric = Literal["slo_attainment", "completion", "ttft_ms", "tpot_ms", "e2el_ms", "itl_p99_ms"]
JudgedMetric = Literal["ttft_ms", "tpot_ms"]
Percentile = Literal["p50", "p90", "p99"]
StatedFirstToken = Literal[FirstToken, "mixed"]
BreakEvenReason = Literal["always helps", "never helps", "only one bandwidth", "not monotone"]


class Difference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Disaggregated minus baseline, over the pairs of requests in which both have a value.

    Shares (0 to 1) for `slo_attainment` and `completion`, milliseconds otherwise. `low`…`high` is the 95 % interval
    of the mean, null when there is no more than one pair. `decides`: the interval excludes 0, enough pairs differ,
    and the size is material (see `core.verdict`).
    """

    mean: float | None
    low: float | None
    high: float | None
    pairs: int
    decides: bool


class BandwidthOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The comparison at one KV bandwidth; `left_out` pairs did not complete on both sides and have no latency."""

    kv_bandwidth_bps: float
    outcome: VerdictOutcome
    deciding_metric: DecidingMetric | None
    pairs: int
    left_out: int
    differences: dict[DecidingMetric, Difference]


class BreakEven(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The highest bandwidth run that does not help, and the lowest from which on it helps."""

    low_bps: float
    high_bps: float


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One disaggregated deployment against one colocated baseline.

    `outcome` and `deciding_metric` (null for no difference) are those at the highest bandwidth that was run;
    `break_even` is null for the reason in `break_even_reason`.
    """

    deployment: str
    baseline: str
    best_baseline: bool
    outcome: VerdictOutcome
    deciding_metric: DecidingMetric | None
    break_even: BreakEven | None
    break_even_reason: BreakEvenReason | None
    text: str
    by_bandwidth: tuple[BandwidthOutcome, ...]


class Withheld(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A comparison about which nothing is said, and why; the bandwidth is null when it goes for all of them."""

    deployment: str
    baseline: str
    kv_bandwidth_bps: float | None
    reason: str


class Deviation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One percentile of one metric, milliseconds; `difference` is live over simulated less 1, null for nothing."""

    metric: JudgedMetric
    percentile: Percentile
    live_ms: float | None
    simulated_ms: float | None
    difference: float | None
    bound: float
    within: bool


class RunParity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run by both drivers (`core.parity`)."""

    deployment: str
    kv_bandwidth_bps: float | None
    completed_live: int
    completed_simulated: int
    slo_attainment_live: float | None
    slo_attainment_simulated: float | None
    deviations: tuple[Deviation, ...]

    @property
    def within(self) -> bool:
        """Whether every deviation is within its bound."""
        return all(deviation.within for deviation in self.deviations)


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An expectation of the topology (`specs.Expectation`): whether it holds, null where that was not measured.

    `measured` says what was found, or why nothing was.
    """

    sentence: str
    holds: bool | None
    measured: str


class CompareSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole document that `pdemu compare --json` prints; `parity` has live against simulated, where asked for.

    `first_token` is that of all runs in which KV is handed over, `mixed` where each says its own, null without any.
    `traces` has every trace that is replayed, the same in all runs. `device` is the kind of device of every node.
    """

    topology: str
    launcher: str
    shaping: str
    scale: Scale
    first_token: StatedFirstToken | None
    seed: int
    slo: Slo
    runs: tuple[RunSummary, ...]
    verdict: tuple[Verdict, ...] = ()
    withheld: tuple[Withheld, ...] = ()
    parity: tuple[RunParity, ...] = ()
    expectations: tuple[Expected, ...] = ()
    traces: tuple[ReplayedTrace, ...] = ()
    cost_basis: str = COST_BASIS
    device: DeviceName = "virtual"

    @property
    def as_expected(self) -> bool:
        """Whether no expectation is known not to hold."""
        return all(expected.holds is not False for expected in self.expectations)


def stated_first_token(modes: Iterable[FirstToken | None]) -> StatedFirstToken | None:
    """One word for the modes of many runs: theirs where they agree, None without any."""
    known = {mode for mode in modes if mode is not None}
    return "mixed" if len(known) > 1 else next(iter(known), None)
