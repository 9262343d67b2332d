"""What a load generator sends: lengths of one size, a topology's traffic, or a trace, as a plan.

A topology's traffic and a trace with times keep their own pattern, stretched where a rate is asked for; requests
that have only lengths come as `core.bench.arrivals` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from emulator.core import traffic
from emulator.core.bench.arrivals import Pace, arrival_times_s
from emulator.core.errors import ConfigError
from emulator.core.trace import Trace
from emulator.core.workload import MAX_REQUESTS, LoadPlan, PlannedRequest, plan_load, scale_rate

STREAM = "bench"
DEFAULT_NUM_PROMPTS = 1000


def lengths_plan(input_len: int, output_len: int, num_prompts: int, pace: Pace, seed: int) -> LoadPlan:
    """`num_prompts` requests of one length."""
    return _drawn([(input_len, output_len)] * num_prompts, pace, seed)


def trace_plan(trace: Trace, num_prompts: int | None, pace: Pace, seed: int) -> LoadPlan:
    """A trace's first requests: at its own pace, or stretched to the pace's rate; drawn where it has no times.

    Raises ConfigError for a pace that goes with drawn arrivals alone, and for a rate where there is none to stretch.
    """
    rows = trace.rows[:num_prompts]
    if not trace.timed:
        return _drawn([(row.prompt_tokens, row.output_tokens) for row in rows], pace, seed)
    _refuse_drawing(pace, "the trace has times of its own")
    used = msgspec.structs.replace(trace, rows=rows)
    if not pace.at_once:
        if used.rate_per_s is None:
            raise ConfigError("--request-rate: the trace's requests come at one instant, so there is no rate to change")
        used = used.at_rate(pace.request_rate)
    times = [row.time_s for row in used.rows]
    return _plan(times, [(row.prompt_tokens, row.output_tokens) for row in rows], times[-1])


def topology_plan(
    workload: traffic.Workload, traces: Mapping[str, Trace], num_prompts: int | None, pace: Pace
) -> LoadPlan:
    """A topology's traffic, at the pace's rate where it has one; of its open-loop requests the first `num_prompts`.

    Raises ConfigError for a pace that goes with drawn arrivals alone, and for traffic that cannot be.
    """
    _refuse_drawing(pace, "a topology's streams have arrivals of their own")
    if not pace.at_once:
        workload = scale_rate(workload, pace.request_rate, traces)
    plan = plan_load(workload, traces)
    if num_prompts is None:
        return plan
    if plan.users:
        raise ConfigError("--num-prompts: closed-loop users send as long as the duration lasts; leave it out")
    return msgspec.structs.replace(plan, open=plan.open[:num_prompts])


def _refuse_drawing(pace: Pace, why: str) -> None:
    if pace.ramp_up is not None:
        raise ConfigError(f"--ramp-up-strategy: {why}; leave it out, or use --input-len and --output-len")
    if pace.burstiness != 1:
        raise ConfigError(f"--burstiness: {why}; leave it out, or use --input-len and --output-len")


def _drawn(lengths: Sequence[tuple[int, int]], pace: Pace, seed: int) -> LoadPlan:
    times = arrival_times_s(len(lengths), pace, seed)
    duration_s = times[-1] if math.isinf(pace.request_rate) else len(lengths) / pace.request_rate
    return _plan(times, lengths, duration_s)


def _plan(times_s: Sequence[float], lengths: Sequence[tuple[int, int]], duration_s: float) -> LoadPlan:
    if len(lengths) > MAX_REQUESTS:
        raise ConfigError(f"{len(lengths)} requests; at most {MAX_REQUESTS} are possible: lower --num-prompts")
    requests = (
        PlannedRequest(f"{STREAM}-{n:06d}", STREAM, time_s, prompt, output)
        for n, (time_s, (prompt, output)) in enumerate(zip(times_s, lengths, strict=True))
    )
    return LoadPlan(tuple(requests), (), duration_s, 0.0)
