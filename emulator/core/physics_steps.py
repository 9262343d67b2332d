"""What no device can do: steps that overlap, tokens out of nothing, arithmetic and reading beyond a GPU's peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emulator.core.cost import RooflineCost
from emulator.core.hardware import Catalog, Gpu, Model, weight_element_bytes
from emulator.core.physics_link import prefilled_anew
from emulator.core.physics_rules import INSTANT_S, said
from emulator.core.records import Record, StepRecord
from emulator.core.run_spec import NodeSpec, RunSpec

PEAK_SHARE = 1e-3
"""By so much an efficiency of 1 may come out above the peak, since parameters are given to three figures."""


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def step_violations(
    run: RunSpec,
    records: Sequence[Record],
    steps: Sequence[StepRecord],
    *,
    catalog: Catalog | None = None,
    simulated: bool = False,
) -> list[str]:
    """A sentence for each law that the run's steps break, with its first case (see `core.physics`)."""
    table = _table(run, steps)
    found = _step_times(table) + _conservation(run, records, table, simulated=simulated)
    return found + _peaks(run, table, catalog)


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
    found = said("a node that is not part of the run has steps", table.strangers)
    due_s = table.start_s + table.planned_s
    overlap = (table.node[1:] == table.node[:-1]) & (table.start_s[1:] < due_s[:-1] - INSTANT_S)
    found += said("steps of one node overlap", table.where(overlap, after=1))
    short = table.end_s < due_s - INSTANT_S
    found += said("a step took less time than it was planned to", table.where(short))
    blocks = np.array([node.kv_blocks for node in table.nodes], dtype=np.int64)
    full = table.kv_blocks_used > blocks[table.node]
    return found + said("a step held more KV than the memory has", table.where(full))


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
    return said("a request completed on no node of the run", needed.homeless) + said(
        "tokens of requests and of steps do not agree", broken
    )


# --- peaks ----------------------------------------------------------------------------------------------------


def machine(node: NodeSpec, catalog: Catalog | None) -> tuple[Model, Gpu] | None:
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
        found = machine(node, catalog)
        if found is None:
            continue
        model, gpu = found
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
    return said("a step computes faster than the peak of its GPUs", too_fast) + said(
        "a step reads its weights faster than the memory of its GPUs", too_wide
    )
