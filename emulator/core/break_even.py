"""The break-even document: for each disaggregated deployment and baseline, the bandwidths between which it turns.

The names of the fields are the keys of the JSON. Nothing is in it that was not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from emulator.core.compare_summary import BandwidthOutcome, BreakEven, DecidingMetric
from emulator.core.quantities import MAX_BANDWIDTH_BPS, BitsPerSecond
from emulator.core.run_summary import Distribution, RunSummary
from emulator.core.specs import Slo, VerdictOutcome
from emulator.core.turning import Change, break_even, changes, is_monotone
from emulator.core.verdict_text import METRIC_NAMES

UNLIMITED_BPS = MAX_BANDWIDTH_BPS
"""A link so fast that transfers take no time: 1000 Tbps carries the KV of a 100,000-token prompt in microseconds."""

VERBS: Mapping[VerdictOutcome, str] = {
    "helps": "helps",
    "hurts": "hurts",
    "no difference": "makes no difference",
}


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Tried(_Part, frozen=True, kw_only=True):
    """A bandwidth that was run, and what came of it."""

    kv_bandwidth_bps: float
    outcome: VerdictOutcome
    deciding_metric: DecidingMetric | None

    @classmethod
    def of(cls, found: BandwidthOutcome) -> Tried:
        """Without the differences."""
        return cls(
            kv_bandwidth_bps=found.kv_bandwidth_bps, outcome=found.outcome, deciding_metric=found.deciding_metric
        )


class TriedBudget(_Part, frozen=True, kw_only=True):
    """One chunk budget of colocated nodes on `gpus` GPUs. `best`: see `core.verdict.best_baseline`."""

    gpus: int
    max_num_batched_tokens: int
    best: bool
    slo_attainment: float | None
    request_goodput: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution

    @classmethod
    def of(cls, budget: int, summary: RunSummary, *, best: bool) -> TriedBudget:
        """From the summary of its run, all seeds together."""
        return cls(
            gpus=summary.gpus,
            max_num_batched_tokens=budget,
            best=best,
            slo_attainment=summary.slo_attainment,
            request_goodput=summary.request_goodput,
            ttft_ms=summary.ttft_ms,
            tpot_ms=summary.tpot_ms,
            itl_ms=summary.itl_ms,
        )


class LiveCheck(_Part, frozen=True, kw_only=True):
    """A live run at half or twice a bandwidth found, and whether it falls on the side of the simulated one there.

    Null where nothing may be concluded from it, for `reason`. `stamps` say which nodes shared a device in it.
    """

    kv_bandwidth_bps: float
    expected: VerdictOutcome
    outcome: VerdictOutcome | None
    deciding_metric: DecidingMetric | None
    as_expected: bool | None
    reason: str | None = None
    stamps: tuple[str, ...] = ()


class PairBreakEven(_Part, frozen=True, kw_only=True):
    """One deployment against one baseline. `chunk_budget`: the baseline is the best budget, not the topology's own.

    `changes` has every two neighbouring bandwidths between which the outcome changes; `break_even` is the one change
    from which on it helps, null when there is none or it does not stay. `unlimited`, where nothing changes and it
    does not help, is the outcome over a link without limit. `live` is null when no live runs were asked for.
    """

    deployment: str
    baseline: str
    chunk_budget: int | None
    break_even: BreakEven | None
    changes: tuple[Change, ...]
    monotone: bool
    tried: tuple[Tried, ...]
    unlimited: Tried | None
    text: str
    live: tuple[LiveCheck, ...] | None = None


class BreakEvenSummary(_Part, frozen=True, kw_only=True):
    """The whole document that `pdemu break-even --json` prints."""

    topology: str
    low_bps: float
    high_bps: float
    tolerance: float
    seeds: tuple[int, ...]
    slo: Slo
    launcher: str
    live_launcher: str | None
    budgets: tuple[TriedBudget, ...]
    pairs: tuple[PairBreakEven, ...]
    remarks: tuple[str, ...] = ()


def conclude(
    deployment: str,
    baseline: str,
    tried: Sequence[Tried],
    *,
    chunk_budget: int | None,
    unlimited: Tried | None,
    detail: str,
) -> PairBreakEven:
    """What the bandwidths tried (ascending) come to; `detail` is the verdict's text where there is most to say."""
    outcomes = {at.kv_bandwidth_bps: at.outcome for at in tried}
    found = changes(outcomes)
    return PairBreakEven(
        deployment=deployment,
        baseline=baseline,
        chunk_budget=chunk_budget,
        break_even=break_even(outcomes),
        changes=found,
        monotone=is_monotone(outcomes),
        tried=tuple(tried),
        unlimited=unlimited,
        text=" ".join((*_turns(tried, found), *_beyond(tried, found, unlimited), detail)),
    )


def _turns(tried: Sequence[Tried], found: Sequence[Change]) -> list[str]:
    """Where it turns, from the lowest bandwidth on, or that it does not."""
    lowest, highest = tried[0], tried[-1]
    if len(found) == 1 and found[0].above == "helps":
        return []  # the verdict says it
    if not found:
        return [
            f"It {VERBS[highest.outcome]} at each of the {len(tried)} bandwidths that were run, from "
            f"{BitsPerSecond(lowest.kv_bandwidth_bps)} to {BitsPerSecond(highest.kv_bandwidth_bps)}."
        ]
    by_bandwidth = {at.kv_bandwidth_bps: at for at in tried}
    sentences = [
        f"Between {BitsPerSecond(change.low_bps)} and {BitsPerSecond(change.high_bps)} it turns from "
        f"{_outcome(by_bandwidth[change.low_bps])} to {_outcome(by_bandwidth[change.high_bps])}."
        for change in found
    ]
    if not is_monotone({at.kv_bandwidth_bps: at.outcome for at in tried}):
        sentences.append("So more bandwidth does not always help here.")
    return sentences


def _outcome(at: Tried) -> str:
    return at.outcome if at.deciding_metric is None else f"{at.outcome} ({METRIC_NAMES[at.deciding_metric]})"


def _beyond(tried: Sequence[Tried], found: Sequence[Change], unlimited: Tried | None) -> list[str]:
    """What a link without limit would bring, where nothing else changes the outcome."""
    if found or unlimited is None:
        return []
    link = f"{BitsPerSecond(unlimited.kv_bandwidth_bps)}, as good as an infinitely fast link,"
    if unlimited.outcome == tried[-1].outcome:
        return [f"Even {link} changes nothing:"]
    return [f"But {link} would change it:"]
