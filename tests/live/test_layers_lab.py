"""KV that leaves by groups of layers over real sockets: whole, checked, and on its way before the prefill has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.core.records import read_records
from tests.live.lab import SMALL, json_of, pdemu

pytestmark = [pytest.mark.live, pytest.mark.alone]


def test_kv_leaves_while_later_layers_compute_and_arrives_to_the_byte(tmp_path: Path) -> None:
    topology = tmp_path / "layers.toml"
    text = SMALL.read_text(encoding="utf-8").replace('overlap = "chunk"', 'overlap = "layer"\nlayer_groups = 3')
    text = text.replace("prefill_base_ms = 2.0", "prefill_base_ms = 40.0")  # long to one that wakes late
    topology.write_text(text, encoding="utf-8")
    out = tmp_path / "o"
    (run,) = json_of(pdemu("run", topology, "--deployment", "1P1D", "--verify-kv", "--json", "--out", out))["runs"]
    assert run["completed"] == run["requests"] == 15
    records = read_records((out / "1P1D@0.2Gbps" / "records.jsonl").read_bytes())
    assert [record.kv_bytes for record in records] == [4096 * record.prompt_tokens for record in records]
    for record in records:
        assert record.kv_start_s is not None
        assert record.kv_end_s is not None
        assert record.prefill_end_s is not None
        assert record.kv_start_s < record.prefill_end_s < record.kv_end_s
