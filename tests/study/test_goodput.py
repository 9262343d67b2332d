"""Goodput of a small lab: rates that were simulated, and what bounds them named."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence

import msgspec
import numpy as np
import pytest

from emulator.core import deployments, traffic
from emulator.core.deploy import plan_runs
from emulator.core.errors import ConfigError, RunError
from emulator.core.quantities import BitsPerSecond, Seconds
from emulator.core.run_spec import RunSpec
from emulator.core.search_summary import goodput_advantages, slo_advantages
from emulator.core.slo_scale import scaled
from emulator.core.specs import Slo, Topology
from emulator.core.trace import Trace, TraceRow
from emulator.core.workload import plan_load, scale_rate
from emulator.lab.catalog_files import load_catalog
from emulator.lab.simulated import simulated_result
from emulator.lab.topology_files import load_topology
from emulator.study import slo_scale
from emulator.study.goodput import Candidate, Goodput, SearchOptions, Trial, goodput, search_all
from emulator.study.rated_runs import ONE_RUN, Outcome, candidates
from emulator.study.searches import find_all
from tests.builders import load_plan, node_spec, run_spec
from tests.live.lab import SMALL

CATALOG = load_catalog()
QUICK = SearchOptions(seeds=2, tolerance=0.1, workers=1)


def small(**workload: object) -> Topology:
    """The small lab at one KV bandwidth of 200 Mbps, its workload changed."""
    topology = load_topology(SMALL)
    return msgspec.structs.replace(topology, workload=msgspec.structs.replace(topology.workload, **workload))


def attainment(topology: Topology, deployment: str, rate_per_s: float, seed: int) -> float | None:
    """What a run of its own, planned from the topology, attains."""
    workload = msgspec.structs.replace(scale_rate(topology.workload, rate_per_s), seed=seed)
    topology = msgspec.structs.replace(topology, workload=workload)
    run = plan_runs(topology, CATALOG, plan_load(workload, {}), deployments=[deployment])[0]
    return simulated_result(run).summary.slo_attainment


@pytest.fixture(scope="module")
def both() -> list[Goodput]:
    """Both deployments of the small lab."""
    topology = small()
    return search_all(topology, CATALOG, {}, candidates(topology), options=QUICK)


def test_the_rate_found_passes_and_the_next_one_fails(both: list[Goodput]) -> None:
    for found in both:
        assert found.rate_per_s is not None
        assert found.next_rate_per_s is not None
        assert found.rate_per_s < found.next_rate_per_s <= 1.1 * found.rate_per_s * (1 + 1e-9)
        trials = {trial.rate_per_s: trial for trial in found.trials}
        assert trials[found.rate_per_s].passes
        assert not trials[found.next_rate_per_s].passes
        assert found.per_gpu == found.rate_per_s / 2
        assert {found.low_per_s, found.high_per_s} <= {None, *trials}
        assert list(trials) == sorted(trials)


def test_goodput_is_worth_so_much_per_dollar_and_per_joule(both: list[Goodput]) -> None:
    """Two H100 at 2.95 USD/h and 700 W each."""
    for found in both:
        assert found.rate_per_s is not None
        assert found.usd_per_h == pytest.approx(5.90)
        assert found.watts == 1400
        assert found.requests_per_usd == pytest.approx(found.rate_per_s * 3600 / 5.90)
        assert found.requests_per_joule == pytest.approx(found.rate_per_s / 1400)


def test_every_trial_is_the_attainment_of_its_runs(both: list[Goodput]) -> None:
    for found in both:
        for trial in found.trials[:: max(1, len(found.trials) - 1)]:
            again = tuple(attainment(small(), found.deployment, trial.rate_per_s, seed) for seed in (3, 4))
            assert trial.attainment == again
            assert trial.passes == (np.mean(trial.attainment) >= 0.9)


def test_in_worker_processes_or_here_the_same_is_found(both: list[Goodput]) -> None:
    topology = small()
    told: list[tuple[Candidate, Trial]] = []
    options = SearchOptions(seeds=2, tolerance=0.1, workers=2)
    pooled = search_all(
        topology, CATALOG, {}, candidates(topology), options=options, on_trial=lambda c, t: told.append((c, t))
    )
    assert pooled == both
    for found in pooled:
        mine = [trial for candidate, trial in told if candidate.deployment == found.deployment]
        assert sorted(mine, key=lambda trial: trial.rate_per_s) == list(found.trials)


def test_one_search_is_that_of_all_and_tells_its_trials(both: list[Goodput]) -> None:
    told: list[Trial] = []
    found = goodput(small(), CATALOG, {}, "1P1D", options=QUICK, on_trial=told.append)
    assert found == both[1]
    assert found.kv_bandwidth_bps == 2e8
    assert sorted(trial.rate_per_s for trial in told) == [trial.rate_per_s for trial in found.trials]


def test_a_search_says_that_the_end_of_its_range_bounds_it() -> None:
    high = goodput(small(), CATALOG, {}, "colocated", options=SearchOptions(seeds=1, high=12.0, workers=1))
    assert (high.rate_per_s, high.next_rate_per_s, high.bounded_by) == (12.0, None, "high")
    assert (high.low_per_s, high.high_per_s) == (None, None)
    hopeless = msgspec.structs.replace(small(), slo=Slo(ttft_ms=0.001))
    low = goodput(hopeless, CATALOG, {}, "colocated", options=SearchOptions(seeds=1, low=5.0, workers=1))
    assert (low.rate_per_s, low.per_gpu, low.next_rate_per_s, low.bounded_by) == (None, None, 5.0, "low")


def test_a_trace_that_is_too_short_for_a_higher_rate_bounds_the_search() -> None:
    rows = tuple(TraceRow(n / 10, 100, 10) for n in range(31))
    streams = (traffic.Stream(name="replay", arrivals=traffic.Trace(file="made.csv")),)
    found = goodput(small(streams=streams), CATALOG, {"replay": Trace(rows)}, "colocated", options=QUICK)
    assert found.bounded_by == "load generator"
    assert found.rate_per_s == 30 / 1.5
    assert found.trials[-1].requests == 30
    assert ONE_RUN in found.notes
    assert found.trials[0].attainment == (1.0,)


def test_kv_memory_that_holds_the_rate_down_is_named() -> None:
    pool = deployments.Pool(role="colocated", nodes=2, policy="prefill_first", gpu_memory_utilization=0.00052)
    tight = msgspec.structs.replace(small(), deployments=(deployments.Deployment(name="colocated", pools=(pool,)),))
    short = goodput(tight, CATALOG, {}, "colocated", options=QUICK)
    roomy = goodput(small(), CATALOG, {}, "colocated", options=QUICK)
    assert short.bounded_by == "kv memory"
    assert roomy.bounded_by is None
    assert short.rate_per_s is not None
    assert roomy.rate_per_s is not None
    assert short.rate_per_s < roomy.rate_per_s
    assert any("KV memory is the limit" in note for note in short.notes)


def test_requests_that_never_fit_the_kv_memory_bound_the_search_at_its_low_end() -> None:
    pool = deployments.Pool(role="colocated", nodes=2, gpu_memory_utilization=0.00051)
    streams = (traffic.Stream(name="replay", arrivals=traffic.Trace(file="made.csv")),)
    tight = msgspec.structs.replace(
        small(streams=streams), deployments=(deployments.Deployment(name="colocated", pools=(pool,)),)
    )
    rows = tuple(TraceRow(n / 10, 290 if n % 5 == 0 else 50, 10) for n in range(31))
    found = goodput(tight, CATALOG, {"replay": Trace(rows)}, "colocated", options=QUICK)
    assert (found.rate_per_s, found.bounded_by) == (None, "kv memory")
    assert found.trials[0].failure is not None
    assert "has room for" in found.trials[0].failure


def test_users_of_a_closed_loop_are_explained_or_refused() -> None:
    chat = small().workload.streams[0]
    users = msgspec.structs.replace(chat, name="users", arrivals=traffic.ClosedLoop(users=3, think_s=0.1))
    mixed = goodput(small(streams=(chat, users)), CATALOG, {}, "colocated", options=QUICK)
    assert any("3 users of stream users make their own rate" in note for note in mixed.notes)
    with pytest.raises(ConfigError, match="no stream of the workload has a rate"):
        goodput(small(streams=(users,)), CATALOG, {}, "colocated", options=QUICK)


def test_one_of_several_bandwidths_must_be_chosen() -> None:
    topology = small()
    assert topology.kv_network is not None
    rates = (BitsPerSecond(1e8), BitsPerSecond(2e8))
    several = msgspec.structs.replace(
        topology, kv_network=msgspec.structs.replace(topology.kv_network, bandwidth=rates)
    )
    assert [c.label for c in candidates(several)] == ["colocated", "1P1D@0.1Gbps", "1P1D@0.2Gbps"]
    with pytest.raises(ConfigError, match="2 bandwidths"):
        goodput(several, CATALOG, {}, "1P1D", options=QUICK)
    quick = SearchOptions(seeds=1, high=10.0, workers=1)
    assert goodput(several, CATALOG, {}, "1P1D", kv_bandwidth_bps=1e8, options=quick).kv_bandwidth_bps == 1e8


def test_a_rate_that_the_network_would_not_carry_for_long_is_noted() -> None:
    """Each prompt's KV takes long on this link, but a short run ends before its queue has grown."""
    topology = load_topology(SMALL)
    assert topology.kv_network is not None
    network = msgspec.structs.replace(topology.kv_network, bandwidth=(BitsPerSecond(2e7),))
    slow = msgspec.structs.replace(topology, kv_network=network, slo=Slo(target=0.5))
    found = goodput(slow, load_catalog(), {}, "1P1D", options=SearchOptions(seeds=1, high=200.0, workers=1))
    assert found.rate_per_s is not None
    (note,) = [note for note in found.notes if "for long" in note]
    carried = float(note.split("carries ")[1].split(" ")[0])
    assert 2e7 * 1448 / 1514 / 8 / 4096 / 300 < carried < found.rate_per_s
    in_here = goodput(topology, load_catalog(), {}, "colocated", options=SearchOptions(workers=1))
    assert not any("for long" in note for note in in_here.notes)


