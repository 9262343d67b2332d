"""Break-even searches: the ends of what is found were run and turn out so, and live runs are held against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from emulator.core import verdict
from emulator.core.break_even import UNLIMITED_BPS, BreakEvenSummary, PairBreakEven, Tried
from emulator.core.compare_summary import Verdict
from emulator.core.deploy import plan_runs
from emulator.core.deployments import Pool
from emulator.core.errors import ConfigError
from emulator.core.quantities import BitsPerSecond
from emulator.core.run_spec import RunSpec
from emulator.core.run_summary import RunResult
from emulator.core.specs import Topology
from emulator.lab.catalog_files import load_catalog
from emulator.lab.experiment import Conditions
from emulator.lab.simulated import simulated_result
from emulator.lab.topology_files import load_topology
from emulator.live.status import Interim
from emulator.report.break_even_table import render
from emulator.study import variants
from emulator.study.break_even import Found, SearchOptions, find_break_even, half_and_twice, plan_search
from emulator.study.break_even_live import confirm
from tests.in_process import Pdemu
from tests.live.lab import SMALL, TOPOLOGIES, json_of, pdemu

CATALOG = load_catalog()
TOPOLOGY = load_topology(SMALL)
OPTIONS: dict[str, Any] = {"low_bps": 1e7, "high_bps": 1e10, "budgets": (64, 512)}


def searched(topology: Topology = TOPOLOGY, **options: Any) -> Found:
    """A search in this process."""
    chosen = SearchOptions(**{**OPTIONS, "workers": 1, **options})
    return find_break_even(plan_search(topology, CATALOG, {}, chosen), lambda *_: None)


@pytest.fixture(scope="module")
def found() -> Found:
    """What a search of the small lab finds."""
    return searched()


def rated(rate_per_s: float) -> Topology:
    """The small lab at another rate."""
    return variants.with_rate(TOPOLOGY, rate_per_s, {})


def pair_of(found: Found, baseline: str | None = None) -> PairBreakEven:
    """1P1D against a baseline, or against the best chunk budget."""
    pairs = found.summary.pairs
    return next(p for p in pairs if (p.chunk_budget is not None if baseline is None else p.baseline == baseline))


def judged(topology: Topology, bandwidth_bps: float, baseline: str) -> Verdict:
    """The verdict of one comparison, as `pdemu compare --launcher simulate` reaches it."""
    there = variants.with_bandwidths(topology, [bandwidth_bps])
    runs = plan_runs(there, CATALOG, variants.load_of(there, {}), deployments=[baseline, "1P1D"])
    return verdict.judge([simulated_result(run) for run in runs], topology.slo).verdicts[0]


# --- what is found --------------------------------------------------------------------------------------------


def test_both_ends_of_a_change_were_run_and_turn_out_as_it_says(found: Found) -> None:
    pair = pair_of(found, "colocated")
    (change,) = pair.changes
    assert (change.below, change.above) == ("hurts", "no difference")
    assert 1 < change.high_bps / change.low_bps <= 1.05
    for bandwidth, outcome in ((change.low_bps, change.below), (change.high_bps, change.above)):
        assert judged(TOPOLOGY, bandwidth, "colocated").outcome == outcome
        assert outcome in [at.outcome for at in pair.tried if at.kv_bandwidth_bps == bandwidth]
    assert pair.break_even is None, "it does not help anywhere"
    assert (
        f"Between {BitsPerSecond(change.low_bps)} and {BitsPerSecond(change.high_bps)} it turns from hurts (TTFT)"
        in (pair.text)
    )


def test_every_outcome_tried_is_that_of_a_comparison() -> None:
    for tried in pair_of(searched(tolerance=0.5), "colocated").tried:
        there = judged(TOPOLOGY, tried.kv_bandwidth_bps, "colocated")
        assert (there.outcome, there.deciding_metric) == (tried.outcome, tried.deciding_metric)


def test_a_split_that_comes_to_help_breaks_even() -> None:
    pair = pair_of(searched(rated(100.0), baselines=["colocated"], budgets=(512,), tolerance=0.5), "colocated")
    assert pair.break_even is not None
    assert pair.break_even.low_bps == pair.changes[-1].low_bps
    assert [at.outcome for at in pair.tried if at.kv_bandwidth_bps >= pair.break_even.high_bps] == ["helps"] * len(
        [at for at in pair.tried if at.kv_bandwidth_bps >= pair.break_even.high_bps]
    )
    low, high = BitsPerSecond(pair.break_even.low_bps), BitsPerSecond(pair.break_even.high_bps)
    assert f"It turns between {low}, where it" in pair.text
    assert f"{high}, where it helps" in pair.text


def test_where_nothing_changes_a_link_without_limit_says_why() -> None:
    pair = pair_of(searched(rated(150.0), low_bps=1e9, budgets=(512,)), "colocated")
    assert pair.changes == ()
    assert {at.outcome for at in pair.tried} == {"hurts"}
    assert pair.unlimited is not None
    assert (pair.unlimited.kv_bandwidth_bps, pair.unlimited.outcome) == (UNLIMITED_BPS, "hurts")
    assert pair.text.startswith(
        f"It hurts at each of the {len(pair.tried)} bandwidths that were run, from 1Gbps to 10Gbps."
    )
    assert "Even 1000Tbps, as good as an infinitely fast link, changes nothing: 1P1D hurts against" in pair.text
    assert "more queueing for prefill" in pair.text


def test_a_split_that_always_helps_needs_no_link_without_limit() -> None:
    options = {"low_bps": 2e9, "baselines": ["colocated"], "budgets": (512,)}
    pair = pair_of(searched(rated(100.0), **options), "colocated")
    assert pair.unlimited is None
    assert {at.outcome for at in pair.tried} == {"helps"}
    assert pair.text.startswith("It helps at each of the")


def test_the_best_budget_is_the_best_baseline_among_them(found: Found) -> None:
    marked = [budget.max_num_batched_tokens for budget in found.summary.budgets if budget.best]
    assert [budget.max_num_batched_tokens for budget in found.summary.budgets] == [64, 512]
    pool = variants.pool_of(TOPOLOGY, "colocated")
    results = []
    for tokens in (64, 512):
        deployment = variants.chunked_deployment(pool, tokens, gpus=2, name=str(tokens))
        topology = variants.with_deployments(TOPOLOGY, [deployment])
        results.append(simulated_result(plan_runs(topology, CATALOG, variants.load_of(topology, {}))[0]).summary)
    best = verdict.best_baseline(results)
    assert best is not None
    assert marked == [int(best.deployment)] == [pair_of(found).chunk_budget]
    assert [budget.ttft_ms for budget in found.summary.budgets] == [summary.ttft_ms for summary in results]


def test_more_seeds_are_judged_together() -> None:
    assert searched(seeds=2, tolerance=0.5).summary.seeds == (3, 4)
    topology = variants.with_bandwidths(TOPOLOGY, [1e9])
    fixed = msgspec.structs.replace(topology.workload.streams[0], prompt_tokens=100, output_tokens=5)
    workload = msgspec.structs.replace(topology.workload, streams=(fixed,))
    alike = searched(msgspec.structs.replace(topology, workload=workload), seeds=2).summary
    assert alike.seeds == (3,)
    assert alike.remarks == ("No seed changes this traffic, so each bandwidth is run once.",)


@pytest.mark.live
def test_workers_find_what_one_process_finds(found: Found) -> None:
    assert searched(workers=2).summary == found.summary


# --- who is compared ------------------------------------------------------------------------------------------


def test_only_equal_hardware_is_compared_and_the_rest_is_said() -> None:
    more = variants.deployment_of(TOPOLOGY, variants.parse_ratio("3C"))
    topology = variants.with_deployments(TOPOLOGY, [*TOPOLOGY.deployments, more])
    found = searched(topology, tolerance=0.5)
    assert [pair.baseline for pair in found.summary.pairs if pair.chunk_budget is None] == ["colocated"]
    unequal, one_seed = found.summary.remarks
    assert unequal == "1P1D (2 GPUs) is not compared with 3C (3 GPUs): only equal numbers of GPUs are."
    assert one_seed.startswith("One seed: the outcome may turn elsewhere")


def test_splits_of_different_size_get_budgets_of_their_own() -> None:
    larger = variants.deployment_of(TOPOLOGY, variants.parse_ratio("1P2D"))
    topology = variants.with_deployments(TOPOLOGY, [*TOPOLOGY.deployments, larger])
    found = searched(topology, tolerance=0.5)
    assert [(pair.deployment, pair.baseline) for pair in found.summary.pairs if pair.chunk_budget is None] == [
        ("1P1D", "colocated")
    ]
    budgets = [(budget.gpus, budget.max_num_batched_tokens) for budget in found.summary.budgets]
    assert budgets == [(2, 64), (2, 512), (3, 64), (3, 512)]
    assert [budget.gpus for budget in found.summary.budgets if budget.best] == [2, 3]


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(ConfigError, match="--deployment colocated: is not disaggregated; those of small are: 1P1D"):
        searched(deployments=["colocated"])
    with pytest.raises(ConfigError, match="--baseline 1P1D: is not colocated"):
        searched(baselines=["1P1D"])
    with pytest.raises(ConfigError, match="no deployment is disaggregated"):
        searched(variants.with_deployments(TOPOLOGY, TOPOLOGY.deployments[:1]))
    with pytest.raises(ConfigError, match="--low 10Gbps is not below --high 10Gbps"):
        searched(low_bps=1e10)
    own = tuple(
        msgspec.structs.replace(pool, **{"kv_egress" if pool.role == "prefill" else "kv_ingress": BitsPerSecond(1e9)})
        for pool in TOPOLOGY.deployments[1].pools
    )
    fixed = msgspec.structs.replace(TOPOLOGY.deployments[1], pools=own)
    with pytest.raises(ConfigError, match="every pool has a NIC of its own"):
        searched(variants.with_deployments(TOPOLOGY, [TOPOLOGY.deployments[0], fixed]))


def test_a_budget_takes_the_name_of_no_deployment() -> None:
    pool = Pool(role="colocated", nodes=2)
    other = msgspec.structs.replace(TOPOLOGY.deployments[0], name="chunk-budget-64", pools=(pool,))
    topology = variants.with_deployments(TOPOLOGY, [*TOPOLOGY.deployments, other])
    found = searched(topology, tolerance=0.5)
    assert [pair.chunk_budget for pair in found.summary.pairs] == [None, None, 512]


# --- live runs ------------------------------------------------------------------------------------------------


class _Silent:
    """A display that shows nothing."""

    def progress(self, run: RunSpec, status: Interim) -> None:
        """Nothing."""

    def result(self, run: RunSpec, result: RunResult) -> None:
        """Nothing."""


def _confirmed(found: Found, topology: Topology, folder: Path) -> BreakEvenSummary:
    how = Conditions(launcher="simulate")
    return confirm(
        found, topology, CATALOG, {}, how, scale=None, folder=folder, show=lambda _: nullcontext(_Silent())
    ).summary


def test_runs_at_half_and_twice_are_held_against_the_simulation(found: Found, tmp_path: Path) -> None:
    """With a simulator as the launcher they agree, to the metric."""
    summary = _confirmed(found, TOPOLOGY, tmp_path)
    for pair in summary.pairs:
        (change,) = pair.changes
        assert pair.live is not None
        assert [check.kv_bandwidth_bps for check in pair.live] == pytest.approx(
            [change.low_bps / 2, 2 * change.high_bps], rel=1e-3
        )
        assert [check.expected for check in pair.live] == [change.below, change.above]
        assert [check.outcome for check in pair.live] == [change.below, change.above]
        assert all(check.as_expected for check in pair.live)
        expected = {at.kv_bandwidth_bps: at.outcome for at in pair.tried}
        assert [expected[check.kv_bandwidth_bps] for check in pair.live] == [check.expected for check in pair.live]
    assert (tmp_path / "live-1P1D" / "report.html").exists()


def test_a_run_on_the_wrong_side_is_told_as_such(found: Found, tmp_path: Path) -> None:
    """Here "live" is a network whose delay alone hurts at any bandwidth."""
    assert TOPOLOGY.kv_network is not None
    network = msgspec.structs.replace(TOPOLOGY.kv_network, delay=type(TOPOLOGY.kv_network.delay)(0.1))
    summary = _confirmed(found, msgspec.structs.replace(TOPOLOGY, kv_network=network), tmp_path)
    pair = summary.pairs[0]
    assert pair.live is not None
    assert [(check.expected, check.outcome, check.as_expected) for check in pair.live] == [
        ("hurts", "hurts", True),
        ("no difference", "hurts", False),
    ]
    assert "Live at 1.109Gbps: hurts (TTFT), but simulated it is no difference" in _shown(summary)


def test_what_turns_nowhere_is_not_run_live(tmp_path: Path) -> None:
    found = searched(rated(150.0), low_bps=1e9, baselines=["colocated"], budgets=(512,))
    assert all(not pair.changes for pair in found.summary.pairs)
    summary = _confirmed(found, rated(150.0), tmp_path)
    assert [pair.live for pair in summary.pairs] == [None, None]
    assert not list(tmp_path.iterdir())


def test_what_only_a_link_without_limit_changes_is_said_to_be_so() -> None:
    pair = pair_of(searched(rated(100.0), high_bps=2e7, baselines=["colocated"], budgets=(512,)), "colocated")
    assert pair.changes == ()
    assert pair.unlimited is not None
    assert (pair.tried[-1].outcome, pair.unlimited.outcome) == ("hurts", "helps")
    assert "But 1000Tbps, as good as an infinitely fast link, would change it: 1P1D helps against" in pair.text


@pytest.mark.live
@pytest.mark.alone
def test_live_runs_confirm_a_search(tmp_path: Path) -> None:
    args = ["--low", "10Mbps", "--high", "10Gbps", "--chunk-budgets", "512", "--baseline", "colocated", "--live"]
    document = json_of(pdemu("break-even", SMALL, *args, "--json", "--out", tmp_path / "b"))
    assert document == msgspec.json.decode((tmp_path / "b" / "break-even.json").read_bytes())
    assert document["live_launcher"] == "local"
    for pair in document["pairs"]:
        assert len(pair["live"]) == 2
        for check in pair["live"]:  # a busy machine may be too slow for a verdict, but then says so
            assert check["as_expected"] is True or (check["outcome"] is None and "not faithful" in check["reason"])
    for bandwidth in {check["kv_bandwidth_bps"] for pair in document["pairs"] for check in pair["live"]}:
        assert (tmp_path / "b" / "live-1P1D" / f"1P1D@{bandwidth / 1e9:g}Gbps" / "records.jsonl").exists()


# --- what is shown --------------------------------------------------------------------------------------------


def _shown(summary: BreakEvenSummary) -> str:
    console = Console(width=110, no_color=True)
    with console.capture() as capture:
        console.print(render(summary))
    return " ".join(capture.get().split())


def test_a_terminal_shows_every_pair_every_budget_and_why(found: Found) -> None:
    summary = found.summary
    shown = _shown(summary)
    for pair in summary.pairs:
        for change in pair.changes:
            assert f"{BitsPerSecond(change.low_bps)} and {BitsPerSecond(change.high_bps)}" in shown
        assert " ".join(pair.text.split()) in shown
    assert "best chunk budget (512 tokens)" in shown
    assert "The best is the largest that was tried" in shown
    assert "Best: the highest SLO attainment, then request goodput, then lowest mean TTFT." in shown


def test_each_bandwidth_is_told_as_it_is_found() -> None:
    told: list[tuple[str, float, dict[str, Tried]]] = []

    def tell(name: str, bandwidth_bps: float, against: Mapping[str, Tried]) -> None:
        told.append((name, bandwidth_bps, dict(against)))

    search = plan_search(TOPOLOGY, CATALOG, {}, SearchOptions(**{**OPTIONS, "budgets": (512,)}, workers=1))
    found = find_break_even(search, tell)
    bandwidths = [bandwidth for _, bandwidth, _ in told]
    assert len(set(bandwidths)) == len(bandwidths), "nothing is simulated twice"
    assert sorted(bandwidths) == [at.kv_bandwidth_bps for at in found.summary.pairs[0].tried]
    assert set(half_and_twice(found.summary.pairs[0].changes)) <= set(bandwidths)


@pytest.mark.slow
def test_on_the_quickstart_it_turns_between_two_and_a_half_and_five_gbps() -> None:
    quickstart = load_topology(TOPOLOGIES / "quickstart.toml")
    pair = pair_of(
        searched(quickstart, budgets=(512,), baselines=["colocated-prefill-first"], tolerance=0.2),
        "colocated-prefill-first",
    )
    assert pair.break_even is not None
    assert 2.5e9 < pair.break_even.low_bps < pair.break_even.high_bps < 5e9


BAD_OPTIONS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "low without unit": (["--low", "1"], ["--low: '1'", "unit"]),
    "high in bytes": (["--high", "1GB/s"], ["--high: '1GB/s'", "bits per second"]),
    "low above high": (["--low", "2Gbps", "--high", "1Gbps"], ["--low 2Gbps is not below --high 1Gbps"]),
    "tolerance 0": (["--tolerance", "0%"], ["--tolerance 0%", "from 0.1%"]),
    "tolerance no share": (["--tolerance", "close"], ["--tolerance: 'close'", "5%"]),
    "budget 0": (["--chunk-budgets", "512,0"], ["--chunk-budgets: '0'"]),
    "budget twice": (["--chunk-budgets", "512,512"], ["given twice"]),
    "deployment": (["--deployment", "2P1D"], ["'2P1D'", "colocated, 1P1D"]),
    "baseline": (["--baseline", "1P1D"], ["--baseline 1P1D", "not colocated"]),
    "seeds 0": (["--seeds", "0"], ["--seeds 0"]),
    "workers 0": (["--workers", "0"], ["--workers 0"]),
    "live and simulate": (["--live", "--launcher", "simulate"], ["--live --launcher simulate", "netns"]),
    "scale without live": (["--scale", "2"], ["--scale 2", "--live"]),
    "shaping without live": (["--shaping", "paced"], ["--shaping paced", "--live"]),
    "rate 0": (["--rate", "0"], ["--rate 0"]),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_a_bad_option_is_one_line_and_exit_2(case: str, tmp_path: Path, pdemu: Pdemu) -> None:
    args, expected = BAD_OPTIONS[case]
    pdemu("break-even", SMALL, *args, "--out", tmp_path / "o").check_refusal(expected)
    assert not (tmp_path / "o").exists()
