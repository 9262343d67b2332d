"""What articles on disaggregation say, by simulation, statement by statement."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from emulator.core import verdict
from emulator.core.catalog import find_model
from emulator.core.cost import kv_bytes
from emulator.core.run_summary import RunResult, RunSummary
from emulator.core.specs import Topology
from emulator.core.workload import open_rate_per_s
from emulator.report.validate_table import Finding
from emulator.study.published import Attained, Bench, at_rate, with_slo

COLOCATED = "colocated-prefill-first"
SPLIT = "1P1D"
USERS, OUTPUT_TOKENS, STEP_S = 50, 150, 0.025
"""The worked example: users of the closed loop, their mean output, and a decode step as the article has it."""

BISECTIONS = 8


def interference(bench: Bench) -> list[Finding]:
    """A1, A2, A4 and A5: the stall of one prompt, of several at once, KV bytes, and short prompts."""
    topology = bench.topology("interference")
    stalled, smooth = (_longest_gap_ms(bench.run(topology, name), 0.0) for name in (COLOCATED, SPLIT))
    gaps = bench.run(bench.topology("published/article-gaps"), "colocated")
    by_prompts = [_longest_gap_ms(gaps, start_s, start_s + 2.5) for start_s in (0.0, 2.5, 5.0)]
    nbytes = kv_bytes(find_model(bench.catalog, "Llama-2-70B"), 2000)
    return [
        bench.found(
            "A1",
            stalled,
            setting="interference.toml, colocated",
            why=f"A gap is the 80 ms of the prefill and the stream's own step; on 1P1D the longest is {smooth:.1f} ms.",
        ),
        bench.found(
            "A2",
            max(by_prompts),
            setting="three long prompts at once",
            why="One long prompt is not enough: the longest gaps with one, two and three at an instant are "
            + ", ".join(f"{gap:.0f}" for gap in by_prompts)
            + " ms.",
        ),
        bench.found(
            "A4",
            nbytes / 1e9,
            why=f"The formula gives {nbytes:,} bytes for 8 KV heads of fp16; the article's figure is twice that.",
        ),
        _short_prompts(bench),
    ]


def _short_prompts(bench: Bench) -> Finding:
    """A5: the verdict against the best colocated deployment."""
    topology = bench.topology("short-prompts")
    results = [bench.run(topology, deployment.name) for deployment in topology.deployments]
    judged = next(v for v in verdict.judge(results, topology.slo).verdicts if v.best_baseline)
    ours = "helps" if judged.outcome == "helps" else "does not help"
    return bench.found("A5", ours, setting="short-prompts.toml", why=judged.text)


def closed_loop(bench: Bench) -> list[Finding]:
    """A3 and A6 with fifty users who wait for their answers, as worked-example.toml has them."""
    topology = bench.topology("worked-example")
    colocated, split = (bench.run(topology, name) for name in (COLOCATED, SPLIT))
    ceiling = USERS / (OUTPUT_TOKENS * STEP_S)
    sent = {name: result.summary.requested_rate for name, result in (("colocated", colocated), (SPLIT, split))}
    why = (
        f"A closed loop makes its own rate: {USERS} users with {OUTPUT_TOKENS} tokens of {STEP_S * 1e3:.0f} ms cannot "
        f"pass {ceiling:.1f} req/s whatever serves them, and send {sent['colocated']:.1f} (colocated) and "
        f"{sent[SPLIT]:.1f} (1P1D) here; 45 req/s need the open loop. So queues stay short: of the mean TTFT "
        f"{_waiting(colocated)} colocated, {_waiting(split)} on 1P1D."
    )
    return [
        *_latencies(bench, colocated, split, "closed loop", why),
        bench.found("A6 goodput", colocated.summary.request_goodput, setting="closed loop", why=why),
        bench.found("A6 goodput split", split.summary.request_goodput, setting="closed loop", why=why),
        bench.found(
            "A6 gain",
            _quotient(split.summary.request_goodput, colocated.summary.request_goodput),
            setting="closed loop",
            why=why,
        ),
        _missed(bench, _attained(colocated), "closed loop"),
    ]


def open_loop(bench: Bench) -> list[Finding]:
    """A3 and A6 with Poisson arrivals: latencies at the published 12 requests/s, and the goodput of each."""
    topology = bench.topology("published/article-open-loop")
    colocated, split = (bench.run(topology, name) for name in (COLOCATED, SPLIT))
    goodputs = [bench.goodput_per_s(topology, name) for name in (COLOCATED, SPLIT)]
    rate = open_rate_per_s(topology.workload)
    setting = f"open loop, {rate:g} req/s"
    loose = bench.goodput_per_s(with_slo(topology, itl_p99_ms=None), COLOCATED)
    why = (
        f"{_why_goodput(bench, topology)} Colocated, the bound on gaps decides, which the article does not give: "
        f"without it {loose:.1f} instead of {goodputs[0]:.1f} req/s hold."
    )
    return [
        *_latencies(bench, colocated, split, setting, _why_latencies(bench, topology)),
        bench.found("A6 goodput", goodputs[0], setting="open loop", why=why),
        bench.found("A6 goodput split", goodputs[1], setting="open loop", why=why),
        bench.found("A6 gain", _quotient(goodputs[1], goodputs[0]), setting="open loop", why=why),
        _missed(bench, bench.attainment(topology, COLOCATED, rate), setting, _why_missed(bench, topology)),
    ]


def _why_latencies(bench: Bench, topology: Topology) -> str:
    """The rates at which each published latency is reached: they are not one rate."""
    wanted = (
        ("A6 TTFT", COLOCATED, lambda s: s.ttft_ms.p90),
        ("A6 ITL", COLOCATED, lambda s: s.itl_ms.p90),
        ("A6 TTFT split", SPLIT, lambda s: s.ttft_ms.p90),
        ("A6 ITL split", SPLIT, lambda s: s.itl_ms.p90),
    )
    reached = ", ".join(
        f"{claim[3:]} {bench.value(claim):g} ms at {_rate_of(bench, topology, name, read, bench.value(claim)):.1f}"
        for claim, name, read in wanted
    )
    return f"The four latencies belong to four rates, not to one: with these step times (P90, req/s) {reached}."


def _rate_of(
    bench: Bench, topology: Topology, deployment: str, read: Callable[[RunSummary], float | None], bound: float
) -> float:
    """The rate, requests per second, from which on a figure of the run's summary is above a bound (0.5 to 128)."""
    return _crossing(lambda rate: read(bench.run(at_rate(topology, rate), deployment).summary), bound)


