"""What no run can do, whoever ran it: bytes beyond a NIC's rate, FLOPs beyond a GPU's peak, tokens out of nothing.

A simulator that breaks one of these reports latencies that no cluster could have, and its curves look fine. So every
run is held against them, from its records and steps alone. Arithmetic is counted from below and independently of the
cost models: a token takes at least 2 FLOPs for each parameter of the linear layers that it uses, and a step reads
those weights at least once. Attention, activations and everything else come on top and are left out.

A published profile has step times but no peak: its steps are held against the GPU and the model that it names where a
catalog has both (`unchecked` says where none does). What is found then may be the profile's doing: a fit is at fault
where it is asked for prompts of a few tokens, or for more sequences than were measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emulator.core.cost import RooflineCost
from emulator.core.deploy import NodeSpec, RunSpec
from emulator.core.hardware import Catalog, Gpu, Model, weight_element_bytes
from emulator.core.physics_link import Allowance, link_violations, prefilled_anew
from emulator.core.physics_memory import memory_violations
from emulator.core.records import MemoryRecord, Record, StepRecord, TimeRun

SIMULATED = Allowance(rate_share=1e-9, bursts=0, time_s=1e-6)
"""Rounding alone."""
MEASURED = Allowance(rate_share=0.03, bursts=2, time_s=1e-3, queued_bytes=24 * 1024 * 1024)
"""What a faithful run may have: links within 3 % of their rate, a burst at either end, clocks within 1 ms.

What may queue for a receiver that wakes late: 16 frames of 1 MiB in ZeroMQ, 8 MiB in the kernel's receive buffer.
"""
INSTANT_S = 1e-6
"""Instants on one clock are equal within rounding, also where a row of steps stands for many."""
PEAK_SHARE = 1e-3
"""By so much an efficiency of 1 may come out above the peak, since parameters are given to three figures."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def violations(
    run: RunSpec,
    records: Sequence[Record],
    steps: Sequence[StepRecord],
    *,
    memory: Iterable[MemoryRecord] = (),
    catalog: Catalog | None = None,
    simulated: bool = False,
) -> list[str]:
    """A sentence for each law that a run breaks, with its first case; none for a run that could be.

    A `simulated` run is held to the letter; a live one is allowed what its fidelity allows, and links that it was
    forced to use as they are have no rate to keep. `catalog` serves runs whose step times are a profile.
    """
    allowed = SIMULATED if simulated else MEASURED
    table = _table(run, steps)
    found = _accounts(run, records) + _token_times(records) + _step_times(table)
    found += _conservation(run, records, table, simulated=simulated)
    found += _peaks(run, table, catalog) + memory_violations(run, memory)
    return found + link_violations(run, records, allowed, rates_hold=simulated or not run.force)


def unchecked(run: RunSpec, catalog: Catalog | None = None) -> list[str]:
    """A sentence for each profile whose steps have no peak to be held against."""
    profiles = {n.cost.profile for n in run.nodes if not isinstance(n.cost, RooflineCost) and not _machine(n, catalog)}
    return [
        f"the steps of profile {profile.name} were not held against a peak: no GPU {profile.gpu} or no model "
        f"{profile.model} is in the catalog"
        for profile in sorted(profiles, key=lambda profile: profile.name)
    ]


def _said(rule: str, cases: Sequence[str]) -> list[str]:
    """One sentence for all cases in which a rule is broken."""
    more = f" (and {len(cases) - 1} more)" if len(cases) > 1 else ""
    return [f"{rule}: {cases[0]}{more}"] if cases else []


# --- requests -------------------------------------------------------------------------------------------------


def _accounts(run: RunSpec, records: Sequence[Record]) -> list[str]:
    """Every planned request has one record, as planned, and nobody else has one; users count without a gap."""
    planned = {request.request_id: request for request in run.load.open}
    seen = Counter(record.request_id for record in records)
    twice = [f"{request_id} has {n} records" for request_id, n in seen.items() if n > 1]
    lost = [f"{request_id} was planned and has no record" for request_id in planned if request_id not in seen]
    changed, turns = [], {user.prefix: set[int]() for user in run.load.users}
    unknown = []
    for record in records:
        request = planned.get(record.request_id)
        if request is None:
            prefix, _, number = record.request_id.rpartition("-")
            if prefix in turns and number.isdecimal():
                turns[prefix].add(int(number))
            else:
                unknown.append(f"{record.request_id} was never planned")
        elif (record.scheduled_s, record.prompt_tokens, record.max_tokens) != (
            request.scheduled_s,
            request.prompt_tokens,
            request.max_tokens,
        ):
            changed.append(f"{record.request_id} is not as it was planned")
    lost += [
        f"user {prefix} has {len(numbers)} records, numbered up to {max(numbers, default=0)}"
        for prefix, numbers in turns.items()
        if len(numbers) != max(numbers, default=0) + 1
    ]
    return _said("not every request is accounted for", twice + lost + unknown + changed)


