"""From exchanges to the document of a load test, its keys those of `vllm bench serve --save-result`.

Where a key is vLLM's, so is its meaning: latency counts from the send, throughputs and `request_goodput` are over
`duration`, which ends with the last answer. A key in `_from_schedule` counts from the scheduled instant instead and so
includes what waited before it was sent. `slo_attainment` counts from the schedule, over all that was due. Two things
differ: a chunk that only announces the role is no first token, and what does not exist is null, not 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from emulator.core import metrics
from emulator.core.bench.arrivals import Pace
from emulator.core.bench.exchange import ChunkCounts, Exchange
from emulator.core.bench.faithful import Rates, judge
from emulator.core.bench.measures import Latency, Measures, percentile_word
from emulator.core.metrics import Floats, Measurements
from emulator.core.records import Record
from emulator.core.specs import Slo

FROM_SCHEDULE = "_from_schedule"
ANCHORED: tuple[Latency, ...] = ("ttft", "e2el")
"""Latencies that depend on where they start; the others are differences between tokens."""
_MS = 1e3


@dataclass(frozen=True, slots=True)
class Observed:
    """A load test that has ended: every request that was due, how late the generator's loop ran, how long it took.

    It began at `began_unix_s`, in seconds of the wall since 1970.
    """

    exchanges: Sequence[Exchange]
    loop_lag_s: Sequence[float]
    duration_s: float
    interrupted: bool = False
    began_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for; `head` has further keys to begin with, such as the model's name."""

    head: dict[str, Any]
    pace: Pace
    measures: Measures
    max_concurrency: int | None = None


def fold(observed: Observed, asked: Asked, *, detailed: bool = False) -> dict[str, Any]:
    """The whole document; `detailed` with what each request saw."""
    exchanges = observed.exchanges
    records = [exchange.record() for exchange in exchanges]
    from_send = metrics.measure([_sent_on_schedule(record) for record in records])
    from_schedule = metrics.measure(records)
    document = asked.head | _traffic(asked) | _ramp(asked, observed) | _totals(observed, from_send)
    if detailed:
        document |= _details(exchanges)
    document |= _peaks(records)
    for latency in asked.measures.latencies:
        document |= _statistics(latency, "", _values(latency, from_send), asked.measures)
    for latency in ANCHORED:
        if latency in asked.measures.latencies:
            document |= _statistics(latency, FROM_SCHEDULE, _values(latency, from_schedule), asked.measures)
    document |= _judged(asked.measures.slo, from_send, from_schedule, observed.duration_s)
    document |= _schedule(observed, asked)
    document["tokens"] = _tokens(exchanges)
    document["chunks"] = asdict(_chunks(exchanges))
    return document


def _sent_on_schedule(record: Record) -> Record:
    """The record as if the request had been scheduled when it was sent."""
    if record.sent_s is None:
        return record
    return msgspec.structs.replace(record, scheduled_s=record.sent_s)


def _traffic(asked: Asked) -> dict[str, Any]:
    pace = asked.pace
    return {
        "request_rate": _finite(pace.request_rate),
        "burstiness": _finite(pace.burstiness),
        "max_concurrency": asked.max_concurrency,
    }


def _ramp(asked: Asked, observed: Observed) -> dict[str, Any]:
    """What was asked of the rate, and when it reached each whole number of requests per second."""
    ramp = asked.pace.ramp_up
    if ramp is None:
        return {}
    scheduled_s = [exchange.request.scheduled_s for exchange in observed.exchanges]
    scale_time = asked.head.get("scale_time") or 1.0
    begun = {"rps": ramp.start_rps, "timestamp": _utc(observed.began_unix_s)}
    reached = [
        {"rps": rps, "timestamp": _utc(observed.began_unix_s + scheduled_s[place] * scale_time)}
        for rps, place in ramp.steps(asked.head.get("num_prompts", 0) or len(scheduled_s))
        if place < len(scheduled_s)
    ]
    return {
        "ramp_up_strategy": ramp.strategy,
        "ramp_up_start_rps": ramp.start_rps,
        "ramp_up_end_rps": ramp.end_rps,
        "rps_change_events": [begun, *reached],
    }


