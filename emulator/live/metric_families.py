"""Prometheus metrics with vLLM's names, labels and buckets where vLLM has them, for dashboards that know these.

All times are wall seconds, as a client sees them: model seconds times `scale.time`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from emulator.core.messages import Heartbeat
from emulator.core.records import RequestTimes
from emulator.core.run_spec import NodeSpec, RunSpec

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
NODE_LABELS = ("model_name", "engine", "role")


class Families:
    """One process's metrics; `engine` is a node's name, or "0" where they are the whole cluster's."""

    def __init__(self, run: RunSpec, engine: str) -> None:
        self.scale_time = run.scale.time
        self.labels = {"model_name": run.model, "engine": engine}
        self.registry = CollectorRegistry()

    def counter(self, name: str, what: str) -> Counter:
        """A counter that `_total` is put behind the name of."""
        return Counter(name, what, tuple(self.labels), registry=self.registry).labels(**self.labels)

    def histogram(self, name: str, what: str, bounds: Sequence[float]) -> Histogram:
        """A histogram with these upper bounds of its buckets."""
        labels = tuple(self.labels)
        return Histogram(name, what, labels, buckets=bounds, registry=self.registry).labels(**self.labels)

    def observe(self, histogram: Histogram, start_s: float | None, end_s: float | None) -> None:
        """What lies between two model instants, if both are known."""
        if start_s is not None and end_s is not None:
            histogram.observe(max(0.0, end_s - start_s) * self.scale_time)

    def exposition(self) -> tuple[bytes, str]:
        """What a scrape is answered with, and its content type; any thread may ask.

        OpenMetrics is not spoken, even to who would like it: the library writes names without their colons there.
        """
        encode, content_type = choose_encoder("")
        return encode(self.registry), content_type


class Waits:
    """Histograms of a request's waits for its prefill, and of that."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._queue = families.histogram(
            "vllm:request_queue_time_seconds", "Time before the prefill.", REQUEST_BOUNDS_S
        )
        self._prefill = families.histogram(
            "vllm:request_prefill_time_seconds", "Time in the prefill.", REQUEST_BOUNDS_S
        )

    def observe(self, times: RequestTimes) -> None:
        """Those of one request, as far as they are known."""
        self._families.observe(self._queue, times.queued_s, times.prefill_start_s)
        self._families.observe(self._prefill, times.prefill_start_s, times.prefill_end_s)


class NodeGauges(Collector):
    """What nodes have to do, by `loads` when somebody scrapes, and whether they are there at all."""

    def __init__(
        self,
        model: str,
        nodes: Sequence[NodeSpec],
        loads: Callable[[], Mapping[str, Heartbeat]],
        lost: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._model, self._nodes = model, nodes
        self._loads, self._lost = loads, lost

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The gauges of the nodes that have said something, and are not lost."""
        running = node_gauge("vllm:num_requests_running", "Requests in the node's batch.")
        waiting = node_gauge("vllm:num_requests_waiting", "Requests that wait at the node.")
        usage = node_gauge("vllm:kv_cache_usage_perc", "Share of the node's KV blocks in use, 0 to 1.")
        up = node_gauge("pdemu_node_up", "1 for a node that serves, 0 for one that was lost.")
        loads, lost = self._loads(), self._lost()
        for node in self._nodes:
            values = (self._model, node.name, node.role)
            up.add_metric(values, float(node.name not in lost))
            load = loads.get(node.name)
            if load is not None and node.name not in lost:
                running.add_metric(values, load.running)
                waiting.add_metric(values, load.waiting)
                usage.add_metric(values, 1 - load.kv_blocks_free / node.kv_blocks)
        return (running, waiting, usage, up)


def node_gauge(name: str, what: str) -> GaugeMetricFamily:
    """A gauge that each node has one value of."""
    return GaugeMetricFamily(name, what, labels=NODE_LABELS)
