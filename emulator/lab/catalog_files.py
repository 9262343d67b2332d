"""The catalog that ships with the package, read from its TOML files."""

from __future__ import annotations

from functools import cache
from importlib import resources

from emulator.core.catalog import parse_catalog
from emulator.core.hardware import Catalog

FILES = ("models.toml", "gpus.toml", "profiles.toml", "tables.toml")


@cache
def load_catalog() -> Catalog:
    """Read every shipped model, GPU, profile and table, once a process."""
    folder = resources.files("emulator") / "catalog"
    return parse_catalog({name: (folder / name).read_text(encoding="utf-8") for name in FILES})
