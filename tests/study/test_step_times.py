"""The cost models against published step times, within the bounds that the project sets itself."""

from __future__ import annotations

import re

import pytest

from emulator.core.errors import ConfigError
from emulator.core.measured_steps import MeasuredStep, parse_steps
from emulator.lab.catalog_files import load_catalog
from emulator.report.step_errors import Errors
from emulator.report.step_times_table import StepTimes
from emulator.study.step_times import load_files, validate_step_times

CATALOG, FILES = load_catalog(), load_files()


@pytest.fixture(scope="module")
def found() -> StepTimes:
    return validate_step_times(CATALOG)


def group(groups: tuple[Errors, ...], name: str, model: str = "roofline") -> Errors:
    return next(g for g in groups if (g.name, g.model) == (name, model))


def test_every_published_step_is_there_scored_or_listed_with_its_reason(found: StepTimes) -> None:
    assert len(found.steps) == len(FILES.steps) == 41
    assert sum(step.scored for step in found.steps) == 32
    for step in found.steps:
        assert step.scored == (not step.reason)
        assert (step.roofline_error is not None) or not step.scored


def test_rows_without_tokens_or_without_a_catalogued_gpu_are_listed(found: StepTimes) -> None:
    reasons = {(s.source, s.gpu): s.reason for s in found.steps if not s.scored}
    assert "not sure of the context" in reasons["yobitel vLLM 0.21", "h100"]
    assert "a100-40g is not in the catalog" in reasons["johnmusgrave vLLM 0.23", "a100-40g"]
    assert "does not state the context" in reasons["continuum", "l40s"]
    assert all(s.implied_tokens for s in found.steps if s.tokens is None)


def test_sums_of_kernels_are_met_within_ten_per_cent(found: StepTimes) -> None:
    """Each within 5 %; but in-sample, and said to be."""
    errors = group(found.groups, "kernel-sum")
    assert errors.n == 10
    assert errors.in_sample
    assert errors.median is not None
    assert errors.median <= 0.10
    assert errors.within


def test_engines_of_today_would_be_scored_against_their_bound(found: StepTimes) -> None:
    errors = group(found.groups, "e2e, vLLM 0.2x")
    assert errors.median_within == 0.25
    assert errors.n == 0, "none of the file's rows states its tokens on a catalogued GPU"
    yobitel = next(s for s in found.steps if s.source.startswith("yobitel"))
    assert yobitel.roofline_error == pytest.approx(0.0, abs=0.25)


@pytest.mark.parametrize(
    ("gpu", "median", "worst"), [("h100", 0.04, 0.10), ("h200", 0.04, 0.10), ("a100-80g", 0.08, 0.25)]
)
def test_the_roofline_follows_the_sweeps_at_every_size(found: StepTimes, gpu: str, median: float, worst: float) -> None:
    of_gpu = [e for e in found.sweeps if e.name.startswith(f"{gpu}, ") and e.model == "roofline"]
    assert [e.n for e in of_gpu] == [42, 135], "prompts of 128 to 8,192 tokens, alone and by four; all decodes"
    for errors in of_gpu:
        assert errors.in_sample
        assert errors.median is not None
        assert errors.worst is not None
        assert errors.median <= median
        assert abs(errors.worst) <= worst
        assert errors.within


def test_the_errors_by_prompt_length_are_those_of_the_sweeps(found: StepTimes) -> None:
    within = {"h100": 0.10, "h200": 0.10, "a100-80g": 0.25}
    assert {size.tokens for size in found.sizes} == {128 * 2**n for n in range(9)}
    assert sum(size.n for size in found.sizes) == 144
    for size in found.sizes:
        assert 0 <= size.median <= abs(size.worst) <= within[size.gpu]


def test_fitted_profiles_reproduce_their_sweeps_within_the_error_that_they_state(found: StepTimes) -> None:
    checked = 0
    for profile in CATALOG.profiles:
        stated = re.search(r"mean error prefill (\S+) %, decode (\S+) %", profile.source)
        if stated is None:
            continue
        for phase, percent in zip(("prefill", "decode"), stated.groups(), strict=True):
            errors = group(found.sweeps, f"{profile.name}, {phase}", "fitted")
            assert errors.mean is not None
            assert errors.mean * 100 == pytest.approx(float(percent), abs=0.051)
            checked += 1
    assert checked == 18


def test_profiles_reproduce_what_they_were_made_from(found: StepTimes) -> None:
    """Splitwise's medians as tables, DistServe's fit as a profile: to the rounding of the published figures."""
    for name, n in (("e2e, engine of 2023", 18), ("fit, engine of 2024", 4)):
        errors = group(found.groups, name, "its own profile")
        assert errors.n == n
        assert errors.worst is not None
        assert abs(errors.worst) < 0.02


def test_every_outlier_is_explained(found: StepTimes) -> None:
    far = [s for s in found.steps if s.scored and s.roofline_error is not None and abs(s.roofline_error) > 0.25]
    assert len(far) >= 10
    assert all(step.why and step.why != "not explained" for step in far)
    assert {step.source for step in far} == {"Splitwise"}


def test_an_engine_that_waits_for_its_host_shows_it_in_the_rows_themselves() -> None:
    """The explanation's grounds: four more GPUs change nothing for one sequence."""
    ms = {(s.gpu, s.tp): s.ms for s in FILES.steps if (s.source, s.phase, s.batch) == ("Splitwise", "decode", 1)}
    assert ms["a100-80g", 8] == pytest.approx(ms["a100-80g", 4], rel=0.01)
    for gpu in ("a100-80g", "h100"):
        rows = {s.tokens: s.ms for s in FILES.steps if (s.gpu, s.tp, s.phase) == (gpu, 8, "prefill")}
        assert 1.4 < (rows[8192] / 8192) / (rows[2048] / 2048) < 1.56


def test_mixed_steps_with_an_assumed_chunk(found: StepTimes) -> None:
    """H100 and H200 agree with a chunk of 2,048 tokens; L40S does not, and the page says so."""
    by_gpu = {step.gpu: step for step in found.mixed if step.cost == "roofline"}
    assert abs(by_gpu["h100"].error) < 0.05
    assert abs(by_gpu["h200"].error) < 0.10
    assert all(step.slows_prefill < 0.10 for step in found.mixed), "measured: decode slows prefill by less than 10 %"
    assert by_gpu["l40s"].error > 0.5
    assert by_gpu["l40s"].implied_chunk_tokens == pytest.approx(1300, abs=50)
    assert any("2,048" in note and "L40S" in note for note in found.notes)


def test_the_files_hold_the_whole_sweeps() -> None:
    def count(phase: str) -> int:
        return sum(step.phase == phase for step in FILES.sweeps)

    assert (count("prefill"), count("decode")) == (144, 405)
    known = {source.name for source in FILES.sources.sources}
    assert {step.source for step in (*FILES.steps, *FILES.sweeps)} <= known


def test_a_broken_row_is_named() -> None:
    text = "gpu,model,tp,phase,batch,tokens,ms\nh100,m,1,prefill,1,256?,3\nh100,m,1,prefil,1,2,3\n"
    steps = parse_steps(text, "x.csv", "me")
    assert next(steps) == MeasuredStep(
        gpu="h100", model="m", tp=1, phase="prefill", batch=1, tokens=256, ms=3.0, source="me", doubtful=True
    )
    with pytest.raises(ConfigError, match=r"x\.csv: line 3: .*prefil"):
        next(steps)
