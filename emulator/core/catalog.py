"""The catalog of models, GPUs and profiles: parsed from TOML texts, extended by a topology's own entries, searched."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from emulator.core import strict
from emulator.core.errors import ConfigError
from emulator.core.hardware import Catalog, FittedProfile, Gpu, Model, StepTable


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


def parse_catalog(texts: Mapping[str, str]) -> Catalog:
    """Parse TOML texts, each under the file name that errors should show, into one catalog.

    Raises ConfigError for TOML that cannot be read, unknown or missing keys, and names given twice.
    """
    catalog = Catalog()
    for where, text in texts.items():
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{where}: not valid TOML: {error}") from None
        part = strict.convert(data, Catalog, where)
        catalog = extend(catalog, models=part.models, gpus=part.gpus, profiles=part.profiles, tables=part.tables)
    return catalog


def extend(
    catalog: Catalog,
    models: Sequence[Model] = (),
    gpus: Sequence[Gpu] = (),
    profiles: Sequence[FittedProfile] = (),
    tables: Sequence[StepTable] = (),
) -> Catalog:
    """Add entries, such as those of a topology file; raises ConfigError for a name that exists already."""
    return Catalog(
        models=_joined("model", catalog.models, models),
        gpus=_joined("gpu", catalog.gpus, gpus),
        profiles=_joined("profile", catalog.profiles, profiles),
        tables=_joined("table", catalog.tables, tables),
    )


def find_model(catalog: Catalog, name: str) -> Model:
    """Find a model by name without regard to case; raises ConfigError listing what exists."""
    return _find("model", catalog.models, name)


def find_gpu(catalog: Catalog, name: str) -> Gpu:
    """Find a GPU by name without regard to case; raises ConfigError listing what exists."""
    return _find("gpu", catalog.gpus, name)


def find_profile(catalog: Catalog, name: str) -> FittedProfile:
    """Find a profile by name without regard to case; raises ConfigError listing what exists."""
    return _find("profile", catalog.profiles, name)


def find_table(catalog: Catalog, name: str) -> StepTable:
    """Find a table by name without regard to case; raises ConfigError listing what exists."""
    return _find("table", catalog.tables, name)


def _joined(kind: str, known: Sequence[N], added: Iterable[N]) -> tuple[N, ...]:
    entries = list(known)
    seen = {entry.name.casefold() for entry in known}
    for entry in added:
        key = entry.name.casefold()
        if key in seen:
            raise ConfigError(f"{kind} {entry.name!r} exists already: give yours another name")
        seen.add(key)
        entries.append(entry)
    return tuple(entries)


def _find(kind: str, entries: Sequence[N], name: str) -> N:
    by_key = {entry.name.casefold(): entry for entry in entries}
    found = by_key.get(name.casefold())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.casefold(), by_key, n=1)
    hint = f" (did you mean {by_key[near[0]].name!r}?)" if near else ""
    known = ", ".join(entry.name for entry in entries) or "none"
    raise ConfigError(f"there is no {kind} {name!r}{hint}; known: {known}")
