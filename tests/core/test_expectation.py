"""A scenario's sentence held against what was measured."""

from __future__ import annotations

import pytest

from emulator.core.compare_summary import Expected
from emulator.core.errors import ConfigError
from emulator.core.expectation import check, check_metrics
from emulator.core.run_summary import Fidelity, RunResult
from emulator.core.specs import Expectation, Slo
from emulator.core.strict import convert
from emulator.core.verdict import judge
from tests.core.made_records import made_record, made_run

SLO = Slo(ttft_ms=1000)


def run(ttft_ms: float, deployment: str = "1P1D", bandwidth_bps: float | None = 1e10, *, ok: bool = True) -> RunResult:
    records = [made_record(f"r{i}", scheduled_s=i / 6, ttft_ms=ttft_ms + i) for i in range(30)]
    fidelity = Fidelity(ok=ok, reasons=() if ok else ("late",))
    return made_run(records, SLO, deployment=deployment, kv_bandwidth_bps=bandwidth_bps, fidelity=fidelity)


def colocated(ttft_ms: float, name: str = "colocated") -> RunResult:
    return run(ttft_ms, name, None)


def held(expectation: Expectation, *results: RunResult) -> Expected:
    (expected,) = check([expectation], [r.summary for r in results], judge(results, SLO).verdicts)
    return expected


def outcome(word: str, **keys: object) -> Expectation:
    data = {"sentence": "It does.", "deployment": "1P1D", "outcome": word, **keys}
    return convert(data, Expectation, "here")


def ratio(**keys: object) -> Expectation:
    data = {"sentence": "It is.", "deployment": "1P1D", "metric": "ttft_ms.mean", **keys}
    return convert(data, Expectation, "here")


def test_a_verdict_is_held_against_the_one_expected() -> None:
    results = [colocated(300), run(800)]
    assert held(outcome("hurts"), *results) == Expected(
        sentence="It does.", holds=True, measured="1P1D hurts against colocated"
    )
    assert held(outcome("helps"), *results).holds is False
    assert held(outcome("no difference"), colocated(300), run(300)).holds is True


def test_the_best_baseline_is_meant_unless_one_is_named() -> None:
    results = [colocated(900, "slow"), colocated(300, "fast"), run(600)]
    assert held(outcome("hurts"), *results).holds is True
    assert held(outcome("helps", against="slow"), *results).holds is True


def test_the_highest_bandwidth_is_meant_unless_one_is_named() -> None:
    results = [colocated(500), run(800, bandwidth_bps=1e9), run(200, bandwidth_bps=1e11)]
    assert held(outcome("helps"), *results).holds is True
    assert held(outcome("hurts", kv_bandwidth="1Gbps"), *results).holds is True
    assert held(outcome("hurts", kv_bandwidth="5Gbps"), *results).holds is None


@pytest.mark.parametrize(
    ("bounds", "holds"),
    [
        ({"at_least": 1.9}, True),
        ({"at_least": 2.1}, False),
        ({"at_most": 2.1}, True),
        ({"at_most": 1.9}, False),
        ({"at_least": 1.5, "at_most": 2.5}, True),
        ({"at_least": 2.5, "at_most": 3.5}, False),
    ],
)
def test_a_metric_is_held_against_that_of_another_deployment(bounds: dict[str, float], holds: bool) -> None:
    expected = held(ratio(**bounds, against="2P2D"), run(985.5), run(485.5, "2P2D"), colocated(500))
    assert expected.holds is holds
    assert expected.measured == "ttft_ms.mean of 1P1D is 2 times that of 2P2D (1000 and 500)"


def test_what_was_not_run_or_not_faithful_is_not_measured() -> None:
    assert held(outcome("hurts", against="other"), colocated(300), run(800)).measured == "other was not run as it asks"
    assert held(outcome("hurts"), run(800)).measured == "a colocated baseline was not run as it asks"
    late = held(ratio(at_least=0.1, against="colocated"), colocated(300), run(800, ok=False))
    assert (late.holds, late.measured) == (None, "the emulation of 1P1D was not faithful")
    nothing = held(ratio(metric="kv.achieved_bps", at_least=1.0, against="colocated"), colocated(300), run(800))
    assert nothing.holds is None


def _topology(**expectation: object) -> object:
    from emulator.core.specs import Topology

    data = {
        "name": "x",
        "model": "m",
        "gpu": "g",
        "slo": {},
        "workload": {
            "duration": "1s",
            "streams": [
                {
                    "name": "a",
                    "arrivals": {"process": "constant", "rate_per_s": 1},
                    "prompt_tokens": 1,
                    "output_tokens": 1,
                }
            ],
        },
        "deployments": [{"name": "c", "pools": [{"role": "colocated"}]}],
        "expectations": [{"sentence": "It is.", "deployment": "c", **expectation}],
    }
    topology = convert(data, Topology, "x.toml")
    check_metrics(topology, "x.toml")
    return topology


@pytest.mark.parametrize(
    ("expectation", "problem"),
    [
        (
            {"metric": "ttft.p90", "at_least": 1.0},
            "expectations\\[0\\].metric = 'ttft.p90': no key 'ttft' there; allowed",
        ),
        ({"metric": "ttft_ms.p95", "at_least": 1.0}, "no key 'p95' there; allowed: mean, p50, p90, p99, max"),
        ({"metric": "ttft_ms", "at_least": 1.0}, "not a number; name one of its keys"),
        ({"metric": "ttft_ms.p90", "at_least": 2.0, "at_most": 1.0}, "at_least 2 is above at_most 1: nothing can"),
        ({"metric": "ttft_ms.p90"}, "a metric needs at_least, at_most or both"),
        ({"outcome": "helps", "at_most": 1.0}, "a metric needs at_least, at_most or both; an outcome neither"),
        ({"outcome": "helps", "metric": "ttft_ms.p90", "at_most": 1.0}, "give either an outcome or a metric"),
        ({}, "give either an outcome or a metric"),
        ({"outcome": "wins"}, "allowed: helps, hurts, no difference"),
        ({"outcome": "helps", "against": "d"}, "expectations: no deployment 'd'; there are c"),
    ],
)
def test_an_expectation_that_cannot_be_checked_is_refused(expectation: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        _topology(**expectation)


@pytest.mark.parametrize("metric", ["slo_attainment", "request_goodput", "costs.requests_per_usd", "e2el_ms.max"])
def test_any_number_of_a_summary_can_be_a_metric(metric: str) -> None:
    _topology(metric=metric, at_least=1.0)
