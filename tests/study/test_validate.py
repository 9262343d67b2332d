"""Published results by simulation: arithmetic exact, Fig. 1's ranking and binding phase, every claim answered."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import emulator
from emulator.cli.main import main
from emulator.core.catalog import find_profile
from emulator.core.cost import Chunk, FittedCost, StepShape
from emulator.core.errors import ConfigError
from emulator.lab.catalog_files import load_catalog
from emulator.report.validate_table import Finding, Validated, ValidateSummary, agreement, ratio_of, render
from emulator.study.claims_article import interference
from emulator.study.claims_distserve import fig1, kv_bandwidth, step_factor
from emulator.study.published import Bench, load_published, slowed, topologies_folder, with_slo
from emulator.study.validate import PARTS, bench_for, validate

PUBLISHED = load_published()
OVERHEAD_FIT = "vllm-2024-opt-13b-tp1-overhead"
SHOWN_IN_WORDS = {"D11", "D13"}
"""Curves that stand in the text of another's rows."""


def bench(name: str, duration_s: float, seeds: int = 1) -> Bench:
    return bench_for(PUBLISHED[name], seeds, duration_s)


def by_claim(findings: list[Finding]) -> dict[str, Finding]:
    """The first finding of each claim."""
    found: dict[str, Finding] = {}
    for finding in findings:
        found.setdefault(finding.claim, finding)
    return found


# --- what is computed ---------------------------------------------------------------------------------------------


def test_kv_sizes_and_bandwidth_are_what_the_formula_gives() -> None:
    found = kv_bandwidth(bench("distserve-kv-bandwidth", 5))
    sizes = [finding.ours for finding in found if finding.claim == "D15 size"]
    assert sizes == [1.207959552, 1.125]
    assert by_claim(found)["D15"].ours == pytest.approx(10 * 1.207959552 * 8)
    assert by_claim(interference(bench("article", 5)))["A4"].ours == 0.65536


def test_a_long_prompt_stalls_by_its_prefill_and_one_step() -> None:
    """80 ms for 2,000 tokens, then a step of 24 ms and an eighth of one for each of the sequences that decode."""
    found = by_claim(interference(bench("article", 5)))
    stalled, three = found["A1"].ours, found["A2"].ours
    assert isinstance(stalled, float)
    assert isinstance(three, float)
    assert 80 + 24 < stalled < 80 + 26
    assert 3 * 80 + 24 < three < 3 * 80 + 26


@pytest.mark.slow
def test_fig_1_ranks_the_deployments_as_published_and_decode_binds_2p1d() -> None:
    found = by_claim(fig1(bench("distserve-fig1", 30), OVERHEAD_FIT))
    assert found["D1-D4 ranking"].agrees is True
    assert found["D4 binding"].agrees is True
    assert all(isinstance(found[claim].ours, float) for claim in ("D1", "D2", "D3", "D4"))
    assert all(finding.why for finding in found.values() if finding.agrees is False)


def test_the_step_factor_finds_by_how_much_steps_were_made_shorter() -> None:
    lab = bench("distserve-fig1", 60)
    topology = lab.topology("published/distserve-fig1-prefill")
    profile = lab.profile(topology)
    whole = step_factor(lab, topology, "prefill-only", 6.0)
    halved = step_factor(lab, slowed(topology, profile, 0.8), "prefill-only", 6.0)
    assert halved * 0.8 == pytest.approx(whole, rel=0.05)


def test_a_metric_without_a_bound_does_not_count() -> None:
    lab = bench("distserve-fig1", 30)
    topology = lab.topology("published/distserve-fig1-colocated")
    both = lab.attainment(topology, "colocated", 3.0)
    alone = lab.attainment(with_slo(topology, tpot_ms=None), "colocated", 3.0)
    assert set(both.by_metric) == {"ttft_ms", "tpot_ms"}
    assert alone.by_metric == {"ttft_ms": both.by_metric["ttft_ms"]}
    assert both.together <= both.each_alone <= alone.together


def test_more_memory_lifts_what_memory_bounds() -> None:
    lab = bench("distserve-sharegpt", 60)
    topology = lab.topology("published/distserve-sharegpt")
    tight, roomy = (lab.attainment(topology, "DistServe", 9.0, memory=times).together for times in (1, 10))
    assert tight < roomy


