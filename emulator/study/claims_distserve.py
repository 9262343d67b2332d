"""What DistServe published, by simulation: Fig. 1, the ShareGPT result, Table 2, the KV bandwidth and the SLO scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from emulator.core import metrics
from emulator.core.catalog import find_model
from emulator.core.cost import Chunk, FittedCost, StepShape, kv_bytes
from emulator.core.metrics import Metric
from emulator.core.specs import Topology
from emulator.lab.simulated import simulated_result
from emulator.report.validate_table import Finding, agreement, ratio_of
from emulator.study.published import Attained, Bench, at_rate, slowed, with_profile, with_slo
from emulator.study.rated_runs import base_run, candidate_of, candidates
from emulator.study.slo_scale import fixed_runs, perform

FITS = {
    "vllm-2024-opt-13b-tp1": "vLLM's fit",
    "vllm-2024-opt-13b-tp1-overhead": "vLLM's fit + overhead",
    "distserve-opt-13b-tp1": "DistServe's fit",
    "distserve-opt-13b-tp1-overhead": "DistServe's fit + overhead",
}
"""Profiles of the catalog, and what the table calls them."""

GPUS = 3
"""Of 2P1D, and of DistServe's prefill node of two GPUs with a decode node of one."""

BISECTIONS = 5
MORE_MEMORY = 10

MEASURED_PROMPT = 1608
"""Tokens of the prompt of claim "D5 prompt"."""

SCALE_RATES = (1.6, 3.3, 4.5)
"""Requests per second and GPU: what colocated GPUs sustain by Fig. 1, what 2P1D does, and more than either."""

_NAMES: Mapping[str, str] = MappingProxyType({"ttft_ms": "TTFT", "tpot_ms": "TPOT"})


# --- Fig. 1 -------------------------------------------------------------------------------------------------------


class Search(NamedTuple):
    """Goodput of a deployment in both readings, requests per second, and the metric that gives out beyond it.

    `why_bound` says how many requests meet each bound at the rate that was tried next and failed.
    """

    together: float
    each_alone: float
    binding: str
    why_bound: str


def both_readings(bench: Bench, topology: Topology, deployment: str) -> Search:
    """Goodput with 90 % of requests meeting both bounds, and with each bound met by 90 %.

    The second is at least the first, and searched only where the first failing rate passes in the second reading.
    """
    found = bench.goodput(topology, deployment)
    together = found.rate_per_s or 0.0
    if found.next_rate_per_s is None:
        return Search(together, together, "nothing", "no rate failed")
    attained = bench.attainment(topology, deployment, found.next_rate_per_s)
    binding = min(attained.by_metric, key=lambda metric: attained.by_metric[metric])
    why_bound = f"at {found.next_rate_per_s:.1f} req/s {_shares(attained)}"
    each_alone = together
    if attained.each_alone >= topology.slo.target:
        bounds: list[Metric] = ["ttft_ms", "tpot_ms"]
        each_alone = min(bench.goodput_per_s(with_slo(topology, **{bound: None}), deployment) for bound in bounds)
    return Search(together, each_alone, binding, why_bound)


