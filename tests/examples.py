"""How many examples a property is tried on: so many, and a share of them by the profile of `make check`."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

ALL = 100
"""Examples of a property that says nothing else, without a profile of fewer; others are in proportion."""


def examples(n: int, **others: Any) -> settings:
    """Settings of `n` examples, or of the profile's share of them; `others` are as in `settings`."""
    return settings(max_examples=max(1, n * settings().max_examples // ALL), **others)


def drawn_slowly(n: int) -> settings:
    """`examples` of what takes long to draw, such as a whole run."""
    return examples(n, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
