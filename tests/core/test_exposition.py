"""Prometheus' text format, and the endpoint's metrics in it."""

from __future__ import annotations

import re

import pytest

from emulator.core.exposition import Family, Histogram, Sample, render
from emulator.core.messages import Finished, Heartbeat
from emulator.core.records import RequestTimes
from emulator.core.run_spec import RunSpec
from emulator.core.serving_metrics import ServingMetrics
from emulator.core.specs import Scale
from tests.builders import load_plan, pair, run_spec

_LINE = re.compile(
    r'[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-z_]+="(\\.|[^"\\])*",?)*\})? (NaN|[+-]Inf|-?[0-9.]+(e[+-]?[0-9]+)?)'
)


def values(text: bytes) -> dict[str, float]:
    """Every sample by its name and labels; asserts that each line has the format's shape."""
    found = {}
    for line in text.decode().splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP [a-z0-9_:]+ .+|TYPE [a-z0-9_:]+ (counter|gauge|histogram))", line), line
            continue
        assert _LINE.fullmatch(line), line
        name, _, value = line.rpartition(" ")
        found[name] = float(value)
    return found


def test_a_histogram_counts_up_from_bound_to_bound() -> None:
    histogram = Histogram([1.0, 2.5])
    for value in (0.5, 1.0, 2.0, 9.0):
        histogram.observe(value)
    text = render([Family("h", "histogram", "What.", histogram.samples({"a": "b"}))])
    assert text.decode() == (
        '# HELP h What.\n# TYPE h histogram\nh_bucket{a="b",le="1.0"} 2.0\nh_bucket{a="b",le="2.5"} 3.0\n'
        'h_bucket{a="b",le="+Inf"} 4.0\nh_count{a="b"} 4.0\nh_sum{a="b"} 12.5\n'
    )


def test_labels_and_help_are_escaped() -> None:
    text = render([Family("g", "gauge", "a\\b\nc", [Sample("", {"x": 'q"\\\n'}, float("inf"))])])
    assert text.decode() == '# HELP g a\\\\b\\nc\n# TYPE g gauge\ng{x="q\\"\\\\\\n"} Inf\n'


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
    found = values(render(metrics.families({})))
    labels = 'model_name="any",engine="0"'
    for name, seconds in [
        ("vllm:time_to_first_token_seconds", 0.04),
        ("vllm:inter_token_latency_seconds", 0.02),
        ("vllm:e2e_request_latency_seconds", 1.0),
        ("vllm:request_queue_time_seconds", 0.5),
        ("vllm:request_prefill_time_seconds", 0.5),
        ("pdemu_kv_transfer_seconds", 0.5),
        ("pdemu_kv_transfer_queue_seconds", 0.5),
    ]:
        assert found[f"{name}_sum{{{labels}}}"] == pytest.approx(seconds)
        assert found[f"{name}_count{{{labels}}}"] == found[f'{name}_bucket{{{labels},le="+Inf"}}'] == 1
    assert found[f"pdemu_kv_transfer_bytes_total{{{labels}}}"] == 7
    assert found[f"vllm:prompt_tokens_total{{{labels}}}"] == 10
    assert found[f"vllm:generation_tokens_total{{{labels}}}"] == 2


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
    found = values(render(metrics.families({})))
    ends = {
        end: found[f'vllm:request_success_total{{model_name="any",engine="0",finished_reason="{end}"}}']
        for end in ("length", "stop", "abort", "error")
    }
    assert ends == {"length": 1, "stop": 1, "abort": 1, "error": 2}
    labels = '{model_name="any",engine="0"}'
    assert found[f"vllm:num_preemptions_total{labels}"] == 2
    assert found[f"pdemu_kv_transfer_failures_total{labels}"] == 1
    assert found[f"vllm:e2e_request_latency_seconds_count{labels}"] == 2, "of those that ended well"


def test_a_nodes_gauges_are_what_it_said_last(metrics: ServingMetrics) -> None:
    run = a_run()
    decode = next(node for node in run.nodes if node.role == "decode")
    load = Heartbeat(decode.kv_blocks // 4, 3, 5)
    found = values(render(metrics.families({decode.name: load})))
    labels = f'{{model_name="any",engine="{decode.name}",role="decode"}}'
    assert found[f"vllm:num_requests_running{labels}"] == 3
    assert found[f"vllm:num_requests_waiting{labels}"] == 5
    assert found[f"vllm:kv_cache_usage_perc{labels}"] == pytest.approx(1 - load.kv_blocks_free / decode.kv_blocks)
    assert sum(name.startswith("vllm:num_requests_running") for name in found) == 1, "others have said nothing"