def fig1(bench: Bench, profile: str) -> list[Finding]:
    """D1 to D4 with one profile's step times, and the step times with which the published goodput would follow."""
    topologies = {
        name: with_profile(bench.topology(f"published/distserve-fig1-{name}"), profile)
        for name in ("colocated", "prefill", "decode", "2p1d")
    }
    colocated = both_readings(bench, topologies["colocated"], "colocated")
    split = both_readings(bench, topologies["2p1d"], "2P1D")
    prefill = bench.goodput_per_s(topologies["prefill"], "prefill-only")
    decode = bench.goodput_per_s(topologies["decode"], "decode-only")
    label = FITS[profile]
    rows: list[tuple[str, float | None, float | None]] = [
        ("D1", colocated.each_alone, colocated.together),
        ("D2", prefill, None),
        ("D3", decode, None),
        ("D4", split.each_alone, split.together),
        ("D4/GPU", split.each_alone / GPUS, split.together / GPUS),
        (
            "D4 gain",
            _quotient(split.each_alone / GPUS, colocated.each_alone),
            _quotient(split.together / GPUS, colocated.together),
        ),
    ]
    off = [claim for claim, own, _ in rows if agreement(bench.value(claim), own, None, lower_bound=False) is False]
    factors = _factors(bench, topologies) if off else {}
    why = f"{label}: {_why_fig1(bench, topologies, prefill, factors)}" if off else ""
    findings = []
    for claim, own, together in rows:
        reason = _why_gain(label, factors) if claim == "D4 gain" and claim in off else why
        reason = reason if claim in off else ""
        setting = f"{label}, either reading" if together is not None and together == own else label
        findings.append(bench.found(claim, own, setting=setting, why=reason))
        if together is not None and together != own:
            findings.append(bench.found(claim, together, setting=f"{label}, both SLOs together", why=reason))
    per_gpu = {"C": colocated.each_alone, "2P1D": split.each_alone / GPUS, "P": prefill, "D": decode}
    binding = {"ttft_ms": "prefill", "tpot_ms": "decode"}.get(split.binding, split.binding)
    return [
        *findings,
        bench.found("D1-D4 ranking", " < ".join(sorted(per_gpu, key=lambda name: per_gpu[name])), setting=label),
        bench.found("D4 binding", binding, setting=label, why=f"{label}: {split.why_bound}."),
    ]


def _factors(bench: Bench, topologies: dict[str, Topology]) -> dict[str, float]:
    """How many times as long steps take where the published goodput just holds, by deployment."""
    settings = (
        ("colocated", "colocated", "D1"),
        ("prefill", "prefill-only", "D2"),
        ("decode", "decode-only", "D3"),
        ("2p1d", "2P1D", "D4"),
    )
    return {
        deployment: step_factor(bench, topologies[name], deployment, bench.value(claim))
        for name, deployment, claim in settings
    }


def _why_fig1(bench: Bench, topologies: dict[str, Topology], prefill: float, factors: dict[str, float]) -> str:
    """One sentence from two experiments: slower steps, and prompts computed one at a time."""
    slower = ", ".join(f"{factor:.2f} for {deployment}" for deployment, factor in factors.items())
    unbatched = bench.goodput_per_s(topologies["prefill"], "prefill-only-unbatched")
    return (
        "the published goodput follows when every step takes longer than these step times say, by a factor of "
        f"{slower}; so the two differ in step times. Batching of prompts is not the cause: with one prompt a step "
        f"prefill alone still reaches {unbatched:.1f} instead of {prefill:.1f} req/s."
    )


def _why_gain(label: str, factors: dict[str, float]) -> str:
    return (
        f"{label}: prefill steps are further from the figure's ({factors['prefill-only']:.2f} times) than decode steps "
        f"({factors['decode-only']:.2f} times). Short prefills raise colocated goodput, where they stall decodes, and "
        "not that of 2P1D, which decode binds."
    )


def step_factor(bench: Bench, topology: Topology, deployment: str, rate_per_s: float) -> float:
    """How many times as long steps may take for the SLO, each metric on its own, to hold at a rate (0.5 to 2).

    A diagnosis of how far a profile is from a published figure; nothing else is computed from it.
    """
    profile = bench.profile(topology)
    low, high = 0.5, 2.0
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        attained = bench.attainment(slowed(topology, profile, middle), deployment, rate_per_s)
        holds = attained.each_alone >= topology.slo.target
        low, high = (middle, high) if holds else (low, middle)
    return math.sqrt(low * high)


# --- ShareGPT and Table 2 -----------------------------------------------------------------------------------------


