"""Sweeps: the grid, rows that are the runs, a folder that can be taken up again, and what a terminal shows."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from emulator.core import verdict
from emulator.core.deploy import plan_runs
from emulator.core.errors import ConfigError
from emulator.core.grid import Axes, PointResult, pool_seeds, slices
from emulator.core.specs import Topology
from emulator.core.trace import Trace, TraceRow
from emulator.core.traffic import Stream
from emulator.core.traffic import Trace as TraceArrivals
from emulator.core.upkeep import Costs
from emulator.lab.catalog_files import load_catalog
from emulator.lab.simulated import simulated_result
from emulator.lab.topology_files import load_topology
from emulator.report.sweep_table import render
from emulator.study import variants
from emulator.study.sweep import Sweep, plan_sweep, run_sweep
from emulator.study.sweep_folder import SweepFolder
from emulator.study.variants import parse_ratio
from tests.live.lab import SMALL, TOPOLOGIES

TOPOLOGY = load_topology(SMALL)
CATALOG = load_catalog()
AXES = Axes(kv_bandwidth_bps=(5e7, 2e8, 1e9), rate_per_s=(5.0, 20.0))
TABLES = ("runs.csv", "runs.jsonl", "outcomes.csv", "outcomes.jsonl")


def planned(axes: Axes = AXES, topology: Topology = TOPOLOGY, **options: Any) -> Sweep:
    """A sweep of the small lab."""
    return plan_sweep(topology, CATALOG, {}, axes, **options)


def performed(sweep: Sweep, out: Path, *, workers: int = 1, most: int | None = None) -> list[PointResult]:
    """Run it, or `most` of its points, into a folder."""
    with SweepFolder.open(out, "small", sweep.identity()) as folder:
        for done, _ in enumerate(results := run_sweep(sweep, folder, workers=workers), 1):
            if done == most:
                results.close()  # type: ignore[attr-defined]
                break
        return folder.results()


def rows_of(path: Path) -> list[dict[str, str]]:
    """A CSV table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- the grid -------------------------------------------------------------------------------------------------


def test_the_grid_has_every_combination_once_with_equal_traffic_together() -> None:
    axes = Axes(kv_bandwidth_bps=(1e9, 2e9), rate_per_s=(1.0, 2.0, 3.0), prompt_tokens=(10,))
    points = axes.points()
    assert [point.index for point in points] == list(range(6))
    assert [(point.rate_per_s, point.kv_bandwidth_bps) for point in points] == [
        (rate, bandwidth) for rate in (1.0, 2.0, 3.0) for bandwidth in (1e9, 2e9)
    ]
    assert {(point.prompt_tokens, point.output_tokens) for point in points} == {(10, None)}
    assert axes.varied == ("kv_bandwidth_bps", "rate_per_s")


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_tasks_are_all_points_in_order_and_split_only_where_workers_would_idle(workers: int) -> None:
    points = Axes(kv_bandwidth_bps=tuple(map(float, range(1, 9))), rate_per_s=(1.0, 2.0, 3.0)).points()
    tasks = slices(points, workers)
    assert [point for task in tasks for point in task] == list(points)
    assert all(len({point.traffic for point in task}) == 1 for task in tasks)
    assert len(tasks) >= min(len(points), workers)
    assert len(slices(points, 1)) == 3


# --- rows -----------------------------------------------------------------------------------------------------


def test_a_row_is_the_run_and_an_outcome_the_verdict(tmp_path: Path) -> None:
    results = performed(planned(), tmp_path / "s")
    assert [len(result.runs) for result in results] == [2] * 6
    point = results[5].point
    assert (point.rate_per_s, point.kv_bandwidth_bps) == (20.0, 1e9)
    topology = variants.with_bandwidths(variants.with_rate(TOPOLOGY, 20.0, {}), [1e9])
    runs = plan_runs(topology, CATALOG, variants.load_of(topology, {}))
    simulated = [simulated_result(run) for run in runs]
    for row, result in zip(results[5].runs, simulated, strict=True):
        summary = result.summary
        assert row["deployment"] == summary.deployment
        assert row["slo_attainment"] == summary.slo_attainment
        assert row["ttft_ms_p99"] == summary.ttft_ms.p99
        assert row["itl_ms_p50"] == summary.itl_ms.p50
        assert row["kv_bytes"] == summary.kv.bytes
        assert row["request_goodput_per_s_per_gpu"] == summary.request_goodput / 2
        assert {name: row[name] for name in Costs.__struct_fields__} == msgspec.structs.asdict(summary.costs)
        assert row["goodput_requests_per_usd"] == pytest.approx(summary.request_goodput * 3600 / 5.90), "two H100"
    judged = verdict.judge(simulated, topology.slo).verdicts[0]
    outcome = results[5].outcomes[0]
    assert (outcome.outcome, outcome.deciding_metric) == (judged.outcome, judged.deciding_metric)


