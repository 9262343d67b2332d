"""Published measurements of engines that no figure of a cost model was fitted to: read from the catalog's files."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from emulator.core import strict
from emulator.core.errors import ConfigError
from emulator.core.hardware import Model, WeightsDtype

HeldOutPhase = Literal["prefill", "decode", "run", "served"]
Unit = Literal["ms", "tok/s", "tok/s/GPU"]
Kind = Literal["16-bit dense", "fp8 dense", "16-bit MoE", "fp8 MoE", "16-bit MLA", "fp8 MLA"]
"""What a measurement is of, by weights and by shape; a model with MLA counts as that, also where it has experts."""

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]

REQUIRED = ("gpu", "model", "tp", "weights", "kv", "phase", "tokens", "value", "unit", "source")


class HeldOutSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where figures come from, what is `known` of them and `assumed`; `listed` says why they are not scored.

    `grouped_attention` says what makes it doubtful that the engine read KV once for a group of query heads.
    """

    name: str
    text: str
    known: str
    assumed: str = ""
    listed: str = ""
    grouped_attention: str = ""


class HeldOutStep(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure: `batch` prompts of `tokens` each (context in `decode`) and `new_tokens` decoded of each."""

    gpu: str
    model: str
    tp: _Count
    weights: WeightsDtype
    kv: Literal["fp16", "fp8"]
    phase: HeldOutPhase
    tokens: _Count
    value: _Positive
    unit: Unit
    source: str
    batch: _Count | None = None
    new_tokens: _Count | None = None

    def __post_init__(self) -> None:
        if (self.batch is None) != (self.phase == "served"):
            raise ValueError("batch: every phase but served has one")
        if (self.new_tokens is None) != (self.phase in ("prefill", "decode")):
            raise ValueError("new_tokens: run and served have them, prefill and decode have none")

    @property
    def ms(self) -> float:
        """The figure in ms: of the step; in a run, of what it takes for one token of each sequence; served, a token."""
        if self.unit == "ms":
            return self.value
        per_s = self.value * (self.tp if self.unit == "tok/s/GPU" else 1)
        return (self.batch or 1) / per_s * 1e3


class HeldOutSources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file of sources."""

    sources: tuple[HeldOutSource, ...]


def kind_of(model: Model, weights: WeightsDtype) -> Kind:
    """What a model with such weights is compared as."""
    fp8 = weights == "fp8"
    if model.mla is not None:
        return "fp8 MLA" if fp8 else "16-bit MLA"
    if model.active_params_b < model.params_b:
        return "fp8 MoE" if fp8 else "16-bit MoE"
    return "fp8 dense" if fp8 else "16-bit dense"


def parse_held_out_sources(data: object, where: str) -> dict[str, HeldOutSource]:
    """Read the file of sources, parsed as TOML, by name."""
    return {source.name: source for source in strict.convert(data, HeldOutSources, where).sources}


def parse_held_out(text: str, where: str) -> Iterator[HeldOutStep]:
    """Read figures from CSV; raises ConfigError with the line for anything else."""
    rows = csv.DictReader(text.splitlines())
    for row in rows:
        try:
            given = {key: row[key] for key in REQUIRED}
            given |= {key: row[key] for key in ("batch", "new_tokens") if row[key]}
            yield msgspec.convert(given, HeldOutStep, strict=False)
        except (msgspec.ValidationError, KeyError) as error:
            raise ConfigError(f"{where}: line {rows.line_num}: {error}") from None
