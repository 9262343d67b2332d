"""A cluster's metrics as Prometheus' own parser reads them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from emulator.core.messages import Finished, FinishReason, Heartbeat, TokenCount, Tokens
from emulator.core.records import RequestTimes
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Scale
from emulator.live.metric_families import Families
from emulator.live.serving_metrics import ServingMetrics
from tests.builders import load_plan, pair, run_spec

Sample = tuple[str, frozenset[tuple[str, str]]]


def values(families: Families) -> dict[Sample, float]:
    """Every sample by its name and labels."""
    text, content_type = families.exposition()
    assert content_type.startswith("text/plain; version=0.0.4")
    samples = [sample for family in parse(text.decode()) for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def sample(name: str, **labels: str) -> Sample:
    """The key of one sample of the cluster's."""
    return name, frozenset(({"model_name": "any", "engine": "0"} | labels).items())


def a_run() -> RunSpec:
    """One prefill and one decode node at half speed."""
    return run_spec(pair(), load_plan(), scale=Scale(time=2.0))


@pytest.fixture
def metrics() -> ServingMetrics:
    return ServingMetrics(a_run(), dict, tuple)


def tokens(n: int) -> Tokens:
    return Tokens((TokenCount("a", n),))


def test_the_metrics_have_vllms_names_and_wall_seconds(metrics: ServingMetrics) -> None:
    metrics.submitted("a", 10, 1.0)
    metrics.tokens(tokens(1), 1.02)
    metrics.tokens(tokens(1), 1.03)
    times = RequestTimes(
        queued_s=1.0, prefill_start_s=1.25, prefill_end_s=1.5, kv_ready_s=1.5, kv_start_s=1.75, kv_end_s=2.0, kv_bytes=7
    )
    metrics.finished(Finished("a", "length", times=times))
    found = values(metrics.families)
    for name, seconds in [
        ("vllm:time_to_first_token_seconds", 0.04),
        ("vllm:inter_token_latency_seconds", 0.02),
        ("vllm:e2e_request_latency_seconds", 0.06),
        ("vllm:request_queue_time_seconds", 0.5),
        ("vllm:request_prefill_time_seconds", 0.5),
        ("pdemu_kv_transfer_seconds", 0.5),
        ("pdemu_kv_transfer_queue_seconds", 0.5),
    ]:
        assert found[sample(f"{name}_sum")] == pytest.approx(seconds)
        assert found[sample(f"{name}_count")] == found[sample(f"{name}_bucket", le="+Inf")] == 1
    assert found[sample("vllm:time_to_first_token_seconds_bucket", le="0.02")] == 0
    assert found[sample("vllm:time_to_first_token_seconds_bucket", le="0.06")] == 1
    assert found[sample("pdemu_kv_transfer_bytes_total")] == 7
    assert found[sample("vllm:prompt_tokens_total")] == 10
    assert found[sample("vllm:generation_tokens_total")] == 2


def test_a_bound_belongs_to_its_bucket(metrics: ServingMetrics) -> None:
    metrics.submitted("a", 10, 0.0)
    metrics.tokens(tokens(1), 0.125)
    found = values(metrics.families)
    buckets = [found[sample("vllm:time_to_first_token_seconds_bucket", le=bound)] for bound in ("0.1", "0.25")]
    assert buckets == [0, 1]


def test_tokens_of_one_message_came_together(metrics: ServingMetrics) -> None:
    metrics.submitted("a", 10, 0.0)
    metrics.tokens(tokens(3), 1.0)
    metrics.tokens(tokens(2), 1.5)
    found = values(metrics.families)
    assert found[sample("vllm:time_to_first_token_seconds_count")] == 1
    assert found[sample("vllm:inter_token_latency_seconds_count")] == 4
    assert found[sample("vllm:inter_token_latency_seconds_sum")] == pytest.approx(1.0)


def test_requests_are_counted_by_how_they_ended(metrics: ServingMetrics) -> None:
    under_way = RequestTimes(kv_ready_s=1.0, kv_start_s=1.5)
    ends: list[tuple[FinishReason, bool, RequestTimes]] = [
        ("length", False, RequestTimes()),
        ("length", True, RequestTimes(preemptions=2)),
        ("aborted", True, under_way),
        ("error", False, under_way),
        ("error", False, RequestTimes()),
    ]
    for reason, stop, times in ends:
        metrics.submitted("a", 1, 0.0)
        metrics.finished(Finished("a", reason, times=times), stop=stop)
    metrics.finished(Finished("a", "error"))
    found = values(metrics.families)
    counted = {
        end: found[sample("vllm:request_success_total", finished_reason=end)]
        for end in ("length", "stop", "abort", "error")
    }
    assert counted == {"length": 1, "stop": 1, "abort": 1, "error": 2}, "and nobody who is not known"
    assert found[sample("vllm:num_preemptions_total")] == 2
    assert found[sample("pdemu_kv_transfer_failures_total")] == 1
    assert found[sample("vllm:e2e_request_latency_seconds_count")] == 2, "of those that ended well"


def test_a_nodes_gauges_are_what_it_said_last_until_it_is_lost() -> None:
    run = a_run()
    prefill, decode = run.nodes
    loads: dict[str, Heartbeat] = {}
    lost: list[str] = []
    metrics = ServingMetrics(run, lambda: loads, lambda: lost)
    loads[decode.name] = load = Heartbeat(decode.kv_blocks // 4, 3, 5)
    labels = {"engine": decode.name, "role": "decode"}
    found = values(metrics.families)
    assert found[sample("vllm:num_requests_running", **labels)] == 3
    assert found[sample("vllm:num_requests_waiting", **labels)] == 5
    usage = 1 - load.kv_blocks_free / decode.kv_blocks
    assert found[sample("vllm:kv_cache_usage_perc", **labels)] == pytest.approx(usage)
    assert found[sample("pdemu_node_up", **labels)] == 1
    assert sum(name == "vllm:num_requests_running" for name, _ in found) == 1, "others have said nothing"
    lost.append(decode.name)
    found = values(metrics.families)
    assert found[sample("pdemu_node_up", **labels)] == 0
    assert found[sample("pdemu_node_up", engine=prefill.name, role="prefill")] == 1
    assert not [name for name, _ in found if name == "vllm:num_requests_running"]


def test_two_endpoints_of_one_process_count_apart(metrics: ServingMetrics) -> None:
    metrics.submitted("a", 1, 0.0)
    metrics.tokens(tokens(1), 1.0)
    other = ServingMetrics(a_run(), dict, tuple)
    assert values(other.families)[sample("vllm:time_to_first_token_seconds_count")] == 0
