"""`pdemu trace`, and the options of a trace on the commands that replay one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from emulator.core.records import read_records
from emulator.core.traffic import Trace
from emulator.lab.topology_files import load_topology
from tests.in_process import Ended, Pdemu
from tests.live.lab import SMALL

HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
ROWS = [(0, 100, 4), (0.2, 0, 0), (0.4, 200, 5), (1.0, 1020, 5), (9.0, 120, 6)]


@pytest.fixture
def burst(tmp_path: Path) -> Path:
    """A BurstGPT trace: one row failed, one exceeds the context of SMALL's model (1,024), one comes late."""
    path = tmp_path / "burst.csv"
    path.write_text("\n".join([HEADER, *(f"{t},GPT-4,{p},{o},{p + o},API log" for t, p, o in ROWS)]))
    return path


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """Lengths alone."""
    path = tmp_path / "lengths.csv"
    path.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *(f"{n + 50},3" for n in range(40))]))
    return path


def _compare(pdemu: Pdemu, tmp_path: Path, *args: str | Path) -> Ended:
    return pdemu("compare", SMALL, "--launcher", "simulate", "--json", "--out", tmp_path / "o", *args)


# --- pdemu trace --------------------------------------------------------------------------------------------------


def test_a_trace_is_told_as_text(burst: Path, pdemu: Pdemu) -> None:
    ended = pdemu("trace", burst)
    assert ended.code == 0
    assert ended.err == ""
    lines = [line.strip() for line in ended.out.splitlines()]
    assert lines[:5] == [
        f"{burst}: burstgpt, times in s, the default for burstgpt",
        "5 rows read, 4 used",
        "dropped: 1 failed (0 output tokens)",
        "not looked at: Model, Total tokens, Log Type",
        "9.000 s, 0.3333 requests/s, CV of inter-arrivals 1.179",
    ]
    assert lines[6].split() == ["prompt", "100", "160", "360", "774", "995.4", "1,020"]


def test_a_trace_is_told_as_json(burst: Path, pdemu: Pdemu) -> None:
    ended = pdemu("trace", burst, "--json", "--max-model-len", "1024", "--max-context", "truncate", "--limit", "3")
    found = msgspec.json.decode(ended.out)
    assert found["reading"] == {
        "file": str(burst),
        "format": "burstgpt",
        "time_unit": "s",
        "time_unit_given": False,
        "rows_read": 5,
        "rows_used": 3,
        "dropped": {"no_output_tokens": 1, "beyond_limit": 1},
        "truncated": 1,
        "over_context": 0,
        "context_tokens": 1024,
        "steps_back": 0,
        "ignored": ["Model", "Total tokens", "Log Type"],
    }
    assert (found["duration_s"], found["rate_per_s"]) == (1.0, 2.0)
    assert found["prompt_tokens"]["max"] == 1019


def test_a_rate_stretches_times_and_keeps_their_shape(burst: Path, pdemu: Pdemu) -> None:
    own, faster = (msgspec.json.decode(pdemu("trace", burst, "--json", *more).out) for more in ([], ["--rate", "3"]))
    assert faster["rate_per_s"] == pytest.approx(3.0)
    assert faster["duration_s"] == pytest.approx(1.0)
    assert faster["inter_arrival_cv"] == pytest.approx(own["inter_arrival_cv"])


def test_lengths_alone_are_told_without_a_rate(lengths: Path, pdemu: Pdemu) -> None:
    assert f"{lengths}: vidur, lengths only, no times" in pdemu("trace", lengths).out
    found = msgspec.json.decode(pdemu("trace", lengths, "--json").out)
    assert (found["duration_s"], found["rate_per_s"], found["inter_arrival_cv"]) == (None, None, None)


