"""Published results beside ours: the document that `pdemu validate --json` prints, and its table.

The types stand here because the report may not import the lab that fills them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

AGREES_WITHIN = 0.15
"""A number agrees when it is within this share of the published one."""

NOTHING = "-"


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One published value beside ours, which is null where the mechanics do not exist.

    `published` and `ours` are numbers in `unit`, or words. `published_high` makes the published value a range,
    `lower_bound` one that ours has to reach. `ratio` is ours over published (over the middle of a range), null for
    words. `why` says where a difference comes from, or how the value was got.
    """

    claim: str
    statement: str
    setting: str
    published: float | str
    ours: float | str | None
    unit: str
    published_high: float | None = None
    lower_bound: bool = False
    ratio: float | None = None
    agrees: bool | None = None
    why: str = ""


class Validated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One reproduction: what was assumed for it and what came out."""

    name: str
    title: str
    source: str
    assumptions: tuple[str, ...]
    findings: tuple[Finding, ...]


class ValidateSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole document that `pdemu validate --json` prints."""

    seeds: int
    reproductions: tuple[Validated, ...]


def ratio_of(published: float | str, ours: float | str | None, high: float | None) -> float | None:
    """Ours over published (over the middle of a range); None for words, for nothing, and for a published 0."""
    if isinstance(published, str) or ours is None or isinstance(ours, str):
        return None
    reference = published if high is None else (published + high) / 2
    return ours / reference if reference else None


def agreement(
    published: float | str, ours: float | str | None, high: float | None, *, lower_bound: bool
) -> bool | None:
    """Whether ours is what was published: the same word, in the range, above the bound, or within 15 %."""
    if ours is None:
        return None
    if isinstance(published, str) or isinstance(ours, str):
        return published == ours
    if lower_bound:
        return ours >= published
    if high is not None:
        return published <= ours <= high
    return abs(ours - published) <= AGREES_WITHIN * abs(published)


def render(summary: ValidateSummary) -> RenderableType:
    """Every reproduction as a table, the reasons below it, and what was assumed."""
    parts: list[RenderableType] = []
    for reproduction in summary.reproductions:
        parts += [*_reproduction(reproduction), ""]
    return Group(*parts)


def listing(reproductions: Iterable[tuple[str, str, str]]) -> Table:
    """What there is to validate: (name, title, source) of each."""
    table = Table(title="Reproductions", title_justify="left", box=None)
    for heading in ("name", "what", "source"):
        table.add_column(heading, overflow="fold")
    for row in reproductions:
        table.add_row(*row)
    return table


def _reproduction(reproduction: Validated) -> list[RenderableType]:
    lines: list[RenderableType] = [
        Text(f"{reproduction.name}: {reproduction.title}", style="bold"),
        Text(reproduction.source, style="dim"),
        _findings_table(reproduction.findings),
    ]
    lines += [Padding(Text(f"[{number}] {why}"), (0, 1)) for why, number in _reasons(reproduction.findings).items()]
    lines.append(Text("Assumed", style="bold"))
    lines += [Padding(Text(f"· {assumption}"), (0, 1)) for assumption in reproduction.assumptions]
    return lines


def _findings_table(findings: Sequence[Finding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("claim", overflow="fold")
    table.add_column("what", overflow="fold")
    for heading in ("published", "ours", "ratio"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("why", no_wrap=True)
    reasons = _reasons(findings)
    for found in findings:
        what = f"{found.statement}; {found.setting}" if found.setting else found.statement
        style = {True: "green", False: "yellow", None: "dim"}[found.agrees]
        table.add_row(
            found.claim,
            what,
            _published_text(found),
            Text(_value_text(found.ours, found.unit), style=style),
            NOTHING if found.ratio is None else f"{found.ratio:.2f}",
            f"[{reasons[found.why]}]" if found.why else "",
        )
    return table


def _reasons(findings: Sequence[Finding]) -> dict[str, int]:
    """Each sentence once, numbered in the order in which the rows need it."""
    sentences = dict.fromkeys(found.why for found in findings if found.why)
    return {why: number for number, why in enumerate(sentences, start=1)}


def _published_text(found: Finding) -> str:
    text = _value_text(found.published, found.unit)
    if found.published_high is not None:
        text = f"{found.published:g}-{found.published_high:g} {found.unit}".strip()
    return f"over {text}" if found.lower_bound else text


def _value_text(value: float | str | None, unit: str) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, str):
        return value
    size = abs(value)
    number = f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"
    return f"{number} {unit}".strip()
