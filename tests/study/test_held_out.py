"""The roofline against figures that nothing was fitted to: complete, apart from the rest, and each outlier named."""

from __future__ import annotations

import statistics

import pytest

from emulator.core.catalog import find_gpu, find_model
from emulator.core.cost import Chunk, StepShape, cost_model
from emulator.lab.catalog_files import load_catalog
from emulator.report.held_out_table import HeldOut, HeldOutTime
from emulator.study.held_out import FAR, held_out_errors, load_held_out, validate_held_out
from emulator.study.step_times import load_files

CATALOG, FILES = load_catalog(), load_held_out()


@pytest.fixture(scope="module")
def found() -> HeldOut:
    return validate_held_out(CATALOG)


def row(found: HeldOut, *of: str | int) -> HeldOutTime:
    """By source, GPU, model, phase, batch and tokens."""
    (one,) = [r for r in found.rows if (r.source, r.gpu, r.model, r.phase, r.batch, r.tokens) == of]
    return one


def test_every_figure_is_there_scored_or_listed_with_its_reason(found: HeldOut) -> None:
    assert len(found.rows) == len(FILES.steps) == 173
    assert sum(r.scored for r in found.rows) == 140
    assert {step.source for step in FILES.steps} == set(FILES.sources)
    for r in found.rows:
        assert r.scored == (not r.reason)
        assert r.scored or r.assumed, "what is listed says what is assumed"


def test_nothing_held_out_is_among_what_efficiencies_were_fitted_to() -> None:
    known = {source.name for source in load_files().sources.sources}
    assert not known & set(FILES.sources)


def test_a_run_is_its_prefill_and_every_decode_step(found: HeldOut) -> None:
    r = row(found, "TensorRT-LLM 0.9", "h100", "Llama-2-7B", "run", 56, 2048)
    cost = cost_model(
        cost="roofline",
        model=find_model(CATALOG, "Llama-2-7B"),
        gpu=find_gpu(CATALOG, "h100"),
        tp=1,
        weights="fp8",
        kv_element_bytes=1,
    )
    steps = [cost.step_s(StepShape((), 56, 56 * context)) for context in range(2048, 2048 + 2047)]
    prefill = cost.step_s(StepShape((Chunk(2048, 0),) * 56, 0, 0))
    assert r.roofline_ms == pytest.approx((prefill + sum(steps)) / 2048 * 1e3)
    assert r.ms == pytest.approx(56 / 2826 * 1e3)


def test_every_outlier_says_why_or_that_nothing_explains_it(found: HeldOut) -> None:
    for r in found.rows:
        assert bool(r.why) == (r.scored and abs(r.error) > FAR)


def test_it_says_that_its_errors_were_known(found: HeldOut) -> None:
    assert any("their errors were known" in note for note in found.notes)
    assert any("not findings" in note for note in found.notes)


def test_what_explains_an_outlier_is_a_calculation(found: HeldOut) -> None:
    impossible = row(found, "TensorRT-LLM 0.9", "a100-80g", "Mixtral-8x7B", "run", 32, 2048)
    assert "115% of the datasheet's memory rate" in impossible.why
    newer = row(found, "TensorRT-LLM 0.6.1", "h100", "Llama-2-70B", "run", 64, 2048)
    assert "TensorRT-LLM 0.9 takes 31.7 ms for the same" in newer.why
    assert "once for every query head" in newer.why
    host = row(found, "TensorRT-LLM 0.9", "h100", "Llama-2-7B", "prefill", 1, 128)
    assert "on h200, whatever the GPU's rates" in host.why
    reduced = row(found, "TensorRT-LLM 0.9", "h200", "Llama-2-70B", "prefill", 1, 128)
    assert "NCCL's ring" in reduced.why
    compiled = [r for r in found.rows if r.source == "gpt-fast" and r.tp == 8 and r.model == "Llama-2-7B"]
    assert "fixed time of layers" in compiled[0].why
    unexplained = row(found, "TensorRT-LLM 0.9", "h100", "Mixtral-8x7B", "prefill", 1, 2048)
    assert unexplained.why == "not explained"


def test_errors_by_kind_are_those_of_the_scored_rows(found: HeldOut) -> None:
    for kind, n in (("16-bit dense", 36), ("fp8 dense", 72), ("16-bit MoE", 12), ("fp8 MoE", 18), ("fp8 MLA", 2)):
        (errors,) = [g for g in found.groups if g.name == kind]
        of_kind = [r.error for r in found.rows if r.kind == kind and r.scored]
        assert errors.n == len(of_kind) == n
        assert errors.median == pytest.approx(statistics.median(abs(error) for error in of_kind))
        assert errors.worst == max(of_kind, key=abs)
        assert not errors.in_sample


def test_errors_of_one_gpu_are_part_of_the_kinds(found: HeldOut) -> None:
    (of_gpu,) = [g for g in found.groups if g.name == "fp8 dense, h100"]
    assert held_out_errors(CATALOG, "h100", "fp8 dense").median == of_gpu.median
    assert held_out_errors(CATALOG, "h100", "fp8 dense", listed=True).n == 15
    assert held_out_errors(CATALOG, "b200", "fp8 dense").n == 0