def test_points_of_one_traffic_share_their_requests(tmp_path: Path) -> None:
    results = performed(planned(), tmp_path / "s")
    colocated = [row for result in results for row in result.runs if row["deployment"] == "colocated"]
    slow = [{**row, "point": 0, "kv_bandwidth_bps": 0} for row in colocated if row["rate_per_s"] == 5.0]
    assert slow[0] == slow[1] == slow[2]
    split = [row for result in results for row in result.runs if row["deployment"] == "1P1D"]
    assert len({row["ttft_ms_mean"] for row in split}) == len(split), "bandwidth and rate do matter"


def test_prompt_and_output_are_what_is_sent(tmp_path: Path) -> None:
    axes = Axes(prompt_tokens=(100, 400), output_tokens=(4,))
    results = performed(planned(axes), tmp_path / "s")
    split = [row for result in results for row in result.runs if row["disaggregated"]]
    assert [row["kv_bytes"] for row in split] == [15 * 4096 * 100, 15 * 4096 * 400]
    assert [row["kv_bandwidth_bps"] for row in split] == [2e8, 2e8], "the topology's own"


def test_seeds_are_rows_of_their_own_and_judged_together(tmp_path: Path) -> None:
    axes = Axes(kv_bandwidth_bps=(2e8,))
    sweep = planned(axes, seeds=2)
    result = performed(sweep, tmp_path / "s")[0]
    assert [(row["deployment"], row["seed"]) for row in result.runs] == [
        ("colocated", 3),
        ("colocated", 4),
        ("1P1D", 3),
        ("1P1D", 4),
    ]
    assert result.outcomes[0].pairs == 30
    alone = performed(planned(axes), tmp_path / "one")[0]
    assert alone.outcomes[0].pairs == 15
    assert alone.runs[0] == result.runs[0]


def test_pooled_seeds_are_one_run_of_all_their_requests() -> None:
    results = []
    for seed in (3, 4):
        topology = variants.with_seed(TOPOLOGY, seed)
        results.append(simulated_result(plan_runs(topology, CATALOG, variants.load_of(topology, {}))[0]))
    pooled = pool_seeds(results, TOPOLOGY.slo)
    assert len({record.request_id for record in pooled.records}) == 30
    assert pooled.summary.duration_s == 3.0
    shares = [result.summary.slo_attainment or 0.0 for result in results]
    assert pooled.summary.slo_attainment == pytest.approx(sum(shares) / 2)
    assert pool_seeds(results[:1], TOPOLOGY.slo) is results[0]


def test_ratios_are_compared_at_equal_hardware_alone(tmp_path: Path) -> None:
    ratios = [parse_ratio(text) for text in ("1P1D", "1P2D", "2P1D", "3C")]
    sweep = planned(Axes(kv_bandwidth_bps=(2e8,)), ratios=ratios)
    assert [remark.split()[0] for remark in sweep.remarks] == ["1P1D"]
    result = performed(sweep, tmp_path / "s")[0]
    assert [(row["deployment"], row["gpus"]) for row in result.runs] == [
        ("3C", 3),
        ("1P1D", 2),
        ("1P2D", 3),
        ("2P1D", 3),
    ]
    assert [(outcome.deployment, outcome.baseline) for outcome in result.outcomes] == [("1P2D", "3C"), ("2P1D", "3C")]
    assert [best.gpus for best in result.best] == [2, 3]


# --- what cannot be -------------------------------------------------------------------------------------------


