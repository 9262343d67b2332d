"""`--launcher simulate`: the same records, folder and verdict as a live run, in virtual time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from emulator.core.records import read_records, read_steps
from tests.in_process import Pdemu
from tests.live.lab import SMALL


def test_a_simulated_comparison_leaves_what_a_live_one_does(tmp_path: Path, pdemu: Pdemu) -> None:
    ended = [pdemu("compare", SMALL, "--launcher", "simulate", "--json", "--out", tmp_path / name) for name in "ab"]
    assert [one.code for one in ended] == [0, 0]
    documents = [msgspec.json.decode(one.out) for one in ended]
    assert documents[0] == documents[1], "nothing in it is random"
    assert (documents[0]["launcher"], documents[0]["shaping"]) == ("simulate", "modelled")
    assert [run["completed"] for run in documents[0]["runs"]] == [15, 15]
    two_h100_at_10_per_s = {"usd_per_h": 5.90, "requests_per_usd": 36_000 / 5.90, "requests_per_joule": 10 / 1_400}
    for run in documents[0]["runs"]:
        assert {name: run["costs"][name] for name in two_h100_at_10_per_s} == pytest.approx(two_h100_at_10_per_s)
        assert (run["costs"]["weight_bytes"], run["costs"]["weight_copies"]) == (80_000_000, 2)
    assert len(documents[0]["verdict"]) == 1
    folder = tmp_path / "a" / "1P1D@0.2Gbps"
    records = read_records((folder / "records.jsonl").read_bytes())
    assert len(records) == 15
    assert read_steps((folder / "steps.jsonl").read_bytes())
    assert msgspec.json.decode((folder / "manifest.json").read_bytes())["state"] == "complete"
    transfers = [msgspec.json.decode(line) for line in (folder / "transfers.jsonl").read_bytes().splitlines()]
    assert sum(row["parts"][0][2] for row in transfers) == sum(4096 * record.prompt_tokens for record in records)
    assert (tmp_path / "a" / "report.html").exists()


@pytest.mark.parametrize("option", [("--scale", "2"), ("--shaping", "paced")])
def test_what_a_simulation_does_not_have_is_refused(option: tuple[str, str], tmp_path: Path, pdemu: Pdemu) -> None:
    pdemu("compare", SMALL, "--launcher", "simulate", *option, "--out", tmp_path / "o").check_refusal([option[0]])
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("at_most", "code"), [(1e9, 0), (1e-9, 1)])
def test_a_checked_comparison_ends_by_whether_it_is_as_expected(
    at_most: float, code: int, tmp_path: Path, pdemu: Pdemu
) -> None:
    topology = tmp_path / "expects.toml"
    expectation = f'sentence = "So it is"\ndeployment = "1P1D"\nmetric = "ttft_ms.p50"\nat_most = {at_most}'
    unmeasured = (
        'sentence = "Or so"\ndeployment = "1P1D"\nkv_bandwidth = "7Gbps"\nmetric = "ttft_ms.p50"\nat_most = 1.0'
    )
    topology.write_text(f"{SMALL.read_text()}\n[[expectations]]\n{expectation}\n[[expectations]]\n{unmeasured}\n")
    simulated = ("compare", topology, "--launcher", "simulate", "--json")
    checked = pdemu(*simulated, "--check", "--out", tmp_path / "checked")
    assert checked.code == code, checked.err
    found = msgspec.json.decode(checked.out)
    assert [expected["holds"] for expected in found["expectations"]] == [code == 0, None]
    assert found["parity"] == [], "there is nothing to simulate beside it"
    assert pdemu(*simulated, "--out", tmp_path / "plain").code == 0
