"""`pdemu sweep` as a user runs it: one document, an end at any time, and bad input in one line."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.in_process import Pdemu
from tests.live.lab import PDEMU, SMALL, all_gone, children_of, eventually, json_of, pdemu

LONG = ["--rate", ",".join(map(str, range(10, 50))), "--duration", "2", "--workers", "2"]


def _begin(out: Path) -> subprocess.Popen[str]:
    command = [*PDEMU, "sweep", str(SMALL), *LONG, "--out", str(out)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = out / "points.jsonl"
    assert eventually(lambda: journal.exists() and journal.stat().st_size > 0), "no point within a minute"
    return started


@pytest.mark.live
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_ended_leaves_no_process_and_goes_on_later(how: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "s"
    started = _begin(out)
    workers = children_of(started.pid)
    started.send_signal(how)
    _, err = started.communicate(timeout=30)
    assert all_gone(workers, 10)
    done = (out / "points.jsonl").read_bytes().count(b"\n")
    assert 0 < done < 40
    if how != signal.SIGKILL:
        assert started.returncode == 130
        assert f"of 40 points are in {out}" in err
        assert err.strip().splitlines()[-1] == "pdemu: interrupted"
        assert "Traceback" not in err
    resumed = pdemu("sweep", SMALL, *LONG, "--out", out)
    assert resumed.returncode == 0, resumed.stderr
    assert f"{done} of 40 points are in {out} already" in resumed.stderr
    assert (out / "runs.csv").read_text().count("\n") == 1 + 80


@pytest.mark.live
def test_the_command_prints_one_document_and_says_how_far_it_is(tmp_path: Path) -> None:
    grid = ["--kv-bandwidth", "1Gbps,50Mbps", "--rate", "20,5"]
    args: list[str | Path] = ["sweep", SMALL, *grid, "--json", "--out", tmp_path / "s"]
    result = pdemu(*args)
    document = json_of(result)
    assert document["axes"]["kv_bandwidth_bps"] == [5e7, 1e9]
    assert document["axes"]["rate_per_s"] == [5, 20]
    assert len(document["runs"]) == 8
    assert len(document["outcomes"]) == len(document["best"]) == 4
    assert "4/4 points" in result.stderr
    again = pdemu(*args)
    assert json_of(again) == document
    assert "4 of 4 points are in" in again.stderr


BAD_OPTIONS = {
    "bandwidth without unit": (["--kv-bandwidth", "10G"], ["--kv-bandwidth: '10G'", "Gbps"]),
    "bandwidth twice": (["--kv-bandwidth", "1Gbps,1000Mbps"], ["--kv-bandwidth", "given twice"]),
    "rate 0": (["--rate", "2,0"], ["--rate: '0'", "above 0"]),
    "rate no number": (["--rate", "fast"], ["--rate: 'fast'", "such as 2.5"]),
    "prompt no number": (["--prompt", "1e3"], ["--prompt: '1e3'", "such as 1000"]),
    "prompt empty": (["--prompt", "10,"], ["--prompt: ''"]),
    "output 0": (["--output", "0"], ["--output: '0'"]),
    "ratio": (["--ratio", "2P2D,4"], ["--ratio: '4' is not a ratio", "2P2D"]),
    "ratio twice": (["--ratio", "2P2D,2P2D"], ["2P2D is there twice"]),
    "deployment": (["--deployment", "2P2D"], ["'2P2D'", "colocated, 1P1D"]),
    "seeds 0": (["--seeds", "0"], ["--seeds 0", "from 1"]),
    "workers 0": (["--workers", "0"], ["--workers 0", "from 1"]),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_a_bad_option_is_one_line_and_exit_2(case: str, tmp_path: Path, pdemu: Pdemu) -> None:
    args, expected = BAD_OPTIONS[case]
    pdemu("sweep", SMALL, *args, "--out", tmp_path / "o").check_refusal(expected)
    assert not (tmp_path / "o").exists()
