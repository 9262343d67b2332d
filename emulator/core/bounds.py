"""What no scheduling of a deployment can exceed: upper bounds on its goodput, from counts of tokens alone.

A request that meets its SLO needs its prompt computed, its KV carried and its tokens decoded within the run. Each of
these costs a resource a least time, whatever it is batched with:

- A token's share of a step is least in the largest step that the batch limits allow, since what a step costs once
  (weights, overheads) is spread over the most tokens there and the p-norm of compute and memory per token only falls.
- Attention adds up over requests: prefill by its arithmetic, decode by the KV that it reads.
- KV adds up over NICs, unless a node may both prefill and decode whatever comes: then perhaps none has to move. What
  messages cost is left out.

A node that may do both counts for both, and all nodes together for all work.

The resources have until the last request that arrives in time must have been served. Those requests that need least
are counted first, so the share of requests that fit is the most that any policy could serve, and the lowest rate at
which that share is below the target bounds the goodput. The bound is loose, by what queueing, uneven load and
requests of unlucky size take, and by the drain of a short run; it is there to rule deployments out, never to rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emulator.core import roofline
from emulator.core.cost import RooflineCost, TableCost
from emulator.core.hardware import FittedProfile
from emulator.core.roles import sends_kv, takes_in_kv
from emulator.core.run_spec import NodeSpec, RunSpec
from emulator.core.workload import LoadPlan

Limit = Literal["prefill", "decode", "prefill and decode", "KV network"]

STEPS = 32
"""Rates are tried in steps of 2^(1/32), 2 %."""

Floats = NDArray[np.float64]


class LeastCosts(NamedTuple):
    """The least seconds of one node: per prompt token and its square, per decoded token and token of its context."""

    prompt_token_s: float
    prompt_token2_s: float
    decode_token_s: float
    decode_context_s: float


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests of one run: tokens of each prompt, and of each output."""

    prompts: Floats
    outputs: Floats

    @classmethod
    def of(cls, load: LoadPlan) -> Demand | None:
        """The requests of a plan; None where closed-loop users send some, which only a run tells."""
        if load.users:
            return None
        prompts, outputs = zip(*((r.prompt_tokens, r.max_tokens) for r in load.open), strict=True)
        return cls(np.array(prompts, dtype=np.float64), np.array(outputs, dtype=np.float64))

    @property
    def decoded(self) -> Floats:
        """Tokens that decode steps make: all but the first, which prefill does."""
        return self.outputs - 1

    @property
    def contexts(self) -> Floats:
        """Tokens whose KV each request's decode steps read or write, over all of them."""
        return self.decoded * (self.prompts + 2) + self.decoded * (self.decoded - 1) / 2


class Bound(NamedTuple):
    """No rate from `rate_per_s` requests per second on is served well enough, since `limit` is not up to it."""

    rate_per_s: float
    limit: Limit


def goodput_bound(
    run: RunSpec, demands: Callable[[float], Sequence[Demand]], *, start: float, low: float, high: float
) -> Bound | None:
    """A rate that the deployment of `run` cannot serve, nor any above it; None where it might serve even `high`.

    `demands(rate)` are the requests at a rate, one Demand a seed; what fits is the mean over seeds, as goodput is.
    Rates are `start` times powers of 2^(1/STEPS) from `low` to `high`, so that `demands` can keep its answers for the
    next deployment.
    """
    lowest, highest = (round(STEPS * math.log2(end / start)) for end in (low, high))
    found: list[Bound] = []
    for limit in limits(run):

        def fits(power: int, limit: Limit = limit) -> bool:
            shares = [servable_share(run, demand, limit) for demand in demands(start * 2 ** (power / STEPS))]
            return float(np.mean(shares)) >= run.slo.target

        power = _first_that_fails(fits, lowest, highest)
        if power is not None:
            found.append(Bound(start * 2 ** (power / STEPS), limit))
    return min(found, default=None)


def _first_that_fails(fits: Callable[[int], bool], lowest: int, highest: int) -> int | None:
    """The lowest power for which `fits` fails, above `lowest`, if it fails for all above; None when `highest` fits."""
    if fits(0):
        below, above = 0, min(STEPS, highest)
        while fits(above):
            if above == highest:
                return None
            below, above = above, min(above + STEPS, highest)
    else:
        below, above = max(-STEPS, lowest), 0
        while below > lowest and not fits(below):
            below, above = max(below - STEPS, lowest), below
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return above


