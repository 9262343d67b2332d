"""Whether a comparison shows what its topology expects of it.

A scenario says in one sentence what a reader should see; here the same is told from the results, so that the sentence
cannot outlive the behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from emulator.core.compare_summary import Expected, Verdict
from emulator.core.errors import ConfigError
from emulator.core.quantities import BitsPerSecond
from emulator.core.run_summary import RunSummary
from emulator.core.specs import Expectation, Topology
from emulator.core.verdict import best_baseline


def check_metrics(topology: Topology, where: str) -> None:
    """Raise ConfigError for an expectation of a metric that no run's summary has."""
    for number, expected in enumerate(topology.expectations):
        if expected.metric is not None and (problem := _problem(expected.metric)):
            raise ConfigError(f"{where}: expectations[{number}].metric = {expected.metric!r}: {problem}")


def check(
    expectations: Sequence[Expectation], runs: Sequence[RunSummary], verdicts: Sequence[Verdict]
) -> tuple[Expected, ...]:
    """Each expectation held against what was run and concluded."""
    return tuple(_checked(expected, runs, verdicts) for expected in expectations)


def _checked(expected: Expectation, runs: Sequence[RunSummary], verdicts: Sequence[Verdict]) -> Expected:
    ours = _run_of(expected.deployment, expected.kv_bandwidth, runs)
    theirs = best_baseline(runs) if expected.against is None else _run_of(expected.against, expected.kv_bandwidth, runs)
    if ours is None or theirs is None:
        missing = expected.deployment if ours is None else expected.against or "a colocated baseline"
        return _left(expected, f"{missing} was not run as it asks")
    unfaithful = [run.deployment for run in (ours, theirs) if not run.fidelity.ok]
    if unfaithful:
        return _left(expected, f"the emulation of {' and '.join(unfaithful)} was not faithful")
    if expected.outcome is not None:
        return _verdict(expected, ours, theirs, verdicts)
    return _ratio(expected, ours, theirs)


def _run_of(deployment: str, bandwidth: BitsPerSecond | None, runs: Sequence[RunSummary]) -> RunSummary | None:
    """The deployment's run at a bandwidth, or at its highest; a colocated one has none."""
    found = [run for run in runs if run.deployment == deployment]
    at = [run for run in found if bandwidth is None or run.kv_bandwidth_bps in (None, float(bandwidth))]
    return max(at, key=lambda run: run.kv_bandwidth_bps or 0.0, default=None)


def _verdict(expected: Expectation, ours: RunSummary, theirs: RunSummary, verdicts: Sequence[Verdict]) -> Expected:
    found = [
        outcome.outcome
        for verdict in verdicts
        if (verdict.deployment, verdict.baseline) == (ours.deployment, theirs.deployment)
        for outcome in verdict.by_bandwidth
        if outcome.kv_bandwidth_bps == ours.kv_bandwidth_bps
    ]
    if not found:
        return _left(expected, f"{ours.deployment} and {theirs.deployment} were not compared")
    verb = "makes no difference" if found[0] == "no difference" else found[0]
    holds = found[0] == expected.outcome
    return Expected(
        sentence=expected.sentence, holds=holds, measured=f"{ours.deployment} {verb} against {theirs.deployment}"
    )


def _ratio(expected: Expectation, ours: RunSummary, theirs: RunSummary) -> Expected:
    assert expected.metric is not None
    mine, other = _value(expected.metric, ours), _value(expected.metric, theirs)
    if mine is None or not other:
        return _left(expected, f"{expected.metric} of {ours.deployment} or {theirs.deployment} has no value")
    ratio = mine / other
    holds = (expected.at_least or 0.0) <= ratio and (expected.at_most is None or ratio <= expected.at_most)
    measured = f"{expected.metric} of {ours.deployment} is {ratio:.3g} times that of {theirs.deployment}"
    return Expected(sentence=expected.sentence, holds=holds, measured=f"{measured} ({mine:.4g} and {other:.4g})")


def _left(expected: Expectation, why: str) -> Expected:
    return Expected(sentence=expected.sentence, holds=None, measured=why)


def _value(metric: str, run: RunSummary) -> float | None:
    found: Any = run
    for key in metric.split("."):
        found = found.get(key) if isinstance(found, dict) else getattr(found, key)
    return None if found is None else float(found)


def _problem(metric: str) -> str:
    """Why a summary has no such number; nothing where it has one."""
    kind: Any = RunSummary
    for key in metric.split("."):
        fields = {f.name: f.type for f in msgspec.structs.fields(kind)} if hasattr(kind, "__struct_fields__") else {}
        if key not in fields:
            allowed = ", ".join(fields) or "nothing"
            return f"no key {key!r} there; allowed: {allowed}"
        kind = fields[key]
    return "" if kind in (float, int, float | None) else "not a number; name one of its keys, such as ttft_ms.p90"