def test_what_cannot_be_swept_is_refused_before_anything_is_made() -> None:
    users = load_topology(TOPOLOGIES / "short-prompts.toml")
    with pytest.raises(ConfigError, match="no stream has a rate"):
        planned(Axes(rate_per_s=(1.0,)), users)
    with pytest.raises(ConfigError, match=r"--prompt 2000: 2001 tokens .* exceed the context of tiny, 1024 tokens"):
        planned(Axes(prompt_tokens=(10, 2000)))
    with pytest.raises(ConfigError, match="--output 1024: 1025 tokens"):
        planned(Axes(output_tokens=(1024,)))
    with pytest.raises(ConfigError, match="--kv-bandwidth: no deployment of small that is run is disaggregated"):
        planned(Axes(kv_bandwidth_bps=(1e9,)), deployments=["colocated"])
    with pytest.raises(ConfigError, match="--seeds 0: must be from 1"):
        planned(seeds=0)
    with pytest.raises(ConfigError, match="is there twice"):
        planned(ratios=[parse_ratio("1P1D")] * 2)


def test_seeds_that_change_nothing_are_run_once() -> None:
    rows = tuple(TraceRow(n / 10, 100, 5) for n in range(10))
    stream = Stream(name="t", arrivals=TraceArrivals(file="t.csv"))
    workload = msgspec.structs.replace(TOPOLOGY.workload, streams=(stream,))
    replayed = msgspec.structs.replace(TOPOLOGY, workload=workload)
    sweep = plan_sweep(replayed, CATALOG, {"t": Trace(rows)}, Axes(), seeds=3)
    assert sweep.seeds == (3,)
    assert "run once" in sweep.remarks[-1]
    with pytest.raises(ConfigError, match="stream t replays a trace"):
        plan_sweep(replayed, CATALOG, {"t": Trace(rows)}, Axes(prompt_tokens=(5,)))


# --- the folder -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_sweep_ends_as_one_that_was_not(workers: int, tmp_path: Path) -> None:
    sweep = planned(seeds=2)
    performed(sweep, tmp_path / "whole")
    assert len(performed(sweep, tmp_path / "cut", workers=workers, most=2)) >= 2
    assert not (tmp_path / "cut" / "runs.csv").exists(), "tables are those of the whole sweep"
    before = (tmp_path / "cut" / "points.jsonl").read_bytes()
    performed(sweep, tmp_path / "cut", workers=workers)
    assert (tmp_path / "cut" / "points.jsonl").read_bytes().startswith(before), "nothing is simulated twice"
    assert len((tmp_path / "cut" / "points.jsonl").read_bytes().splitlines()) == 6
    for name in TABLES:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_line_half_written_is_cut_off_and_its_point_simulated_again(tmp_path: Path) -> None:
    sweep = planned()
    performed(sweep, tmp_path / "whole")
    performed(sweep, tmp_path / "cut")
    journal = tmp_path / "cut" / "points.jsonl"
    journal.write_bytes(journal.read_bytes()[:-200])
    with SweepFolder.open(tmp_path / "cut", "small", sweep.identity()) as folder:
        assert len(folder.done) == 5
    performed(sweep, tmp_path / "cut")
    with SweepFolder.open(tmp_path / "cut", "small", sweep.identity()) as folder:
        assert len(folder.done) == 6, "the new line does not stick to the half one"
    for name in TABLES:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_folder_of_another_sweep_is_refused(tmp_path: Path) -> None:
    performed(planned(), tmp_path / "s", most=1)
    others = {
        "over other values of the axes": planned(Axes(rate_per_s=(5.0,))),
        "with other seeds": planned(seeds=2),
        "of another topology, or of other deployments of it": planned(ratios=[parse_ratio("2P2D"), parse_ratio("4C")]),
    }
    for what, other in others.items():
        with pytest.raises(ConfigError, match=f"holds a sweep {what}"):
            SweepFolder.open(tmp_path / "s", "small", other.identity())
    with SweepFolder.open(tmp_path / "s", "small", planned().identity()) as folder:
        assert len(folder.done) == 1
    (tmp_path / "s" / "sweep.json").write_text("{}")
    with pytest.raises(ConfigError, match="not that of a sweep"):
        SweepFolder.open(tmp_path / "s", "small", planned().identity())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    with pytest.raises(ConfigError, match="not empty"):
        SweepFolder.open(tmp_path / "mine", "small", planned().identity())


