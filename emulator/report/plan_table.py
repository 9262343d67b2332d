"""A plan in a terminal: the ranking, what was not run and why, and below it the recommendation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from emulator.core.bounds import Limit
from emulator.core.plan import Objective, Plan, PlannedPool, Ranked
from emulator.core.search import BoundedBy
from emulator.report.table import bandwidth_text, figure_text

RANKED_BY: dict[Objective, str] = {
    "goodput": "requests/s",
    "per-dollar": "requests per dollar",
    "per-watt": "requests/s per kW of TDP",
}


RESOURCES: dict[Limit, str] = {
    "prefill": "prefill nodes",
    "decode": "decode nodes",
    "prefill and decode": "GPUs",
    "KV network": "KV network",
}


SCREENED = (
    "Screened: searched coarsely with fewer seeds, to see that it is not among the best; its rate is rough, and so is "
    "the order of those screened."
)
BOUNDED: dict[BoundedBy, str] = {
    "low": "nothing lower tried",
    "high": "nothing higher tried",
    "load generator": "all that can be sent",
    "kv memory": "KV memory limits",
}
OPEN_ENDS: tuple[BoundedBy, ...] = ("high", "load generator")


def render(plan: Plan, *, top: int) -> RenderableType:
    """What a terminal shows of a plan, the first `top` of its ranking; for a rich Console."""
    parts: list[RenderableType] = [_ranking(plan, top)]
    if (left := len(plan.ranking) - top) > 0:
        parts.append(Text(f"and {left} more, which --top {len(plan.ranking)} shows"))
    ruled_out = ((f"{out.deployment} {out.bound_per_s:.3g}/s", RESOURCES[out.bound_limit]) for out in plan.ruled_out)
    parts += [
        Text(f"Not run, since their {limit} can serve no more than: {', '.join(names)}")
        for limit, names in _grouped(ruled_out)
    ]
    impossible = ((no.deployment, no.reason) for no in plan.impossible)
    parts += [Text(f"Impossible: {', '.join(names)}: {reason}") for reason, names in _grouped(impossible)]
    if not all(ranked.confirmed for ranked in plan.ranking[:top]):
        parts.append(Text(SCREENED))
    said = ((ranked.deployment, note) for ranked in plan.ranking[:top] if ranked.confirmed for note in ranked.notes)
    found = [f"{', '.join(names)}: {note}" for note, names in _grouped((name, note) for name, note in said)]
    parts += [Text(note, style="yellow") for note in (*plan.notes, *found)]
    parts.append(Text(f"Per dollar and kW: {plan.cost_basis}."))
    return Group(*parts, Text(""), *_recommendation(plan))


def _ranking(plan: Plan, top: int) -> Table:
    title = f"{plan.topology} on {plan.gpus} GPUs, by {RANKED_BY[plan.objective]} with {plan.slo.target:.0%} in the SLO"
    if plan.kv_bandwidth_bps is not None:
        title += f"; KV at {bandwidth_text(plan.kv_bandwidth_bps)}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    table.add_column("", justify="right")
    table.add_column("deployment", overflow="fold", min_width=14)
    table.add_column("GPUs", overflow="fold")
    for heading in ("req/s", "fails\nat", "per\nGPU", "per\ndollar", "per\nkW", "seeds"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("notes", overflow="fold")
    for place, ranked in enumerate(plan.ranking[:top], start=1):
        style = "bold green" if ranked.deployment == plan.recommended else None if ranked.confirmed else "dim"
        table.add_row(
            str(place),
            ranked.deployment,
            pools_text(ranked.pools),
            _rate(ranked),
            figure_text(ranked.next_rate_per_s),
            figure_text(ranked.per_gpu),
            figure_text(ranked.per_dollar),
            figure_text(ranked.per_kw),
            str(ranked.seeds),
            _note(ranked),
            style=style,
        )
    return table


def pools_text(pools: Sequence[PlannedPool]) -> str:
    """`5 h100 + 3 a100-80g`, with `2x4 h100` for two nodes of four; of a colocated pool also how it batches."""
    text = " + ".join(f"{f'{p.nodes}x{p.tp}' if p.tp > 1 else p.nodes} {p.gpu}" for p in pools)
    if pools[0].role != "colocated":
        return text
    whole = pools[0].policy == "prefill_first"
    return f"{text}, {'prefill first' if whole else f'chunks {pools[0].max_num_batched_tokens}'}"


def _recommendation(plan: Plan) -> list[Text]:
    if plan.recommended is None:
        return [Text("Nothing is recommended: no deployment meets the SLO at any rate that was tried.", style="bold")]
    return [Text(f"Recommended: {plan.recommended}", style="bold"), *map(Text, plan.reasons)]


def _note(ranked: Ranked) -> str:
    notes = [] if ranked.confirmed else ["screened"]
    if ranked.beaten_at_per_s is not None:
        notes = [f"beaten at {figure_text(ranked.beaten_at_per_s)}"]
    if ranked.bounded_by is not None:
        notes.append(BOUNDED[ranked.bounded_by])
    return ", ".join(notes)


def _rate(ranked: Ranked) -> str:
    """The rate served, `≥` before what may be more."""
    text = figure_text(ranked.rate_per_s)
    return f"≥ {text}" if ranked.bounded_by in OPEN_ENDS else text


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Names by what is said of them, in the order in which it is first said."""
    groups: dict[str, list[str]] = {}
    for name, said in pairs:
        groups.setdefault(said, []).append(name)
    return list(groups.items())
