"""A verdict in words: what an engineer would tell a colleague, with the size, the turning point and the cost.

Plain ASCII, so that it prints anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emulator.core.compare_summary import BandwidthOutcome, BreakEven, BreakEvenReason, DecidingMetric, Difference
from emulator.core.metrics import METRICS, Metric, Part
from emulator.core.quantities import BitsPerSecond
from emulator.core.run_summary import RunSummary
from emulator.core.specs import VerdictOutcome

METRIC_NAMES: Mapping[DecidingMetric, str] = {
    "slo_attainment": "SLO attainment",
    "completion": "share of requests completed",
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "e2el_ms": "E2EL",
    "itl_p99_ms": "ITL p99",
}

PART_WORDS: Mapping[Part, str] = {
    "queue": "more queueing for prefill",
    "prefill": "longer prefill",
    "orchestration": "orchestration",
    "decode_wait": "waiting for decode memory",
    "decode": "for the first decode step",
}

WORTH_NAMING_MS = 0.1
WORTH_NAMING_SHARE = 0.1
"""A part of a TTFT difference is named from a tenth of it on."""


@dataclass(frozen=True)
class Comparison:
    """A disaggregated run (`ours`) against a colocated one at one bandwidth.

    `part_changes_ms` is by how much each part of the mean TTFT is longer on our side, over the requests completed on
    both; a baseline has no transfer, so that of `wire` is all of ours.
    """

    outcome: BandwidthOutcome
    ours: RunSummary
    theirs: RunSummary
    part_changes_ms: Mapping[Part, float]


def write_text(
    last: Comparison,
    outcomes: Sequence[BandwidthOutcome],
    break_even: BreakEven | None,
    reason: BreakEvenReason | None,
    bounds_ms: Mapping[Metric, float],
) -> str:
    """The verdict at the highest bandwidth, where it turns, and what it costs or gains besides."""
    sentences = [_claim(last, bounds_ms), _turn(outcomes, break_even, reason), *_asides(last), *_caveats(last)]
    sentences += _stamps(last)
    return " ".join(sentences)


def signed_ms(value: float) -> str:
    """`+2.4 ms`, `-1,250 ms`: one decimal below 100 ms."""
    return f"{'-' if value < 0 else '+'}{_ms(abs(value))}"


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value < 99.95 else f"{value:,.0f} ms"


def _claim(comparison: Comparison, bounds_ms: Mapping[Metric, float]) -> str:
    outcome = comparison.outcome
    verb = {"helps": "helps", "hurts": "hurts", "no difference": "makes no difference"}[outcome.outcome]
    subject = f"{comparison.ours.deployment} {verb} against {comparison.theirs.deployment}"
    subject += f" at {BitsPerSecond(outcome.kv_bandwidth_bps)}"
    attainment = f"SLO attainment {_percent(comparison.ours)} against {_percent(comparison.theirs)}"
    metric = outcome.deciding_metric
    if metric is None:
        claim = f"{subject}: {attainment}, and no latency with a bound differs materially."
        wire_ms = comparison.ours.ttft_breakdown_ms.wire
        if wire_ms:
            claim += f" It gains nothing that the SLO asks for and pays {_ms(wire_ms)} of transfer in the mean TTFT."
        elif comparison.ours.first_token == "prefill":
            claim += " It gains nothing that the SLO asks for; the transfer comes after the first token."
        return claim
    difference = outcome.differences[metric]
    if metric == "slo_attainment":
        return f"{subject}: {attainment} ({_points(difference)}{_scope(comparison)})."
    if metric == "completion":
        done = f"{_done(comparison.ours)} against {_done(comparison.theirs)} requests completed"
        return f"{subject}: {done} ({_points(difference)}{_scope(comparison)}); {attainment}."
    mean, low, high = difference.mean or 0.0, difference.low or 0.0, difference.high or 0.0
    bound = bounds_ms[metric]
    size = (
        f"{signed_ms(mean)} on average (95% interval {signed_ms(low)} to {signed_ms(high)}; its bound is {bound:g} ms)"
    )
    size += _transfer(comparison, mean) if metric == "ttft_ms" else ""
    return f"{subject}: {METRIC_NAMES[metric]} {size}; {attainment}."


def _percent(summary: RunSummary) -> str:
    return "none" if summary.slo_attainment is None else f"{100 * summary.slo_attainment:.1f}%"


def _done(summary: RunSummary) -> str:
    return f"{summary.completed} of {summary.requests}"


def _points(difference: Difference) -> str:
    mean, low, high = (100 * (value or 0.0) for value in (difference.mean, difference.low, difference.high))
    return f"{mean:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}"


def _scope(comparison: Comparison) -> str:
    """Say it when the two runs were not sent the same requests, as with closed-loop users."""
    pairs = comparison.outcome.pairs
    if pairs == comparison.ours.requests == comparison.theirs.requests:
        return ""
    return f", over the {pairs} requests that both were sent"


def _turn(outcomes: Sequence[BandwidthOutcome], break_even: BreakEven | None, reason: BreakEvenReason | None) -> str:
    lowest, highest = (BitsPerSecond(outcomes[i].kv_bandwidth_bps) for i in (0, -1))
    if break_even is not None:
        low, high = BitsPerSecond(break_even.low_bps), BitsPerSecond(break_even.high_bps)
        return f"It turns between {low}, where it {_verb(outcomes, break_even.low_bps)}, and {high}, where it helps."
    if reason == "only one bandwidth":
        return "No other bandwidth was compared."
    if reason == "always helps":
        return f"It helps at every bandwidth that was run, from {lowest} to {highest}."
    each = ", ".join(f"{outcome.outcome} at {BitsPerSecond(outcome.kv_bandwidth_bps)}" for outcome in outcomes)
    if reason == "not monotone":
        return f"There is no single turning point: {each}."
    if len({outcome.outcome for outcome in outcomes}) == 1:
        return f"It is the same at every bandwidth that was run, from {lowest} to {highest}."
    return f"It helps at no bandwidth that was run: {each}."


def _verb(outcomes: Sequence[BandwidthOutcome], bandwidth_bps: float) -> str:
    outcome: VerdictOutcome = next(o.outcome for o in outcomes if o.kv_bandwidth_bps == bandwidth_bps)
    return "makes no difference" if outcome == "no difference" else outcome


def _asides(comparison: Comparison) -> list[str]:
    """What else differs materially, and in which direction; TTFT and the transfer in it in any case."""
    outcome = comparison.outcome
    notes: dict[str, list[str]] = {"": [], "helps": [], "hurts": []}
    for metric in METRICS:
        difference = outcome.differences[metric]
        if difference.mean is None or metric == outcome.deciding_metric:
            continue
        if metric == "ttft_ms" or difference.decides:
            size = f"{METRIC_NAMES[metric]} {signed_ms(difference.mean)}"
            size += _transfer(comparison, difference.mean) if metric == "ttft_ms" else ""
            sign = "" if not difference.decides else "helps" if difference.mean < 0 else "hurts"
            notes[sign].append(size)
    sentences = [f"{', '.join(notes[''])}."] if notes[""] else []
    for sign in ("hurts", "helps") if outcome.outcome == "hurts" else ("helps", "hurts"):
        if notes[sign]:
            contrast = "Also" if outcome.outcome == sign else "But"
            quality = "better" if sign == "helps" else "worse"
            sentences.append(f"{contrast} {quality}: {', '.join(notes[sign])}.")
    return sentences


def _transfer(comparison: Comparison, difference_ms: float) -> str:
    """What a TTFT difference is made of: `, of which 2.1 ms transfer`, and the other parts that grew as notably.

    Where prefill streams the first token the transfer is no part of it, which is said instead.
    """
    changes = comparison.part_changes_ms
    link = "of which" if difference_ms >= changes["wire"] else "including"
    notable = max(WORTH_NAMING_MS, WORTH_NAMING_SHARE * abs(difference_ms))
    grown = sorted((part for part in PART_WORDS if changes[part] >= notable), key=lambda part: -changes[part])
    named = [f"{_ms(changes[part])} {PART_WORDS[part]}" for part in grown]
    later = comparison.ours.first_token == "prefill"
    if not later:
        named.insert(0, f"{_ms(changes['wire'])} transfer")
    return (f", {link} {' and '.join(named)}" if named else "") + (" (the transfer comes after it)" if later else "")


def _stamps(comparison: Comparison) -> list[str]:
    """Which of the two runs had nodes share a device: what follows from them goes for that device, shared."""
    return [
        f"{run.deployment}: {stamp}." for run in (comparison.ours, comparison.theirs) for stamp in run.device.stamps()
    ]


def _caveats(comparison: Comparison) -> list[str]:
    """Requests that did not complete, which no latency above covers."""
    outcome = comparison.outcome
    if not outcome.left_out:
        return []
    runs = ((run.deployment, run.failed, run.unfinished) for run in (comparison.ours, comparison.theirs))
    counts = [
        f"{name} left {' and '.join(_count(failed, 'failed') + _count(unfinished, 'unfinished'))}"
        for name, failed, unfinished in runs
        if failed or unfinished
    ]
    return [
        f"{outcome.left_out} of {outcome.pairs} requests did not complete in both and are in no latency here"
        f" ({', '.join(counts)})."
    ]


def _count(number: int, what: str) -> list[str]:
    return [f"{number} {what}"] if number else []
