"""From records to latencies, SLO attainment and goodput: pure folds, so every number of a report can be recomputed.

The definitions are those of the field, with the choices that tools differ in made once, here:

- A latency starts at the *scheduled* arrival, on the client's clock, so a generator or a server that falls behind
  cannot hide it (no coordinated omission). TTFT ends at the first token, E2EL at the last.
- TPOT = (E2EL − TTFT)/(n − 1) for n output tokens; undefined for n = 1, and such a request passes a TPOT bound.
- ITL pools the gaps between the tokens of all completed requests; `itl_p99_ms` is the 99th percentile of the gaps
  *within* one request, undefined (and passed) where there is no gap.
- Percentiles interpolate linearly and cover completed requests. Failed and unfinished requests miss every SLO, and
  the shares are of all requests that were due, sent in time or not.
- `request_goodput` is requests meeting every SLO per second of the arrival window, as vLLM's benchmark names it;
  its denominator is the window in which requests arrive, without the drain, so that a deployment that drains
  slowly is not charged twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from emulator.core.records import Record, expand_all
from emulator.core.specs import Slo

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

Metric = Literal["ttft_ms", "tpot_ms", "e2el_ms", "itl_p99_ms"]
Part = Literal["queue", "prefill", "orchestration", "wire", "decode_wait", "decode"]
METRICS: tuple[Metric, ...] = get_args(Metric)
PARTS: tuple[Part, ...] = get_args(Part)

_MS = 1e3
_ROWS_AT_A_TIME = 32


@dataclass(frozen=True)
class Measurements:
    """What one run's records say, a row a request in the order given; NaN where a value is undefined.

    Latencies and the parts of TTFT are in milliseconds and NaN for every request that did not complete. `gaps_ms`
    pools the gaps between tokens of completed requests. `last_s` is the latest finish of a completed request, 0 when
    there is none.
    """

    request_ids: tuple[str, ...]
    completed: Bools
    failed: Bools
    output_tokens: NDArray[np.int64]
    latency_ms: Mapping[Metric, Floats]
    ttft_parts_ms: Mapping[Part, Floats]
    gaps_ms: Floats
    last_s: float

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def unfinished(self) -> Bools:
        """Requests that neither completed nor failed by the drain deadline."""
        return ~(self.completed | self.failed)


def measure(records: Sequence[Record]) -> Measurements:
    """Latencies of every request, with what they are made of; an empty sequence gives empty rows."""
    completed = np.array([r.outcome == "completed" for r in records], dtype=np.bool_)
    failed = np.array([r.outcome == "failed" for r in records], dtype=np.bool_)
    tokens = np.array([r.output_tokens for r in records], dtype=np.int64)
    scheduled, first, finish = (_column(records, name) for name in ("scheduled_s", "first_token_s", "finish_s"))
    ttft = np.where(completed, first - scheduled, np.nan) * _MS
    e2el = np.where(completed, finish - scheduled, np.nan) * _MS
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(tokens > 1, (e2el - ttft) / (tokens - 1), np.nan)
    gaps, counts = _gaps_ms(records, completed)
    return Measurements(
        request_ids=tuple(r.request_id for r in records),
        completed=completed,
        failed=failed,
        output_tokens=tokens,
        latency_ms={
            "ttft_ms": ttft,
            "tpot_ms": tpot,
            "e2el_ms": e2el,
            "itl_p99_ms": percentile_within(gaps, counts, 99.0),
        },
        ttft_parts_ms=_ttft_parts_ms(records, ttft),
        gaps_ms=gaps,
        last_s=float(np.max(finish[completed], initial=0.0)),
    )


def meets(measured: Measurements, slo: Slo) -> dict[Metric, Bools]:
    """Which requests meet each bound of `slo`, by the bounds it has; every request that did not complete misses.

    TPOT and ITL are undefined for a request of one token, which passes them.
    """
    met: dict[Metric, Bools] = {}
    for metric, bound in bounds_ms(slo).items():
        values = measured.latency_ms[metric]
        within = values <= bound
        if metric in ("tpot_ms", "itl_p99_ms"):
            within |= np.isnan(values) & (measured.output_tokens <= 1)
        met[metric] = measured.completed & within
    return met


def meets_all(measured: Measurements, slo: Slo) -> Bools:
    """Which requests completed and met every bound of `slo`."""
    met = measured.completed.copy()
    for within in meets(measured, slo).values():
        met &= within
    return met


def bounds_ms(slo: Slo) -> dict[Metric, float]:
    """The bounds that `slo` sets, by metric, milliseconds."""
    bounds = ((metric, getattr(slo, metric)) for metric in METRICS)
    return {metric: float(bound) for metric, bound in bounds if bound is not None}


def share(met: Bools) -> float | None:
    """The share of requests for which `met` holds, 0 to 1; None when there is no request."""
    return float(np.mean(met)) if met.size else None


def request_goodput(met: Bools, duration_s: float) -> float:
    """Requests for which `met` holds per second of the arrival window of `duration_s` seconds."""
    return float(np.count_nonzero(met)) / duration_s


def output_throughput(measured: Measurements, duration_s: float) -> float:
    """Output tokens of completed requests per second, from the start of the run to the last completion.

    The denominator is at least the arrival window of `duration_s` seconds.
    """
    tokens = int(np.sum(measured.output_tokens[measured.completed]))
    return tokens / max(duration_s, measured.last_s)


def percentile_within(values: Floats, sizes: NDArray[np.int64], q: float) -> Floats:
    """The q-th percentile (linear interpolation) of each owner's values; NaN for an owner without any.

    `values` has the first owner's values first, then the second's, …; `sizes` says how many each has.
    """
    if not values.size:
        return np.full(sizes.size, np.nan)
    ordered = values.copy()
    ends = np.cumsum(sizes)
    for start, end in zip(ends - sizes, ends, strict=True):  # many short sorts: ten times as fast as one by two keys
        ordered[start:end].sort()
    rank = (sizes - 1) * (q / 100.0)
    below = np.floor(rank)
    low = np.clip(ends - sizes + below.astype(np.int64), 0, values.size - 1)
    high = np.clip(np.minimum(low + 1, ends - 1), 0, values.size - 1)
    interpolated = ordered[low] + (rank - below) * (ordered[high] - ordered[low])
    return np.where(sizes > 0, interpolated, np.nan)


def _column(records: Sequence[Record], name: str) -> Floats:
    """One attribute of all records, NaN for None."""
    found = (getattr(r, name) for r in records)
    return np.array([np.nan if value is None else value for value in found], dtype=np.float64)


def _gaps_ms(records: Sequence[Record], completed: Bools) -> tuple[Floats, NDArray[np.int64]]:
    """Gaps between the tokens of completed requests, request by request, and how many each request has."""
    rows = np.flatnonzero(completed)
    gaps: list[Floats] = [np.empty(0)]
    counts = np.zeros(len(records), dtype=np.int64)
    for start in range(0, len(rows), _ROWS_AT_A_TIME):  # so that memory for single instants stays bounded
        some = rows[start : start + _ROWS_AT_A_TIME]
        times, sizes = expand_all([records[row].token_times_s for row in some.tolist()])
        inside = np.ones(max(0, times.size - 1), dtype=np.bool_)
        ends = np.cumsum(sizes)
        inside[ends[(ends > 0) & (ends < times.size)] - 1] = False
        gaps.append((np.diff(times) * _MS)[inside])
        counts[some] = np.maximum(sizes - 1, 0)
    return np.concatenate(gaps), counts


def _ttft_parts_ms(records: Sequence[Record], ttft_ms: Floats) -> dict[Part, Floats]:
    """What TTFT is made of; the parts of a request add up to its TTFT.

    Queue runs from arrival at the prefilling node to the first step, prefill to the end of the last one; decode_wait
    is what the KV then waits for its ticket (for memory at the decode node, for its turn to be read where it is pulled,
    and for the messages that ask for it and grant it), wire what of the transfer remains after that: its turn on the
    link, what its messages cost, its bytes. Where the prefill may not start without a ticket, the wait for it is
    decode_wait and not queue. Where the decode node computes the
    last token of the prompt again, decode is the rest of its running step and that step. Where the first token is
    streamed at the end of the prefill, what comes later is no part of its TTFT. Orchestration is the rest: a late
    send, the hops, handing over. A part whose instants are unknown is 0.
    """
    queued, admitted, start, end, ready, arrived, streamed = (
        _column(records, f"{name}_s")
        for name in ("queued", "admitted", "prefill_start", "prefill_end", "kv_ready", "kv_end", "streamed")
    )
    until = np.where(np.isnan(streamed), np.inf, streamed)
    ready, arrived = np.minimum(ready, until), np.minimum(arrived, until)
    known: dict[Part, Floats] = {
        "queue": start - np.fmax(queued, admitted),
        "prefill": end - start,
        "decode_wait": _known(admitted - queued) + _known(np.maximum(0.0, ready - end)),
        "wire": np.maximum(0.0, arrived - np.fmax(ready, end)),
        "decode": np.maximum(0.0, streamed - np.fmax(arrived, np.fmax(ready, end))),
    }
    counted = ~np.isnan(ttft_ms)
    parts = {part: np.where(counted, _known(seconds) * _MS, np.nan) for part, seconds in known.items()}
    parts["orchestration"] = ttft_ms - sum(parts.values())
    return {part: parts[part] for part in PARTS}


def _known(values: Floats) -> Floats:
    return np.nan_to_num(values, nan=0.0)