def limits(run: RunSpec) -> tuple[Limit, ...]:
    """The resources of a deployment."""
    if run.link is None:
        return ("prefill and decode",)
    phases: tuple[Limit, ...] = ("prefill", "decode")
    if any(_prefills(run, node) and _decodes(run, node) for node in run.nodes):
        phases += ("prefill and decode",)
    return phases if _may_stay(run) else (*phases, "KV network")


def _prefills(run: RunSpec, node: NodeSpec) -> bool:
    """Whether a node may compute prompts, for itself at least: a decode node where KV need not or cannot move."""
    local = run.router.conditional is not None or any(other.role == "mixed" for other in run.nodes)
    own = node.role == "colocated" or sends_kv(node.role, switching=_switches(run))
    return own or (local and node.role == "decode")


def _decodes(run: RunSpec, node: NodeSpec) -> bool:
    return node.role == "colocated" or takes_in_kv(node.role, switching=_switches(run))


def _switches(run: RunSpec) -> bool:
    return run.router.role_switching is not None


def _may_stay(run: RunSpec) -> bool:
    """Whether any request's KV may stay where its prompt is computed."""
    conditional = run.router.conditional
    if conditional is not None and conditional.max_prefill_queue_size is not None:
        return True
    return _switches(run) or any(node.role == "mixed" for node in run.nodes)


def servable_share(run: RunSpec, demand: Demand, limit: Limit) -> float:
    """The largest share of requests, 0 to 1, that a resource could serve, those that need least first."""
    first_s, last_s = _until_s(run, demand)
    if limit == "KV network":
        until_s = last_s if run.first_token == "prefill" else first_s  # there the first token does not need the KV
        carried = moved_tokens(run, demand)
        return min(_fitting(carried, seconds * until_s) for seconds in _network_tokens_per_s(run))
    serve = {"prefill": _prefills, "decode": _decodes}.get(limit)
    nodes = [node for node in run.nodes if serve is None or serve(run, node)]
    least = [least_costs(node, demand, mixed=_prefills(run, node) and _decodes(run, node)) for node in nodes]
    costs = LeastCosts(*(min(column) for column in zip(*least, strict=True)))
    work = np.zeros_like(demand.prompts)
    if limit != "decode":
        work += costs.prompt_token_s * demand.prompts + costs.prompt_token2_s * demand.prompts**2
    if limit != "prefill":
        work += costs.decode_token_s * demand.decoded + costs.decode_context_s * demand.contexts
    return _fitting(np.maximum(work, 0.0), len(nodes) * (first_s if limit == "prefill" else last_s))


def moved_tokens(run: RunSpec, demand: Demand) -> Floats:
    """Tokens of each request whose KV has to cross the network: those of its prompt, or none."""
    if _may_stay(run):
        return np.zeros_like(demand.prompts)
    moved = demand.prompts
    if run.router.conditional is not None:
        moved = np.where(demand.prompts > (run.router.conditional.eff_isl_threshold or 0), moved, 0.0)
    if run.first_token == "prefill":  # whoever wants no other token than the first needs no KV
        moved = np.where(demand.decoded > 0, moved, 0.0)
    return moved


def _fitting(work: Floats, room: float) -> float:
    """The share of pieces of work that fit into `room`, the smallest first."""
    return float(np.searchsorted(np.cumsum(np.sort(work)), room, side="right")) / work.size


def _until_s(run: RunSpec, demand: Demand) -> tuple[float, float]:
    """When the last first token and the last token of all can come that meet the SLO, seconds from the start."""
    slo, drain_s = run.slo, run.load.drain_s
    end_s = min(drain_s, slo.e2el_ms / 1e3) if slo.e2el_ms is not None else drain_s
    first_s = min(end_s, slo.ttft_ms / 1e3) if slo.ttft_ms is not None else end_s
    if slo.ttft_ms is not None and slo.tpot_ms is not None:
        end_s = min(end_s, first_s + float(np.max(demand.decoded)) * slo.tpot_ms / 1e3)
    return run.load.duration_s + first_s, run.load.duration_s + end_s