@pytest.mark.slow
def test_every_claim_gets_a_finding() -> None:
    for name, reproduction in PUBLISHED.items():
        parts = PARTS[name][:1] if name == "distserve-fig1" else PARTS[name]
        found = {f.claim.split(" at ")[0] for part in parts for f in part(bench(name, 8))}
        assert found == {claim.id for claim in reproduction.claims} - SHOWN_IN_WORDS, name
        assert reproduction.assumptions, name
    assert PARTS.keys() == PUBLISHED.keys()


# --- step times ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["distserve-opt-13b-tp1", "vllm-2024-opt-13b-tp1"])
@pytest.mark.parametrize("batch", [20, 120])
def test_the_overhead_is_added_to_every_step_of_an_unmodified_fit(name: str, batch: int) -> None:
    catalog = load_catalog()
    plain, with_overhead = find_profile(catalog, name), find_profile(catalog, f"{name}-overhead")
    changed = {"name": plain.name, "source": plain.source, "step_overhead": None}
    assert msgspec.structs.replace(with_overhead, **changed) == plain
    for shape, tokens in (
        (StepShape((Chunk(512, 0), Chunk(300, 0)), 0, 0), 812),
        (StepShape((), batch, batch * 540), batch * 540),
    ):
        before, after = (FittedCost(profile=profile).step_s(shape) for profile in (plain, with_overhead))
        assert after - before == pytest.approx(2e-3 + 1e-7 * tokens)


def test_step_times_with_an_overhead_survive_the_wire() -> None:
    cost = FittedCost(profile=find_profile(load_catalog(), OVERHEAD_FIT))
    again = msgspec.json.decode(msgspec.json.encode(cost), type=FittedCost)
    assert again == cost


# --- agreement and its table --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "ours", "high", "lower_bound", "agrees"),
    [
        (10.0, 11.4, None, False, True),
        (10.0, 11.6, None, False, False),
        (10.0, 8.4, None, False, False),
        (30.0, 35.0, 40.0, False, True),
        (30.0, 41.0, 40.0, False, False),
        (90.0, 300.0, None, True, True),
        (90.0, 89.0, None, True, False),
        ("decode", "decode", None, False, True),
        ("decode", "prefill", None, False, False),
        (10.0, None, None, False, None),
    ],
)
def test_agreement(
    published: float | str, ours: float | str | None, high: float | None, lower_bound: bool, agrees: bool | None
) -> None:
    assert agreement(published, ours, high, lower_bound=lower_bound) is agrees


def test_a_ratio_is_ours_over_published_or_over_the_middle_of_a_range() -> None:
    assert ratio_of(10.0, 5.0, None) == 0.5
    assert ratio_of(30.0, 70.0, 40.0) == 2.0
    assert ratio_of("decode", "decode", None) is None
    assert ratio_of(10.0, None, None) is None


def test_the_table_shows_both_values_the_ratio_and_each_reason_once() -> None:
    row = Finding(
        claim="D1",
        statement="colocated",
        setting="a fit",
        published=1.6,
        ours=2.4,
        unit="req/s",
        ratio=1.5,
        agrees=False,
        why="Steps are shorter.",
    )
    shown = Validated(name="fig", title="A figure", source="a paper", assumptions=("a model",), findings=(row, row))
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(render(ValidateSummary(seeds=1, reproductions=(shown,))))
    text = console.export_text()
    for part in ("D1", "1.60 req/s", "2.40 req/s", "1.50", "A figure", "a paper", "a model"):
        assert part in text
    assert text.count("Steps are shorter.") == 1


# --- the command --------------------------------------------------------------------------------------------------


def pdemu(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["pdemu", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_prints_one_json_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pdemu(monkeypatch, "validate", "distserve-kv-bandwidth", "--json", "--seeds", "1") == 0
    summary = msgspec.json.decode(capsys.readouterr().out, type=ValidateSummary)
    assert [reproduction.name for reproduction in summary.reproductions] == ["distserve-kv-bandwidth"]
    assert by_claim(list(summary.reproductions[0].findings))["D15"].ratio == pytest.approx(1.0737, abs=1e-4)


def test_the_command_lists_what_there_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert pdemu(monkeypatch, "validate", "--list") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in PUBLISHED)


def test_an_unknown_name_is_one_line_that_says_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pdemu(monkeypatch, "validate", "distserve-fig9") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert "'distserve-fig9'" in captured.err
    assert "distserve-fig1" in captured.err


def test_no_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="--seeds 0"):
        validate([], seeds=0)


def test_a_package_without_its_topologies_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(emulator, "__file__", str(tmp_path / "emulator" / "__init__.py"))
    with pytest.raises(ConfigError, match="checkout"):
        topologies_folder()
