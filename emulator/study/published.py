"""Published results and what it takes to reproduce them: the claims, their topologies, and a bench to run these on.

What was published stands in `catalog/published.toml`; the topologies in `topologies/published`. A recipe asks the
bench for goodput, attainment or a run, and gives back findings: a claim, and what came out.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

import emulator
from emulator.core import metrics, strict, traffic
from emulator.core.catalog import find_profile
from emulator.core.errors import ConfigError
from emulator.core.hardware import Catalog, DecodeFit, FittedProfile
from emulator.core.quantities import Seconds
from emulator.core.run_summary import RunResult
from emulator.core.search import Goodput
from emulator.core.specs import Topology
from emulator.core.workload import scale_rate
from emulator.lab.simulated import simulated_result
from emulator.lab.topology_files import load_topology
from emulator.report.validate_table import Finding, agreement, ratio_of
from emulator.study.goodput import perform
from emulator.study.rated_runs import RatedRuns, SearchOptions, base_run, candidate_of, candidates, rated_runs

TOPOLOGIES = Path("topologies")
PUBLISHED = "published"
TOLERANCE = 0.03


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One published value: a number, a word, with `high` a range; or a curve of (rate, value) pairs."""

    id: str
    statement: str
    value: float | str | None = None
    unit: str = ""
    high: float | None = None
    bound: Literal["at least"] | None = None
    curve: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if (self.value is None) != bool(self.curve):
            raise ValueError(f"claim {self.id}: give a value or a curve, and not both")


class Reproduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Claims of one source about one setting, and everything assumed to reproduce them."""

    name: str
    title: str
    source: str
    assumptions: tuple[str, ...]
    claims: tuple[Claim, ...]


class _Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    reproductions: tuple[Reproduction, ...]


def load_published() -> dict[str, Reproduction]:
    """Every reproduction by name, in the order of the file."""
    name = "published.toml"
    text = (resources.files("emulator") / "catalog" / name).read_text(encoding="utf-8")
    found = strict.convert(tomllib.loads(text), _Published, name)
    return {reproduction.name: reproduction for reproduction in found.reproductions}


def topologies_folder() -> Path:
    """The checkout's topologies; raises ConfigError where the package was installed without them."""
    folder = Path(emulator.__file__).resolve().parent.parent / TOPOLOGIES
    if not (folder / PUBLISHED).is_dir():
        raise ConfigError(
            f"{folder / PUBLISHED}: is not there, and validate runs the topologies in it: install pdemu from a "
            "checkout of its repository (pip install -e .)"
        )
    return folder


