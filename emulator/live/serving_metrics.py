"""The metrics of a whole cluster, as its router and its endpoint see it: requests by what they hear of them.

`engine` is a node of the cluster where a metric is one node's, and "0" where it is the cluster's. A node's gauges are
what it said last, about once a model second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import Counter

from emulator.core.messages import Finished, Heartbeat, Tokens
from emulator.core.records import RequestTimes
from emulator.core.run_spec import RunSpec
from emulator.live.metric_families import (
    ITL_BOUNDS_S,
    REQUEST_BOUNDS_S,
    TRANSFER_BOUNDS_S,
    TTFT_BOUNDS_S,
    Families,
    NodeGauges,
    Waits,
)

CLUSTER = "0"

End = Literal["stop", "length", "abort", "error"]
_ENDS: dict[str, End] = {"stop": "stop", "length": "length", "aborted": "abort", "error": "error"}


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    prompt_tokens: int
    submitted_s: float
    latest_s: float
    tokens: int = 0


class ServingMetrics:
    """Folds what is heard of requests. Instants given are model seconds.

    `loads` is what each node said last, `lost` the nodes that are gone; both are asked when somebody scrapes.
    """

    def __init__(
        self, run: RunSpec, loads: Callable[[], Mapping[str, Heartbeat]], lost: Callable[[], Collection[str]]
    ) -> None:
        self.families = families = Families(run, CLUSTER)
        families.registry.register(NodeGauges(run.model, run.nodes, loads, lost))
        self._open: dict[str, _Open] = {}
        self._preemptions = families.counter("vllm:num_preemptions", "Times that a request lost its memory.")
        self._prompt = families.counter("vllm:prompt_tokens", "Prompt tokens of ended requests.")
        self._generation = families.counter("vllm:generation_tokens", "Output tokens of ended requests.")
        ends = Counter(
            "vllm:request_success",
            "Ended requests, by how they ended.",
            (*families.labels, "finished_reason"),
            registry=families.registry,
        )
        self._ends = {end: ends.labels(**families.labels, finished_reason=end) for end in _ENDS.values()}
        self._ttft = families.histogram("vllm:time_to_first_token_seconds", "Time to first token.", TTFT_BOUNDS_S)
        self._itl = families.histogram("vllm:inter_token_latency_seconds", "Time between two tokens.", ITL_BOUNDS_S)
        self._e2e = families.histogram("vllm:e2e_request_latency_seconds", "Time to the last token.", REQUEST_BOUNDS_S)
        self._waits = Waits(families)
        self._transfer = families.histogram(
            "pdemu_kv_transfer_seconds", "First byte on the wire to last received.", TRANSFER_BOUNDS_S
        )
        self._transfer_queue = families.histogram(
            "pdemu_kv_transfer_queue_seconds", "KV ready to first byte sent.", TRANSFER_BOUNDS_S
        )
        self._kv_bytes = families.counter("pdemu_kv_transfer_bytes", "Bytes of KV that were received.")
        self._kv_failures = families.counter("pdemu_kv_transfer_failures", "Requests that failed in transfer.")

    def submitted(self, request_id: str, prompt_tokens: int, now_s: float) -> None:
        """A request came."""
        self._open[request_id] = _Open(prompt_tokens, now_s, now_s)

    def tokens(self, message: Tokens, now_s: float) -> None:
        """Tokens came; further ones of a request in one message came together."""
        scale_time = self.families.scale_time
        for request_id, n in ((count.request_id, count.n) for count in message.tokens):
            request = self._open.get(request_id)
            if request is None:
                continue
            histogram = self._itl if request.tokens else self._ttft
            histogram.observe((now_s - request.latest_s) * scale_time)
            for _ in range(n - 1):
                self._itl.observe(0.0)
            request.tokens += n
            request.latest_s = now_s

    def finished(self, message: Finished, *, stop: bool = False) -> None:
        """A request ended; `stop`: at a stop, which the cluster knows nothing of."""
        request = self._open.pop(message.request_id, None)
        if request is None:
            return
        end = "stop" if stop and message.reason == "length" else _ENDS[message.reason]
        self._ends[end].inc()
        self._prompt.inc(request.prompt_tokens)
        self._generation.inc(request.tokens)
        if end in ("stop", "length"):
            self.families.observe(self._e2e, request.submitted_s, request.latest_s)
        self._told(message.times, failed=end == "error")

    def _told(self, times: RequestTimes, *, failed: bool) -> None:
        """What the nodes knew of a request."""
        self._preemptions.inc(times.preemptions)
        self._waits.observe(times)
        self.families.observe(self._transfer, times.kv_start_s, times.kv_end_s)
        self.families.observe(self._transfer_queue, times.kv_ready_s, times.kv_start_s)
        self._kv_bytes.inc((times.kv_bytes or 0) + times.kv_bytes_again)
        if failed and times.kv_ready_s is not None and times.kv_end_s is None:
            self._kv_failures.inc()
