"""When a load test sends what: arrivals by number, plans, the limit on concurrency, prompts, and options in text."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core import traffic
from emulator.core.bench.arrivals import Pace, RampUp, arrival_times_s
from emulator.core.bench.gate import Gate
from emulator.core.bench.measures import parse_goodput, parse_latencies, parse_percentiles, percentile_word
from emulator.core.bench.plan import lengths_plan, topology_plan, trace_plan
from emulator.core.bench.prompts import POOL_WORDS, Calibration, PromptPool, request_body
from emulator.core.errors import ConfigError
from emulator.core.quantities import Seconds
from emulator.core.specs import Slo
from emulator.core.trace import Trace, TraceRow

# --- arrivals -----------------------------------------------------------------------------------------------------


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times_s(3, Pace(), 0) == [0.0, 0.0, 0.0]


def test_a_rate_is_kept_exactly_whatever_the_seed() -> None:
    for seed in range(5):
        times = arrival_times_s(200, Pace(20.0), seed)
        assert times[-1] == pytest.approx(10.0)
        assert times == sorted(times)
    assert arrival_times_s(200, Pace(20.0), 1) == arrival_times_s(200, Pace(20.0), 1)
    assert arrival_times_s(200, Pace(20.0), 1) != arrival_times_s(200, Pace(20.0), 2)


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    def cv(burstiness: float) -> float:
        gaps = np.diff(arrival_times_s(20_000, Pace(10.0, burstiness), 3))
        return float(np.std(gaps) / np.mean(gaps))

    assert cv(1.0) == pytest.approx(1.0, rel=0.05)
    assert cv(0.25) == pytest.approx(2.0, rel=0.08)
    assert cv(4.0) == pytest.approx(0.5, rel=0.05)
    assert cv(math.inf) == pytest.approx(0.0, abs=1e-6)


def test_a_rate_ramps_up_from_the_first_request_to_the_last() -> None:
    even = arrival_times_s(101, Pace(burstiness=math.inf, ramp_up=RampUp("linear", 10.0, 20.0)), 0)
    assert even[0] == pytest.approx(1 / 10)
    assert even[-1] - even[-2] == pytest.approx(1 / 20)
    assert even[50] - even[49] == pytest.approx(1 / 15)
    growing = arrival_times_s(101, Pace(burstiness=math.inf, ramp_up=RampUp("exponential", 1.0, 100.0)), 0)
    assert growing[50] - growing[49] == pytest.approx(1 / 10)
    assert arrival_times_s(1, Pace(ramp_up=RampUp("linear", 2.0, 3.0)), 0)[0] > 0


@pytest.mark.parametrize(
    "ramp", [RampUp("linear", 0.5, 20.0), RampUp("exponential", 2.5, 90.0), RampUp("linear", 3, 3)]
)
def test_a_ramp_tells_who_is_the_first_with_each_whole_rate(ramp: RampUp) -> None:
    for n in (0, 1, 2, 37):
        last, expected = int(ramp.start_rps), []
        for place, rate in enumerate(ramp.rates(n)):
            expected += [(rps, place) for rps in range(last + 1, int(rate) + 1)]
            last = max(last, int(rate))
        assert ramp.steps(n) == expected


# --- plans --------------------------------------------------------------------------------------------------------

TRACE = Trace((TraceRow(0.0, 100, 10), TraceRow(1.0, 200, 20), TraceRow(4.0, 300, 30)))


def test_requests_of_one_length() -> None:
    plan = lengths_plan(64, 8, 3, Pace(1.0, math.inf), 0)
    assert [(r.prompt_tokens, r.max_tokens) for r in plan.open] == [(64, 8)] * 3
    assert [r.scheduled_s for r in plan.open] == pytest.approx([1.0, 2.0, 3.0])
    assert len({r.request_id for r in plan.open}) == 3
    assert plan.duration_s == pytest.approx(3.0)


def test_a_trace_keeps_its_own_pace_or_is_stretched() -> None:
    assert [r.scheduled_s for r in trace_plan(TRACE, None, Pace(), 0).open] == [0.0, 1.0, 4.0]
    twice = trace_plan(TRACE, None, Pace(1.0), 0)
    assert [r.scheduled_s for r in twice.open] == [0.0, 0.5, 2.0]
    assert [(r.prompt_tokens, r.max_tokens) for r in twice.open] == [(100, 10), (200, 20), (300, 30)]


def test_the_first_rows_of_a_trace_are_sent_at_the_rate_asked_for() -> None:
    assert [r.scheduled_s for r in trace_plan(TRACE, 2, Pace(0.5), 0).open] == [0.0, 2.0]


def test_a_trace_without_times_is_drawn() -> None:
    untimed = Trace(tuple(TraceRow(0.0, 10 + n, 5) for n in range(10)), timed=False)
    assert {r.scheduled_s for r in trace_plan(untimed, None, Pace(), 0).open} == {0.0}
    drawn = trace_plan(untimed, 4, Pace(2.0, 3.0), 0)
    assert [r.prompt_tokens for r in drawn.open] == [10, 11, 12, 13]
    assert drawn.open[-1].scheduled_s == pytest.approx(2.0)


def test_what_a_trace_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="--burstiness: the trace has times of its own"):
        trace_plan(TRACE, None, Pace(burstiness=2.0), 0)
    with pytest.raises(ConfigError, match="--ramp-up-strategy: the trace"):
        trace_plan(TRACE, None, Pace(ramp_up=RampUp("linear", 1, 2)), 0)
    with pytest.raises(ConfigError, match="no rate to change"):
        trace_plan(TRACE, 1, Pace(3.0), 0)


def _workload(arrivals: traffic.Poisson | traffic.ClosedLoop) -> traffic.Workload:
    stream = traffic.Stream(name="chat", arrivals=arrivals, prompt_tokens=100, output_tokens=5)
    return traffic.Workload(streams=(stream,), duration=Seconds(20.0), seed=1)


def test_a_topologys_traffic_at_its_own_rate_or_another() -> None:
    workload = _workload(traffic.Poisson(rate_per_s=5.0))
    own = topology_plan(workload, {}, None, Pace())
    faster = topology_plan(workload, {}, None, Pace(10.0))
    assert faster.open[0].scheduled_s == pytest.approx(own.open[0].scheduled_s / 2)
    assert topology_plan(workload, {}, 7, Pace()).open == own.open[:7]


def test_closed_loop_users_are_planned_but_not_by_number() -> None:
    workload = _workload(traffic.ClosedLoop(users=3, think_s=1.0))
    assert len(topology_plan(workload, {}, None, Pace()).users) == 3
    with pytest.raises(ConfigError, match="--num-prompts: closed-loop users"):
        topology_plan(workload, {}, 7, Pace())


# --- concurrency --------------------------------------------------------------------------------------------------


@given(limit=st.integers(1, 4) | st.none(), moves=st.lists(st.booleans(), max_size=60))
def test_the_gate_lets_in_so_many_in_the_order_in_which_they_came(limit: int | None, moves: list[bool]) -> None:
    gate: Gate[int] = Gate(limit)
    numbers = itertools.count()
    entered: list[int] = []
    left = 0
    for arrives in moves:
        if arrives:
            number = next(numbers)
            if gate.arrive(number):
                entered.append(number)
        elif gate.inside:
            following = gate.leave()
            left += 1
            if following is not None:
                entered.append(following)
        gate.check_integrity()
        assert gate.inside == len(entered) - left
    assert entered == list(range(len(entered)))


# --- prompts ------------------------------------------------------------------------------------------------------


def test_prompts_have_so_many_words_and_share_no_beginning() -> None:
    pool = PromptPool(0)
    prompts = [pool.text(n, 300) for n in range(200)]
    assert {len(prompt.split()) for prompt in prompts} == {300}
    assert len({tuple(prompt.split()[:16]) for prompt in prompts}) == 200
    assert PromptPool(0).text(5, 40) == pool.text(5, 40)
    assert PromptPool(1).text(5, 40) != pool.text(5, 40)


def test_a_prompt_may_be_longer_than_the_pool() -> None:
    pool = PromptPool(0)
    assert len(pool.text(3, POOL_WORDS + 10).split()) == POOL_WORDS + 10
    assert len(pool.ids(3, 2 * POOL_WORDS + 10)) == 2 * POOL_WORDS + 10


def test_a_server_tells_how_long_text_is() -> None:
    template = Calibration.of((32, 288), (32 * 2 + 9, 288 * 2 + 9))
    assert template == Calibration(9.0, 2.0)
    assert template.words(1009) == 500
    assert template.words(3) == 1
    assert Calibration().words(77) == 77


@pytest.mark.parametrize("counted", [(None, 300), (40, None), (40, 40), (50, 40)])
def test_counts_without_sense_are_none(counted: tuple[int | None, int | None]) -> None:
    assert Calibration.of((32, 288), counted) is None


def test_bodies_ask_for_a_stream_with_usage() -> None:
    plain = msgspec.json.decode(request_body("completions", "m", [1, 2], 9, ignore_eos=True))
    assert plain == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 9,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    chat = msgspec.json.decode(request_body("chat", "m", "hello", 9, ignore_eos=False))
    assert chat["messages"] == [{"role": "user", "content": "hello"}]
    assert chat["max_completion_tokens"] == 9
    assert "ignore_eos" not in chat


def test_further_fields_of_a_body_go_over_its_own() -> None:
    body = request_body("completions", "m", [1], 9, ignore_eos=True, extra={"temperature": 0.7, "top_k": 3})
    found = msgspec.json.decode(body)
    assert (found["temperature"], found["top_k"], found["max_tokens"]) == (0.7, 3, 9)


# --- options in text ----------------------------------------------------------------------------------------------


def test_bounds_of_a_good_request() -> None:
    assert parse_goodput(["ttft:200 tpot:50", "e2el:3000,itl_p99:80.5"]) == Slo(
        ttft_ms=200, tpot_ms=50, e2el_ms=3000, itl_p99_ms=80.5
    )
    assert parse_goodput([]) == Slo()


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:0", "ttft:nan", "ttft:inf", "itl:5", "ttft:1 ttft:2"])
def test_bounds_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput([text])


def test_metrics_and_percentiles() -> None:
    assert parse_latencies("itl, ttft") == ("ttft", "itl")
    assert parse_percentiles("99,50,99.9,50") == (50.0, 99.0, 99.9)
    assert [percentile_word(q) for q in (50.0, 99.9, 100.0)] == ["p50", "p99.9", "p100"]
    with pytest.raises(ConfigError, match="'latency' is not one of"):
        parse_latencies("ttft,latency")
    for text in ("", "101", "-1", "nan", "50,"):
        with pytest.raises(ConfigError, match="--metric-percentiles"):
            parse_percentiles(text)
