"""`pdemu validate`: every reproduction of a published result, in parts that run side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from emulator.core.errors import ConfigError
from emulator.lab.catalog_files import load_catalog
from emulator.lab.parallel import Team
from emulator.report.validate_table import Finding, Validated, ValidateSummary
from emulator.study import claims_article, claims_distserve, claims_splitwise
from emulator.study.published import Bench, Reproduction, load_published, topologies_folder

Part = Callable[[Bench], list[Finding]]

PARTS: Mapping[str, tuple[Part, ...]] = MappingProxyType(
    {
        "distserve-fig1": tuple(partial(claims_distserve.fig1, profile=profile) for profile in claims_distserve.FITS),
        "distserve-sharegpt": (claims_distserve.sharegpt_split, claims_distserve.sharegpt_vllm),
        "distserve-table2": tuple(partial(claims_distserve.table2, claim_id=claim) for claim in ("D10", "D12")),
        "distserve-kv-bandwidth": (claims_distserve.kv_bandwidth,),
        "distserve-slo-scale": (claims_distserve.slo_scale,),
        "splitwise-transfer": tuple(partial(claims_splitwise.transfer, machine=m) for m in ("A100", "H100")),
        "splitwise-iso-cost": (claims_splitwise.iso_cost,),
        "article": (claims_article.interference, claims_article.closed_loop, claims_article.open_loop),
    }
)
"""What each reproduction computes, by its name in `catalog/published.toml`; parts are independent of each other."""

OnPart = Callable[[str, int, int], None]
"""Called with a reproduction's name, and how many of all parts have ended, of how many."""


def _untold(*_: object) -> None:
    """Tell nobody."""


def validate(
    names: Sequence[str], *, seeds: int, on_part: OnPart = _untold, workers: int | None = None
) -> ValidateSummary:
    """Run the reproductions named (all when none is), on one process a core, and put published and ours together.

    Raises ConfigError for a name that does not exist, for no seed, and where the topologies are not at hand.
    """
    known = load_published()
    chosen = choose(known, names)
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: must be at least 1")
    topologies_folder()
    tasks = [(name, index, seeds) for name in chosen for index in range(len(PARTS[name]))]
    tasks.reverse()  # the many long parts of Fig. 1 last, so that no core is idle before the end
    found: dict[tuple[str, int], list[Finding]] = {}
    with Team(run_part, workers) as team:
        for task, findings in team.stream(tasks):
            name, index, _ = tasks[task]
            found[name, index] = findings
            on_part(name, len(found), len(tasks))
    return ValidateSummary(
        seeds=seeds,
        reproductions=tuple(
            _validated(known[name], [f for index in range(len(PARTS[name])) for f in found[name, index]])
            for name in chosen
        ),
    )


def choose(known: Mapping[str, Reproduction], names: Sequence[str]) -> list[str]:
    """The reproductions named, or all; raises ConfigError for one that does not exist."""
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no reproduction {name!r}; there are {', '.join(known)}")
    return [name for name in known if not names or name in names]


def run_part(task: tuple[str, int, int]) -> Iterator[list[Finding]]:
    """One part of a reproduction, by its name and number, with so many seeds."""
    name, index, seeds = task
    yield PARTS[name][index](bench_for(load_published()[name], seeds))


def bench_for(reproduction: Reproduction, seeds: int, duration_s: float | None = None) -> Bench:
    """The bench that a reproduction's parts run on."""
    return Bench(
        claims={claim.id: claim for claim in reproduction.claims},
        catalog=load_catalog(),
        folder=topologies_folder(),
        seeds=seeds,
        duration_s=duration_s,
    )


def _validated(reproduction: Reproduction, findings: Sequence[Finding]) -> Validated:
    return Validated(
        name=reproduction.name,
        title=reproduction.title,
        source=reproduction.source,
        assumptions=reproduction.assumptions,
        findings=tuple(findings),
    )
