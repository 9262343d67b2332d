"""The command line: bad input is one line that says what, where and what would be right, and exit 2."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from emulator.lab.catalog_files import load_catalog
from emulator.lab.experiment import Conditions, prepare
from emulator.lab.topology_files import load_topology
from tests.in_process import Pdemu
from tests.live.lab import SMALL, TOPOLOGIES

TEXT = SMALL.read_text()


def _edited(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


BAD_TOPOLOGIES = {
    "unknown model": (_edited('model = "tiny"', 'model = "tinny"'), ["'tinny'", "did you mean 'tiny'"]),
    "unknown gpu": (_edited('gpu = "h100"', 'gpu = "h900"'), ["'h900'", "h100"]),
    "unknown profile": (_edited('"tiny-steps"', '"tiny-step"'), ["'tiny-step'", "tiny-steps"]),
    "misspelt key": (_edited("duration =", "duratoin ="), ["workload", "'duratoin'", "did you mean 'duration'"]),
    "bandwidth without unit": (_edited('"200Mbps"', '"10G"'), ["kv_network.bandwidth[0]", "10G", "Gbps"]),
    "bandwidth in bytes": (_edited('"200Mbps"', '"10GB/s"'), ["bits per second"]),
    "bandwidth twice": (_edited('["200Mbps"]', '["1Gbps", "1000Mbps"]'), ["kv_network", "given twice"]),
    "bandwidth 0": (_edited('"200Mbps"', '"0Gbps"'), ["greater than 0"]),
    "time without unit": (_edited('"1.5s"', "1.5"), ["workload.duration", "20s"]),
    "rate 0": (_edited("rate_per_s = 10.0", "rate_per_s = 0"), ["rate_per_s = 0", "> 0"]),
    "unknown process": (_edited('"constant"', '"konstant"'), ["'konstant'", "poisson"]),
    "prompt beyond context": (_edited("high = 300", "high = 2000"), ["'chat'", "2000", "1024"]),
    "weights that do not fit": (
        _edited("params_b = 0.02\nactive", "params_b = 200\nactive"),
        ["400.0 GB", "80 GB", "tp"],
    ),
    "KV memory too small": (
        _edited('role = "prefill" }', 'role = "prefill", gpu_memory_utilization = 0.00051 }'),
        ["1P1D", "prefill-0", "tokens"],
    ),
    "unequal hardware": (_edited("nodes = 2", "nodes = 3"), ["colocated (3 GPUs)", "1P1D (2 GPUs)"]),
    "decode alone": (_edited('{ role = "prefill" }, ', ""), ["deployments[1]", "prefill and decode"]),
    "not TOML": ("name = ", ["not valid TOML"]),
    "empty file": ("", ["key 'name' is missing"]),
}


@pytest.mark.parametrize("case", BAD_TOPOLOGIES)
def test_a_bad_topology_is_one_line_and_exit_2(case: str, tmp_path: Path, pdemu: Pdemu) -> None:
    text, expected = BAD_TOPOLOGIES[case]
    path = tmp_path / "bad.toml"
    path.write_text(text)
    _fails(pdemu, ["compare", str(path), "--out", str(tmp_path / "o")], expected)
    assert not (tmp_path / "o").exists()


BAD_OPTIONS = {
    "no such file": (["compare", "nowhere.toml"], ["nowhere.toml", "cannot be read"]),
    "a folder": (["compare", str(SMALL.parent)], ["cannot be read"]),
    "bandwidth without unit": (["compare", str(SMALL), "--kv-bandwidth", "10G"], ["--kv-bandwidth", "'10G'", "Gbps"]),
    "bandwidth twice": (["compare", str(SMALL), "--kv-bandwidth", "1Gbps,1000Mbps"], ["twice"]),
    "force in a simulation": (["compare", str(SMALL), "--launcher", "simulate", "--force"], ["--force", "simulation"]),
    "checksums in a simulation": (["compare", str(SMALL), "--launcher", "simulate", "--verify-kv"], ["--verify-kv"]),
    "check of a simulation": (["compare", str(SMALL), "--launcher", "simulate", "--check"], ["--check", "live"]),
    "rate 0": (["compare", str(SMALL), "--rate", "0"], ["--rate 0", "from 0.000001"]),
    "rate not a number": (["compare", str(SMALL), "--rate", "fast"], ["--rate", "valid number"]),
    "duration 0": (["compare", str(SMALL), "--duration", "0"], ["--duration 0", "above 0"]),
    "seed below 0": (["compare", str(SMALL), "--seed", "-1"], ["--seed -1", "0 or more"]),
    "no such trace": (["compare", str(SMALL), "--trace", "none.csv"], ["none.csv", "cannot be read"]),
    "unknown deployment": (["run", str(SMALL), "--deployment", "2P1D"], ["'2P1D'", "colocated, 1P1D"]),
    "unknown option": (["compare", str(SMALL), "--bandwith", "1Gbps"], ["--bandwith"]),
    "unknown command": (["comparee", str(SMALL)], ["comparee"]),
    "unknown model": (["kv-size", "Llama-9", "10"], ["'Llama-9'", "Llama-2-70B"]),
    "no tokens": (["kv-size", "Llama-2-70B", "0"], ["at least 1"]),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_a_bad_option_is_one_line_and_exit_2(case: str, pdemu: Pdemu) -> None:
    args, expected = BAD_OPTIONS[case]
    _fails(pdemu, args, expected)


BAD_TRACES = {
    "empty": ("", ["trace.csv", "empty"]),
    "no rows": ("TIMESTAMP,ContextTokens,GeneratedTokens\n", ["trace.csv"]),
    "missing column": ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.9,5\n", ["GeneratedTokens"]),
    "not a number": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,many,5\n",
        ["line 2", "many"],
    ),
    "binary": ("\x00\x01\x02", ["trace.csv"]),
}


@pytest.mark.parametrize("case", BAD_TRACES)
def test_a_bad_trace_is_one_line_and_exit_2(case: str, tmp_path: Path, pdemu: Pdemu) -> None:
    text, expected = BAD_TRACES[case]
    path = tmp_path / "trace.csv"
    path.write_text(text)
    _fails(pdemu, ["compare", str(SMALL), "--trace", str(path), "--out", str(tmp_path / "o")], expected)
    assert not (tmp_path / "o").exists()


def test_results_are_never_laid_over_others(tmp_path: Path, pdemu: Pdemu) -> None:
    (tmp_path / "precious").write_text("mine")
    _fails(pdemu, ["compare", str(SMALL), "--out", str(tmp_path)], ["--out", "not empty"])
    assert (tmp_path / "precious").read_text() == "mine"


def test_kv_that_the_machine_cannot_hold_is_refused_with_a_scale(tmp_path: Path, pdemu: Pdemu) -> None:
    path = tmp_path / "small.toml"
    path.write_text('host_memory = "1MB"\n' + TEXT)
    _fails(pdemu, ["compare", str(path), "--out", str(tmp_path / "o")], ["scale.bytes = ", "host_memory"])


def test_kv_size_is_the_formula(pdemu: Pdemu) -> None:
    assert msgspec.json.decode(pdemu("kv-size", "llama-2-70b", "2000", "--json").out) == {
        "model": "Llama-2-70B",
        "tokens": 2000,
        "bytes_per_token": 327_680,
        "bytes": 655_360_000,
    }


@pytest.mark.parametrize("what", ["models", "gpus"])
def test_the_catalog_is_printed_as_a_table_and_as_json(what: str, pdemu: Pdemu) -> None:
    listed = msgspec.json.decode(pdemu(what, "--json").out)
    table = pdemu(what)
    assert table.code == 0
    assert all(entry["name"] in table.out for entry in listed)
    assert all(entry["source"] for entry in listed)


SHIPPED = sorted(TOPOLOGIES.rglob("*.toml"))


def test_topologies_are_shipped() -> None:
    assert len(SHIPPED) >= 4


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(TOPOLOGIES)))
def test_every_shipped_topology_is_valid(path: Path, tmp_path: Path) -> None:
    how = Conditions(launcher="simulate")
    assert prepare(load_topology(path), load_catalog(), {}, how, out=tmp_path / "runs").runs


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(TOPOLOGIES)))
def test_every_shipped_topology_fits_this_machine(path: Path, tmp_path: Path) -> None:
    assert prepare(load_topology(path), load_catalog(), {}, out=tmp_path / "runs").runs


def _fails(pdemu: Pdemu, args: list[str], expected: list[str]) -> None:
    pdemu(*args).check_refusal(expected)
