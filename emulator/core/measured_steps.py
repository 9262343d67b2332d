"""Published step times to hold cost models against: read from the catalog's files, and what they are as steps."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Annotated

import msgspec

from emulator.core import strict
from emulator.core.cost import Chunk, StepShape
from emulator.core.errors import ConfigError
from emulator.core.profile_fit import Phase

_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where measured steps come from; `group` is what they are scored with, and against which median, if any.

    `profiles` begins the names of profiles made from the same source. `why_prefill` and `why_decode` explain where and
    why a roofline is far off.
    """

    name: str
    group: str
    text: str
    profiles: str = ""
    in_sample: bool = False
    median_within: _Share | None = None
    why_prefill: str = ""
    why_decode: str = ""


class MixedMeasured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Decode steps of `batch` sequences, alone and beside chunks of prompts of a size that is not stated."""

    gpu: str
    model: str
    tp: int
    batch: int
    decode_ms: float
    mixed_ms: float
    text: str


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True):
    """One measured step: `batch` prompts of `tokens` each, or decodes at `tokens` of context.

    `tokens` is None where the source has none; `doubtful` where it is not sure of them.
    """

    gpu: str
    model: str
    tp: int
    phase: Phase
    batch: int
    tokens: int | None
    ms: float
    source: str
    doubtful: bool = False

    def shape(self, tokens: int | None = None) -> StepShape:
        """The step as a cost model sees it, with other tokens if they are given."""
        tokens = tokens if tokens is not None else self.tokens
        assert tokens is not None
        if self.phase == "prefill":
            return StepShape((Chunk(tokens, 0),) * self.batch, 0, 0)
        return StepShape((), self.batch, self.batch * tokens)


class StepSources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file of sources."""

    sources: tuple[Source, ...]
    mixed: tuple[MixedMeasured, ...] = ()

    def source(self, name: str) -> Source:
        """A source by its name; raises ConfigError for one that is not there."""
        for source in self.sources:
            if source.name == name:
                return source
        raise ConfigError(f"step times name the source {name!r}, which is not among the sources")


def parse_sources(data: object, where: str) -> StepSources:
    """Read the file of sources, parsed as TOML."""
    return strict.convert(data, StepSources, where)


def parse_steps(text: str, where: str, source: str = "") -> Iterator[MeasuredStep]:
    """Read measured steps from CSV: gpu, model, tp, phase, batch, tokens, ms and, unless it is given, source.

    Tokens end with `?` where the source is not sure of them and are `?` where it does not say. Raises ConfigError with
    the line for anything else.
    """
    rows = csv.DictReader(text.splitlines())
    for row in rows:
        tokens = row["tokens"].removesuffix("?")
        try:
            yield msgspec.convert(
                {
                    **{key: row[key] for key in ("gpu", "model", "tp", "phase", "batch", "ms")},
                    "tokens": tokens or None,
                    "source": source or row["source"],
                    "doubtful": row["tokens"].endswith("?"),
                },
                MeasuredStep,
                strict=False,
            )
        except (msgspec.ValidationError, KeyError) as error:
            raise ConfigError(f"{where}: line {rows.line_num}: {error}") from None
