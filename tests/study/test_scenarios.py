"""Every scenario shows what it says, by simulation; every preset of a system is one that runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.core import expectation, verdict
from emulator.core.deploy import plan_runs
from emulator.core.workload import plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.lab.simulated import simulated_result
from emulator.lab.topology_files import load_topology

SCENARIOS = sorted(Path("topologies/scenarios").glob("*.toml"))


def test_there_are_scenarios_for_and_against() -> None:
    outcomes = {e.outcome for path in SCENARIOS for e in load_topology(path).expectations}
    assert {"helps", "hurts", "no difference"} <= outcomes


@pytest.mark.slow
@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_shows_what_it_says(path: Path) -> None:
    topology = load_topology(path)
    assert topology.expectations, "a scenario without an expectation"
    load = plan_load(topology.workload, {})
    results = [simulated_result(run) for run in plan_runs(topology, load_catalog(), load)]
    judged = verdict.judge(results, topology.slo)
    for found in expectation.check(topology.expectations, [r.summary for r in results], judged.verdicts):
        assert found.holds is True, f"{found.sentence} {found.measured}"
