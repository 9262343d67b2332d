"""Pulled KV with real processes and sockets: every prompt arrives once and whole, after the decode node has asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.core.records import Record, read_records
from tests.live.lab import SMALL, json_of, pdemu

pytestmark = pytest.mark.live

KV_BYTES_PER_TOKEN = 4096


def _records(tmp_path: Path, keys: str) -> list[Record]:
    """The records of the small lab's 1P1D with these keys instead of overlap."""
    topology = tmp_path / "pull.toml"
    topology.write_text(SMALL.read_text().replace('overlap = "chunk"', keys))
    out = tmp_path / "out"
    document = json_of(pdemu("run", topology, "--deployment", "1P1D", "--json", "--verify-kv", "--out", out))
    (run,) = document["runs"]
    assert run["completed"] == run["requests"] == 15
    return read_records((out / "1P1D@0.2Gbps" / "records.jsonl").read_bytes())


@pytest.mark.parametrize("admission", ["dispatch", "decode_reserve_first", "prefill_first"])
def test_a_lab_that_pulls_serves_every_request(tmp_path: Path, admission: str) -> None:
    for record in _records(tmp_path, f'transfer_mode = "pull"\nadmission = "{admission}"'):
        assert record.outcome == "completed"
        assert record.kv_bytes == KV_BYTES_PER_TOKEN * record.prompt_tokens
        assert record.kv_ready_s is not None
        assert record.prefill_end_s is not None
        assert record.kv_start_s is not None
        assert record.prefill_end_s < record.kv_ready_s <= record.kv_start_s, "the decode node's request is between"