def _token_times(records: Iterable[Record]) -> list[str]:
    """Tokens are counted as they came, in order, after the arrival and before the end; the completed have all."""
    wrong, late = [], []
    for record in records:
        name, due = record.request_id, record.max_tokens
        n, first, last, ordered = _walk(record.token_times_s)
        if n != record.output_tokens:
            wrong.append(f"{name} has {record.output_tokens} output tokens but the instants of {n}")
        elif n > due or (n < due and record.outcome == "completed"):
            wrong.append(f"{name}, {record.outcome}, has {n} output tokens where {due} were asked for")
        if not n:
            continue
        if record.first_token_s is None or abs(first - record.first_token_s) > INSTANT_S:
            late.append(f"the first token of {name} came at {first:g} s, and is said to have come otherwise")
        elif first < record.scheduled_s - INSTANT_S:
            late.append(f"the first token of {name} came {record.scheduled_s - first:g} s before its arrival")
        elif not ordered:
            late.append(f"a token of {name} came before the one that precedes it")
        elif record.finish_s is not None and record.finish_s < last - INSTANT_S:
            late.append(f"{name} ended at {record.finish_s:g} s, before its last token at {last:g} s")
    return _said("output tokens are not conserved", wrong) + _said("tokens are out of time", late)


def _walk(times: Sequence[float | TimeRun]) -> tuple[int, float, float, bool]:
    """How many instants there are, the first, the last, and whether they come in order; runs are not written out."""
    count, last, ordered = len(times), -math.inf, True
    for entry in times:
        if isinstance(entry, TimeRun):
            start, gaps, first_gap_s, delta_s = entry.t0_s, entry.n - 1, entry.first_step_s, entry.delta_s
            end = start + gaps * (first_gap_s + delta_s * (gaps - 1) / 2)
            if gaps and (first_gap_s < -INSTANT_S or first_gap_s + (gaps - 1) * delta_s < -INSTANT_S):
                ordered = False
            count += gaps
        else:
            start = end = entry
        if start < last - INSTANT_S:
            ordered = False
        last = end
    first = times[0] if times else math.nan
    return count, first.t0_s if isinstance(first, TimeRun) else first, last, ordered


# --- steps ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Steps:
    """A run's rows of steps as columns, ordered by node and start; `node` indexes `nodes`. Seconds and tokens.

    `planned_s` is for all steps of a row, `shortest_s` what the shortest of them took; tokens are those of one step.
    """

    nodes: Sequence[NodeSpec]
    strangers: Sequence[str]
    node: Ints
    start_s: Floats
    end_s: Floats
    planned_s: Floats
    shortest_s: Floats
    steps: Ints
    prefill_tokens: Ints
    decode_batch: Ints
    kv_blocks_used: Ints

    def where(self, broken: NDArray[np.bool_], *, after: int = 0, on: str = "") -> list[str]:
        """Steps by node and start, for a sentence: those for which `broken` holds, or so many rows after them."""
        rows = (np.flatnonzero(broken) + after).tolist()
        return [f"that of {self.nodes[self.node[row]].name} at {self.start_s[row]:.6f} s{on}" for row in rows]

    def total(self, column: Ints) -> Ints:
        """The sum over all steps of each node."""
        sums = np.bincount(self.node, weights=column * self.steps, minlength=len(self.nodes))
        return np.rint(sums).astype(np.int64)


