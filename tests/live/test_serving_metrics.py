"""The endpoint's metrics as Prometheus' own parser reads them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from emulator.core.messages import Finished, Heartbeat
from emulator.core.records import RequestTimes
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Scale
from emulator.live.serving_metrics import ServingMetrics
from tests.builders import load_plan, pair, run_spec

Sample = tuple[str, frozenset[tuple[str, str]]]


def values(metrics: ServingMetrics, loads: dict[str, Heartbeat] | None = None) -> dict[Sample, float]:
    """Every sample by its name and labels."""
    text, content_type = metrics.exposition(loads or {})
    assert content_type.startswith("text/plain; version=0.0.4")
    samples = [sample for family in parse(text.decode()) for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def sample(name: str, **labels: str) -> Sample:
    """The key of one sample of the endpoint's."""
    return name, frozenset(({"model_name": "any", "engine": "0"} | labels).items())


def a_run() -> RunSpec:
    """One prefill and one decode node at half speed."""
    return run_spec(pair(), load_plan(), scale=Scale(time=2.0))


@pytest.fixture
def metrics() -> ServingMetrics:
    return ServingMetrics(a_run())


def test_the_metrics_have_vllms_names_and_wall_seconds(metrics: ServingMetrics) -> None:
    metrics.first_token(0.02)
    metrics.token_gap(0.01)
    times = RequestTimes(
        queued_s=1.0, prefill_start_s=1.25, prefill_end_s=1.5, kv_ready_s=1.5, kv_start_s=1.75, kv_end_s=2.0, kv_bytes=7
    )
    ended = Finished("http-0", "length", times=times)
    metrics.ended(ended, prompt_tokens=10, output_tokens=2, after_s=0.5, stop=False)
    found = values(metrics)
    for name, seconds in [
        ("vllm:time_to_first_token_seconds", 0.04),
        ("vllm:inter_token_latency_seconds", 0.02),
        ("vllm:e2e_request_latency_seconds", 1.0),
        ("vllm:request_queue_time_seconds", 0.5),
        ("vllm:request_prefill_time_seconds", 0.5),
        ("pdemu_kv_transfer_seconds", 0.5),
        ("pdemu_kv_transfer_queue_seconds", 0.5),
    ]:
        assert found[sample(f"{name}_sum")] == pytest.approx(seconds)
        assert found[sample(f"{name}_count")] == found[sample(f"{name}_bucket", le="+Inf")] == 1
    assert found[sample("vllm:time_to_first_token_seconds_bucket", le="0.02")] == 0
    assert found[sample("vllm:time_to_first_token_seconds_bucket", le="0.04")] == 1, "a bound belongs to its bucket"
    assert found[sample("pdemu_kv_transfer_bytes_total")] == 7
    assert found[sample("vllm:prompt_tokens_total")] == 10
    assert found[sample("vllm:generation_tokens_total")] == 2


def test_requests_are_counted_by_how_they_ended(metrics: ServingMetrics) -> None:
    under_way = RequestTimes(kv_ready_s=1.0, kv_start_s=1.5)
    for reason, stop, times in [
        ("length", False, RequestTimes()),
        ("length", True, RequestTimes(preemptions=2)),
        ("aborted", True, under_way),
        ("error", False, under_way),
        ("error", False, RequestTimes()),
    ]:
        ended = Finished("a", reason, times=times)  # type: ignore[arg-type]
        metrics.ended(ended, prompt_tokens=1, output_tokens=0, after_s=0.5, stop=stop)
    found = values(metrics)
    ends = {
        end: found[sample("vllm:request_success_total", finished_reason=end)]
        for end in ("length", "stop", "abort", "error")
    }
    assert ends == {"length": 1, "stop": 1, "abort": 1, "error": 2}
    assert found[sample("vllm:num_preemptions_total")] == 2
    assert found[sample("pdemu_kv_transfer_failures_total")] == 1
    assert found[sample("vllm:e2e_request_latency_seconds_count")] == 2, "of those that ended well"


def test_a_nodes_gauges_are_what_it_said_last(metrics: ServingMetrics) -> None:
    run = a_run()
    decode = next(node for node in run.nodes if node.role == "decode")
    load = Heartbeat(decode.kv_blocks // 4, 3, 5)
    found = values(metrics, {decode.name: load})
    labels = {"engine": decode.name, "role": "decode"}
    assert found[sample("vllm:num_requests_running", **labels)] == 3
    assert found[sample("vllm:num_requests_waiting", **labels)] == 5
    assert found[sample("vllm:kv_cache_usage_perc", **labels)] == pytest.approx(
        1 - load.kv_blocks_free / decode.kv_blocks
    )
    assert sum(name == "vllm:num_requests_running" for name, _ in found) == 1, "others have said nothing"


def test_two_endpoints_of_one_process_count_apart(metrics: ServingMetrics) -> None:
    metrics.first_token(1.0)
    assert values(ServingMetrics(a_run()))[sample("vllm:time_to_first_token_seconds_count")] == 0
