"""What the records of one run come to, as types of the JSON and as the fold that makes them.

The names of the fields are the keys of the JSON and part of the interface; a value that does not exist (a percentile
of nothing, a rate of no transfer) is null, never NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from emulator.core import metrics
from emulator.core.deployments import FirstToken
from emulator.core.device_use import DeviceUse
from emulator.core.kv_memory import KvMemory
from emulator.core.metrics import Floats, Measurements, Metric
from emulator.core.records import MemoryRecord, Record, StepRecord
from emulator.core.specs import Slo
from emulator.core.upkeep import Costs, Holdings

EndedBy = Literal["load", "stop", "limit"]
"""What ended a record: the end of the load, with its drain deadline; a stop; as much as is recorded at most."""

_MS = 1e3


class Distribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Mean, percentiles (linear interpolation) and largest of a set of values; all null when there is none."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Floats) -> Distribution:
        """The distribution of `values`, leaving out NaN."""
        unknown = np.isnan(values)
        known = values[~unknown] if unknown.any() else values
        if not known.size:
            return cls()
        p50, p90, p99 = np.percentile(known, (50, 90, 99))
        return cls(mean=float(np.mean(known)), p50=float(p50), p90=float(p90), p99=float(p99), max=float(np.max(known)))


class TtftBreakdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Means over completed requests, milliseconds, adding up to the mean TTFT; null when none completed."""

    queue: float | None = None
    prefill: float | None = None
    orchestration: float | None = None
    wire: float | None = None
    decode_wait: float | None = None
    decode: float | None = None


class KvSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KV that crossed the network, of all requests whatever became of them.

    `bytes` were counted at the decode nodes, `bytes_again` of them for requests that were prefilled anew because they
    had lost their memory; the rest is of first hand-overs. `transfer_ms` is from the first byte on the wire to the last
    one counted. `achieved_bps` is payload bits over the time in which at least one transfer was under way, the times of
    the decode nodes added up: the mean rate of a decode node while it receives. TCP segments sent again and packets
    dropped are those of all nodes during the run, null where the kernel does not shape. `local_prefills` are completed
    requests whose KV stayed where it was: one node prefilled and decoded them.
    """

    bytes: int = 0
    bytes_again: int = 0
    transfers: int = 0
    transfer_ms: Distribution = Distribution()
    achieved_bps: float | None = None
    tcp_retransmits: int | None = None
    qdisc_drops: int | None = None
    local_prefills: int = 0


class Fidelity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How faithful an emulation was, in model time; null where nothing was measured (a simulation, no transfer).

    The lateness of steps is that of nodes that had their device for themselves (see `core.device_use`). `link_ratio` is
    achieved over requested payload rate, `cpu_busy` the busiest core's share of a second, 0 to 1,
    `suggested_scale_time` the `scale.time` that would cure what failed.
    """

    ok: bool = True
    step_lateness_ms_p99: float | None = None
    loop_lag_ms_p99: float | None = None
    schedule_delay_ms_p99: float | None = None
    link_ratio: float | None = None
    cpu_busy: float | None = None
    suggested_scale_time: float | None = None
    reasons: tuple[str, ...] = ()


class RunSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One deployment under the whole traffic, at one KV bandwidth (null when no KV network is used).

    `requests` = completed + failed + unfinished are all that were due; `failure` is the reason of the first that
    failed; `saturated` says that some had not ended by the drain deadline, and not that a stop or the record's limit
    came first (`ended_by`). `requested_rate` is requests due,
    `request_goodput` requests meeting every SLO, both per second of the arrival window of `duration_s`;
    `output_throughput` is output tokens per second of the run.
    Attainments are shares of all requests, null when there were none. `first_token` is null where no KV is handed over.
    `costs` goes by completed requests and by `request_goodput`. `preemptions`: how often a request lost its memory on
    the node that decodes it. `device` is what computed its steps.
    """

    deployment: str
    kv_bandwidth_bps: float | None
    gpus: int
    duration_s: float
    seed: int | None
    launcher: str
    shaping: str
    requests: int
    completed: int
    failed: int
    failure: str | None
    unfinished: int
    saturated: bool
    requested_rate: float
    slo_attainment: float | None
    slo_attainment_by_metric: dict[Metric, float | None]
    request_goodput: float
    output_throughput: float
    costs: Costs
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    itl_p99_ms: Distribution
    e2el_ms: Distribution
    ttft_breakdown_ms: TtftBreakdown
    kv: KvSummary
    fidelity: Fidelity
    first_token: FirstToken | None = None
    preemptions: int = 0
    kv_memory: KvMemory = KvMemory()
    device: DeviceUse = DeviceUse()
    ended_by: EndedBy = "load"

    @property
    def disaggregated(self) -> bool:
        """Whether KV crossed a network."""
        return self.kv_bandwidth_bps is not None


@dataclass(frozen=True)
class RunResult:
    """A run's summary together with the rows from which it was made."""

    summary: RunSummary
    records: Sequence[Record]
    steps: Sequence[StepRecord] = ()
    memory: Sequence[MemoryRecord] = ()