def sharegpt_split(bench: Bench) -> list[Finding]:
    """D5: DistServe's placement on ShareGPT-like lengths."""
    topology = bench.topology("published/distserve-sharegpt")
    found = bench.goodput(topology, "DistServe")
    roomy = bench.goodput_per_s(topology, "DistServe", memory=MORE_MEMORY) / GPUS
    bound = "bounded by KV memory" if found.bounded_by == "kv memory" else "not bounded by KV memory"
    why = (
        f"Ours is {bound}: KV that the decode GPU has no room for stays with the prefill GPU, which stalls when its "
        f"own memory is full. With {MORE_MEMORY} times the KV memory it is {roomy:.2f} req/s."
    )
    return [
        bench.found("D5", (found.rate_per_s or 0.0) / GPUS, why=why),
        bench.found("D5", roomy, setting=f"{MORE_MEMORY} times the KV memory", why=why),
    ]


def sharegpt_vllm(bench: Bench) -> list[Finding]:
    """D5's baselines, and how vLLM's fit compares with a prompt that was measured."""
    topology = bench.topology("published/distserve-sharegpt-vllm")
    published = bench.value("D5 vLLM")
    attained = bench.attainment(topology, "vLLM", published)
    factor = step_factor(bench, topology, "vLLM", published)
    cost = FittedCost(profile=bench.profile(topology))
    one_ms = cost.step_s(StepShape((Chunk(MEASURED_PROMPT, 0),), 0, 0)) * 1e3
    measured_ms = bench.value("D5 prompt")
    why = (
        f"The fit is too slow for long prompts, which decide here: it gives {one_ms:.0f} ms for {MEASURED_PROMPT:,} "
        f"tokens, of which vLLM was measured to need no more than {measured_ms:.0f} ms ({measured_ms / one_ms:.2f} "
        f"times). At the published rate {_shares(attained)}; with steps of {factor:.2f} times the fit's 90 % would."
    )
    return [
        bench.found("D5 vLLM", bench.goodput_per_s(topology, "vLLM"), why=why),
        bench.found("D5 prompt", one_ms, why=why),
        bench.found("D5 gain", None, why="There is no quotient where our vLLM sustains no rate."),
        bench.found("D5 MII", None, why="Not run: no step times of DeepSpeed-MII are published with the result."),
    ]


def table2(bench: Bench, claim_id: str) -> list[Finding]:
    """D10 to D13: one measured curve, the authors' simulator in words, and ours on the ShareGPT-like workload."""
    theirs = dict(bench.claims["D11" if claim_id == "D10" else "D13"].curve)
    if claim_id == "D10":
        topology, deployment, gpus = bench.topology("published/distserve-sharegpt-vllm"), "vLLM", 1
    else:
        topology, deployment, gpus = bench.topology("published/distserve-sharegpt"), "DistServe", GPUS
    claim = bench.claims[claim_id]
    why = (
        "Another workload, model or SLO than the table's, which states none of them; only the shape can be compared: "
        "attainment falls with the rate, and DistServe's later than vLLM's."
    )
    if claim_id == "D12":
        shares = [
            f"at {rate:g} req/s {bench.attainment(topology, deployment, rate * gpus).together:.0%} and "
            f"{bench.attainment(topology, deployment, rate * gpus, memory=MORE_MEMORY).together:.0%}"
            for rate in (2.5, 4.0)
        ]
        why += (
            f" Ours falls sooner because prefill stalls where the decode GPU has no KV memory left: as it is and with "
            f"{MORE_MEMORY} times the memory {shares[0]} meet the SLO, {shares[1]}, where prefill is overloaded too."
        )
    findings = []
    for rate, published in claim.curve:
        ours = 100 * bench.attainment(topology, deployment, rate * gpus).together
        findings.append(
            Finding(
                claim=f"{claim.id} at {rate:g}",
                statement=claim.statement,
                setting=f"{rate:g} req/s per GPU; their simulator: {theirs[rate]:g} %",
                published=published,
                ours=ours,
                unit=claim.unit,
                ratio=ratio_of(published, ours, None),
                agrees=agreement(published, ours, None, lower_bound=False),
                why=why,
            )
        )
    return findings


# --- KV bandwidth and SLO scale -----------------------------------------------------------------------------------


