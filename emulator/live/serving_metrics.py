"""The endpoint's metrics, with vLLM's names, labels and buckets where vLLM has them, for dashboards that know these.

`engine` is a node of the cluster where a metric is one node's, and "0" where it is the endpoint's. All times are wall
seconds, as a client sees them: model seconds times `scale.time`. A node's gauges are what it said last, about once a
model second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from emulator.core.messages import Finished, Heartbeat
from emulator.core.run_spec import RunSpec

TTFT_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TRANSFER_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)

End = Literal["stop", "length", "abort", "error"]
_ENDS: dict[str, End] = {"stop": "stop", "length": "length", "aborted": "abort", "error": "error"}


class NodeGauges(Collector):
    """What the nodes say of themselves, read when somebody scrapes; `loads` is what they said last, by name."""

    def __init__(self, run: RunSpec) -> None:
        self._model, self._nodes = run.model, run.nodes
        self.loads: Mapping[str, Heartbeat] = {}

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The gauges of the nodes that have said something."""
        labels = ("model_name", "engine", "role")
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests in the node's batch.", labels=labels)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait at the node.", labels=labels)
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of the node's KV blocks in use, 0 to 1.", labels=labels
        )
        for node in self._nodes:
            load = self.loads.get(node.name)
            if load is not None:
                values = (self._model, node.name, node.role)
                running.add_metric(values, load.running)
                waiting.add_metric(values, load.waiting)
                usage.add_metric(values, 1 - load.kv_blocks_free / node.kv_blocks)
        return (running, waiting, usage)


class ServingMetrics:
    """Folds what happens to requests at the endpoint. Instants and durations given are model seconds."""

    def __init__(self, run: RunSpec) -> None:
        self._scale = run.scale.time
        self._labels = {"model_name": run.model, "engine": "0"}
        self._registry = CollectorRegistry()
        self._gauges = NodeGauges(run)
        self._registry.register(self._gauges)
        self._preemptions = self._counter("vllm:num_preemptions", "Times that a request lost its memory.")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of ended requests.")
        self._generation = self._counter("vllm:generation_tokens", "Output tokens of ended requests.")
        ends = Counter(
            "vllm:request_success",
            "Ended requests, by how they ended.",
            (*self._labels, "finished_reason"),
            registry=self._registry,
        )
        self._ends = {end: ends.labels(**self._labels, finished_reason=end) for end in _ENDS.values()}
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to first token.", TTFT_BOUNDS_S)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Time between two tokens.", ITL_BOUNDS_S)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Time to the last token.", REQUEST_BOUNDS_S)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Time before the prefill.", REQUEST_BOUNDS_S)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Time in the prefill.", REQUEST_BOUNDS_S)
        self._transfer = self._histogram(
            "pdemu_kv_transfer_seconds", "First byte on the wire to last received.", TRANSFER_BOUNDS_S
        )
        self._transfer_queue = self._histogram(
            "pdemu_kv_transfer_queue_seconds", "KV ready to first byte sent.", TRANSFER_BOUNDS_S
        )
        self._kv_bytes = self._counter("pdemu_kv_transfer_bytes", "Bytes of KV that were received.")
        self._kv_failures = self._counter("pdemu_kv_transfer_failures", "Requests that failed in transfer.")

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(name, what, tuple(self._labels), registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, what: str, bounds: Sequence[float]) -> Histogram:
        labels = tuple(self._labels)
        return Histogram(name, what, labels, buckets=bounds, registry=self._registry).labels(**self._labels)

    def first_token(self, after_s: float) -> None:
        """The first token of a request came so long after it."""
        self._ttft.observe(after_s * self._scale)

    def token_gap(self, gap_s: float) -> None:
        """A further token came so long after the one before."""
        self._itl.observe(gap_s * self._scale)

    def ended(self, message: Finished, *, prompt_tokens: int, output_tokens: int, after_s: float, stop: bool) -> None:
        """A request ended so long after it came; `stop`: at a stop, which the cluster knows nothing of."""
        end = "stop" if stop and message.reason == "length" else _ENDS[message.reason]
        self._ends[end].inc()
        times = message.times
        self._prompt.inc(prompt_tokens)
        self._generation.inc(output_tokens)
        self._preemptions.inc(times.preemptions)
        if end in ("stop", "length"):
            self._e2e.observe(after_s * self._scale)
        self._observe(self._queue, times.queued_s, times.prefill_start_s)
        self._observe(self._prefill, times.prefill_start_s, times.prefill_end_s)
        self._observe(self._transfer, times.kv_start_s, times.kv_end_s)
        self._observe(self._transfer_queue, times.kv_ready_s, times.kv_start_s)
        self._kv_bytes.inc((times.kv_bytes or 0) + times.kv_bytes_again)
        under_way = times.kv_ready_s is not None and times.kv_end_s is None
        if end == "error" and under_way:
            self._kv_failures.inc()

    def _observe(self, histogram: Histogram, start_s: float | None, end_s: float | None) -> None:
        if start_s is not None and end_s is not None:
            histogram.observe(max(0.0, end_s - start_s) * self._scale)

    def exposition(self, loads: Mapping[str, Heartbeat]) -> tuple[bytes, str]:
        """What a scrape is answered with, and its content type; `loads` is what nodes said last.

        OpenMetrics is not spoken, even to who would like it: the library writes names without their colons there.
        """
        self._gauges.loads = loads
        encode, content_type = choose_encoder("")
        return encode(self._registry), content_type