def _network_tokens_per_s(run: RunSpec) -> tuple[float, float]:
    """Tokens of KV a second that all nodes together can send, and that they can take in."""
    assert run.link is not None
    link, bits = run.link, 8 * run.nodes[0].kv_bytes_per_token
    sent = sum(link.nic(name).egress_bps for name in run.kv_senders)
    taken = sum(link.nic(name).ingress_bps for name in run.kv_receivers)
    return sent / bits, taken / bits


# --- least costs ----------------------------------------------------------------------------------------------


def least_costs(node: NodeSpec, demand: Demand, *, mixed: bool) -> LeastCosts:
    """What a node takes at least for each token, seconds; `mixed`: it prefills and decodes.

    Where such a node chunks, its decodes share the largest step with prompts; elsewhere a step has at most
    `max_num_seqs` of them. `prefill_first` computes whole prompts, the longest of them perhaps beyond the budget.
    """
    budget, seats = node.max_num_batched_tokens, min(node.max_num_seqs, node.max_num_batched_tokens)
    prompt_step, decode_step, mixed = budget, seats, mixed and node.policy == "chunked"
    if node.policy == "prefill_first":
        prompt_step = max(budget, int(np.max(demand.prompts)))
        decode_step = node.max_num_seqs
    if mixed:
        decode_step = budget
    if isinstance(node.cost, RooflineCost):
        cost = node.cost
        rates = roofline.rates(cost.model, cost.gpu, cost.tp, cost.kv_element_bytes, cost.weights)
        return _least_roofline(rates, prompt_step, decode_step)
    if isinstance(node.cost, TableCost):
        return _least_measured(node.cost, mixed=mixed)
    return _least_fitted(node.cost.profile, prompt_step, decode_step, mixed=mixed)


def _least_roofline(costs: roofline.Rates, prompt_step: int, decode_step: int) -> LeastCosts:
    pair_s = costs.prefill_attention_per_pair
    return LeastCosts(
        prompt_token_s=_roofline_token_s(costs, prompt_step) + pair_s / 2,
        prompt_token2_s=pair_s / 2,
        decode_token_s=_roofline_token_s(costs, decode_step),
        decode_context_s=costs.kv_per_token,
    )


def _roofline_token_s(costs: roofline.Rates, tokens: int) -> float:
    """A token's share of a step of `tokens` tokens without attention and output head."""
    step = roofline.parts(costs, tokens=tokens, sampled=0, pairs=0.0, prefill_kv=0, decode_context=0, decode_batch=0)
    return roofline.total_s(step) / tokens


def _least_measured(cost: TableCost, *, mixed: bool) -> LeastCosts:
    """On straight lines the least a token takes is at one of their ends; a mixed step's first decode is free."""
    table = cost.profile
    per_prompt_token_ms = min(ms / size for size, ms in (*table.prefill, *cost.batched))
    per_sequence_ms = min(ms / size for size, ms in table.decode) * cost.least_context_share
    return LeastCosts(
        prompt_token_s=per_prompt_token_ms / 1e3,
        prompt_token2_s=0.0,
        decode_token_s=0.0 if mixed else per_sequence_ms / 1e3,
        decode_context_s=0.0,
    )


def _least_fitted(profile: FittedProfile, prompt_step: int, decode_step: int, *, mixed: bool) -> LeastCosts:
    """A mixed step joins its two bases as a p-norm, which is at least the prompts' part: the decodes' base is free."""
    fits = [(profile.decode, decode_step)]
    if profile.decode_large is not None and profile.large_batch_from is not None:
        fits = [(profile.decode, min(decode_step, profile.large_batch_from - 1))]
        fits += [(profile.decode_large, decode_step)] if decode_step >= profile.large_batch_from else []
    tokens_ms = [fit.per_sequence_ms + (0.0 if mixed else fit.base_ms / max(batch, 1)) for fit, batch in fits]
    return LeastCosts(
        prompt_token_s=(profile.prefill_per_token_ms + profile.prefill_base_ms / prompt_step) / 1e3,
        prompt_token2_s=profile.prefill_per_token2_ms / 1e3,
        decode_token_s=min(tokens_ms) / 1e3,
        decode_context_s=min(fit.per_context_token_ms for fit, _ in fits) / 1e3,
    )
