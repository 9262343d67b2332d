"""A lab whose nodes do what is not their own: real sockets in both directions, and prompts that stay where they are."""

from __future__ import annotations

from collections import Counter

import pytest

from emulator.core.records import Record, read_records
from tests.live.lab import SMALL, json_of, pdemu

pytestmark = pytest.mark.live

KV_BYTES_PER_TOKEN = 4096
DEPLOYMENTS = """
[[deployments]]
name = "switching"
pools = [
    { role = "prefill", gpu_memory_utilization = 0.02 },
    { role = "decode", gpu_memory_utilization = 0.02 },
    { role = "mixed", gpu_memory_utilization = 0.02 },
]
role_switching = { max_queued_prompt_tokens = 1, max_kv_usage = 0.0005 }

[[deployments]]
name = "conditional"
pools = [{ role = "prefill" }, { role = "decode", nodes = 2 }]
overlap = "chunk"
conditional = { eff_isl_threshold = 150, max_prefill_queue_size = 3 }

"""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Record]]:
    """Bursts of requests for both deployments on small memory, at whatever rate the links have; by deployment."""
    folder = tmp_path_factory.mktemp("roles")
    head, rest = SMALL.read_text().split("[[deployments]]", 1)
    for plain, other in (
        ('process = "constant", rate_per_s = 10.0', 'process = "gamma", burstiness = 0.3, rate_per_s = 40.0'),
        ("low = 2, high = 20", "low = 20, high = 60"),
        ("200Mbps", "1Gbps"),
    ):
        assert plain in head
        head = head.replace(plain, other)
    topology = folder / "roles.toml"
    topology.write_text(head + DEPLOYMENTS + rest[rest.index("[[models]]") :])
    document = json_of(pdemu("compare", topology, "--verify-kv", "--force", "--json", "--out", folder / "out"))
    assert all(run["completed"] == run["requests"] > 40 for run in document["runs"])
    found = {}
    for run in document["runs"]:
        name = run["deployment"]
        found[name] = read_records((folder / "out" / f"{name}@1Gbps" / "records.jsonl").read_bytes())
        local = sum(record.prefill_node == record.decode_node for record in found[name])
        assert run["kv"]["local_prefills"] == local
        assert "frames were dropped" not in " ".join(run["fidelity"]["reasons"])
    return found


@pytest.mark.parametrize("deployment", ["switching", "conditional"])
def test_kv_crosses_the_network_to_the_byte_or_not_at_all(records: dict[str, list[Record]], deployment: str) -> None:
    for record in records[deployment]:
        moved = record.prefill_node != record.decode_node
        assert record.kv_bytes == (KV_BYTES_PER_TOKEN * record.prompt_tokens if moved else 0)
        assert (record.kv_end_s is not None) is moved
        assert len(record.times()) == record.max_tokens


def test_kv_goes_both_ways_between_nodes_that_help_each_other(records: dict[str, list[Record]]) -> None:
    ways = Counter((r.prefill_node, r.decode_node) for r in records["switching"] if r.kv_bytes)
    assert any((there, here) in ways for here, there in ways), ways


def test_short_prompts_are_prefilled_where_they_are_decoded(records: dict[str, list[Record]]) -> None:
    short = [record for record in records["conditional"] if record.prompt_tokens <= 150]
    assert short
    assert all(record.prefill_node == record.decode_node != "prefill-0" for record in short)
    assert any(record.prefill_node == "prefill-0" != record.decode_node for record in records["conditional"])