class Attained(NamedTuple):
    """Shares of requests, 0 to 1: all bounds met together, and each bound on its own."""

    together: float
    by_metric: Mapping[metrics.Metric, float]

    @property
    def each_alone(self) -> float:
        """The smallest of the shares that meet one bound."""
        return min(self.by_metric.values())


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a recipe runs what it needs: the claims by id, the catalog, and how many seeds each rate is run with.

    `duration_s` replaces the arrival window of every topology where it is given (tests are short).
    """

    claims: Mapping[str, Claim]
    catalog: Catalog
    folder: Path
    seeds: int
    duration_s: float | None = None

    def topology(self, name: str) -> Topology:
        """A topology of the checkout by its file's name, such as `published/article-gaps`."""
        topology = load_topology(self.folder / f"{name}.toml")
        if self.duration_s is None or any(isinstance(s.arrivals, traffic.At) for s in topology.workload.streams):
            return topology
        return with_workload(topology, duration=Seconds(self.duration_s))

    def goodput(self, topology: Topology, deployment: str, *, memory: int = 1) -> Goodput:
        """The search for the highest rate that meets the topology's SLO, with `memory` times the KV memory."""
        return perform([self._rated(topology, deployment, memory)], workers=1)[0]

    def goodput_per_s(self, topology: Topology, deployment: str, *, memory: int = 1) -> float:
        """The highest rate, requests per second, that was run and meets the topology's SLO; 0 where none does."""
        return self.goodput(topology, deployment, memory=memory).rate_per_s or 0.0

    def attainment(self, topology: Topology, deployment: str, rate_per_s: float, *, memory: int = 1) -> Attained:
        """How many requests meet the SLO at a rate, over all seeds, with `memory` times the KV memory."""
        runs = self._rated(topology, deployment, memory).at(rate_per_s)
        summaries = [simulated_result(run).summary for run in runs]
        return Attained(
            together=_mean(s.slo_attainment for s in summaries),
            by_metric={
                metric: _mean(s.slo_attainment_by_metric[metric] for s in summaries)
                for metric in summaries[0].slo_attainment_by_metric
            },
        )

    def run(self, topology: Topology, deployment: str) -> RunResult:
        """One simulated run of a deployment under the topology's own traffic, at its first KV bandwidth."""
        return simulated_result(base_run(topology, self.catalog, {}, candidates(topology, [deployment])[0]))

    def _rated(self, topology: Topology, deployment: str, memory: int = 1) -> RatedRuns:
        wanted = candidate_of(topology, deployment, None)
        options = SearchOptions(seeds=self.seeds, tolerance=TOLERANCE)
        runs = rated_runs(topology, self.catalog, {}, wanted, options)
        nodes = tuple(msgspec.structs.replace(node, kv_blocks=memory * node.kv_blocks) for node in runs.base.nodes)
        return dataclasses.replace(runs, base=msgspec.structs.replace(runs.base, nodes=nodes))

    def profile(self, topology: Topology) -> FittedProfile:
        """The step-time profile that a topology names."""
        own = {profile.name: profile for profile in topology.profiles}
        assert topology.profile is not None, f"{topology.name} has no profile"
        return own.get(topology.profile) or find_profile(self.catalog, topology.profile)

    def found(self, claim_id: str, ours: float | str | None, *, setting: str = "", why: str = "") -> Finding:
        """A claim of a single value, and ours."""
        claim = self.claims[claim_id]
        assert claim.value is not None, f"claim {claim_id} is a curve"
        lower_bound = claim.bound == "at least"
        return Finding(
            claim=claim.id,
            statement=claim.statement,
            setting=setting,
            published=claim.value,
            published_high=claim.high,
            lower_bound=lower_bound,
            ours=ours,
            unit=claim.unit,
            ratio=ratio_of(claim.value, ours, claim.high),
            agrees=agreement(claim.value, ours, claim.high, lower_bound=lower_bound),
            why=why,
        )

    def value(self, claim_id: str) -> float:
        """The published number of a claim."""
        value = self.claims[claim_id].value
        assert isinstance(value, float), f"claim {claim_id} is no number"
        return value


def _mean(shares: Iterable[float | None]) -> float:
    """The mean of shares, of which none counts as 0."""
    values = [share or 0.0 for share in shares]
    return sum(values) / len(values)


# --- topologies as a recipe needs them ----------------------------------------------------------------------------


def with_workload(topology: Topology, **changes: object) -> Topology:
    """The topology with other values in its workload."""
    return msgspec.structs.replace(topology, workload=msgspec.structs.replace(topology.workload, **changes))


def at_rate(topology: Topology, rate_per_s: float) -> Topology:
    """The topology with all open-loop streams together at a rate."""
    return msgspec.structs.replace(topology, workload=scale_rate(topology.workload, rate_per_s))


def with_slo(topology: Topology, **changes: float | None) -> Topology:
    """The topology with other bounds; None takes a bound away."""
    return msgspec.structs.replace(topology, slo=msgspec.structs.replace(topology.slo, **changes))


def with_profile(topology: Topology, name: str) -> Topology:
    """The topology with another profile of the catalog."""
    return msgspec.structs.replace(topology, profile=name)


def slowed(topology: Topology, profile: FittedProfile, factor: float) -> Topology:
    """The topology with every step taking `factor` times as long as `profile` says."""

    def slower(fit: DecodeFit) -> DecodeFit:
        return DecodeFit(
            base_ms=fit.base_ms * factor,
            per_context_token_ms=fit.per_context_token_ms * factor,
            per_sequence_ms=fit.per_sequence_ms * factor,
        )

    plain = profile.with_overhead_inside()
    made = msgspec.structs.replace(
        plain,
        name="slowed",
        prefill_base_ms=plain.prefill_base_ms * factor,
        prefill_per_token_ms=plain.prefill_per_token_ms * factor,
        prefill_per_token2_ms=plain.prefill_per_token2_ms * factor,
        decode=slower(plain.decode),
        decode_large=slower(plain.decode_large) if plain.decode_large is not None else None,
        source=f"{plain.name}, {factor:g} times as long",
    )
    return msgspec.structs.replace(topology, profiles=(made,), profile=made.name)
