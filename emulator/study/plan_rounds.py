"""The rounds in which deployments are searched, so that few simulations decide which is best.

1. Bound: a deployment whose resources cannot serve what another one did serve is not run (`core.bounds`).
2. Screen: the others are searched with one seed (more where runs are short), coarsely, a few at a time.
3. Confirm: the best, and the best of other nodes (not the same nodes with another chunk budget), are searched with all
   seeds to the full tolerance. So is whoever came near either, and passes with all seeds at what that one reached.

All runs have the topology's duration: a shorter one ends before its queues and batches have filled, which flatters
deployments that are short of decode, so it would not only be noisier but rank differently. The rounds repeat until
the best is confirmed and nothing that was screened or ruled out could be ahead of it. What is tried depends on
results alone, not on the number of processes or their speed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from emulator.core.bounds import Bound, Limit
from emulator.core.hardware import Catalog
from emulator.core.plan import Diagnosis, Objective, Ranked, RuledOut, Shape, diagnose
from emulator.core.run_spec import RunSpec
from emulator.core.search import Goodput
from emulator.core.trace import Trace
from emulator.core.workload import scale_rate
from emulator.lab.simulated import simulated_result
from emulator.study.contenders import Fit
from emulator.study.goodput import perform
from emulator.study.rated_runs import Candidate, RatedRuns, SearchOptions, rated_runs, search_span, seeded_runs
from emulator.study.variants import with_rate

WAVE = 6
"""So many deployments are screened before what they reached rules others out."""
SCREEN_REQUESTS = 400
"""A screened rate is run with as many seeds as give about so many requests: the share that meets the SLO is then known
to 1.5 points, and the rate to some 2 %."""
SCREEN_TOLERANCE = 0.08
NEAR = 0.85
"""From this share of the best on, a screened goodput is near it."""
BOUND_SHARE = 0.6
"""A first guess of a goodput, as a share of its bound, from which the time that decode has after the last arrival is
taken off."""
AROUND = 1.1
"""Screened goodputs are confirmed within this factor, and beyond only where they are not found there."""

WANT: dict[Limit, str] = {
    "prefill": "prefill nodes",
    "decode": "decode nodes",
    "prefill and decode": "GPUs",
    "KV network": "KV bandwidth",
}

Round = Literal["screened", "confirmed"]
OnFound = Callable[[str, Round, Goodput], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What to plan: `gpus` GPUs, of one or several `gpu_types` (default: the topology's), ranked by `objective`."""

    gpus: int
    gpu_types: tuple[str, ...] = ()
    objective: Objective = "goodput"
    seeds: int = 3
    tolerance: float = 0.02
    workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenRuns(RatedRuns):
    """Runs of a search that does not ask whether KV memory is the limit."""

    def with_more_memory(self, rate_per_s: float) -> list[RunSpec]:  # noqa: ARG002 - as its base has it
        """None."""
        return []