def _table(run: RunSpec, rows: Sequence[StepRecord]) -> _Steps:
    index = {node.name: number for number, node in enumerate(run.nodes)}
    strangers = sorted({row.node for row in rows} - index.keys())
    known = [row for row in rows if row.node in index] if strangers else rows
    node = np.array([index[row.node] for row in known], dtype=np.int64)
    counted = np.array(
        [(r.steps, r.prefill_tokens, r.decode_batch, r.kv_blocks_used) for r in known], dtype=np.int64
    ).reshape(-1, 4)
    timed = np.array([(r.start_s, r.end_s, r.planned_s, r.delta_s) for r in known], dtype=np.float64).reshape(-1, 4)
    order = np.lexsort((timed[:, 0], node))
    steps, prefill_tokens, decode_batch, kv_blocks_used = counted[order].T
    start_s, end_s, first_s, delta_s = timed[order].T
    last_s = first_s + delta_s * (steps - 1)
    return _Steps(
        nodes=run.nodes,
        strangers=strangers,
        node=node[order],
        start_s=start_s,
        end_s=end_s,
        planned_s=steps * (first_s + last_s) / 2,
        shortest_s=np.where(steps > 1, np.minimum(first_s, last_s), end_s - start_s),
        steps=steps,
        prefill_tokens=prefill_tokens,
        decode_batch=decode_batch,
        kv_blocks_used=kv_blocks_used,
    )


def _step_times(table: _Steps) -> list[str]:
    """A device runs one step at a time, none shorter than planned, none with more KV than there is memory.

    A late step delays no other: the next one counts from where the last was to end.
    """
    found = _said("a node that is not part of the run has steps", table.strangers)
    due_s = table.start_s + table.planned_s
    overlap = (table.node[1:] == table.node[:-1]) & (table.start_s[1:] < due_s[:-1] - INSTANT_S)
    found += _said("steps of one node overlap", table.where(overlap, after=1))
    short = table.end_s < due_s - INSTANT_S
    found += _said("a step took less time than it was planned to", table.where(short))
    blocks = np.array([node.kv_blocks for node in table.nodes], dtype=np.int64)
    full = table.kv_blocks_used > blocks[table.node]
    return found + _said("a step held more KV than the memory has", table.where(full))


@dataclass(frozen=True, slots=True)
class _Needed:
    """Prompt tokens to compute and tokens to decode for the completed requests, by node.

    Of requests that were prefilled anew for want of memory, only the first prompt's node is known: the rest may have
    been on any (`moved_prompts`, `moved_decodes`). `shortest` prompt of those that decode on a node alone.
    """

    prompts: Ints
    decodes: Ints
    shortest: Ints
    moved_prompts: int
    moved_decodes: int
    homeless: Sequence[str]


def _needed(run: RunSpec, records: Sequence[Record]) -> _Needed:
    """The first token is made by prefill, unless a decode node that took KV in recomputes the prompt's last one."""
    index = {node.name: number for number, node in enumerate(run.nodes)}
    prompts, decodes = np.zeros((2, len(run.nodes)), dtype=np.int64)
    shortest = np.full(len(run.nodes), np.iinfo(np.int64).max)
    moved_prompts = moved_decodes = 0
    homeless = []
    for record in records:
        if record.outcome != "completed":
            continue
        prefill, decode = index.get(record.prefill_node or ""), index.get(record.decode_node or "")
        if prefill is None or decode is None:
            homeless.append(f"{record.request_id} completed on {record.prefill_node} and {record.decode_node}")
            continue
        prompts[prefill] += record.prompt_tokens
        by_prefill = 0 if run.first_token == "recompute" and prefill != decode else 1
        if prefilled_anew(run, record):
            moved_prompts += record.kv_bytes_again // run.nodes[decode].kv_bytes_per_token
            fewest = 0 if by_prefill == 0 and not run.serves_alone else 1 + record.preemptions
            moved_decodes += record.output_tokens - fewest
        else:
            decodes[decode] += record.output_tokens - by_prefill
            shortest[decode] = min(shortest[decode], record.prompt_tokens)
    return _Needed(prompts, decodes, shortest, moved_prompts, moved_decodes, homeless)


