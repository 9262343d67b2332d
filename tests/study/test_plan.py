"""`pdemu plan`: its first choice is what an exhaustive search finds, and it reports nothing that was not run."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from emulator.cli.main import main
from emulator.core.bounds import Bound
from emulator.core.deployments import Deployment, Pool
from emulator.core.errors import CapacityError, ConfigError
from emulator.core.plan import (
    Diagnosis,
    Impossible,
    Plan,
    PlannedPool,
    Ranked,
    RuledOut,
    in_order,
    reasons,
    runner_up,
    tied,
)
from emulator.core.quantities import BitsPerSecond, Seconds
from emulator.core.search import Goodput
from emulator.core.specs import Slo, Topology
from emulator.lab.catalog_files import load_catalog
from emulator.lab.topology_files import load_topology
from emulator.report import plan_table
from emulator.study import goodput as searches
from emulator.study.contenders import Fit, contenders
from emulator.study.plan import perform, prepare
from emulator.study.plan_rounds import PlanOptions
from emulator.study.rated_runs import SearchOptions, candidate_of, rated_runs
from tests.live.lab import SMALL, TOPOLOGIES

CATALOG = load_catalog()


def short(name: str, gbps: float = 100, **slo: float) -> Topology:
    """A topology that ships, with five seconds of arrivals and one KV bandwidth."""
    topology = load_topology(TOPOLOGIES / f"{name}.toml")
    assert topology.kv_network is not None
    return msgspec.structs.replace(
        topology,
        workload=msgspec.structs.replace(topology.workload, duration=Seconds(5.0), drain=Seconds(15.0)),
        kv_network=msgspec.structs.replace(topology.kv_network, bandwidth=(BitsPerSecond(gbps * 1e9),)),
        slo=msgspec.structs.replace(topology.slo, **slo),
    )


def exhaustive(fits: Sequence[Fit], options: SearchOptions) -> dict[str, Goodput]:
    """The goodput of every deployment, searched in full."""
    planned = [
        rated_runs(fit.topology, CATALOG, {}, candidate_of(fit.topology, fit.base.deployment, None), options)
        for fit in fits
    ]
    return {found.deployment: found for found in searches.perform(planned)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "seeds", "best"),
    [(short("quickstart", 10), 1, "4C-512"), (short("2p1d", itl_p99_ms=50), 2, "3P1D")],
    ids=["colocated is best", "a split is best"],
)
def test_the_first_choice_is_what_an_exhaustive_search_finds(topology: Topology, seeds: int, best: str) -> None:
    heard: list[Goodput] = []
    prepared = prepare(topology, CATALOG, {}, PlanOptions(gpus=4, seeds=seeds, tolerance=0.08))
    plan = perform(prepared, CATALOG, {}, lambda name, round_name, found: heard.append(found))
    found = exhaustive(prepared.fits, SearchOptions(seeds=seeds, tolerance=0.08))
    rates = {name: goodput.rate_per_s or 0.0 for name, goodput in found.items()}
    assert plan.recommended == max(rates, key=lambda name: rates[name]) == best
    assert plan.ranking[0].confirmed
    assert len(plan.reasons) == 2
    assert {ranked.deployment for ranked in plan.ranking} | {out.deployment for out in plan.ruled_out} == rates.keys()
    assert plan.ruled_out, "something was saved"
    for name, bound in prepared.bounds.items():
        assert bound is not None
        assert bound.rate_per_s > rates[name], f"{name} served more than it can"
    run = {(goodput.deployment, trial.rate_per_s, trial.passes) for goodput in heard for trial in goodput.trials}
    for ranked in plan.ranking:
        assert ranked.rate_per_s is None or (ranked.deployment, ranked.rate_per_s, True) in run
        assert ranked.next_rate_per_s is None or (ranked.deployment, ranked.next_rate_per_s, False) in run


@pytest.mark.slow
def test_a_plan_does_not_depend_on_the_number_of_processes() -> None:
    topology = load_topology(SMALL)
    plans = [
        perform(prepare(topology, CATALOG, {}, options), CATALOG, {})
        for options in (PlanOptions(gpus=2, seeds=1, workers=workers) for workers in (1, 2))
    ]
    assert plans[0] == plans[1]


# --- what there is to choose from -----------------------------------------------------------------------------


def names(topology: Topology, gpus: int, *types: str) -> list[str]:
    return [fit.contender.deployment for fit in contenders(topology, CATALOG, {}, gpus, types)[0]]


def refused(topology: Topology, gpus: int, *types: str) -> dict[str, str]:
    return {no.deployment: no.reason for no in contenders(topology, CATALOG, {}, gpus, types)[1]}


def with_pools(*pools: Pool) -> Topology:
    """The quickstart with one deployment of these pools, on GPUs that hold a larger model."""
    topology = short("quickstart")
    return msgspec.structs.replace(topology, gpu="h100", deployments=(Deployment(name="own", pools=pools),))


PREFILL, DECODE = Pool(role="prefill", tp=2), Pool(role="decode", tp=4)


def test_every_split_of_the_gpus_and_every_batch_policy_is_a_contender() -> None:
    assert names(short("quickstart"), 4) == [
        "4C-256", "4C-512", "4C-1024", "4C-2048", "4C-prefill-first", "1P3D", "2P2D", "3P1D"
    ]  # fmt: skip


def test_splits_keep_the_tensor_parallelism_of_the_pools_and_use_all_gpus() -> None:
    fits, impossible = contenders(with_pools(PREFILL, DECODE), CATALOG, {}, 10)
    assert [f.contender.deployment for f in fits if "P" in f.contender.deployment] == ["1P2D", "3P1D"]
    assert all(fit.base.gpus == 10 for fit in fits)
    assert "5C-512-tp2" in [fit.contender.deployment for fit in fits]
    reason = "10 GPUs do not make whole nodes of 4 (tp); a multiple of 4 would"
    assert impossible == [Impossible(deployment="colocated-tp4", reason=reason)]


def test_an_odd_number_of_gpus_that_makes_no_split_says_so() -> None:
    reason = refused(with_pools(PREFILL, msgspec.structs.replace(DECODE, tp=2)), 2)["xPyD"]
    assert reason == "2 GPUs do not make whole nodes of 2 (prefill) and 2 (decode)"


def test_several_gpus_make_homogeneous_deployments_and_mixed_splits() -> None:
    found = names(short("quickstart"), 2, "L40S", "h100")
    assert [name for name in found if "P" in name] == ["1P1D-l40s", "1P1D-l40s+h100", "1P1D-h100+l40s", "1P1D-h100"]
    assert "2C-8192-h100" in found
    assert "2C-8192-l40s" not in found, "beyond the default budgets, each GPU has its own"


def test_what_cannot_be_is_listed_with_its_reason_and_the_rest_goes_on() -> None:
    topology = msgspec.structs.replace(short("quickstart"), model="Llama-2-70B")
    reason = refused(topology, 2, "l40s", "b200")["1P1D-l40s+b200"]
    assert reason.startswith("Llama-2-70B does not fit on l40s with tp = 1")
    assert "1P1D-b200" in names(topology, 2, "l40s", "b200")


def test_nothing_possible_is_an_error_with_the_first_reason() -> None:
    topology = msgspec.structs.replace(short("quickstart"), model="Llama-2-70B")
    with pytest.raises(CapacityError, match="quickstart on 4 GPUs: 4C-256: Llama-2-70B does not fit on l40s"):
        contenders(topology, CATALOG, {}, 4)


def test_heterogeneous_pools_add_up_in_dollars_and_watts() -> None:
    fits, _ = contenders(short("quickstart"), CATALOG, {}, 4, ["l40s", "h100"])
    (mixed,) = [fit.contender for fit in fits if fit.contender.deployment == "1P3D-h100+l40s"]
    assert mixed.upkeep.usd_per_h == pytest.approx(2.95 + 3 * 1.86)
    assert mixed.upkeep.watts == pytest.approx(700 + 3 * 350)
    assert mixed.value(2.0, "per-dollar") == pytest.approx(7200 / (2.95 + 3 * 1.86))
    assert mixed.value(2.0, "per-watt") == pytest.approx(2.0 / 1.75)


def test_dollars_need_a_price() -> None:
    topology = short("quickstart")
    gpu = next(gpu for gpu in CATALOG.gpus if gpu.name == "l40s")
    free = msgspec.structs.replace(gpu, name="free", price_usd_per_h=None)
    topology = msgspec.structs.replace(topology, gpu="free", gpus=(free,))
    with pytest.raises(ConfigError, match="gpu free has no price_usd_per_h"):
        prepare(topology, CATALOG, {}, PlanOptions(gpus=2, objective="per-dollar"))


# --- order and reasons ----------------------------------------------------------------------------------------


def ranked(name: str, rate: float | None, *, confirmed: bool = True, gpu: str = "l40s", **more: object) -> Ranked:
    pool = PlannedPool(
        role="colocated", nodes=2, gpu=gpu, tp=1, policy="chunked", max_num_batched_tokens=512, price_usd_per_h=2.0,
        tdp_w=500.0,
    )  # fmt: skip
    fields: dict[str, object] = {
        "deployment": name, "pools": (pool,), "rate_per_s": rate, "per_gpu": rate and rate / 2, "per_dollar": rate and
        rate * 1800, "per_kw": rate and rate * 2, "next_rate_per_s": rate and rate * 1.02, "low_per_s": None,
        "high_per_s": None, "bounded_by": None, "seeds": 3, "confirmed": confirmed, "beaten_at_per_s": None,
        "bound_per_s": None, "bound_limit": None,
    }  # fmt: skip
    return Ranked(**(fields | more))  # type: ignore[arg-type]


def seen(**more: object) -> Diagnosis:
    fields: dict[str, object] = {
        "rate_per_s": 9.0, "attainment": 0.8, "metric": "ttft_ms", "metric_attainment": 0.85, "cause": "prefill",
        "busy": {"prefill": 0.97, "decode": 0.5}, "decode_batch": 12.3,
    }  # fmt: skip
    return Diagnosis(**(fields | more))  # type: ignore[arg-type]


def test_the_best_confirmed_one_comes_first_and_the_runner_up_has_other_nodes() -> None:
    rows = [ranked("a", 9.0), ranked("b", 9.5, confirmed=False), ranked("c", None), ranked("d", 5.0, gpu="h100")]
    ordered = in_order(rows, "goodput")
    assert [r.deployment for r in ordered] == ["a", "b", "d", "c"]
    second = runner_up(ordered)
    assert second is not None
    assert second.deployment == "d"


def test_the_reasons_are_two_sentences_with_what_limits_whom() -> None:
    slo = Slo(ttft_ms=500)
    rows = [ranked("a", 9.0, diagnosis=seen()), ranked("d", 6.0, gpu="h100", diagnosis=seen(cause="KV network"))]
    assert reasons(rows, "goodput", slo, 0.02) == (
        "a serves 9 requests/s (4.5 per GPU) with 90% of them in their SLO, 50% more than d (6 requests/s), where at "
        "9/s only 80.0% are, TTFT failing first (85% within 500 ms), since KV waits for the network.",
        "In a prefill binds: at 9/s only 80.0% are, TTFT failing first (85% within 500 ms), with prefill nodes 97% and "
        "decode nodes 50% busy, and 12 sequences in a decode step.",
    )
    close = [rows[0], ranked("d", 8.9, gpu="h100", diagnosis=seen(metric=None, metric_attainment=None))]
    assert "no more than the search can tell from d" in reasons(close, "per-dollar", slo, 0.02)[0]
    assert "requests not ending in time" in reasons(close, "per-dollar", slo, 0.02)[0]
    assert reasons([ranked("a", None)], "goodput", slo, 0.02) == ()
    assert "no other deployment was run" in reasons(rows[:1], "goodput", slo, 0.02)[0]


def test_a_share_of_the_worst_seed_is_told_as_such() -> None:
    rows = [ranked("a", 9.0, diagnosis=seen(seeds=3)), ranked("d", 6.0, gpu="h100", diagnosis=seen())]
    assert (
        "only 80.0% are, TTFT failing first (85% within 500 ms in the worst of 3 runs)"
        in (reasons(rows, "goodput", Slo(ttft_ms=500), 0.02)[1])
    )


def test_where_the_load_generator_ends_the_search_there_is_a_least_and_there_are_equals() -> None:
    end: dict[str, Any] = {"bounded_by": "load generator", "next_rate_per_s": None}
    rows = [ranked("a", 9.0, **end), ranked("b", 9.0, **end), ranked("d", 6.0, gpu="h100", diagnosis=seen())]
    first, _ = reasons(rows, "goodput", Slo(ttft_ms=500), 0.02)
    assert first.startswith("a serves at least 9 requests/s")
    assert "and so does b: the load generator sends no more" in first
    assert "at least 50% more than d" in first
    assert tied(rows, "goodput") == ("b",)


def test_the_table_says_of_each_deployment_whether_it_was_run_and_how_far() -> None:
    rows = (
        ranked("a", 9.0),
        ranked("b", 9.5, confirmed=False, beaten_at_per_s=9.0),
        ranked("c", 1234.5, confirmed=False),
    )
    plan = Plan(
        topology="t", gpus=2, kv_bandwidth_bps=1e10, objective="per-watt", slo=Slo(), duration_s=20.0, seeds=3,
        tolerance=0.02, recommended="a", reasons=("One.", "Two."), ranking=rows,
        ruled_out=tuple(
            RuledOut(deployment=name, pools=rows[0].pools, bound_per_s=8.0, bound_limit="prefill", reason="")
            for name in ("d", "e")
        ),
        impossible=(Impossible(deployment="f", reason="too small"), Impossible(deployment="g", reason="too small")),
    )  # fmt: skip
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(plan_table.render(plan, top=2))
    text = console.export_text()
    assert "t on 2 GPUs, by requests/s per kW of TDP with 90% in the SLO; KV at 10Gbps" in text
    assert "beaten at 9.00" in text
    assert "1,234" not in text
    assert "and 1 more, which --top 3 shows" in text
    assert "Not run, since their prefill nodes can serve no more than: d 8/s, e 8/s" in text
    assert "Screened: searched coarsely" in text
    assert "Impossible: f, g: too small" in text
    assert "Per dollar and kW: prices are indicative; watts are TDP, an upper bound." in text
    assert text.rstrip().endswith("Recommended: a\nOne.\nTwo.")


# --- bounds ---------------------------------------------------------------------------------------------------


def bounds_of(topology: Topology, gpus: int) -> dict[str, Bound]:
    found = prepare(topology, CATALOG, {}, PlanOptions(gpus=gpus, seeds=1)).bounds
    return {name: bound for name, bound in found.items() if bound is not None}


@pytest.mark.slow
def test_the_resource_of_which_there_is_least_bounds_a_split() -> None:
    fast, slow = short("quickstart", 100), short("quickstart", 1)
    assert bounds_of(fast, 8)["1P7D"].limit == "prefill"
    assert bounds_of(fast, 8)["7P1D"].limit == "decode"
    assert bounds_of(slow, 8)["4P4D"].limit == "KV network"
    assert bounds_of(fast, 8)["8C-512"].limit == "prefill and decode"
    one, two = bounds_of(fast, 4)["1P3D"].rate_per_s, bounds_of(fast, 8)["2P6D"].rate_per_s
    assert two == pytest.approx(2 * one, rel=0.2), "twice the prefill nodes serve twice the rate"


def test_users_who_make_their_own_rate_leave_nothing_to_bound() -> None:
    topology = short("worked-example")
    (bound, *others) = prepare(topology, CATALOG, {}, PlanOptions(gpus=8, seeds=1)).bounds.values()
    assert bound is None
    assert not any(others)


# --- the command ----------------------------------------------------------------------------------------------


def pdemu_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str | Path
) -> SimpleNamespace:
    monkeypatch.setattr(sys, "argv", ["pdemu", "plan", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return SimpleNamespace(code=ended.value.code, out=captured.out, err=captured.err)


@pytest.mark.slow
def test_the_command_prints_a_ranking_and_writes_what_it_prints_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (SMALL, "--gpus", "2", "--seeds", "1")
    ended = pdemu_plan(monkeypatch, capsys, *common, "--json", "--out", tmp_path / "a")
    assert ended.code == 0, ended.err
    plan = msgspec.json.decode(ended.out, type=Plan)
    assert (tmp_path / "a" / "plan.json").read_text() == ended.out
    assert plan.recommended is not None
    assert f"screened {plan.recommended}" in ended.err
    table = pdemu_plan(monkeypatch, capsys, *common, "--top", "1", "--out", tmp_path / "b")
    assert f"Recommended: {plan.recommended}" in table.out
    assert f"and {len(plan.ranking) - 1} more, which --top {len(plan.ranking)} shows" in table.out


BAD = {
    "no GPU": (["--gpus", "0"], ["--gpus 0", "from 1 to 256"]),
    "two bandwidths": (["--gpus", "2", "--kv-bandwidth", "1Gbps,2Gbps"], ["--kv-bandwidth 1Gbps,2Gbps", "give one"]),
    "an unknown GPU": (["--gpus", "2", "--gpu-types", "h900"], ["'h900'", "h100"]),
    "a GPU twice": (["--gpus", "2", "--gpu-types", "h100,H100"], ["--gpu-types", "twice"]),
    "an empty name": (["--gpus", "2", "--gpu-types", "h100,"], ["--gpu-types h100,", "empty"]),
    "no row": (["--gpus", "2", "--top", "0"], ["--top 0", "at least 1"]),
    "no seed": (["--gpus", "2", "--seeds", "0"], ["--seeds 0", "from 1"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_option_is_one_line_and_exit_2(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, words = BAD[case]
    ended = pdemu_plan(monkeypatch, capsys, SMALL, *args, "--out", tmp_path / "o")
    assert ended.code == 2
    assert len(ended.err.strip().splitlines()) == 1
    for word in words:
        assert word in ended.err
    assert not (tmp_path / "o").exists()
