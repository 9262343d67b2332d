"""What a plan says: deployments of a number of GPUs ranked by what they serve, and why the first is recommended.

The names of the fields are the keys of the JSON of `pdemu plan` and part of the interface; what does not exist is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec
import numpy as np

from emulator.core.bounds import Limit
from emulator.core.deployments import Policy
from emulator.core.metrics import Metric, measure
from emulator.core.records import Record, StepRecord
from emulator.core.roles import Role
from emulator.core.run_spec import RunSpec
from emulator.core.run_summary import RunResult
from emulator.core.search import BoundedBy
from emulator.core.specs import Slo
from emulator.core.upkeep import COST_BASIS, Upkeep, per_kj

Objective = Literal["goodput", "per-dollar", "per-watt"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

Cause = Literal["prefill", "decode", "KV network", "decode memory", "sharing of steps", "load"]

METRIC_NAMES: dict[Metric, str] = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2el_ms": "E2EL", "itl_p99_ms": "ITL p99"}


class PlannedPool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Nodes of one role: each has `tp` GPUs of one kind. The price is that of all its GPUs for an hour."""

    role: Role
    nodes: int
    gpu: str
    tp: int
    policy: Policy
    max_num_batched_tokens: int
    price_usd_per_h: float | None
    tdp_w: float


Shape = tuple[tuple[Role, int, str, int], ...]
"""Role, nodes, GPU and tp of each pool."""


def shape_of(pools: Sequence[PlannedPool]) -> Shape:
    """The nodes of pools, whatever they batch."""
    return tuple((pool.role, pool.nodes, pool.gpu, pool.tp) for pool in pools)


