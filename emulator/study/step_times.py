"""`pdemu validate --step-times`: published step times and sweeps of single steps against every cost model there is."""

from __future__ import annotations

import statistics
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from typing import NamedTuple

from emulator.core.cost import Chunk, CostModel, RooflineCost, StepShape
from emulator.core.errors import ConfigError
from emulator.core.hardware import Catalog
from emulator.core.measured_steps import (
    MeasuredStep,
    MixedMeasured,
    Source,
    StepSources,
    parse_sources,
    parse_steps,
)
from emulator.lab.catalog_files import load_catalog
from emulator.report.step_errors import Errors
from emulator.report.step_times_table import MixedTime, Modelled, SizeErrors, StepTime, StepTimes
from emulator.study.held_out import validate_held_out
from emulator.study.step_models import Models, errors

SWEEP_SOURCE = "aiconfigurator"
SWEEP_SIZES = (128, 8192)
"""Tokens of a prefill step within which the roofline is held to a bound: where chunk budgets live."""

SWEEP_BOUNDS = {"h100": (0.04, 0.10), "h200": (0.04, 0.10), "a100-80g": (0.08, 0.25)}
"""Median and worst error that the roofline must keep against each GPU's sweeps."""

FAR = {True: 0.10, False: 0.25}
"""Beyond what error a row is an outlier: among sums of kernels, and among measurements of engines."""

ASSUMED_CHUNK = 2048
ASSUMED_CONTEXT = 1024
MOST_TOKENS = 1 << 18

NOTES = (
    "in-sample: the efficiencies of the GPUs were fitted to the sweeps and to sums of the same kernels, so these "
    "errors say how well three or four figures of a GPU describe hundreds of steps, not how well they foretell others",
    "other published sums of the same kernels lie 6 to 9 % above H200's sweep; its efficiency lies in between",
    f"mixed steps: the source states neither chunk nor context; {ASSUMED_CHUNK:,} tokens (vLLM's default budget where "
    f"it is not raised) and {ASSUMED_CONTEXT:,} tokens of context are assumed. On L40S that does not hold: a chunk of "
    "that size takes longer there alone than the measured mixed step; the implied chunk is what would take so long",
    "a roofline is a GPU's time: what an engine's host adds is in no row of it",
)


class Files(NamedTuple):
    """What the catalog has of measured steps."""

    steps: list[MeasuredStep]
    sweeps: list[MeasuredStep]
    sources: StepSources


def load_files() -> Files:
    """Read the shipped files."""
    folder = resources.files("emulator") / "catalog"
    sources = tomllib.loads((folder / "step_sources.toml").read_text(encoding="utf-8"))
    return Files(
        list(parse_steps((folder / "step_times.csv").read_text(encoding="utf-8"), "step_times.csv")),
        list(parse_steps((folder / "step_sweeps.csv").read_text(encoding="utf-8"), "step_sweeps.csv", SWEEP_SOURCE)),
        parse_sources(sources, "step_sources.toml"),
    )


def validate_step_times(catalog: Catalog | None = None) -> StepTimes:
    """Every published step, the sweeps and the mixed steps against the models of the catalog."""
    catalog, files = catalog or load_catalog(), load_files()
    models = Models(catalog)
    steps = [_step_time(step, files.sources.source(step.source), models) for step in files.steps]
    return StepTimes(
        steps=tuple(steps),
        groups=tuple(_groups(steps, files.sources.sources)),
        sweeps=tuple(_sweeps(files.sweeps, models)),
        sizes=tuple(_sizes(files.sweeps, models)),
        mixed=tuple(found for mixed in files.sources.mixed for found in _mixed(mixed, models)),
        held_out=validate_held_out(catalog),
        notes=NOTES,
    )


# --- single steps -----------------------------------------------------------------------------------------------


def _step_time(step: MeasuredStep, source: Source, models: Models) -> StepTime:
    """One row; without known tokens or a catalogued GPU it is listed."""
    reason = models.missing(step.model, step.gpu)
    cost = None if reason else models.roofline(step.model, step.gpu, step.tp)
    implied = None
    if not reason and step.tokens is None:
        reason, implied = "the source does not state the context", _implied_tokens(step, cost)
    elif not reason and step.doubtful:
        reason = "the source is not sure of the context"
    ms = None if cost is None or step.tokens is None else cost.step_s(step.shape()) * 1e3
    error = None if ms is None else ms / step.ms - 1
    far = error is not None and not reason and abs(error) > FAR[source.in_sample]
    why = source.why_prefill if step.phase == "prefill" else source.why_decode
    return StepTime(
        gpu=step.gpu,
        model=step.model,
        tp=step.tp,
        phase=step.phase,
        batch=step.batch,
        tokens=step.tokens,
        ms=step.ms,
        source=step.source,
        group=source.group,
        in_sample=source.in_sample,
        scored=not reason,
        reason=reason,
        roofline_ms=ms,
        roofline_error=error,
        implied_tokens=implied,
        profiles=()
        if reason
        else tuple(_modelled(step, models.profiles(step.model, step.gpu, step.tp, source.profiles))),
        why=(why or "not explained") if far else "",
    )


def _modelled(step: MeasuredStep, costs: Iterable[tuple[str, CostModel]]) -> Iterator[Modelled]:
    for name, cost in costs:
        try:
            ms = cost.step_s(step.shape()) * 1e3
        except ConfigError:  # a table that was not measured so far
            continue
        yield Modelled(profile=name, ms=ms, error=ms / step.ms - 1)


