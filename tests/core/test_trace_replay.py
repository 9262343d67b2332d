"""How a trace's requests become a load: lengths alone come at random, at a rate that has to be given."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from emulator.core import traffic
from emulator.core.errors import ConfigError
from emulator.core.quantities import Seconds
from emulator.core.trace import Trace, TraceRow
from emulator.core.trace_summary import replayed
from emulator.core.workload import LoadPlan, open_rate_per_s, plan_load, scale_rate

UNTIMED = Trace(tuple(TraceRow(0.0, n + 1, 5) for n in range(5000)), timed=False)
TIMED = Trace((TraceRow(0.0, 1, 1), TraceRow(2.0, 1, 1)))
STREAM = traffic.Stream(name="lengths", arrivals=traffic.Trace(file="l.csv"))


def _workload(*streams: traffic.Stream, seed: int = 1, duration_s: float = 100.0) -> traffic.Workload:
    return traffic.Workload(duration=Seconds(duration_s), streams=streams, seed=seed)


def _plan(rate_per_s: float, *, seed: int = 1, trace: Trace = UNTIMED) -> LoadPlan:
    traces = {"lengths": trace}
    return plan_load(scale_rate(_workload(STREAM, seed=seed), rate_per_s, traces), traces)


def test_lengths_alone_come_as_a_poisson_process_in_the_order_of_the_file() -> None:
    plan = _plan(20.0)
    assert [request.prompt_tokens for request in plan.open] == list(range(1, len(plan.open) + 1))
    gaps = np.diff([request.scheduled_s for request in plan.open])
    deviation = np.sqrt(2000)  # of a Poisson number of mean 20 x 100
    assert abs(len(plan.open) - 2000) < 4 * deviation
    assert abs(np.std(gaps) / np.mean(gaps) - 1.0) < 4 / np.sqrt(2000)


def test_seeds_move_the_requests_and_rates_keep_their_pattern() -> None:
    first, second, faster = _plan(20.0), _plan(20.0, seed=2), _plan(40.0)
    assert [r.scheduled_s for r in first.open[:9]] != [r.scheduled_s for r in second.open[:9]]
    slow, fast = ([request.scheduled_s for request in plan.open[:100]] for plan in (first, faster))
    assert fast == pytest.approx([time_s / 2 for time_s in slow])


def test_a_short_file_ends_early_and_the_arrival_window_with_it() -> None:
    """The time for what still runs then ends when it would have ended."""
    plan = _plan(20.0, trace=msgspec.structs.replace(UNTIMED, rows=UNTIMED.rows[:10]))
    assert len(plan.open) == 10
    assert plan.open[-1].scheduled_s < 10.0
    assert plan.duration_s == pytest.approx(plan.open[-1].scheduled_s * 10 / 9)
    assert plan.duration_s + plan.drain_s == pytest.approx(115.0)


def test_the_window_of_a_trace_that_ends_early_holds_its_rate() -> None:
    even = Trace(tuple(TraceRow(float(n), 1, 1) for n in range(50)))
    for rate_per_s in (0.5, 2.0, 5.0):
        plan = _plan(rate_per_s, trace=even)
        assert len(plan.open) == 50
        assert len(plan.open) / plan.duration_s == pytest.approx(rate_per_s)
    assert _plan(0.4, trace=even).duration_s == 100.0, "not all of it is sent"


def test_other_traffic_keeps_the_window_of_a_short_trace_open() -> None:
    other = traffic.Stream(name="other", arrivals=traffic.Poisson(rate_per_s=1), prompt_tokens=1, output_tokens=1)
    assert plan_load(_workload(STREAM, other), {"lengths": TIMED}).duration_s == 100.0
    at_once = Trace((TraceRow(0.0, 1, 1), TraceRow(0.0, 1, 1)))
    assert plan_load(_workload(STREAM), {"lengths": at_once}).duration_s == 100.0, "nobody knows how fast they come"


def test_lengths_alone_have_no_rate_of_their_own() -> None:
    traces = {"lengths": UNTIMED, "timed": TIMED}
    timed = traffic.Stream(name="timed", arrivals=traffic.Trace(file="t.csv"))
    for refused in (
        lambda: open_rate_per_s(_workload(STREAM), traces),
        lambda: plan_load(_workload(STREAM), traces),
        lambda: scale_rate(_workload(STREAM, timed), 3.0, traces),
    ):
        with pytest.raises(
            ConfigError, match=r"stream lengths: l\.csv has lengths and no times.*--rate \(rate_per_s\)"
        ):
            refused()
    with_rate = msgspec.structs.replace(STREAM, arrivals=traffic.Trace(file="l.csv", rate_per_s=1.5))
    assert open_rate_per_s(_workload(with_rate, timed), traces) == 2.0


def test_a_trace_that_was_not_read_from_a_file_has_nothing_to_tell() -> None:
    workload, traces = _workload(STREAM), {"lengths": TIMED}
    assert replayed(workload, traces, plan_load(workload, traces)) == ()


def test_a_stretched_trace_has_the_rate_and_the_same_lengths() -> None:
    trace = Trace((TraceRow(0.0, 1, 1), TraceRow(1.0, 2, 1), TraceRow(4.0, 3, 1)))
    assert trace.at_rate(1.0).rows == (TraceRow(0.0, 1, 1), TraceRow(0.5, 2, 1), TraceRow(2.0, 3, 1))