BAD_OPTIONS = {
    "rate 0": (["--rate", "0"], ["--rate 0", "from 0.000001 to 1,000,000"]),
    "rate nan": (["--rate", "nan"], ["--rate nan", "from 0.000001"]),
    "rate too low": (["--rate", "1e-300"], ["--rate 1e-300", "from 0.000001"]),
    "rate too high": (["--rate", "1e300"], ["--rate 1e+300", "to 1,000,000"]),
    "limit 0": (["--limit", "0"], ["--limit 0", "at least 1"]),
    "no span": (["--slice", "9:3"], ["--slice", "'9:3'", "its end must come after its start"]),
    "unknown unit": (["--trace-time-unit", "min"], ["--trace-time-unit", "ms"]),
    "unknown format": (["--trace-format", "azur"], ["--trace-format", "azure"]),
    "another format": (["--trace-format", "azure"], ["line 1: column ContextTokens is missing"]),
    "context of which model": (["--max-context", "drop"], ["--max-context drop", "--max-model-len"]),
    "a context of one token": (["--max-model-len", "1"], ["--max-model-len 1", "at least 2"]),
    "nothing left": (["--slice", "100:"], ["no request is left of 5 rows: 5 outside the slice"]),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_a_bad_option_is_one_line_and_exit_2(case: str, burst: Path, pdemu: Pdemu) -> None:
    args, expected = BAD_OPTIONS[case]
    pdemu("trace", burst, *args).check_refusal(expected)


def test_a_trace_that_is_not_there_or_is_no_text_is_one_line_and_exit_2(tmp_path: Path, pdemu: Pdemu) -> None:
    pdemu("trace", tmp_path / "none.csv").check_refusal(["none.csv", "cannot be read"])
    (tmp_path / "utf16.csv").write_bytes(HEADER.encode("utf-16"))
    pdemu("trace", tmp_path / "utf16.csv").check_refusal(["utf16.csv", "not a text file in UTF-8"])


def test_lengths_alone_have_no_rate_to_change(lengths: Path, pdemu: Pdemu) -> None:
    pdemu("trace", lengths, "--rate", "3").check_refusal(["--rate 3", "have no times"])


# --- replayed -----------------------------------------------------------------------------------------------------


def test_compare_tells_how_a_trace_was_read_and_how_much_of_it_is_sent(
    burst: Path, tmp_path: Path, pdemu: Pdemu
) -> None:
    ended = _compare(pdemu, tmp_path, "--trace", burst)
    assert ended.code == 0
    assert (
        f"trace {burst}: burstgpt (times in s, the default for burstgpt): 4 of 5 rows used; "
        "dropped: 1 failed (0 output tokens); 1 exceed the context of 1,024 tokens and will fail; "
        "3 sent within 1.5 s, the other 1 not"
    ) in ended.err.splitlines()
    summary = msgspec.json.decode(ended.out)
    (replayed,) = summary["traces"]
    assert (replayed["stream"], replayed["sent"]) == ("trace", 3)
    assert replayed["trace"]["reading"]["rows_used"] == 4
    assert [(run["requests"], run["failed"]) for run in summary["runs"]] == [(3, 1)] * len(summary["runs"])


def test_options_choose_what_is_replayed(burst: Path, tmp_path: Path, pdemu: Pdemu) -> None:
    args = ("--trace", burst, "--slice", "0.3:", "--max-context", "truncate", "--limit", "2", "--duration", "5")
    ended = _compare(pdemu, tmp_path, *args)
    assert (
        "; 1 cut to the context of 1,024 tokens; 2 sent within 1.2 s: the trace ends before the duration of 5 s"
        in ended.err
    )
    (folder,) = (tmp_path / "o").glob("colocated*")
    records = sorted(read_records((folder / "records.jsonl").read_bytes()), key=lambda record: record.scheduled_s)
    assert [(r.scheduled_s, r.prompt_tokens, r.max_tokens) for r in records] == [(0.0, 200, 5), (0.6, 1019, 5)]


def test_a_trace_that_ends_early_ends_the_window_too(burst: Path, tmp_path: Path, pdemu: Pdemu) -> None:
    ended = _compare(pdemu, tmp_path, "--trace", burst, "--rate", "2", "--duration", "60")
    assert ("4 sent within 2 s: the trace ends before the duration of 60 s, and rates are over 2 s") in ended.err
    for run in msgspec.json.decode(ended.out)["runs"]:
        assert (run["duration_s"], run["requested_rate"]) == (pytest.approx(2.0), pytest.approx(2.0))


def test_lengths_alone_come_at_random_at_the_rate_that_is_given(lengths: Path, tmp_path: Path, pdemu: Pdemu) -> None:
    refused = pdemu("compare", SMALL, "--launcher", "simulate", "--trace", lengths, "--out", tmp_path / "r")
    refused.check_refusal(["lengths.csv has lengths and no times", "--rate (rate_per_s)", "poisson"])
    ended = _compare(pdemu, tmp_path, "--trace", lengths, "--rate", "20")
    assert "vidur (lengths only, no times): 40 of 40 rows used; " in ended.err
    assert " sent at random (poisson) within 1.5 s" in ended.err
    (folder,) = (tmp_path / "o").glob("colocated*")
    records = sorted(read_records((folder / "records.jsonl").read_bytes()), key=lambda record: record.scheduled_s)
    assert [record.prompt_tokens for record in records] == [50 + n for n in range(len(records))]
    assert 15 < len(records) < 40
    assert len({record.scheduled_s for record in records}) == len(records)


def test_a_topology_has_the_options_as_keys_and_the_command_line_goes_before_them(
    burst: Path, tmp_path: Path, pdemu: Pdemu
) -> None:
    text = SMALL.read_text()
    start, end = text.index("[[workload.streams]]"), text.index("[kv_network]")
    keys = 'time_unit = "ms", limit = 2, slice = "0:1", sort = true, max_context = "drop", format = "burstgpt"'
    arrivals = f'arrivals = {{ process = "trace", file = "burst.csv", {keys} }}'
    path = tmp_path / "own.toml"
    path.write_text(f'{text[:start]}[[workload.streams]]\nname = "replay"\n{arrivals}\n{text[end:]}')
    found = load_topology(path).workload.streams[0].arrivals
    assert isinstance(found, Trace)
    assert (found.time_unit, found.limit, found.slice, found.max_context) == ("ms", 2, "0:1", "drop")
    simulated = ("compare", path, "--launcher", "simulate", "--json", "--duration", "12", "--out")
    by_keys = pdemu(*simulated, tmp_path / "a")
    assert "(times in ms): 2 of 5 rows used; dropped: 1 failed (0 output tokens), 1 longer than the" in by_keys.err
    over = pdemu(*simulated, tmp_path / "b", "--limit", "9", "--trace-time-unit", "s", "--slice", "0.1:")
    assert "(times in s): 2 of 5 rows used; dropped: 1 outside the slice, 1 failed" in over.err


def test_a_bad_span_in_a_topology_names_the_key(tmp_path: Path, pdemu: Pdemu) -> None:
    path = tmp_path / "bad.toml"
    text = SMALL.read_text()
    start, end = text.index("[[workload.streams]]"), text.index("[kv_network]")
    stream = 'name = "t"\narrivals = { process = "trace", file = "t.csv", slice = "5" }\n'
    path.write_text(f"{text[:start]}[[workload.streams]]\n{stream}{text[end:]}")
    pdemu("compare", path).check_refusal(["bad.toml: workload.streams[0].arrivals", "slice: '5'", "START:END"])


@pytest.mark.parametrize("command", ["compare", "goodput", "sweep", "break-even"])
def test_options_of_a_trace_need_one(command: str, pdemu: Pdemu) -> None:
    pdemu(command, SMALL, "--limit", "5").check_refusal(["--limit", "replays a trace", "--trace FILE"])


def test_goodput_tells_how_a_trace_was_read(burst: Path, tmp_path: Path, pdemu: Pdemu) -> None:
    args = ("--trace", burst, "--max-context", "drop", "--slo-scale", "--deployment", "colocated", "--seeds", "1")
    ended = pdemu("goodput", SMALL, *args, "--json", "--out", tmp_path / "o")
    assert "3 of 5 rows used; dropped: 1 failed (0 output tokens), 1 longer than the context" in ended.err
    (found,) = msgspec.json.decode(ended.out)["traces"]
    assert found["reading"]["rows_used"] == 3