@pytest.mark.slow
def test_a_longer_run_is_stricter() -> None:
    options = SearchOptions(seeds=2, tolerance=0.05, workers=1)
    short, long = (
        goodput(small(duration=Seconds(duration)), CATALOG, {}, "colocated", options=options).rate_per_s
        for duration in (1.5, 12.0)
    )
    assert short is not None
    assert long is not None
    assert long < short


def _die(run: RunSpec) -> Outcome:
    os._exit(1)


def test_a_worker_that_dies_ends_the_search_with_an_error() -> None:
    def search() -> Generator[Sequence[RunSpec], Sequence[Outcome], int]:
        answers = yield [run_spec([node_spec()], load_plan())]
        return len(answers)

    with pytest.raises(RunError, match="worker process has died"):
        find_all([search()], _die, workers=2)


# --- the tightest SLO ---------------------------------------------------------------------------------------------


def test_the_tightest_slo_holds_and_any_tighter_one_does_not() -> None:
    topology = small()
    wanted = candidates(topology)
    planned = [slo_scale.fixed_runs(topology, CATALOG, {}, candidate, 2) for candidate in wanted]
    for found in slo_scale.perform(planned, workers=1):
        assert found.factor is not None
        assert found.rate_per_s == 10.0
        for factor, holds in ((found.factor * (1 + 1e-9), True), (found.factor * (1 - 1e-6), False)):
            tighter = msgspec.structs.replace(topology, slo=scaled(topology.slo, factor))
            shares = [attainment(tighter, found.deployment, 10.0, seed) for seed in (3, 4)]
            assert (np.mean([share or 0.0 for share in shares]) >= 0.9) is np.bool_(holds)
        assert found.bounds_ms == pytest.approx({"ttft_ms": 200 * found.factor, "tpot_ms": 30 * found.factor})
        assert found.deciding_metric in ("ttft_ms", "tpot_ms")
        assert found.mean >= 0.9 - 1e-9