class Rounds:
    """What is known of each contender, and what to find out next."""

    def __init__(
        self,
        fits: Sequence[Fit],
        bounds: Mapping[str, Bound | None],
        options: PlanOptions,
        *,
        catalog: Catalog,
        traces: Mapping[str, Trace],
        on_found: OnFound | None = None,
    ) -> None:
        self._fits = {fit.contender.deployment: fit for fit in fits}
        self._bounds = bounds
        self._options = options
        self._catalog = catalog
        self._traces = traces
        self._on_found = on_found
        self._reachable_per_s = search_span(fits[0].topology, traces, SearchOptions())[0].high
        self._found: dict[str, Goodput] = {}
        self._confirmed: set[str] = set()
        self._beaten: dict[str, float] = {}
        self._by_bound = sorted(self._fits, key=lambda name: (-self._bound_worth(name), name))

    def run(self) -> None:
        """Screen and confirm until nothing that is left could be first, or first of the others."""
        while True:
            first, second = self._leaders()
            if wave := self._to_screen():
                self._screen(wave)
            elif unsure := [name for name in (first, second) if name is not None and name not in self._confirmed]:
                self._confirm(unsure)
            elif near := self._near(first, second):
                self._challenge(near)
            else:
                return

    def ranking(self) -> list[Ranked]:
        """Everything that was run."""
        return [self._ranked(name) for name in self._by_bound if name in self._found]

    def ruled_out(self) -> tuple[RuledOut, ...]:
        """What was not, by its bound."""
        left = [(name, self._bounds[name]) for name in self._by_bound if name not in self._found]
        return tuple(
            RuledOut(
                deployment=name,
                pools=self._fits[name].contender.pools,
                bound_per_s=bound.rate_per_s,
                bound_limit=bound.limit,
                reason=f"cannot serve {bound.rate_per_s:.3g} requests/s for want of {WANT[bound.limit]}",
            )
            for name, bound in left
            if bound is not None
        )

    def diagnosis(self, name: str) -> Diagnosis | None:
        """Why a deployment fails just above its goodput, from one more run of the seed that failed most there.

        None when it was not seen to fail.
        """
        found, fit = self._found[name], self._fits[name]
        failing = next((trial for trial in found.trials if trial.rate_per_s == found.next_rate_per_s), None)
        if failing is None:
            return None
        workload = fit.topology.workload
        worst = min(range(len(failing.attainment)), key=lambda n: failing.attainment[n])
        rated = scale_rate(workload, failing.rate_per_s, self._traces)
        run = seeded_runs(fit.base, rated, self._traces, [workload.seed + worst])[0]
        diagnosis = diagnose(run, simulated_result(run), failing.rate_per_s)
        return msgspec.structs.replace(diagnosis, attainment=failing.mean, seeds=len(failing.attainment))

    # --- what next --------------------------------------------------------------------------------------------

    def _worth(self, name: str, rate_per_s: float | None) -> float:
        return self._fits[name].contender.value(rate_per_s or 0.0, self._options.objective) or 0.0

    def _bound_worth(self, name: str) -> float:
        bound = self._bounds[name]
        return math.inf if bound is None else self._worth(name, bound.rate_per_s)

    def _reached(self, name: str) -> float:
        return self._worth(name, self._found[name].rate_per_s)

    def _best(self) -> float:
        """The most that was confirmed, or until then screened."""
        return max((self._reached(name) for name in self._confirmed or self._found), default=0.0)

    def _to_screen(self) -> list[str]:
        """The next few whose bounds do not rule them out."""
        best = self._best()
        return [n for n in self._by_bound if n not in self._found and self._bound_worth(n) > best][:WAVE]

    def _leaders(self) -> tuple[str | None, str | None]:
        """The best, as far as is known, and the best of other nodes; nobody who is beaten or serves nothing."""
        names = [name for name in self._found if name not in self._beaten and self._reached(name) > 0]
        ordered = sorted(names, key=lambda name: (-self._reached(name), name))
        first = next(iter(ordered), None)
        return first, next((n for n in ordered if first is not None and self._shape(n) != self._shape(first)), None)

    def _near(self, first: str | None, second: str | None) -> dict[str, float]:
        """Those who might be ahead of the leader of their like, with the rate at which they would be."""
        found = {}
        for name in sorted(self._found.keys() - self._confirmed - self._beaten.keys()):
            leader = first if second is None or (first and self._shape(name) == self._shape(first)) else second
            if leader is not None and self._reached(name) >= NEAR * self._reached(leader):
                found[name] = min(self._reached(leader) / self._worth(name, 1.0), self._reachable_per_s)
        return found

    def _shape(self, name: str) -> Shape:
        return self._fits[name].contender.shape

    # --- searches ---------------------------------------------------------------------------------------------

    def _screen(self, names: Sequence[str]) -> None:
        tolerance = max(SCREEN_TOLERANCE, self._options.tolerance)
        options = SearchOptions(seeds=self._screen_seeds(), tolerance=tolerance)
        planned = [self._planned(name, self._guess(name), options) for name in names]
        screens = [ScreenRuns(**{f.name: getattr(runs, f.name) for f in dataclasses.fields(runs)}) for runs in planned]
        for name, found in zip(names, perform(screens, workers=self._options.workers), strict=True):
            self._keep(name, "screened", found)

    def _guess(self, name: str) -> float | None:
        """A first rate to try."""
        bound, load = self._bounds[name], self._fits[name].base.load
        if bound is None:
            return None
        in_time = load.duration_s / (load.duration_s + load.drain_s) if "decode" in bound.limit else 1.0
        return BOUND_SHARE * in_time * bound.rate_per_s

    def _screen_seeds(self) -> int:
        guesses = [guess for name in self._fits if (guess := self._guess(name)) is not None]
        if not guesses:
            return self._options.seeds
        requests = next(iter(self._fits.values())).base.load.duration_s * statistics.median(guesses)
        return max(1, min(self._options.seeds, math.ceil(SCREEN_REQUESTS / requests)))

    def _confirm(self, names: Sequence[str]) -> None:
        """Search with all seeds around what was screened."""
        for name, found in self._full({n: self._found[n].rate_per_s or 0.0 for n in names}, below=AROUND).items():
            self._keep(name, "confirmed", found)

    def _challenge(self, lows: Mapping[str, float]) -> None:
        """Search with all seeds from a rate upwards: who fails there is beaten."""
        for name, found in self._full(lows, below=1.0).items():
            if found.rate_per_s is None:
                self._beaten[name] = lows[name]
            else:
                self._keep(name, "confirmed", found)

    def _full(self, rates: Mapping[str, float], *, below: float) -> dict[str, Goodput]:
        """The goodputs with all seeds, looked for within a factor of AROUND above the rates and of `below` below them.

        They are looked for further up where they are not found there, and further down unless that is 1.
        """
        options = SearchOptions(seeds=self._options.seeds, tolerance=self._options.tolerance)
        found = self._search(
            {
                name: (rate, dataclasses.replace(options, low=rate / below, high=rate * AROUND))
                for name, rate in rates.items()
            }
        )
        low = [name for name in rates if found[name].rate_per_s is None and below > 1]
        high = [name for name in rates if found[name].bounded_by == "high"]
        return found | self._search({name: (rates[name], options) for name in (*low, *high)})

    def _search(self, wanted: Mapping[str, tuple[float | None, SearchOptions]]) -> dict[str, Goodput]:
        """The goodput of each, beginning at a first guess, all at once."""
        planned = [self._planned(name, guess, options) for name, (guess, options) in wanted.items()]
        return dict(zip(wanted, perform(planned, workers=self._options.workers), strict=True)) if planned else {}

    def _planned(self, name: str, guess: float | None, options: SearchOptions) -> RatedRuns:
        fit = self._fits[name]
        topology = fit.topology if guess is None else with_rate(fit.topology, guess, self._traces)
        bandwidth_bps = None if fit.base.link is None else fit.base.link.bandwidth_bps
        return rated_runs(topology, self._catalog, self._traces, Candidate(name, bandwidth_bps), options)

    def _keep(self, name: str, round_name: Round, found: Goodput) -> None:
        self._found[name] = found
        if round_name == "confirmed":
            self._confirmed.add(name)
        if self._on_found is not None:
            self._on_found(name, round_name, found)

    def _ranked(self, name: str) -> Ranked:
        contender, found, bound = self._fits[name].contender, self._found[name], self._bounds[name]
        rate = found.rate_per_s
        return Ranked(
            deployment=name,
            pools=contender.pools,
            rate_per_s=rate,
            per_gpu=found.per_gpu,
            per_dollar=None if rate is None else contender.value(rate, "per-dollar"),
            per_kw=None if rate is None else contender.value(rate, "per-watt"),
            next_rate_per_s=found.next_rate_per_s,
            low_per_s=found.low_per_s,
            high_per_s=found.high_per_s,
            bounded_by=found.bounded_by,
            seeds=len(found.trials[0].attainment),
            confirmed=name in self._confirmed,
            beaten_at_per_s=self._beaten.get(name),
            bound_per_s=None if bound is None else bound.rate_per_s,
            bound_limit=None if bound is None else bound.limit,
            notes=found.notes,
        )