class Contender(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A deployment that could be."""

    deployment: str
    pools: tuple[PlannedPool, ...]

    @property
    def shape(self) -> Shape:
        """Its nodes, whatever they batch: chunk budgets of the same nodes are one deployment with another setting."""
        return shape_of(self.pools)

    @property
    def upkeep(self) -> Upkeep:
        """What all GPUs cost: no price where the catalog has none for one."""
        return Upkeep.total(Upkeep(usd_per_h=pool.price_usd_per_h, watts=pool.tdp_w) for pool in self.pools)

    def value(self, rate_per_s: float, objective: Objective) -> float | None:
        """What a rate is worth: requests per second, per dollar, or per second and kW; None without a price."""
        if objective == "goodput":
            return rate_per_s
        if objective == "per-dollar":
            return self.upkeep.per_usd(rate_per_s)
        return per_kj(self.upkeep.per_joule(rate_per_s))


class Diagnosis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What keeps requests from the SLO just above the goodput. `attainment` is the mean over the seeds run there.

    The rest is of the seed that fails most, of `seeds`: `metric` is the one whose bound the most requests miss, and
    `metric_attainment` the share that meets it; null when more requests failed or did not end. `busy` is the share of
    the arrival window in which a node of each role computed, `decode_batch` the mean number of sequences in a step that
    decodes (null without one).
    """

    rate_per_s: float
    attainment: float
    metric: Metric | None
    metric_attainment: float | None
    cause: Cause
    busy: dict[Role, float]
    decode_batch: float | None
    seeds: int = 1


class Ranked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A deployment with its goodput, as `pdemu goodput` reports it.

    `confirmed` says that it was searched with all seeds to the full tolerance; otherwise fewer seeds have shown that it
    is not among the best, or all of them failed at `beaten_at_per_s`, what a better one reached. `bound_per_s` is what
    its resources could serve at most (null where none was found), and `bound_limit` which of them that is.
    """

    deployment: str
    pools: tuple[PlannedPool, ...]
    rate_per_s: float | None
    per_gpu: float | None
    per_dollar: float | None
    per_kw: float | None
    next_rate_per_s: float | None
    low_per_s: float | None
    high_per_s: float | None
    bounded_by: BoundedBy | None
    seeds: int
    confirmed: bool
    beaten_at_per_s: float | None
    bound_per_s: float | None
    bound_limit: Limit | None
    diagnosis: Diagnosis | None = None
    notes: tuple[str, ...] = ()


class RuledOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A deployment that was not run, since even the bound of its goodput is below what another one reached."""

    deployment: str
    pools: tuple[PlannedPool, ...]
    bound_per_s: float
    bound_limit: Limit
    reason: str


class Impossible(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A deployment that cannot be, and why."""

    deployment: str
    reason: str


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole document that `pdemu plan --json` prints; `recommended` is null when nothing serves any rate."""

    topology: str
    gpus: int
    kv_bandwidth_bps: float | None
    objective: Objective
    slo: Slo
    duration_s: float
    seeds: int
    tolerance: float
    recommended: str | None
    reasons: tuple[str, ...]
    ranking: tuple[Ranked, ...]
    ruled_out: tuple[RuledOut, ...] = ()
    impossible: tuple[Impossible, ...] = ()
    notes: tuple[str, ...] = ()
    cost_basis: str = COST_BASIS


def worth(ranked: Ranked, objective: Objective) -> float:
    """By what a deployment is ranked: requests per second, per dollar, or per second and kW; 0 when it serves none."""
    values = {"goodput": ranked.rate_per_s, "per-dollar": ranked.per_dollar, "per-watt": ranked.per_kw}
    return values[objective] or 0.0


def in_order(ranking: Sequence[Ranked], objective: Objective) -> tuple[Ranked, ...]:
    """Best first, and the best confirmed before all others; of equals the one with fewer pools first."""
    ordered = sorted(ranking, key=lambda r: (-worth(r, objective), len(r.pools), r.deployment))
    first = next((ranked for ranked in ordered if ranked.confirmed), ordered[0])
    return (first, *(ranked for ranked in ordered if ranked is not first))


def tied(ranking: Sequence[Ranked], objective: Objective) -> tuple[str, ...]:
    """Those that serve as much as the first because the load generator sends no more; there is no best among them."""
    first = ranking[0]
    if first.bounded_by not in ("load generator", "high"):
        return ()
    return tuple(r.deployment for r in ranking[1:] if worth(r, objective) >= worth(first, objective))


def runner_up(ranking: Sequence[Ranked]) -> Ranked | None:
    """The next best confirmed one of other nodes than the first; failing that the next."""
    others = [ranked for ranked in ranking[1:] if shape_of(ranked.pools) != shape_of(ranking[0].pools)]
    return next((ranked for ranked in others if ranked.confirmed), next(iter([*others, *ranking[1:]]), None))


# --- what limits ----------------------------------------------------------------------------------------------


def diagnose(run: RunSpec, result: RunResult, rate_per_s: float) -> Diagnosis:
    """What holds a deployment back in a run at a rate that is too high for it."""
    summary = result.summary
    shares = {metric: share for metric, share in summary.slo_attainment_by_metric.items() if share is not None}
    ended = summary.completed / summary.requests if summary.requests else 0.0
    metric = min(shares, key=lambda name: shares[name], default=None)
    if metric is not None and shares[metric] >= ended:
        metric = None
    busy = busy_shares(run, result.steps)
    return Diagnosis(
        rate_per_s=rate_per_s,
        attainment=summary.slo_attainment or 0.0,
        metric=metric,
        metric_attainment=None if metric is None else shares[metric],
        cause=_cause(run, metric, result.records, busy),
        busy=busy,
        decode_batch=_mean_decode_batch(result.steps),
    )


def busy_shares(run: RunSpec, steps: Sequence[StepRecord]) -> dict[Role, float]:
    """The share of the arrival window in which a node of each role computed, the mean over its nodes."""
    role_of = {node.name: node.role for node in run.nodes}
    busy_s: dict[Role, float] = dict.fromkeys(role_of.values(), 0.0)
    end_s = run.load.duration_s
    for step in steps:
        busy_s[role_of[step.node]] += max(0.0, min(step.end_s, end_s) - step.start_s)
    counts = {role: sum(node.role == role for node in run.nodes) for role in busy_s}
    return {role: min(1.0, busy_s[role] / (counts[role] * end_s)) for role in busy_s}


def _mean_decode_batch(steps: Sequence[StepRecord]) -> float | None:
    decoding = [step for step in steps if step.decode_batch]
    count = sum(step.steps for step in decoding)
    return sum(step.decode_batch * step.steps for step in decoding) / count if count else None


def _cause(run: RunSpec, metric: Metric | None, records: Sequence[Record], busy: dict[Role, float]) -> Cause:
    """Gaps between tokens are decode's, a late first token is due to the largest part of it; else the busier role's."""
    if metric in ("tpot_ms", "itl_p99_ms"):
        return "sharing of steps" if run.link is None else "decode"
    if run.link is None:
        return "load"
    if metric == "ttft_ms":
        measured = measure(records)
        late = measured.latency_ms["ttft_ms"] > (run.slo.ttft_ms or 0.0)
        waited = {part: float(np.sum(values[late])) for part, values in measured.ttft_parts_ms.items()}
        waits: dict[Cause, float] = {
            "prefill": waited["queue"] + waited["prefill"],
            "KV network": waited["wire"],
            "decode memory": waited["decode_wait"],
            "decode": waited["decode"],
        }
        return max(waits, key=lambda name: waits[name])
    return "prefill" if busy.get("prefill", 0.0) >= busy.get("decode", 0.0) else "decode"


# --- the recommendation ---------------------------------------------------------------------------------------


def reasons(ranking: Sequence[Ranked], objective: Objective, slo: Slo, tolerance: float) -> tuple[str, ...]:
    """Two sentences: what the first is worth and what limits the second, and which phase binds in the first."""
    first, second = ranking[0], runner_up(ranking)
    if not worth(first, objective):
        return ()
    most = "at least " if _open_above(first) else ""
    text = f"{first.deployment} serves {most}{_worth_text(first, objective)} with {slo.target:.0%} of them in their SLO"
    if equals := tied(ranking, objective):
        text += f", and so do{'es' if len(equals) == 1 else ''} {', '.join(equals)}: the load generator sends no more"
        second = next((r for r in ranking[1:] if r.deployment not in equals), None)
    if second is None:
        text += "; no other deployment was run."
    elif not worth(second, objective):
        text += f"; {second.deployment}, the next, serves no rate that was tried."
    else:
        lead = worth(first, objective) / worth(second, objective) - 1
        told_apart = f"{most}{lead:.0%} more than" if lead > tolerance else "no more than the search can tell from"
        text += f", {told_apart} {second.deployment} ({_worth_text(second, objective, short=True)}), "
        text += f"{_held_back(second, slo)}."
    return text, _binds(first, slo)


def _open_above(ranked: Ranked) -> bool:
    """Whether the search ended before its answer: what is served may be more."""
    return ranked.bounded_by in ("load generator", "high")


def _worth_text(ranked: Ranked, objective: Objective, *, short: bool = False) -> str:
    rate = f"{ranked.rate_per_s:.3g} requests/s"
    if objective == "goodput":
        return rate if short or ranked.per_gpu is None else f"{rate} ({ranked.per_gpu:.3g} per GPU)"
    per = f"{ranked.per_dollar:,.0f} per dollar" if objective == "per-dollar" else f"{ranked.per_kw:.3g} per kW"
    return per if short else f"{rate} ({per})"


def _held_back(ranked: Ranked, slo: Slo) -> str:
    found = ranked.diagnosis
    if found is None:
        return "which was not seen to fail at any rate"
    why = {
        "prefill": "for want of prefill",
        "decode": "for want of decode",
        "KV network": "since KV waits for the network",
        "decode memory": "since KV waits for memory to decode in",
        "sharing of steps": "since prompts share the steps of its decodes",
        "load": "since prompts and decodes fill the same GPUs",
    }[found.cause]
    return f"where {_misses(found, slo)}, {why}"


def _misses(found: Diagnosis, slo: Slo) -> str:
    """`at 48.4/s only 87.2% are, TTFT failing first (84% within 1000 ms in the worst of 3 runs)`."""
    text = f"at {found.rate_per_s:.3g}/s only {found.attainment:.1%} are"
    if found.metric is None or found.metric_attainment is None:
        return f"{text}, requests not ending in time"
    bound = getattr(slo, found.metric)
    where = f" in the worst of {found.seeds} runs" if found.seeds > 1 else ""
    within = f"{found.metric_attainment:.0%} within {bound:g} ms{where}"
    return f"{text}, {METRIC_NAMES[found.metric]} failing first ({within})"


def _binds(first: Ranked, slo: Slo) -> str:
    found = first.diagnosis
    if found is None:
        return f"What binds {first.deployment} was not seen: it passed at every rate that was tried."
    binds = {
        "prefill": "prefill binds",
        "decode": "decode binds",
        "KV network": "the KV network binds",
        "decode memory": "decode memory binds",
        "sharing of steps": "decode binds, whose steps prompts lengthen",
        "load": "both phases together bind",
    }[found.cause]
    busy = " and ".join(f"{role} nodes {share:.0%}" for role, share in found.busy.items())
    batch = "" if found.decode_batch is None else f", and {found.decode_batch:.0f} sequences in a decode step"
    return f"In {first.deployment} {binds}: {_misses(found, slo)}, with {busy} busy{batch}."