def _crossing(figure: Callable[[float], float | None], bound: float) -> float:
    """The rate, 0.5 to 128 requests per second, at which a figure that grows with it passes a bound."""
    low, high = 0.5, 128.0
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        value = figure(middle)
        low, high = (middle, high) if value is not None and value <= bound else (low, middle)
    return math.sqrt(low * high)


def _why_goodput(bench: Bench, topology: Topology) -> str:
    """What one decode node holds at the TPOT bound, from the step times alone."""
    decode, bound_ms = bench.profile(topology).decode, topology.slo.tpot_ms
    assert bound_ms is not None
    batch = (bound_ms - decode.base_ms) / decode.per_sequence_ms
    ceiling = batch / (OUTPUT_TOKENS * bound_ms * 1e-3)
    published = bench.value("A6 goodput split")
    needed = published * OUTPUT_TOKENS * bound_ms * 1e-3
    return (
        f"A decode node whose steps take {decode.base_ms:g} + {decode.per_sequence_ms:g} ms a sequence holds a TPOT of "
        f"{bound_ms:g} ms with up to {batch:.0f} sequences, {ceiling:.0f} req/s; {published:g} would be {needed:.0f} "
        f"sequences, whose steps take {decode.base_ms + decode.per_sequence_ms * needed:.0f} ms."
    )


def _why_missed(bench: Bench, topology: Topology) -> str:
    """The rates at which the published share of requests misses the file's SLO."""
    claim = bench.claims["A3"]
    assert isinstance(claim.value, float)
    assert claim.high is not None
    low, high = (
        _crossing(lambda rate: 1 - bench.attainment(topology, COLOCATED, rate).together, share / 100)
        for share in (claim.value, claim.high)
    )
    return f"{claim.value:g} to {claim.high:g} % miss it at {low:.1f} to {high:.1f} req/s."


def _latencies(bench: Bench, colocated: RunResult, split: RunResult, setting: str, why: str) -> list[Finding]:
    return [
        bench.found("A6 TTFT", colocated.summary.ttft_ms.p90, setting=setting, why=why),
        bench.found("A6 TTFT split", split.summary.ttft_ms.p90, setting=setting, why=why),
        bench.found("A6 ITL", colocated.summary.itl_ms.p90, setting=setting, why=why),
        bench.found("A6 ITL split", split.summary.itl_ms.p90, setting=setting, why=why),
    ]


def _attained(result: RunResult) -> Attained:
    by_metric = {m: share or 0.0 for m, share in result.summary.slo_attainment_by_metric.items()}
    return Attained(together=result.summary.slo_attainment or 0.0, by_metric=by_metric)


def _missed(bench: Bench, attained: Attained, setting: str, more: str = "") -> Finding:
    missed = ", ".join(f"{metric} {1 - share:.0%}" for metric, share in attained.by_metric.items())
    why = (
        f"The share depends on SLO and rate, which the article does not give; the file's bounds are missed by {missed}."
    )
    return bench.found("A3", 100 * (1 - attained.together), setting=setting, why=f"{why} {more}".strip())


def _waiting(result: RunResult) -> str:
    parts = result.summary.ttft_breakdown_ms
    return f"{parts.queue or 0.0:.0f} ms are waiting and {parts.prefill or 0.0:.0f} ms prefill"


def _longest_gap_ms(result: RunResult, from_s: float, to_s: float = np.inf) -> float:
    """The longest gap between tokens of one `running` stream's request that was due in a span of time."""
    gaps = [
        np.max(np.diff(record.times()), initial=0.0)
        for record in result.records
        if record.stream == "running" and from_s <= record.scheduled_s < to_s
    ]
    return float(max(gaps)) * 1e3


def _quotient(a: float, b: float) -> float | None:
    return a / b if b else None
