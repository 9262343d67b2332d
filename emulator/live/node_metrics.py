"""A node's own metrics: what its engine and its end of the KV network have counted anyway, read when somebody scrapes.

Only what is no count, such as how long a request waited, is noted when the node tells the router of it. Scrapes come on
threads of their own, and whatever they read is one value at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from emulator.core.engine import Engine
from emulator.core.messages import KvReceived, Message, PrefillDone, StepTokens
from emulator.core.run_spec import RunSpec
from emulator.live.kv_end import KvEnd
from emulator.live.metric_families import NODE_LABELS, TRANSFER_BOUNDS_S, Families, NodeGauges, Waits, node_gauge


class NodeMetrics(Collector):
    """Those of one node of a run."""

    def __init__(self, run: RunSpec, engine: Engine, kv: KvEnd) -> None:
        node = engine.node
        self.families = families = Families(run, node.name)
        self._values = (run.model, node.name, node.role)
        self._engine, self._kv = engine, kv
        families.registry.register(NodeGauges(run.model, (node,), lambda: {node.name: engine.load}))
        families.registry.register(self)
        self._waits = Waits(families)
        self._transfer = families.histogram(
            "pdemu_kv_transfer_seconds", "First byte on the wire to last received.", TRANSFER_BOUNDS_S
        )
        queue = families.histogram(
            "pdemu_kv_transfer_queue_seconds", "First KV ready to be sent to its first byte sent.", TRANSFER_BOUNDS_S
        )
        kv.begun = queue.observe

    def told(self, message: Message) -> None:
        """The node tells the router something."""
        match message:
            case PrefillDone(times=times):
                self._waits.observe(times)
            case KvReceived(times=times):
                self.families.observe(self._transfer, times.kv_start_s, times.kv_end_s)
            case StepTokens(finished=finished):
                for finish in finished:
                    self._waits.observe(finish.times)

    def collect(self) -> Iterable[Metric]:
        """The counts up to now."""
        seen = self._kv.traffic()
        incoming = self._engine.incoming
        yield self._counter(
            "vllm:num_preemptions",
            "Times that a request lost its memory.",
            self._engine.scheduler.num_preemptions,
        )
        yield self._counter("pdemu_kv_transfer_bytes", "Bytes of KV that were received.", seen.received_bytes)
        yield self._counter("pdemu_kv_transfer_sent_bytes", "Bytes of KV that were sent.", seen.sent_bytes)
        yield self._counter(
            "pdemu_kv_transfer_failures",
            "Transfers to this node that ended with a part of their KV missing: given up, aborted or damaged.",
            seen.broken_off,
        )
        dropped = CounterMetricFamily(
            "pdemu_kv_transfer_dropped_frames",
            "Frames of KV that were not taken in, by reason.",
            labels=(*NODE_LABELS, "reason"),
        )
        for reason, count in seen.dropped_frames.items():
            dropped.add_metric((*self._values, reason), count)
        yield dropped
        for name, what, value in (
            ("queue_bytes", "Bytes of KV that wait to be sent.", seen.waiting_bytes),
            ("queue_requests", "Requests whose KV waits for its first byte to be sent.", seen.waiting_transfers),
            ("in_flight", "Requests with memory here whose KV has not arrived.", incoming.in_flight),
            ("waiting_for_memory", "Requests whose KV waits for memory here.", incoming.waiting),
        ):
            gauge = node_gauge(f"pdemu_kv_transfer_{name}", what)
            gauge.add_metric(self._values, value)
            yield gauge

    def _counter(self, name: str, what: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, what, labels=tuple(self.families.labels))
        family.add_metric(tuple(self.families.labels.values()), value)
        return family