def _conservation(run: RunSpec, records: Sequence[Record], table: _Steps, *, simulated: bool) -> list[str]:
    """On each node: prompts of completed requests were computed, and their tokens decoded one at a step.

    A preempted request is computed again, prompt and tokens so far in one piece, and the end of that brings one token
    more. So as many decodes may be missing as whole recomputations fit into the surplus of computed tokens; and where
    everything has completed and there is no surplus, none may be missing or too many. A live node without steps was
    lost with them. What moved from node to node has to be found on all of them together.
    """
    needed = _needed(run, records)
    computed, decoded = table.total(table.prefill_tokens), table.total(table.decode_batch)
    surplus, missing = computed - needed.prompts, needed.decodes - decoded
    recomputed = np.minimum(np.maximum(surplus, 0) // (needed.shortest + 1), needed.decodes)
    recomputed[needed.shortest == np.iinfo(np.int64).max] = 0
    everything = all(record.outcome == "completed" for record in records) and not (
        run.serves_alone and needed.moved_decodes  # who was prefilled anew by itself, with a token more, is not told
    )
    broken = []
    complete = True
    for number, node in enumerate(run.nodes):
        if not simulated and not np.any(table.node == number):
            complete = False
            continue
        too_many = everything and not needed.moved_decodes and surplus[number] == 0 and missing[number] < 0
        if surplus[number] < 0:
            broken.append(f"{node.name} computed {computed[number]} prompt tokens of {needed.prompts[number]} needed")
        elif missing[number] > recomputed[number] or too_many:
            broken.append(f"{node.name} decoded {decoded[number]} tokens, its requests have {needed.decodes[number]}")
    if needed.moved_prompts and complete and not broken:
        left, still_missing = surplus.sum() - needed.moved_prompts, missing.sum() + needed.moved_decodes
        if left < 0:
            broken.append(f"all nodes computed {-left} prompt tokens less than were needed")
        elif still_missing > recomputed.sum() or (everything and left == 0 and still_missing < 0):
            broken.append(f"all nodes decoded {decoded.sum()} tokens, their requests have {still_missing} more")
    return _said("a request completed on no node of the run", needed.homeless) + _said(
        "tokens of requests and of steps do not agree", broken
    )


# --- peaks ----------------------------------------------------------------------------------------------------


def _machine(node: NodeSpec, catalog: Catalog | None) -> tuple[Model, Gpu] | None:
    """The model and the GPU of a node's steps; None for a profile of something that the catalog does not have."""
    if isinstance(node.cost, RooflineCost):
        return node.cost.model, node.cost.gpu
    profile, catalog = node.cost.profile, catalog or Catalog()
    model = next((m for m in catalog.models if m.name.casefold() == profile.model.casefold()), None)
    gpu = next((g for g in catalog.gpus if g.name.casefold() == profile.gpu.casefold()), None)
    return (model, gpu) if model is not None and gpu is not None else None


def linear_params(model: Model) -> float:
    """Parameters of the linear layers that one token uses at least, without embedding and output head.

    From the matrices' shapes; where a Model does not hold them all (mixture of experts, MLA), the active parameters
    less both ends.
    """
    if model.moe is not None or model.mla is not None or model.active_params_b < model.params_b:
        return max(model.active_params_b * 1e9 - 2 * model.vocab * model.hidden, 0.0)
    projections = 2 * (model.heads + model.kv_heads) * model.head_dim
    mlp = (3 if model.gated_mlp else 2) * model.intermediate
    return float(model.layers * model.hidden * (projections + mlp))


def _peaks(run: RunSpec, table: _Steps, catalog: Catalog | None) -> list[str]:
    """No step computes faster than its GPUs' peak, or reads its weights faster than their memory streams."""
    too_fast: list[str] = []
    too_wide: list[str] = []
    took_s = table.shortest_s * (1 + PEAK_SHARE) + INSTANT_S
    for number, node in enumerate(run.nodes):
        machine = _machine(node, catalog)
        if machine is None:
            continue
        model, gpu = machine
        here, decodes = table.node == number, table.decode_batch
        params, head = linear_params(model), model.vocab * model.hidden
        flops = 2 * (params * (table.prefill_tokens + decodes) + head * decodes)
        weights = node.cost.weights if isinstance(node.cost, RooflineCost) else "fp16"
        nbytes = (params + head * (decodes > 0)) * weight_element_bytes(weights)
        peak_tflops = (weights == "fp8" and gpu.fp8_dense_tflops) or gpu.bf16_dense_tflops
        profile = "" if isinstance(node.cost, RooflineCost) else f" by profile {node.cost.profile.name}"
        on = f" on {node.gpus} x {gpu.name}{profile}"
        too_fast += table.where(here & (flops > peak_tflops * 1e12 * node.gpus * took_s), on=on)
        too_wide += table.where(here & (nbytes > gpu.memory_gb_per_s * 1e9 * node.gpus * took_s), on=on)
    return _said("a step computes faster than the peak of its GPUs", too_fast) + _said(
        "a step reads its weights faster than the memory of its GPUs", too_wide
    )