def kv_bandwidth(bench: Bench) -> list[Finding]:
    """D15: bytes of KV, the bandwidth that they need, and what of the transfer is seen at the published one."""
    topology = bench.topology("published/distserve-kv-bandwidth")
    nbytes = kv_bytes(find_model(bench.catalog, topology.model), 512)
    needed_gbps = nbytes * 8 * 10 / 1e9
    seen_ms = {}
    for candidate in candidates(topology):
        records = simulated_result(base_run(topology, bench.catalog, {}, candidate)).records
        wire_ms = metrics.measure(records).ttft_parts_ms["wire"]
        assert candidate.kv_bandwidth_bps is not None
        seen_ms[candidate.kv_bandwidth_bps / 1e9] = float(np.nanpercentile(wire_ms, 90))
    published = bench.value("D15")
    alone_ms = {gbps: nbytes * 8 / (gbps * 1e6) for gbps in seen_ms}
    hidden = seen_ms[published] < 2 * alone_ms[published]
    why = f"{nbytes:,} bytes are {nbytes / 1e9:.3f} GB or {nbytes / 2**30:.3f} GiB: the paper's GB is 2^30 bytes."
    why += f" Ten of them a second are {needed_gbps:.1f} Gbps; with 10^9 read for 2^30 they come to 90."
    rates = ", ".join(f"{ms:.0f} ms at {gbps:g} Gbps ({alone_ms[gbps]:.0f} alone)" for gbps, ms in seen_ms.items())
    return [
        bench.found("D15 size", nbytes / 1e9, why=why),
        bench.found("D15 size", nbytes / 2**30, setting="in GiB", why=why),
        bench.found("D15", needed_gbps, why=why),
        bench.found(
            "D15 hidden",
            "yes" if hidden else "no",
            setting="Poisson arrivals for 60 s",
            why=f"Transfers queue where one takes longer than a prefill: P90 after the prefill is {rates}.",
        ),
    ]


def slo_scale(bench: Bench) -> list[Finding]:
    """How much tighter an SLO 2P1D holds than colocated GPUs, on Fig. 1's workload, at several rates per GPU."""
    profile = "vllm-2024-opt-13b-tp1-overhead"
    topology = with_profile(bench.topology("published/distserve-fig1-2p1d"), profile)
    rows = []
    for per_gpu in SCALE_RATES:
        loaded = at_rate(topology, per_gpu * GPUS)
        rows.append((per_gpu, *(_tightest_scale(bench, loaded, name) for name in ("colocated", "2P1D"))))
    shown = ", ".join(f"{own:.2f} and {split:.2f} at {rate:g}" for rate, own, split in rows)
    assert topology.slo.tpot_ms is not None
    floor = FittedCost(profile=bench.profile(topology)).step_s(StepShape((), 1, 513)) * 1e3 / topology.slo.tpot_ms
    why = (
        f"The factor depends on rate and workload: the tightest multiples of Fig. 1's SLO are {shown} req/s per GPU "
        f"(colocated and 2P1D). A decode step of one sequence alone takes {floor:.2f} of the TPOT bound, so even a "
        f"2P1D without load would be only {max(own for _, own, _ in rows) / floor:.1f} times tighter here."
    )
    return [
        bench.found("D-abstract", _quotient(own, split), setting=f"{rate:g} req/s per GPU", why=why)
        for rate, own, split in rows
    ]


def _tightest_scale(bench: Bench, topology: Topology, deployment: str) -> float:
    """The smallest common multiple of the SLO's bounds that its target share of requests meets, over all seeds."""
    wanted = candidate_of(topology, deployment, None)
    found = perform([fixed_runs(topology, bench.catalog, {}, wanted, bench.seeds)], workers=1)[0]
    return math.inf if found.factor is None else found.factor


def _shares(attained: Attained) -> str:
    return " and ".join(f"{share:.1%} meet {_NAMES[metric]}" for metric, share in attained.by_metric.items())


def _quotient(a: float, b: float) -> float | None:
    return a / b if b else None