def test_a_trace_counts_by_what_is_in_it_wherever_it_is() -> None:
    def identity(file: str, tokens: int) -> dict[str, Any]:
        stream = Stream(name="t", arrivals=TraceArrivals(file=file))
        workload = msgspec.structs.replace(TOPOLOGY.workload, streams=(stream,))
        trace = Trace((TraceRow(0.0, tokens, 5), TraceRow(0.5, tokens, 5)))
        topology = msgspec.structs.replace(TOPOLOGY, workload=workload)
        return plan_sweep(topology, CATALOG, {"t": trace}, Axes()).identity()

    assert identity("a/t.csv", 100) == identity("b/t.csv", 100)
    assert identity("a/t.csv", 100) != identity("a/t.csv", 101)


def test_tables_are_tidy(tmp_path: Path) -> None:
    performed(planned(), tmp_path / "s")
    rows = rows_of(tmp_path / "s" / "runs.csv")
    assert len(rows) == 12
    assert len({(row["point"], row["deployment"], row["seed"]) for row in rows}) == 12
    lines = [msgspec.json.decode(line) for line in (tmp_path / "s" / "runs.jsonl").read_bytes().splitlines()]
    assert [list(line) for line in lines] == [list(rows[0])] * 12
    assert [float(row["slo_attainment"]) for row in rows] == [line["slo_attainment"] for line in lines]
    assert {row["disaggregated"] for row in rows} == {"true", "false"}
    assert [row["kv_achieved_bps"] for row in rows if row["disaggregated"] == "false"] == [""] * 6
    outcomes = rows_of(tmp_path / "s" / "outcomes.csv")
    assert [row["outcome"] in ("helps", "hurts", "no difference") for row in outcomes] == [True] * 6


# --- what a terminal shows ------------------------------------------------------------------------------------


def _shown(results: list[PointResult], axes: Axes, width: int = 100) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(render(results, axes, TOPOLOGY.slo, width=width))
    return capture.get()


def test_the_map_has_each_outcome_at_its_place(tmp_path: Path) -> None:
    axes = Axes(kv_bandwidth_bps=(5e7, 2e8, 1e9), rate_per_s=(5.0, 100.0))
    results = performed(planned(axes), tmp_path / "s")
    lines = [line.split() for line in _shown(results, axes).splitlines()]
    words = {"helps": "helps", "hurts": "hurts", "no difference": "same"}
    rows = {
        rate: [words[r.outcomes[0].outcome] for r in results if r.point.rate_per_s == rate] for rate in (5.0, 100.0)
    }
    assert rows[5.0] != rows[100.0]
    assert len(set(rows[100.0])) > 1
    assert lines.index(["5", *rows[5.0]]) + 1 == lines.index(["100", *rows[100.0]])
    assert ["requests/s", "\\", "KV", "bandwidth", "50Mbps", "200Mbps", "1Gbps"] in lines


def test_a_map_too_wide_for_words_is_in_letters(tmp_path: Path) -> None:
    results = performed(planned(), tmp_path / "s")
    shown = _shown(results, AXES, width=40)
    assert "H helps, x hurts, = no difference" in " ".join(shown.split())


def test_with_three_axes_there_is_a_map_for_each_value_of_the_third(tmp_path: Path) -> None:
    axes = Axes(kv_bandwidth_bps=(5e7, 2e8), rate_per_s=(5.0, 20.0), prompt_tokens=(100, 400, 700))
    shown = _shown(performed(planned(axes), tmp_path / "s"), axes)
    assert [line.strip() for line in shown.splitlines() if line.strip().startswith("prompt tokens")][:3] == [
        "prompt tokens 100:",
        "prompt tokens 400:",
        "prompt tokens 700:",
    ]


def test_a_point_without_a_baseline_says_so(tmp_path: Path) -> None:
    sweep = planned(Axes(), deployments=["1P1D"])
    shown = _shown(performed(sweep, tmp_path / "s"), sweep.axes)
    assert "it takes a disaggregated and a colocated deployment" in shown
    assert "a = 1P1D, at 1 of 1 points" in shown
