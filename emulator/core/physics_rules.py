"""What all rules of physics share: when two instants are the same, and how a broken rule is said."""

from __future__ import annotations

from collections.abc import Sequence

INSTANT_S = 1e-6
"""Instants on one clock are equal within rounding, also where a row of steps stands for many."""


def said(rule: str, cases: Sequence[str]) -> list[str]:
    """One sentence for all cases in which a rule is broken."""
    more = f" (and {len(cases) - 1} more)" if len(cases) > 1 else ""
    return [f"{rule}: {cases[0]}{more}"] if cases else []
