"""What Splitwise published, by simulation: the visible KV transfer, and A100 machines against H100 of equal cost."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from emulator.core.catalog import find_gpu, find_model
from emulator.core.cost import kv_bytes
from emulator.core.run_summary import RunSummary
from emulator.core.specs import Topology
from emulator.report.validate_table import Finding
from emulator.study.published import Bench, with_slo, with_workload

MEDIAN_PROMPT = 1469
LONG_PROMPT = 2938
"""Tokens of the coding trace's median prompt, and of one twice as long."""

PROMPTS = (256, 512, MEDIAN_PROMPT, LONG_PROMPT)
"""Prompt lengths, tokens, with which the visible transfer is shown to depend on the prompt."""

STRICT_TTFT_MS = 450.0
"""Three times the median prompt's TTFT; the topologies have three times the P90 prompt's. Both are assumptions."""

WAYS = ("serialized", "layer-wise")


def transfer(bench: Bench, machine: str) -> list[Finding]:
    """S3 and S5 on one kind of machine, `A100` or `H100`."""
    topology = bench.topology(f"published/splitwise-transfer-{machine.lower()}")
    why = _why_visible(bench, topology)
    findings = [
        bench.found(
            f"S3 {machine}",
            _wire_ms(bench.run(topology, "layer-wise").summary),
            setting=f"{machine}, median prompt",
            why=why,
        )
    ]
    if machine == "H100":
        findings += _overheads(bench, topology)
    return findings


def _why_visible(bench: Bench, topology: Topology) -> str:
    """What is visible for several prompts, either way, and what of that are bytes."""
    shown = []
    for tokens in PROMPTS:
        at_length = _with_prompt(topology, tokens)
        visible = [_wire_ms(bench.run(at_length, way).summary) for way in WAYS]
        shown.append(f"{visible[0]:.1f} and {visible[1]:.1f} ms for {tokens:,} tokens")
    assert topology.kv_network is not None
    model = find_model(bench.catalog, topology.model)
    layer_ms = kv_bytes(model, PROMPTS[-1]) / model.layers * 8 / topology.kv_network.bandwidth[0] * 1e3
    return (
        f"Visible are, serialized and layer-wise, {'; '.join(shown)}: serialized grows with the prompt, layer-wise it "
        f"is the last layer's message from 512 tokens on. Of that, bytes are {layer_ms:.2f} ms at {PROMPTS[-1]:,} "
        "tokens, so the published figure is mostly what its systems add at the end."
    )


def _overheads(bench: Bench, topology: Topology) -> list[Finding]:
    """S5 on H100 machines (which machine the figure shows is not stated)."""
    median, longer = (_overheads_at(bench, topology, tokens) for tokens in (MEDIAN_PROMPT, LONG_PROMPT))
    why = "The shares grow with the prompt: " + "; ".join(
        f"{way} {at[way].e2e:.2%} of E2E and {at[way].token2:.1%} of a step at {tokens:,} tokens"
        for tokens, at in ((MEDIAN_PROMPT, median), (LONG_PROMPT, longer))
        for way in WAYS
    )
    findings = []
    for tokens, at in ((MEDIAN_PROMPT, median), (LONG_PROMPT, longer)):
        for way in WAYS:
            setting = f"H100, {tokens:,} tokens"
            findings.append(bench.found(f"S5 E2E {way}", 100 * at[way].e2e, setting=setting, why=f"{why}."))
            findings.append(bench.found(f"S5 token 2 {way}", 100 * at[way].token2, setting=setting, why=f"{why}."))
    return findings


class Overhead(NamedTuple):
    """What a transfer adds: to E2E as a share of it, and as a share of the step before the second token."""

    e2e: float
    token2: float


def _overheads_at(bench: Bench, topology: Topology, tokens: int) -> dict[str, Overhead]:
    """Both ways of sending against a machine that does both phases, for prompts of `tokens`."""
    at_length = _with_prompt(topology, tokens)
    alone = bench.run(at_length, "colocated").summary
    return {way: _overhead(alone, bench.run(at_length, way).summary) for way in WAYS}


def _overhead(alone: RunSummary, split: RunSummary) -> Overhead:
    assert alone.e2el_ms.p50 is not None
    assert split.e2el_ms.p50 is not None
    assert alone.itl_ms.p50 is not None
    return Overhead(split.e2el_ms.p50 / alone.e2el_ms.p50 - 1, _wire_ms(split) / alone.itl_ms.p50)


def iso_cost(bench: Bench) -> list[Finding]:
    """S7: throughput by goodput, power by TDP, space by machines, at equal cost by the catalog's prices."""
    split = bench.topology("published/splitwise-iso-cost-a100")
    baseline = bench.topology("published/splitwise-iso-cost-h100")
    gpus = {topology.gpu: topology.deployments[0].gpus for topology in (split, baseline)}
    watts = {name: find_gpu(bench.catalog, name).tdp_w * count for name, count in gpus.items()}
    prices = {name: (find_gpu(bench.catalog, name).price_usd_per_h or 0.0) * count for name, count in gpus.items()}
    machines = gpus[split.gpu] / gpus[baseline.gpu]
    cost = f"{prices[split.gpu]:.0f} and {prices[baseline.gpu]:.0f} USD/h"
    strict = [with_slo(topology, ttft_ms=STRICT_TTFT_MS) for topology in (split, baseline)]
    return [
        _iso_cost_throughput(bench, split, baseline, cost),
        _iso_cost_throughput(bench, strict[0], strict[1], cost),
        bench.found("S7 power", watts[split.gpu] / watts[baseline.gpu], setting="TDP of the GPUs"),
        bench.found(
            "S7 space",
            machines,
            why=f"Equal cost is {machines:.2f} machines to one at the catalog's prices ({cost}).",
        ),
    ]


def _iso_cost_throughput(bench: Bench, split: Topology, baseline: Topology, cost: str) -> Finding:
    """The better split's goodput over the baseline's, at the SLO of the topologies."""
    ours = {deployment.name: bench.goodput_per_s(split, deployment.name) for deployment in split.deployments}
    best = max(ours, key=lambda name: ours[name])
    theirs = bench.goodput_per_s(baseline, "colocated")
    rates = ", ".join(f"{name} {rate:.1f}" for name, rate in ours.items())
    why = (
        f"At {cost}: {rates} against {theirs:.1f} req/s of four H100 machines. The SLO is an assumption, three times "
        "what an A100 machine takes for a prompt, and decides: 1100 ms for the P90 prompt, 450 ms for the median one, "
        "which the long prompts miss on A100."
    )
    return bench.found(
        "S7 throughput",
        ours[best] / theirs if theirs else None,
        setting=f"{best}, goodput, TTFT {split.slo.ttft_ms:g} ms",
        why=why,
    )


def _wire_ms(summary: RunSummary) -> float:
    """What of the KV transfer is left after the prefill, mean over requests."""
    return summary.ttft_breakdown_ms.wire or 0.0


def _with_prompt(topology: Topology, tokens: int) -> Topology:
    stream = msgspec.structs.replace(topology.workload.streams[0], prompt_tokens=tokens)
    return with_workload(topology, streams=(stream,))
