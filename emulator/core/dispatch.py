"""Which nodes a request is given to first: one that serves it alone, or one that prefills and one that decodes.

One node serves a request alone, and no KV moves, where `conditional` says so, where both choices fall on one node, and
where the KV could not move between them (see `core.placement`): then the decode node prefills as well.
"""

from __future__ import annotations

from typing import NamedTuple

from emulator.core.placement import Node, Phase, Placement, Request
from emulator.core.run_spec import RouterSpec


class Alone(NamedTuple):
    """One node serves the request all by itself."""

    node: Node


class HandOver(NamedTuple):
    """One node computes the prompt; another one decodes, this, or one that is chosen when the prompt is computed."""

    prefill: Node
    decode: Node | None


class Nowhere(NamedTuple):
    """No node is left for this phase."""

    phase: Phase


def choose(spec: RouterSpec, nodes: Placement, request: Request) -> Alone | HandOver | Nowhere:
    """The nodes for a request that has none."""
    if (phase := _served_alone(spec, request)) is not None:
        return _alone(nodes.pick(phase, request.total_tokens), phase)
    recomputes = spec.preemption == "recompute"
    prefill = nodes.pick_prefill(request, request.prompt_tokens if recomputes else request.total_tokens)
    if prefill is None:
        return Nowhere("prefill")
    if _queue_is_long(spec, prefill):
        return _alone(nodes.pick("decode", request.total_tokens), "decode")
    if spec.admission == "prefill_first" and not nodes.both_ways:
        return HandOver(prefill, None)
    decode = nodes.pick_decode(request.total_tokens, prefill)
    if decode is not None and nodes.may_move(prefill, decode):
        return HandOver(prefill, decode)
    return _alone(decode, "decode")


def _alone(node: Node | None, phase: Phase) -> Alone | Nowhere:
    return Nowhere(phase) if node is None else Alone(node)


def _served_alone(spec: RouterSpec, request: Request) -> Phase | None:
    """As what a node is picked that serves a request all by itself, whatever else is to do; None where two may."""
    if not spec.disaggregated:
        return "colocated"
    if spec.first_token == "prefill" and request.max_tokens == 1:
        return "prefill"
    threshold = spec.conditional.eff_isl_threshold if spec.conditional is not None else None
    return "decode" if threshold is not None and request.prompt_tokens <= threshold else None


def _queue_is_long(spec: RouterSpec, prefill: Node) -> bool:
    """Whether a prompt had better not wait at this node."""
    most = spec.conditional.max_prefill_queue_size if spec.conditional is not None else None
    return most is not None and prefill.prefilling > most
