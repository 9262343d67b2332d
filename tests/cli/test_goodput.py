"""`pdemu goodput`: bad input is one line and exit 2; results are a table, a document and a folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from emulator.cli.goodput import parse_share
from emulator.core.records import read_records
from emulator.core.search_summary import SearchSummary
from emulator.study import searches
from tests.in_process import Ended, Pdemu
from tests.live.lab import SMALL

QUICK = ("--seeds", "2", "--tolerance", "20%")
USERS_ALONE = SMALL.read_text().replace(
    '{ process = "constant", rate_per_s = 10.0 }', '{ process = "closed_loop", users = 3 }'
)


Goodput = Callable[..., Ended]


@pytest.fixture
def goodput(pdemu: Pdemu) -> Goodput:
    """Runs `pdemu goodput`."""
    return partial(pdemu, "goodput")


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches need no workers, whose start takes longer."""
    monkeypatch.setattr(searches, "cores", lambda: 1)


BAD_OPTIONS: dict[str, tuple[list[str | Path], list[str]]] = {
    "no such file": (["nowhere.toml"], ["nowhere.toml", "cannot be read"]),
    "unknown deployment": ([SMALL, "--deployment", "2P1D"], ["'2P1D'", "colocated, 1P1D"]),
    "bandwidth without unit": ([SMALL, "--kv-bandwidth", "10G"], ["--kv-bandwidth", "'10G'", "Gbps"]),
    "no seeds": ([SMALL, "--seeds", "0"], ["--seeds 0", "from 1"]),
    "low of 0": ([SMALL, "--low", "0"], ["--low 0", "above 0"]),
    "high not finite": ([SMALL, "--high", "inf"], ["--high inf", "finite"]),
    "empty range": ([SMALL, "--low", "5", "--high", "2"], ["--low 5", "--high 2"]),
    "out of reach": ([SMALL, "--low", "1e9"], ["--low", "can be sent"]),
    "tolerance without a number": ([SMALL, "--tolerance", "tight"], ["--tolerance tight", "2%"]),
    "tolerance above 100%": ([SMALL, "--tolerance", "2"], ["--tolerance 2", "2%"]),
    "tolerance of nothing": ([SMALL, "--tolerance", "0%"], ["--tolerance 0%", "0.1%"]),
    "rate 0": ([SMALL, "--rate", "0"], ["--rate 0", "from 0.000001"]),
    "launcher without live": ([SMALL, "--launcher", "local"], ["--launcher local", "--live"]),
    "live in a simulation": ([SMALL, "--live", "--launcher", "simulate"], ["--launcher simulate", "local"]),
    "range of a fixed rate": ([SMALL, "--slo-scale", "--low", "2"], ["--slo-scale", "--rate"]),
    "no such trace": ([SMALL, "--trace", "none.csv"], ["none.csv", "cannot be read"]),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_a_bad_option_is_one_line_and_exit_2(case: str, tmp_path: Path, goodput: Goodput) -> None:
    args, expected = BAD_OPTIONS[case]
    goodput(*args, "--out", tmp_path / "o").check_refusal(expected)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("text", "args", "expected"),
    [
        (USERS_ALONE, [], ["no stream of the workload has a rate", "--slo-scale"]),
        (USERS_ALONE, ["--rate", "5"], ["no stream has a rate"]),
        (SMALL.read_text().replace("ttft_ms = 200\ntpot_ms = 30\n", ""), ["--slo-scale"], ["bounds no latency"]),
    ],
)
def test_a_topology_that_cannot_be_searched_is_one_line(
    text: str, args: list[str], expected: list[str], tmp_path: Path, goodput: Goodput
) -> None:
    path = tmp_path / "small.toml"
    path.write_text(text)
    goodput(path, *args, "--out", tmp_path / "o").check_refusal(expected)
    assert not (tmp_path / "o").exists()


def test_results_are_never_laid_over_others(tmp_path: Path, goodput: Goodput) -> None:
    (tmp_path / "precious").write_text("mine")
    goodput(SMALL, "--out", tmp_path).check_refusal(["--out", "not empty"])


def test_every_trial_is_shown_and_the_document_holds_them_all(tmp_path: Path, goodput: Goodput) -> None:
    ended = goodput(SMALL, *QUICK, "--json", "--out", tmp_path / "o")
    assert ended.code == 0, ended.err
    found = msgspec.json.decode(ended.out, type=SearchSummary)
    assert [(row.deployment, row.kv_bandwidth_bps) for row in found.goodput] == [("colocated", None), ("1P1D", 2e8)]
    lines = ended.err.splitlines()
    for row in found.goodput:
        label = "1P1D@0.2Gbps" if row.kv_bandwidth_bps else row.deployment
        shown = [line for line in lines if line.startswith(label) and ("passes" in line or "fails" in line)]
        assert len(shown) == len(row.trials)
        assert f"goodput {row.rate_per_s:.4g}/s" in ended.err
        assert sum("passes" in line for line in shown) == sum(trial.passes for trial in row.trials)
    assert (tmp_path / "o" / "summary.json").read_text() == ended.out
    assert found.advantages[0] is None
    assert found.advantages[1] is not None


@pytest.mark.usefixtures("one_process")
def test_the_table_names_what_bounds_each_row(tmp_path: Path, goodput: Goodput) -> None:
    ended = goodput(SMALL, "--seeds", "1", "--high", "10", "--deployment", "1P1D", "--out", tmp_path / "o")
    assert ended.code == 0, ended.err
    assert "≥ 10" in ended.out
    assert "1P1D at 200Mbps: passes at 10/s, the end of the range (--high); its goodput may be higher" in ended.out


@pytest.mark.usefixtures("one_process")
def test_the_tightest_slo_is_searched_without_a_rate_too(tmp_path: Path, goodput: Goodput) -> None:
    path = tmp_path / "users.toml"
    path.write_text(USERS_ALONE)
    for topology, rate in ((SMALL, 10.0), (path, None)):
        ended = goodput(topology, "--slo-scale", "--seeds", "2", "--json", "--out", tmp_path / f"o{rate}")
        assert ended.code == 0, ended.err
        found = msgspec.json.decode(ended.out, type=SearchSummary)
        assert [row.rate_per_s for row in found.slo_scale] == [rate, rate]
        for row in found.slo_scale:
            assert row.factor is not None
            assert f"SLO × {row.factor:.4g}" in ended.err
    table = goodput(SMALL, "--slo-scale", "--seeds", "2", "--rate", "20", "--out", tmp_path / "table")
    assert "at 20 requests/s" in table.out


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), ("0.02", 0.02), (" 100% ", 1.0), ("0.5 %", 0.005)])
def test_a_share_is_a_percentage_or_a_fraction(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.live
def test_the_points_found_are_run_live(tmp_path: Path, goodput: Goodput) -> None:
    out = tmp_path / "o"
    ended = goodput(SMALL, "--seeds", "1", "--high", "10", "--deployment", "1P1D", "--live", "--json", "--out", out)
    assert ended.code == 0, ended.err
    found = msgspec.json.decode(ended.out, type=SearchSummary)
    (point,) = found.live
    assert (point.rate_per_s, point.launcher, point.shaping, point.simulated) == (10.0, "local", "paced", 1.0)
    assert (point.live is None) == (point.withheld is not None)
    assert len(read_records((out / "1P1D@0.2Gbps-at-10" / "1P1D@0.2Gbps" / "records.jsonl").read_bytes())) == 15
