"""Topology files that extend others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emulator.core.errors import ConfigError
from emulator.core.traffic import Trace
from emulator.lab.topology_files import load_topology

BASE = """
name = "base"
model = "Qwen2.5-7B"
gpu = "l40s"
slo = { ttft_ms = 1000 }
workload.duration = "10s"
[[workload.streams]]
name = "chat"
arrivals = { process = "trace", file = "requests.csv" }
[[deployments]]
name = "colocated"
pools = [{ role = "colocated" }]
"""


def _write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)


def test_a_file_extends_others_and_names_in_it_are_relative_to_itself(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    _write(tmp_path / "shared", base=BASE)
    own = 'extends = "shared/base.toml"\nname = "own"\nslo = { tpot_ms = 40 }\n'
    _write(tmp_path, one=own + '[[deployments]]\nname = "one"\npools = [{ role = "colocated" }]\n')
    _write(tmp_path, both='extends = ["shared/base.toml", "one.toml"]\nname = "both"\n')
    topology = load_topology(tmp_path / "both.toml")
    assert topology.name == "both"
    assert (topology.slo.ttft_ms, topology.slo.tpot_ms) == (1000, 40)
    assert [d.name for d in topology.deployments] == ["colocated", "one"]
    arrivals = topology.workload.streams[0].arrivals
    assert isinstance(arrivals, Trace)
    assert Path(arrivals.file) == tmp_path / "shared" / "requests.csv"


def test_a_calibration_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    _write(tmp_path / "shared", gpu='[device]\nkind = "cuda"\ncalibration = "h200.toml"\n')
    _write(tmp_path, top='extends = ["shared/gpu.toml", "base.toml"]\n', base=BASE)
    assert load_topology(tmp_path / "top.toml").device.calibration == str(tmp_path / "shared" / "h200.toml")


@pytest.mark.parametrize(
    ("extends", "problem"),
    [
        ('"top.toml"', "extends: the files extend each other in a circle"),
        ('"nowhere.toml"', "nowhere.toml: cannot be read"),
        ("3", 'extends = 3: give the name of a topology file, or a list: ["base.toml"]'),
        ("[3]", "extends = [3]: give the name"),
    ],
)
def test_what_cannot_be_extended_is_refused(tmp_path: Path, extends: str, problem: str) -> None:
    _write(tmp_path, top=f"extends = {extends}\n" + BASE)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load_topology(tmp_path / "top.toml")
