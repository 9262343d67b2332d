"""Errors of cost models over several steps, and the tables that show them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

NOTHING = "-"


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Absolute errors of one model over several steps, the worst with its sign; and what they must be within."""

    name: str
    model: str
    n: int
    in_sample: bool
    median: float | None
    mean: float | None
    worst: float | None
    median_within: float | None = None
    worst_within: float | None = None
    within: bool | None = None


def percent(error: float | None, *, signed: bool = True) -> str:
    """An error in percent."""
    return NOTHING if error is None else f"{error:+.1%}" if signed else f"{error:.1%}"


def table_of(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table with columns of words, then of numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def errors_table(title: str, groups: Sequence[Errors]) -> Table:
    """One row a group, with what it must be within."""
    table = table_of(title, ("what", "model", ""), ("n", "median", "mean", "worst", "must be within", ""))
    for group in groups:
        bounds = [
            f"{name} {bound:.0%}"
            for name, bound in (("median", group.median_within), ("worst", group.worst_within))
            if bound is not None
        ]
        verdict = {True: "yes", False: "NO", None: ""}[group.within]
        table.add_row(
            group.name,
            group.model,
            "in-sample" if group.in_sample else "",
            str(group.n),
            percent(group.median, signed=False),
            percent(group.mean, signed=False),
            percent(group.worst),
            ", ".join(bounds) or NOTHING,
            Text(verdict, style="green" if group.within else "red"),
        )
    return table
