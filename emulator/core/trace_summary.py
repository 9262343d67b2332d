"""What a trace is like: how its rows were read, how they come, how long they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from emulator.core import traffic
from emulator.core.trace import Trace, TraceReading
from emulator.core.trace_selection import counted, dropped_text
from emulator.core.workload import LoadPlan


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tokens of the requests that are used; percentiles interpolate linearly."""

    min: int
    p50: float
    mean: float
    p90: float
    p99: float
    max: int

    @classmethod
    def of(cls, tokens: Sequence[int]) -> Lengths:
        """The quantiles of at least one length."""
        values = np.array(tokens, dtype=np.int64)
        p50, p90, p99 = (float(q) for q in np.percentile(values, (50, 90, 99)))
        return cls(min=int(values.min()), p50=p50, mean=float(values.mean()), p90=p90, p99=p99, max=int(values.max()))


class TraceSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The document of `pdemu trace --json`: the trace at its own pace, or at the rate that was asked for.

    `duration_s` is from the first to the last request, `rate_per_s` (requests − 1)/duration, `inter_arrival_cv` the
    standard deviation of the gaps between requests over their mean; null where there are no times, or only one.
    """

    reading: TraceReading
    duration_s: float | None
    rate_per_s: float | None
    inter_arrival_cv: float | None
    prompt_tokens: Lengths
    output_tokens: Lengths


class ReplayedTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A trace in a run: of a stream's `trace.reading.rows_used` requests, `sent` come within the arrival window."""

    stream: str
    sent: int
    trace: TraceSummary


def summarize_trace(trace: Trace) -> TraceSummary:
    """The statistics of a trace that was read from a file."""
    assert trace.reading is not None
    return TraceSummary(
        reading=trace.reading,
        duration_s=trace.span_s if trace.timed else None,
        rate_per_s=trace.rate_per_s,
        inter_arrival_cv=_inter_arrival_cv(trace) if trace.timed else None,
        prompt_tokens=Lengths.of([row.prompt_tokens for row in trace.rows]),
        output_tokens=Lengths.of([row.output_tokens for row in trace.rows]),
    )


def replayed(workload: traffic.Workload, traces: Mapping[str, Trace], load: LoadPlan) -> tuple[ReplayedTrace, ...]:
    """Every trace that a load replays, with how many of its requests are sent."""
    sent = dict.fromkeys(traces, 0)
    for request in load.open:
        if request.stream in sent:
            sent[request.stream] += 1
    return tuple(
        ReplayedTrace(stream=stream.name, sent=sent[stream.name], trace=summarize_trace(traces[stream.name]))
        for stream in workload.streams
        if stream.name in traces and traces[stream.name].reading is not None
    )


def _inter_arrival_cv(trace: Trace) -> float | None:
    gaps = np.diff(np.array([row.time_s for row in trace.rows]))
    return float(np.std(gaps) / np.mean(gaps)) if trace.span_s > 0 else None


# --- sentences ------------------------------------------------------------------------------------------------


def time_text(reading: TraceReading, *, timed: bool) -> str:
    """How times are written in the file."""
    if not timed:
        return "lengths only, no times"
    if reading.time_unit is None:
        return "times as dates"
    return f"times in {reading.time_unit}{'' if reading.time_unit_given else f', the default for {reading.format}'}"


def changes(reading: TraceReading) -> list[str]:
    """Whatever sets the requests used apart from the rows of the file, a phrase each."""
    found = []
    if reading.dropped:
        found.append(f"dropped: {dropped_text(reading.dropped)}")
    if reading.truncated:
        found.append(f"{reading.truncated:,} cut to the context of {reading.context_tokens:,} tokens")
    if reading.over_context:
        found.append(f"{reading.over_context:,} exceed the context of {reading.context_tokens:,} tokens and will fail")
    if reading.steps_back:
        found.append(f"sorted: time went back {counted(reading.steps_back, 'time')}")
    return found


def reading_line(trace: Trace) -> str:
    """One line about how a trace was read."""
    reading = trace.reading
    assert reading is not None
    head = f"trace {reading.file}: {reading.format} ({time_text(reading, timed=trace.timed)})"
    used = f"{reading.rows_used:,} of {counted(reading.rows_read, 'row')} used"
    return "; ".join((f"{head}: {used}", *changes(reading)))


def replay_line(trace: Trace, replay: ReplayedTrace, load: LoadPlan, duration_s: float) -> str:
    """One line about how a trace was read and how much of it is sent; `duration_s` is the workload's."""
    how = "" if trace.timed else " at random (poisson)"
    line = f"{reading_line(trace)}; {replay.sent:,} sent{how} within {load.duration_s:g} s"
    if rest := replay.trace.reading.rows_used - replay.sent:
        return f"{line}, the other {rest:,} not"
    if load.duration_s < duration_s:
        return (
            f"{line}: the trace ends before the duration of {duration_s:g} s, and rates are over {load.duration_s:g} s"
        )
    last_s = max(request.scheduled_s for request in load.open if request.stream == replay.stream)
    return f"{line}, the last one after {last_s:g} s"