def _utc(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _totals(observed: Observed, measured: Measurements) -> dict[str, Any]:
    completed = [e for e in observed.exchanges if e.outcome == "completed"]
    inputs, outputs = sum(e.prompt_tokens for e in completed), sum(e.output_tokens for e in completed)
    reasons = Counter(e.seen.reason for e in observed.exchanges if e.outcome == "failed")
    return {
        "duration": observed.duration_s,
        "requests": len(measured),
        "completed": len(completed),
        "failed": int(np.count_nonzero(measured.failed)),
        "failed_by_reason": dict(reasons.most_common()),
        "unfinished": int(np.count_nonzero(measured.unfinished)),
        "interrupted": observed.interrupted,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": _per_s(len(completed), observed.duration_s),
        "output_throughput": _per_s(outputs, observed.duration_s),
        "total_token_throughput": _per_s(inputs + outputs, observed.duration_s),
    }


def _per_s(count: float, duration_s: float) -> float | None:
    return count / duration_s if duration_s > 0 else None


def _details(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """A value a request, in the order in which they were due; seconds, and 0 for what failed, as vLLM has it.

    Instants are seconds from the start of the run; a request that was not sent has none, nor has it waited.
    """
    ended = [e.outcome == "completed" and e.sent_s is not None for e in exchanges]
    times = [e.seen.token_times_s for e in exchanges]
    sent = [e.sent_s or 0.0 for e in exchanges]
    return {
        "input_lens": [e.prompt_tokens for e in exchanges],
        "output_lens": [e.output_tokens if ok else 0 for e, ok in zip(exchanges, ended, strict=True)],
        "ttfts": [row[0] - at if ok else 0.0 for row, at, ok in zip(times, sent, ended, strict=True)],
        "itls": [np.diff(row).tolist() if ok else [] for row, ok in zip(times, ended, strict=True)],
        "latencies": [row[-1] - at if ok else 0.0 for row, at, ok in zip(times, sent, ended, strict=True)],
        "start_times": [e.sent_s for e in exchanges],
        "queue_times": [None if e.sent_s is None else e.sent_s - e.request.scheduled_s for e in exchanges],
        "generated_texts": ["".join(e.seen.text) for e in exchanges],
        "errors": [e.record().reason for e in exchanges],
    }


def _peaks(records: Sequence[Record]) -> dict[str, Any]:
    """The busiest second, of seconds counted from the first send of a request that completed."""
    done = [r for r in records if r.outcome == "completed" and r.sent_s is not None and r.finish_s is not None]
    if not done:
        return {"max_output_tokens_per_s": None, "max_concurrent_requests": None}
    spans = np.array([(r.sent_s, r.finish_s) for r in done], dtype=np.float64)
    begin_s = spans[:, 0].min()
    tokens = np.bincount((np.concatenate([r.times() for r in done]) - begin_s).astype(np.int64))
    first, last = (spans - begin_s).astype(np.int64).T
    changes = np.zeros(last.max() + 2, dtype=np.int64)
    np.add.at(changes, first, 1)
    np.add.at(changes, last + 1, -1)
    return {
        "max_output_tokens_per_s": float(tokens.max()),
        "max_concurrent_requests": int(np.cumsum(changes).max()),
    }


def _values(latency: Latency, measured: Measurements) -> Floats:
    if latency == "itl":
        return measured.gaps_ms
    values = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "e2el_ms"}
    found = measured.latency_ms[values[latency]]  # type: ignore[index]
    return found[~np.isnan(found)]


def _statistics(latency: Latency, suffix: str, values: Floats, measures: Measures) -> dict[str, float | None]:
    folds: dict[str, Callable[[Floats], Any]] = {"mean": np.mean, "median": np.median, "std": np.std}
    found: dict[str, float | None] = {
        f"{name}_{latency}_ms{suffix}": float(of(values)) if values.size else None for name, of in folds.items()
    }
    for q in measures.percentiles:
        key = f"{percentile_word(q)}_{latency}_ms{suffix}"
        found[key] = float(np.percentile(values, q)) if values.size else None
    return found


def _judged(slo: Slo, from_send: Measurements, from_schedule: Measurements, duration_s: float) -> dict[str, Any]:
    bounds = metrics.bounds_ms(slo)
    keys = ("request_goodput", f"request_goodput{FROM_SCHEDULE}", "slo_attainment", "slo_attainment_from_send")
    if not bounds:
        return dict.fromkeys(keys) | {"slo": {}, "slo_attainment_by_metric": {}}
    sent, scheduled = metrics.meets_all(from_send, slo), metrics.meets_all(from_schedule, slo)
    values = (
        _per_s(int(np.count_nonzero(sent)), duration_s),
        _per_s(int(np.count_nonzero(scheduled)), duration_s),
        metrics.share(scheduled),
        metrics.share(sent),
    )
    by_metric = {metric: metrics.share(met) for metric, met in metrics.meets(from_schedule, slo).items()}
    return dict(zip(keys, values, strict=True)) | {"slo": bounds, "slo_attainment_by_metric": by_metric}


def _schedule(observed: Observed, asked: Asked) -> dict[str, Any]:
    exchanges, at_once = observed.exchanges, _all_at_once(observed.exchanges, asked.pace)
    rates = Rates.of(exchanges)
    sent = [(e.request.scheduled_s, e.due_s, e.sent_s) for e in exchanges if e.sent_s is not None]
    scheduled_s, due_s, sent_s = np.array(sent, dtype=np.float64).reshape(-1, 3).T
    return {
        "requested_rate": "inf" if at_once else rates.requested,
        "achieved_rate": rates.achieved,
        "schedule_delay_ms": _spread((sent_s - due_s) * _MS),
        "concurrency_wait_ms": _spread((due_s - scheduled_s) * _MS),
        "fidelity": msgspec.to_builtins(judge(exchanges, rates, observed.loop_lag_s, at_once=at_once)),
    }


def _all_at_once(exchanges: Sequence[Exchange], pace: Pace) -> bool:
    """Whether an infinite rate was asked for and not overruled by a trace's or a topology's own instants."""
    return pace.at_once and len({e.request.scheduled_s for e in exchanges}) <= 1


def _spread(values: Floats) -> dict[str, float] | None:
    if not values.size:
        return None
    p50, p99 = np.percentile(values, (50, 99))
    return {"mean": float(np.mean(values)), "p50": float(p50), "p99": float(p99), "max": float(np.max(values))}


def _tokens(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """Tokens as asked for, as the server counts them and as chunks show them, over completed requests.

    A mismatch is a request in which two of them differ.
    """
    completed = [e for e in exchanges if e.outcome == "completed"]
    asked_input, input_tokens = sum(e.request.prompt_tokens for e in completed), sum(e.prompt_tokens for e in completed)
    stated = [e for e in completed if e.seen.output_tokens is not None]
    chunks = sum(len(e.seen.token_times_s) for e in completed)
    return {
        "output_counted_by": {"usage": len(stated), "chunks": len(completed) - len(stated)},
        "asked_input_tokens": asked_input,
        "asked_output_tokens": sum(e.request.max_tokens for e in completed),
        "input_deviation": input_tokens / asked_input - 1 if asked_input else None,
        "input_mismatches": sum(e.prompt_tokens != e.request.prompt_tokens for e in completed),
        "output_mismatches": sum(e.output_tokens != e.request.max_tokens for e in completed),
        "usage_chunk_mismatches": sum(e.seen.output_tokens != len(e.seen.token_times_s) for e in stated),
        "tokens_per_chunk": sum(e.output_tokens for e in completed) / chunks if chunks else None,
    }


def _chunks(exchanges: Sequence[Exchange]) -> ChunkCounts:
    total = ChunkCounts()
    for exchange in exchanges:
        total.add(exchange.seen.counts)
    return total