def _implied_tokens(step: MeasuredStep, cost: RooflineCost | None) -> int | None:
    """The tokens at which the model takes as long as was measured; None where it never does."""
    assert cost is not None
    return _first(lambda tokens: cost.step_s(step.shape(tokens)) * 1e3 >= step.ms)


def _first(reached: Callable[[int], bool]) -> int | None:
    """The smallest number of tokens for which something that stays true is true; None for none, or from 1 on."""
    found = bisect_left(range(MOST_TOKENS), True, lo=1, key=reached)
    return found if 1 < found < MOST_TOKENS else None


# --- errors -----------------------------------------------------------------------------------------------------


def _groups(steps: Sequence[StepTime], sources: Sequence[Source]) -> Iterator[Errors]:
    """Errors of scored rows, by group and phase, and of the profiles of the same source."""
    for name in dict.fromkeys(source.group for source in sources):
        of_group = [source for source in sources if source.group == name]
        rows = [step for step in steps if step.group == name and step.scored]
        bound = of_group[0].median_within
        found = [step.roofline_error for step in rows if step.roofline_error is not None]
        yield errors(name, "roofline", found, in_sample=of_group[0].in_sample, bounds=(bound, None))
        for phase in dict.fromkeys(step.phase for step in rows):
            part = [s.roofline_error for s in rows if s.phase == phase and s.roofline_error is not None]
            yield errors(f"{name}, {phase}", "roofline", part, in_sample=of_group[0].in_sample)
        own = [step.profiles[0].error for step in rows if step.profiles]
        if own:
            yield errors(name, "its own profile", own, in_sample=True)


def _sweeps(sweeps: Sequence[MeasuredStep], models: Models) -> Iterator[Errors]:
    """The roofline within the sizes that have a bound, and each fitted profile over its whole sweep."""
    for gpu in dict.fromkeys(step.gpu for step in sweeps):
        for phase in ("prefill", "decode"):
            rows = [s for s in sweeps if s.gpu == gpu and s.phase == phase and _bounded(s)]
            found = [_error(s, models.roofline(s.model, s.gpu, s.tp)) for s in rows]
            what = "prefill of 128 to 8,192 tokens" if phase == "prefill" else "decode of 1 to 256 sequences"
            yield errors(f"{gpu}, {what}", "roofline", found, in_sample=True, bounds=SWEEP_BOUNDS[gpu])
    for of in dict.fromkeys((step.model, step.gpu, step.tp) for step in sweeps):
        for name, cost in models.profiles(*of, "aiconfigurator-"):
            for phase in ("prefill", "decode"):
                rows = [s for s in sweeps if (s.model, s.gpu, s.tp) == of and s.phase == phase]
                yield errors(f"{name}, {phase}", "fitted", [_error(s, cost) for s in rows], in_sample=True)


def _sizes(sweeps: Sequence[MeasuredStep], models: Models) -> Iterator[SizeErrors]:
    """The roofline's errors over prefills, by GPU and prompt length."""
    found: dict[tuple[str, int], list[float]] = {}
    for step in sweeps:
        if step.phase == "prefill" and step.tokens is not None:
            error = _error(step, models.roofline(step.model, step.gpu, step.tp))
            found.setdefault((step.gpu, step.tokens), []).append(error)
    for (gpu, tokens), of_size in found.items():
        median = statistics.median(abs(error) for error in of_size)
        yield SizeErrors(gpu=gpu, tokens=tokens, n=len(of_size), median=median, worst=max(of_size, key=abs))


def _bounded(step: MeasuredStep) -> bool:
    assert step.tokens is not None
    return step.phase == "decode" or SWEEP_SIZES[0] <= step.tokens <= SWEEP_SIZES[1]


def _error(step: MeasuredStep, cost: CostModel) -> float:
    return cost.step_s(step.shape()) * 1e3 / step.ms - 1


# --- mixed steps ------------------------------------------------------------------------------------------------


def _mixed(step: MixedMeasured, models: Models) -> Iterator[MixedTime]:
    costs = [("roofline", models.roofline(step.model, step.gpu, step.tp))]
    for name, cost in (*costs, *models.profiles(step.model, step.gpu, step.tp, "aiconfigurator-")):
        yield _mixed_time(step, name, cost)


def _mixed_time(step: MixedMeasured, name: str, cost: CostModel) -> MixedTime:
    contexts = step.batch * ASSUMED_CONTEXT

    def mixed_ms(tokens: int) -> float:
        return cost.step_s(StepShape((Chunk(tokens, 0),), step.batch, contexts)) * 1e3

    alone_ms = cost.step_s(StepShape((Chunk(ASSUMED_CHUNK, 0),), 0, 0)) * 1e3
    return MixedTime(
        gpu=step.gpu,
        model=step.model,
        batch=step.batch,
        assumed_chunk_tokens=ASSUMED_CHUNK,
        assumed_context=ASSUMED_CONTEXT,
        cost=name,
        decode_measured_ms=step.decode_ms,
        decode_ms=cost.step_s(StepShape((), step.batch, contexts)) * 1e3,
        mixed_measured_ms=step.mixed_ms,
        mixed_ms=mixed_ms(ASSUMED_CHUNK),
        error=mixed_ms(ASSUMED_CHUNK) / step.mixed_ms - 1,
        slows_prefill=mixed_ms(ASSUMED_CHUNK) / alone_ms - 1,
        implied_chunk_tokens=_first(lambda tokens: mixed_ms(tokens) >= step.mixed_ms),
    )