def test_an_slo_without_bounds_cannot_be_scaled() -> None:
    with pytest.raises(ConfigError, match="bounds no latency"):
        slo_scale.fixed_runs(msgspec.structs.replace(small(), slo=Slo()), CATALOG, {}, Candidate("colocated"), 1)


# --- how deployments compare --------------------------------------------------------------------------------------


def test_deployments_are_held_against_the_best_colocated_one_per_gpu(both: list[Goodput]) -> None:
    colocated, split = both
    worse = msgspec.structs.replace(colocated, deployment="worse", per_gpu=0.1)
    large = msgspec.structs.replace(split, gpus=4)
    advantages = goodput_advantages([worse, colocated, split, large])
    assert advantages[1] is None
    assert advantages[2] is not None
    assert split.per_gpu is not None
    assert colocated.per_gpu is not None
    assert advantages[2].baseline == "colocated"
    assert advantages[2].value == pytest.approx(split.per_gpu / colocated.per_gpu)
    unbounded = msgspec.structs.replace(split, next_rate_per_s=None, bounded_by="high")
    at_least = goodput_advantages([colocated, unbounded])[1]
    assert at_least is not None
    assert at_least.bound == "at least"
    both_open = msgspec.structs.replace(colocated, next_rate_per_s=None, bounded_by="high")
    assert goodput_advantages([both_open, unbounded])[1] is None
    assert goodput_advantages([split]) == (None,)


def test_a_smaller_factor_is_a_tighter_slo() -> None:
    topology = small()
    planned = [slo_scale.fixed_runs(topology, CATALOG, {}, each, 1) for each in candidates(topology)]
    rows = slo_scale.perform(planned, workers=1)
    baseline, advantage = slo_advantages(rows)
    assert baseline is None
    assert advantage is not None
    assert rows[0].factor is not None
    assert rows[1].factor is not None
    assert advantage.value == rows[0].factor / rows[1].factor
