"""`pdemu profile` and `pdemu validate --step-times`, as a user types them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from emulator.core.catalog import parse_catalog
from tests.in_process import Pdemu

MEASURED = """phase,tokens,batch,ms
prefill,128,1,15.2
prefill,512,1,36.5
prefill,2048,1,126.0
prefill,8192,1,560.0
decode,512,1,11.8
decode,1024,8,12.6
decode,2048,64,25.1
decode,4096,64,36.0
"""


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(MEASURED)
    return path


def test_a_fit_prints_a_profile_on_standard_output_and_its_errors_beside(measured: Path, pdemu: Pdemu) -> None:
    ended = pdemu("profile", "fit", measured, "--model", "Llama-3.1-8B", "--gpu", "a100-80g", "--name", "ours")
    assert ended.code == 0
    (profile,) = parse_catalog({"out": ended.out}).profiles
    assert (profile.name, profile.model, profile.gpu, profile.tp) == ("ours", "Llama-3.1-8B", "a100-80g", 1)
    for line in range(2, 10):
        assert f"\n {line} " in ended.err
    assert "prefill: 4 rows, mean error" in ended.err
    assert "Name the model" not in ended.err


def test_a_fit_without_names_says_that_they_are_missing(measured: Path, pdemu: Pdemu) -> None:
    ended = pdemu("profile", "fit", measured)
    assert ended.code == 0
    assert parse_catalog({"out": ended.out}).profiles[0].name == "mine"
    assert "--model and --gpu" in ended.err


def test_a_fit_as_json_has_every_row_and_error(measured: Path, pdemu: Pdemu) -> None:
    ended = pdemu("profile", "fit", measured, "--json")
    found = msgspec.json.decode(ended.out)
    assert [row["line"] for row in found["rows"]] == list(range(2, 10))
    assert all(abs(row["fitted_ms"] / row["ms"] - 1 - row["error"]) < 1e-9 for row in found["rows"])
    assert 0 <= found["prefill"]["mean"] <= abs(found["prefill"]["worst"]) < 0.05


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("phase,tokens,batch,ms\nprefill,128,1,fast\n", ["mine.csv: line 2", "'fast'"]),
        ("phase,tokens,batch,ms\n", ["mine.csv", "0 prefill rows"]),
        (MEASURED.replace("ms\n", "ms,tp\n", 1).replace(".2\n", ".2,0\n", 1), ["mine.csv: line 3"]),
    ],
)
def test_a_file_that_makes_no_sense_is_one_line(text: str, expected: list[str], tmp_path: Path, pdemu: Pdemu) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    pdemu("profile", "fit", path).check_refusal(expected)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, pdemu: Pdemu) -> None:
    pdemu("profile", "fit", tmp_path / "none.csv").check_refusal(["none.csv", "cannot be read"])
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    pdemu("profile", "fit", tmp_path / "binary.csv").check_refusal(["binary.csv", "not text"])


# --- show -------------------------------------------------------------------------------------------------------


def test_one_point_is_a_time_a_bound_and_a_source(pdemu: Pdemu) -> None:
    args = ("profile", "show", "llama-3.1-8b", "H100", "--tp", "1", "--json")
    decode = msgspec.json.decode(pdemu(*args, "--phase", "decode", "--batch", "8", "--tokens", "1024").out)
    assert decode.keys() == {"ms", "bound", "source"}
    assert decode["ms"] == pytest.approx(6.95, abs=0.01)
    assert decode["bound"] == "memory"
    assert "roofline" in decode["source"]
    prefill = msgspec.json.decode(pdemu(*args, "--phase", "prefill", "--batch", "1", "--tokens", "2048").out)
    assert prefill["ms"] == pytest.approx(43.5, rel=0.05)
    assert prefill["bound"] == "compute"
    four = msgspec.json.decode(pdemu(*args, "--phase", "prefill", "--batch", "4", "--tokens", "512").out)
    assert four["ms"] == pytest.approx(42.3, rel=0.08), "tokens are those of each prompt"


TOO_LARGE = {
    "context": (["Llama-3.1-8B", "h100", "--phase", "prefill", "--tokens", "200000"], "131,072"),
    "memory": (["Llama-3.1-8B", "h100", "--phase", "decode", "--batch", "640", "--tokens", "8192"], "tokens of KV"),
    "weights": (["DeepSeek-V3", "h200", "--phase", "decode", "--tokens", "10"], "weights of DeepSeek-V3"),
}


@pytest.mark.parametrize("case", TOO_LARGE)
def test_a_point_that_fits_no_such_machine_is_marked(case: str, pdemu: Pdemu) -> None:
    args, why = TOO_LARGE[case]
    found = msgspec.json.decode(pdemu("profile", "show", *args, "--json").out)
    assert found.keys() == {"ms", "bound", "source", "fits", "note"}
    assert found["fits"] is False
    assert why in found["note"]
    text = pdemu("profile", "show", *args).out
    assert " ms*, bound by" in text
    assert f"* {found['note']}" in text


COMPARED = {
    "16-bit dense": (["Llama-3.1-8B", "h100"], ["dense models with 16-bit weights, mean error 3-8 %"], ["held out"]),
    "fp8 dense": (["Llama-3.1-8B", "h100", "--weights", "fp8"], ["30 figures of fp8 dense models", "70.9 %"], []),
    "fp8 assumed": (["Llama-3.1-8B", "l40s", "--weights", "fp8"], ["assumed to be that in 16 bits"], []),
    "MoE": (["Mixtral-8x7B", "a100-80g", "--tp", "2"], ["12 figures of 16-bit MoE models"], ["not compared"]),
    "MLA": (["DeepSeek-V3", "h200", "--tp", "8", "--weights", "fp8"], ["2 figures of fp8 MLA models"], []),
    "never compared": (["Mixtral-8x7B", "b200"], ["16-bit MoE models on b200 were not compared with any"], []),
}


@pytest.mark.parametrize("case", COMPARED)
def test_the_source_states_errors_for_what_was_compared_alone(case: str, pdemu: Pdemu) -> None:
    args, says, says_not = COMPARED[case]
    made = pdemu("profile", "show", *args, "--phase", "decode", "--tokens", "1000", "--json")
    source = msgspec.json.decode(made.out)["source"]
    assert all(text in source for text in says)
    assert not any(text in source for text in says_not)


def test_a_point_of_a_profile_and_of_a_table(pdemu: Pdemu) -> None:
    def point(*args: str) -> dict[str, object]:
        made = pdemu("profile", "show", *args, "--phase", "decode", "--batch", "64", "--tokens", "576", "--json")
        return msgspec.json.decode(made.out, type=dict[str, object])

    fitted = point("OPT-13B", "a100-80g", "--profile", "distserve-opt-13b-tp1")
    assert fitted["ms"] == pytest.approx(19.9347 + 0.000626936 * 64 * 576 + 0.038507 * 64, rel=1e-4)
    assert fitted["bound"] == "memory"
    table = point("Llama-2-70B", "h100", "--tp", "8", "--profile", "splitwise-llama-2-70b-h100-tp8-medians")
    assert table["ms"] == pytest.approx(50.16)
    assert "medians" in str(table["source"])


def test_a_profile_on_a_gpu_without_efficiencies_has_no_bound(tmp_path: Path, pdemu: Pdemu) -> None:
    pdemu("profile", "show", "OPT-13B", "l4").check_refusal(["l4", "no measured mfu_linear"])


def test_the_table_and_the_plot_are_shown(pdemu: Pdemu, tmp_path: Path) -> None:
    page = tmp_path / "roofline.html"
    ended = pdemu("profile", "show", "Llama-3.1-8B", "h100", "--out", page)
    assert ended.code == 0
    for expected in ("Prefill of one prompt", "Decode step", "compute", "memory", "p prefill, d decode", "*"):
        assert expected in ended.out
    assert "Llama-3.1-8B on 1 x h100" in page.read_text(encoding="utf-8")
    assert "<script src=" not in page.read_text(encoding="utf-8"), "it opens offline"


def test_the_whole_as_json_keeps_under_the_roof(pdemu: Pdemu) -> None:
    found = msgspec.json.decode(pdemu("profile", "show", "Llama-3.1-70B", "h100", "--tp", "8", "--json").out)
    roof = found["roof"]
    for step in found["steps"]:
        most = min(roof["peak_tflops"], step["flops_per_byte"] * roof["memory_gb_per_s"] / 1e3)
        assert 0 < step["tflops"] < most
    assert {step["bound"] for step in found["steps"]} >= {"compute", "memory"}


def test_a_table_shows_only_what_was_measured(pdemu: Pdemu) -> None:
    args = ("Llama-2-70B", "h100", "--tp", "8", "--profile", "splitwise-llama-2-70b-h100-tp8-medians", "--json")
    steps = msgspec.json.decode(pdemu("profile", "show", *args).out)["steps"]
    assert {step["batch"] for step in steps if step["phase"] == "decode"} == {1, 2, 4, 8, 16, 32, 64}


REFUSED = {
    "unknown model": (["Llama-9", "h100"], ["'Llama-9'"]),
    "unknown gpu": (["OPT-13B", "h900"], ["'h900'"]),
    "unknown profile": (["OPT-13B", "h100", "--profile", "x"], ["no profile 'x'", "distserve-opt-13b-tp1"]),
    "another's profile": (["OPT-13B", "h100", "--profile", "article-70b"], ["article-70b", "Llama-2-70B"]),
    "tp": (["Qwen2.5-7B", "h100", "--tp", "8"], ["tp = 8", "28 heads"]),
    "tp of KV heads": (["Qwen2.5-7B", "h100", "--tp", "7"], ["tp = 7", "4 KV heads"]),
    "absurd tokens": (
        ["OPT-13B", "h100", "--phase", "prefill", "--tokens", "99999999999999999999999"],
        ["--tokens 99999999999999999999999", "at most 65,536 requests of 1,073,741,824 tokens"],
    ),
    "absurd batch": (["OPT-13B", "h100", "--phase", "prefill", "--tokens", "1", "--batch", "100000"], ["65,536"]),
    "half a point": (["OPT-13B", "h100", "--phase", "decode"], ["--tokens"]),
    "no phase": (["OPT-13B", "h100", "--tokens", "5"], ["--phase"]),
    "no request": (["OPT-13B", "h100", "--phase", "decode", "--tokens", "5", "--batch", "0"], ["--batch 0"]),
    "no token": (["OPT-13B", "h100", "--phase", "prefill", "--tokens", "0"], ["--tokens 0"]),
    "fp8 on a100": (["OPT-13B", "a100-80g", "--weights", "fp8"], ["a100-80g", "fp8"]),
    "beyond a table": (
        ["Llama-2-70B", "h100", "--tp", "8", "--profile", "splitwise-llama-2-70b-h100-tp8-medians",
         "--phase", "decode", "--tokens", "100", "--batch", "65"],
        ["65", "64 sequences"],
    ),
    "below a table": (
        ["Llama-2-70B", "h100", "--tp", "8", "--profile", "splitwise-llama-2-70b-h100-tp8-medians",
         "--phase", "prefill", "--tokens", "100"],
        ["below the 128"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shown_is_one_line(case: str, pdemu: Pdemu) -> None:
    args, expected = REFUSED[case]
    pdemu("profile", "show", *args).check_refusal(expected)


# --- validate ---------------------------------------------------------------------------------------------------


def test_step_times_are_validated_in_words_and_as_json(pdemu: Pdemu) -> None:
    ended = pdemu("validate", "--step-times")
    assert ended.code == 0
    for expected in ("in-sample", "Listed, not scored", "Errors by kind", "median 10%", "sweeps", "implied chunk"):
        assert expected in ended.out
    for expected in (
        "Held out",
        "Held out, listed, not scored",
        "Held out: errors by kind",
        "fp8 MoE",
        "[1]",
        "assumed: ",
    ):
        assert expected in ended.out
    found = msgspec.json.decode(pdemu("validate", "--step-times", "--json").out)
    assert len(found["steps"]) == 41
    assert all(errors["within"] is not False for errors in (*found["groups"], *found["sweeps"]))
    assert found["mixed"][0]["assumed_chunk_tokens"] == 2048
    assert {row["kind"] for row in found["held_out"]["rows"]} == {
        "16-bit dense", "fp8 dense", "16-bit MoE", "fp8 MoE", "fp8 MLA"
    }  # fmt: skip


def test_step_times_take_no_name(pdemu: Pdemu) -> None:
    pdemu("validate", "article", "--step-times").check_refusal(["--step-times", "no NAME"])
