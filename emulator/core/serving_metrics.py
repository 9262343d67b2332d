"""The endpoint's metrics, with vLLM's names, labels and buckets where vLLM has them, for dashboards that know these.

`engine` is a node of the cluster where a metric is one node's, and "0" where it is the endpoint's. All times are wall
seconds, as a client sees them: model seconds times `scale.time`. A node's gauges are what it said last, about once a
model second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from emulator.core.exposition import Family, Histogram, Sample
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


class ServingMetrics:
    """Folds what happens to requests at the endpoint. Instants and durations given are model seconds."""

    def __init__(self, run: RunSpec) -> None:
        self._scale = run.scale.time
        self._labels = {"model_name": run.model, "engine": "0"}
        self._nodes = {node.name: node for node in run.nodes}
        self._ttft, self._itl = Histogram(TTFT_BOUNDS_S), Histogram(ITL_BOUNDS_S)
        self._e2e, self._queue, self._prefill = (Histogram(REQUEST_BOUNDS_S) for _ in range(3))
        self._transfer, self._transfer_queue = Histogram(TRANSFER_BOUNDS_S), Histogram(TRANSFER_BOUNDS_S)
        self._counts: Counter[str] = Counter()
        self._ends: Counter[End] = Counter(dict.fromkeys(_ENDS.values(), 0))

    def first_token(self, after_s: float) -> None:
        """The first token of a request came so long after it."""
        self._ttft.observe(after_s * self._scale)

    def token_gap(self, gap_s: float) -> None:
        """A further token came so long after the one before."""
        self._itl.observe(gap_s * self._scale)

    def ended(self, message: Finished, *, prompt_tokens: int, output_tokens: int, after_s: float, stop: bool) -> None:
        """A request ended so long after it came; `stop`: at a stop, which the cluster knows nothing of."""
        end = "stop" if stop and message.reason == "length" else _ENDS[message.reason]
        self._ends[end] += 1
        times = message.times
        self._counts["prompt"] += prompt_tokens
        self._counts["generation"] += output_tokens
        self._counts["preemptions"] += times.preemptions
        if end in ("stop", "length"):
            self._e2e.observe(after_s * self._scale)
        _observe(self._queue, times.queued_s, times.prefill_start_s, self._scale)
        _observe(self._prefill, times.prefill_start_s, times.prefill_end_s, self._scale)
        _observe(self._transfer, times.kv_start_s, times.kv_end_s, self._scale)
        _observe(self._transfer_queue, times.kv_ready_s, times.kv_start_s, self._scale)
        self._counts["kv_bytes"] += (times.kv_bytes or 0) + times.kv_bytes_again
        under_way = times.kv_ready_s is not None and times.kv_end_s is None
        self._counts["kv_failures"] += end == "error" and under_way

    def families(self, loads: Mapping[str, Heartbeat]) -> list[Family]:
        """Everything, with the nodes' own figures as they said them last."""
        return [*self._of_nodes(loads), *self._of_requests(), *self._of_transfers()]

    def _of_nodes(self, loads: Mapping[str, Heartbeat]) -> list[Family]:
        known = [(node, loads[name]) for name, node in self._nodes.items() if name in loads]
        labels = {
            node.name: {"model_name": self._labels["model_name"], "engine": node.name, "role": node.role}
            for node, _ in known
        }
        running = [Sample("", labels[node.name], load.running) for node, load in known]
        waiting = [Sample("", labels[node.name], load.waiting) for node, load in known]
        usage = [Sample("", labels[node.name], 1 - load.kv_blocks_free / node.kv_blocks) for node, load in known]
        return [
            Family("vllm:num_requests_running", "gauge", "Requests in the node's batch.", running),
            Family("vllm:num_requests_waiting", "gauge", "Requests that wait at the node.", waiting),
            Family("vllm:kv_cache_usage_perc", "gauge", "Share of the node's KV blocks in use, 0 to 1.", usage),
        ]

    def _of_requests(self) -> list[Family]:
        ends = [Sample("", {**self._labels, "finished_reason": end}, n) for end, n in self._ends.items()]
        return [
            self._counter("vllm:num_preemptions_total", "Times that a request lost its memory.", "preemptions"),
            self._counter("vllm:prompt_tokens_total", "Prompt tokens of ended requests.", "prompt"),
            self._counter("vllm:generation_tokens_total", "Output tokens of ended requests.", "generation"),
            Family("vllm:request_success_total", "counter", "Ended requests, by how they ended.", ends),
            self._histogram("vllm:time_to_first_token_seconds", "Time to first token.", self._ttft),
            self._histogram("vllm:inter_token_latency_seconds", "Time between two tokens.", self._itl),
            self._histogram("vllm:e2e_request_latency_seconds", "Time to the last token.", self._e2e),
            self._histogram("vllm:request_queue_time_seconds", "Time before the prefill.", self._queue),
            self._histogram("vllm:request_prefill_time_seconds", "Time in the prefill.", self._prefill),
        ]

    def _of_transfers(self) -> list[Family]:
        return [
            self._histogram("pdemu_kv_transfer_seconds", "First byte on the wire to last received.", self._transfer),
            self._histogram("pdemu_kv_transfer_queue_seconds", "KV ready to first byte sent.", self._transfer_queue),
            self._counter("pdemu_kv_transfer_bytes_total", "Bytes of KV that were received.", "kv_bytes"),
            self._counter("pdemu_kv_transfer_failures_total", "Requests that failed in transfer.", "kv_failures"),
        ]

    def _counter(self, name: str, what: str, key: str) -> Family:
        return Family(name, "counter", what, [Sample("", self._labels, self._counts[key])])

    def _histogram(self, name: str, what: str, histogram: Histogram) -> Family:
        return Family(name, "histogram", what, histogram.samples(self._labels))


def _observe(histogram: Histogram, start_s: float | None, end_s: float | None, scale: float) -> None:
    if start_s is not None and end_s is not None:
        histogram.observe(max(0.0, end_s - start_s) * scale)
