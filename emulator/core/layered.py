"""Topology files on top of others: what a file `extends` is laid under what it says itself.

Tables are merged key by key and what stands above replaces what stands below, but for lists of named entries
(deployments, expectations, models, GPUs, profiles, tables): these are joined, and an entry that two files share stands
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

JOINED = ("deployments", "expectations", "models", "gpus", "profiles", "tables")
"""Top-level lists whose entries add up."""


def layered(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One document of parsed TOML from several, the lowest first; what is not a table or a list is left as it is."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.get(key)
            if key in JOINED and isinstance(below, list) and isinstance(value, list):
                merged[key] = below + [entry for entry in value if entry not in below]
            else:
                merged[key] = _above(below, value)
    return merged


def _above(below: object, value: object) -> object:
    """A value laid over another: tables by their keys, anything else in its place."""
    if not (isinstance(below, dict) and isinstance(value, dict)):
        return value
    return below | {key: _above(below.get(key), entry) for key, entry in value.items()}
