"""A node's own metrics: what its engine and its link know at the moment of a scrape."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import cast

import pytest

from emulator.core.effects import Reply
from emulator.core.engine import Engine
from emulator.core.messages import Generate, Reserve
from emulator.core.specs import Scale
from emulator.live.kv_end import KvEnd, KvTraffic
from emulator.live.node_metrics import NodeMetrics
from tests.builders import load_plan, node_spec, pair, run_spec
from tests.live.test_serving_metrics import Sample, values


class _Traffic:
    """In the place of a node's end of the KV network."""

    def __init__(self) -> None:
        self.seen = KvTraffic()
        self.begun: Callable[[float], None] | None = None

    def traffic(self) -> KvTraffic:
        return self.seen


def _metrics(engine: Engine, traffic: _Traffic, scale_time: float = 1.0) -> NodeMetrics:
    nodes = pair() if engine.node.role != "colocated" else (engine.node,)
    return NodeMetrics(run_spec(nodes, load_plan(), scale=Scale(time=scale_time)), engine, cast(KvEnd, traffic))


def test_a_prefilling_nodes_gauges_and_waits_are_its_engines() -> None:
    node = node_spec(max_num_seqs=1)
    engine = Engine(node, new_ticket=itertools.count().__next__)
    metrics = _metrics(engine, _Traffic(), scale_time=2.0)

    def sample(name: str, **labels: str) -> Sample:
        return name, frozenset(({"model_name": "any", "engine": "colocated-0"} | labels).items())

    engine.handle(Generate("a", 100, 2), 0.0)
    engine.handle(Generate("b", 100, 1), 0.0)
    found = values(metrics.families)
    assert found[sample("vllm:num_requests_running", role="colocated")] == 1
    assert found[sample("vllm:num_requests_waiting", role="colocated")] == 1
    usage = engine.pool.used_blocks / node.kv_blocks
    assert found[sample("vllm:kv_cache_usage_perc", role="colocated")] == pytest.approx(usage)
    assert usage > 0
    assert found[sample("vllm:num_preemptions_total")] == 0
    while (end_s := engine.busy_until_s) is not None:
        for effect in engine.step_done(end_s):
            if isinstance(effect, Reply):
                metrics.told(effect.message)
    found = values(metrics.families)
    assert found[sample("vllm:num_requests_running", role="colocated")] == 0
    assert found[sample("vllm:kv_cache_usage_perc", role="colocated")] == 0
    assert found[sample("vllm:request_queue_time_seconds_count")] == 2
    assert found[sample("vllm:request_queue_time_seconds_sum")] == pytest.approx(2 * 0.11), "wall seconds"
    assert found[sample("vllm:request_prefill_time_seconds_sum")] == pytest.approx(2 * 0.2)


def test_a_receiving_nodes_transfers_are_its_links() -> None:
    _, decode = pair(decode_blocks=10)
    engine = Engine(decode, new_ticket=itertools.count().__next__, kv_endpoint="tcp://x")
    traffic = _Traffic()
    metrics = _metrics(engine, traffic)

    def sample(name: str, **labels: str) -> Sample:
        return name, frozenset(({"model_name": "any", "engine": "decode-0"} | labels).items())

    engine.handle(Reserve("a", 100, 3), 0.0)
    engine.handle(Reserve("b", 100, 3), 0.0)
    traffic.seen = KvTraffic(
        sent_bytes=1.0, waiting_bytes=2.0, received_bytes=3.0, broken_off=4, dropped_frames={"bad_checksum": 5}
    )
    found = values(metrics.families)
    assert found[sample("pdemu_kv_transfer_in_flight", role="decode")] == 1
    assert found[sample("pdemu_kv_transfer_waiting_for_memory", role="decode")] == 1
    assert found[sample("vllm:num_requests_waiting", role="decode")] == 1
    assert found[sample("pdemu_kv_transfer_sent_bytes_total")] == 1
    assert found[sample("pdemu_kv_transfer_queue_bytes", role="decode")] == 2
    assert found[sample("pdemu_kv_transfer_bytes_total")] == 3
    assert found[sample("pdemu_kv_transfer_failures_total")] == 4
    assert found[sample("pdemu_kv_transfer_dropped_frames_total", role="decode", reason="bad_checksum")] == 5
    for effect in engine.kv_arrived(0, 100_000, 1.0, 1.5, 1.5):
        if isinstance(effect, Reply):
            metrics.told(effect.message)
    found = values(metrics.families)
    assert found[sample("pdemu_kv_transfer_seconds_sum")] == 0.5
    assert found[sample("vllm:request_queue_time_seconds_count")] == 0, "it was queued elsewhere"


def test_a_sending_nodes_queue_is_its_links() -> None:
    prefill, _ = pair()
    traffic = _Traffic()
    metrics = _metrics(Engine(prefill, new_ticket=itertools.count().__next__), traffic, scale_time=2.0)
    assert traffic.begun is not None
    traffic.begun(0.25)
    traffic.begun(0.5)
    traffic.seen = KvTraffic(waiting_bytes=2.0, waiting_transfers=3)
    found = values(metrics.families)
    labels = {"model_name": "any", "engine": "prefill-0"}
    gauge = frozenset((labels | {"role": "prefill"}).items())
    assert found["pdemu_kv_transfer_queue_requests", gauge] == 3
    assert found["pdemu_kv_transfer_queue_bytes", gauge] == 2
    assert found["pdemu_kv_transfer_queue_seconds_count", frozenset(labels.items())] == 2
    assert found["pdemu_kv_transfer_queue_seconds_sum", frozenset(labels.items())] == 0.75, "wall seconds as they are"