def summarize(
    records: Sequence[Record],
    *,
    deployment: str,
    gpus: int,
    slo: Slo,
    duration_s: float,
    kv_bandwidth_bps: float | None = None,
    launcher: str = "local",
    shaping: str = "none",
    seed: int | None = None,
    fidelity: Fidelity | None = None,
    holdings: Holdings | None = None,
    first_token: FirstToken | None = None,
    kv_memory: KvMemory | None = None,
    device: DeviceUse | None = None,
    ended_by: EndedBy = "load",
) -> RunSummary:
    """What the records of one run come to; `duration_s` > 0 is the arrival window, in model seconds.

    `holdings` are those of the deployment, from which its costs follow; without them they are not known.
    """
    measured = metrics.measure(records)
    met = metrics.meets_all(measured, slo)
    completed = int(np.count_nonzero(measured.completed))
    goodput_per_s = metrics.request_goodput(met, duration_s)
    unfinished = int(np.count_nonzero(measured.unfinished))
    latency = measured.latency_ms
    return RunSummary(
        deployment=deployment,
        kv_bandwidth_bps=kv_bandwidth_bps,
        gpus=gpus,
        duration_s=duration_s,
        seed=seed,
        launcher=launcher,
        shaping=shaping,
        requests=len(measured),
        completed=completed,
        failed=int(np.count_nonzero(measured.failed)),
        failure=next((record.reason for record in records if record.outcome == "failed"), None),
        unfinished=unfinished,
        saturated=unfinished > 0 and ended_by == "load",
        requested_rate=len(measured) / duration_s,
        slo_attainment=metrics.share(met),
        slo_attainment_by_metric={m: metrics.share(within) for m, within in metrics.meets(measured, slo).items()},
        request_goodput=goodput_per_s,
        output_throughput=metrics.output_throughput(measured, duration_s),
        costs=Costs.of(holdings or Holdings(), completed_per_s=completed / duration_s, goodput_per_s=goodput_per_s),
        ttft_ms=Distribution.of(latency["ttft_ms"]),
        tpot_ms=Distribution.of(latency["tpot_ms"]),
        itl_ms=Distribution.of(measured.gaps_ms),
        itl_p99_ms=Distribution.of(latency["itl_p99_ms"]),
        e2el_ms=Distribution.of(latency["e2el_ms"]),
        ttft_breakdown_ms=_breakdown(measured),
        kv=_kv_summary(records, first_token),
        fidelity=fidelity or Fidelity(),
        first_token=first_token,
        preemptions=sum(record.preemptions for record in records),
        kv_memory=kv_memory or KvMemory(),
        device=device or DeviceUse(),
        ended_by=ended_by,
    )


def _breakdown(measured: Measurements) -> TtftBreakdown:
    parts = {part: Distribution.of(values).mean for part, values in measured.ttft_parts_ms.items()}
    return TtftBreakdown(**parts)


def _kv_summary(records: Sequence[Record], first_token: FirstToken | None) -> KvSummary:
    spans = [
        (r.decode_node or "", r.kv_start_s, r.kv_end_s, r.kv_bytes)
        for r in records
        if r.kv_start_s is not None and r.kv_end_s is not None
    ]
    durations = np.array([end - start for _, start, end, _ in spans], dtype=np.float64)
    busy_s = sum(
        _union_s([(start, end) for _, start, end, _ in group])
        for _, group in itertools.groupby(sorted(spans), key=lambda span: span[0])
    )
    received_bits = 8.0 * sum(span[3] for span in spans)
    return KvSummary(
        bytes=sum(r.kv_bytes + r.kv_bytes_again for r in records),
        bytes_again=sum(r.kv_bytes_again for r in records),
        transfers=len(spans),
        transfer_ms=Distribution.of(durations * _MS),
        achieved_bps=received_bits / busy_s if busy_s > 0 else None,
        local_prefills=0 if first_token is None else sum(_is_local(r, first_token) for r in records),
    )


def _is_local(record: Record, first_token: FirstToken) -> bool:
    """Whether one node prefilled and decoded a request; where prefill streams all its tokens none decodes."""
    decoded = record.max_tokens > 1 or first_token != "prefill"
    return record.outcome == "completed" and record.prefill_node == record.decode_node and decoded


def _union_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the spans, which come in order of their starts."""
    covered, until = 0.0, -np.inf
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
