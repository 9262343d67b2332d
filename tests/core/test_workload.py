"""Plans: arrivals have the statistics that they are named after, and one stream never changes another."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from emulator.core import traffic
from emulator.core.errors import ConfigError
from emulator.core.quantities import Seconds
from emulator.core.trace import Trace, TraceRow
from emulator.core.workload import LoadPlan, PlannedRequest, open_rate_per_s, plan_load, scale_rate

LENGTHS = traffic.UniformLength(low=1, high=10_000)
TRACE = Trace((TraceRow(0.0, 11, 1), TraceRow(1.0, 12, 2), TraceRow(1.5, 13, 3), TraceRow(6.0, 14, 4)))
REPLAY = traffic.Stream(name="replay", arrivals=traffic.Trace(file="t.csv"))


def _stream(name: str, arrivals: traffic.Arrivals) -> traffic.Stream:
    return traffic.Stream(name=name, arrivals=arrivals, prompt_tokens=LENGTHS, output_tokens=LENGTHS)


def _workload(*streams: traffic.Stream, duration_s: float = 20.0, seed: int = 1) -> traffic.Workload:
    return traffic.Workload(streams=streams, duration=Seconds(duration_s), seed=seed)


def _plan(*streams: traffic.Stream, duration_s: float = 20.0, seed: int = 1) -> LoadPlan:
    return plan_load(_workload(*streams, duration_s=duration_s, seed=seed), {"replay": TRACE})


def _times(plan: LoadPlan) -> NDArray[np.float64]:
    return np.array([request.scheduled_s for request in plan.open])


def _of(plan: LoadPlan, stream: str) -> list[PlannedRequest]:
    return [request for request in plan.open if request.stream == stream]


def _lengths(requests: list[PlannedRequest]) -> list[tuple[str, int, int]]:
    return [(r.request_id, r.prompt_tokens, r.max_tokens) for r in requests]


def _refused(*streams: traffic.Stream, duration_s: float = 20.0) -> str:
    with pytest.raises(ConfigError) as caught:
        _plan(*streams, duration_s=duration_s)
    return str(caught.value)


# --- arrivals -------------------------------------------------------------------------------------------------


def test_poisson_has_its_rate_and_independent_exponential_gaps() -> None:
    times = _times(_plan(_stream("chat", traffic.Poisson(rate_per_s=50)), duration_s=400))
    gaps = np.diff(times)
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.03)
    assert np.quantile(gaps, 0.5) == pytest.approx(np.log(2) / 50, rel=0.04)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    assert times.max() < 400


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_coefficient_of_variation_of_the_burstiness(burstiness: float) -> None:
    gamma = traffic.Gamma(rate_per_s=50, burstiness=burstiness)
    times = _times(_plan(_stream("chat", gamma), duration_s=400))
    gaps = np.diff(times)
    assert len(times) == pytest.approx(20_000, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_constant_arrivals_are_evenly_spaced_from_zero() -> None:
    plan = _plan(_stream("chat", traffic.Constant(rate_per_s=4)), duration_s=1)
    assert _times(plan).tolist() == [0, 0.25, 0.5, 0.75]
    assert [request.request_id for request in plan.open] == ["chat-00000", "chat-00001", "chat-00002", "chat-00003"]


def test_at_sends_at_the_times_given_in_order() -> None:
    assert _times(_plan(_stream("probe", traffic.At(times_s=(3.0, 0.0, 19.99))))).tolist() == [0.0, 3.0, 19.99]


def test_closed_loop_users_start_along_the_ramp_with_seeds_of_their_own() -> None:
    plan = _plan(_stream("users", traffic.ClosedLoop(users=4, think_s=0.5, ramp_s=2.0)))
    assert [user.start_s for user in plan.users] == [0.0, 0.5, 1.0, 1.5]
    assert {user.think_s for user in plan.users} == {0.5}
    assert len({user.seed for user in plan.users}) == 4
    assert plan.users[3].request_id(7) == "users-u03-00007"
    assert plan.open == ()


def test_a_trace_replays_its_times_and_lengths_below_the_duration() -> None:
    plan = _plan(REPLAY, duration_s=6.0)
    assert plan.open == (
        PlannedRequest("replay-00000", "replay", 0.0, 11, 1),
        PlannedRequest("replay-00001", "replay", 1.0, 12, 2),
        PlannedRequest("replay-00002", "replay", 1.5, 13, 3),
    )


def test_a_rescaled_trace_keeps_its_shape() -> None:
    assert TRACE.rate_per_s == 0.5
    arrivals = traffic.Trace(file="t.csv", rate_per_s=1.0)
    plan = _plan(msgspec.structs.replace(REPLAY, arrivals=arrivals))
    assert _times(plan).tolist() == [0.0, 0.5, 0.75, 3.0]


def test_streams_are_merged_in_order_of_time_then_id() -> None:
    plan = _plan(
        _stream("b", traffic.At(times_s=(1.0, 2.0))),
        _stream("a", traffic.At(times_s=(2.0, 1.0))),
        _stream("chat", traffic.Poisson(rate_per_s=5)),
    )
    keys = [(request.scheduled_s, request.request_id) for request in plan.open]
    assert keys == sorted(keys)
    assert len({request.request_id for request in plan.open}) == len(keys)


# --- seeds ----------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_plan_and_another_another() -> None:
    streams = (
        _stream("chat", traffic.Poisson(rate_per_s=5)),
        _stream("bursts", traffic.Gamma(rate_per_s=5, burstiness=0.3)),
        _stream("users", traffic.ClosedLoop(users=2)),
    )
    assert _plan(*streams, seed=9) == _plan(*streams, seed=9)
    other = _plan(*streams, seed=10)
    assert other.users[0].seed != _plan(*streams, seed=9).users[0].seed
    for name in ("chat", "bursts"):
        this, that = _of(_plan(*streams, seed=9), name), _of(other, name)
        assert this[0].scheduled_s != that[0].scheduled_s
        assert [r.prompt_tokens for r in this[:5]] != [r.prompt_tokens for r in that[:5]]


def test_adding_a_stream_changes_no_other() -> None:
    chat = _stream("chat", traffic.Poisson(rate_per_s=5))
    users = _stream("users", traffic.ClosedLoop(users=2))
    alone = _plan(chat, users)
    together = _plan(_stream("batch", traffic.Poisson(rate_per_s=9)), users, chat)
    assert _of(together, "chat") == list(alone.open)
    assert together.users == alone.users


def test_streams_of_equal_shape_get_different_requests() -> None:
    plan = _plan(_stream("a", traffic.Poisson(rate_per_s=5)), _stream("b", traffic.Poisson(rate_per_s=5)))
    a, b = _of(plan, "a"), _of(plan, "b")
    assert a[0].scheduled_s != b[0].scheduled_s
    assert [r.prompt_tokens for r in a[:5]] != [r.prompt_tokens for r in b[:5]]


@pytest.mark.parametrize("burstiness", [None, 0.3])
def test_a_higher_rate_draws_the_same_requests_closer_together(burstiness: float | None) -> None:
    def plan(rate_per_s: float) -> list[PlannedRequest]:
        poisson, gamma = traffic.Poisson(rate_per_s=rate_per_s), traffic.Gamma(rate_per_s=rate_per_s, burstiness=0.3)
        return list(_plan(_stream("chat", poisson if burstiness is None else gamma), duration_s=1000).open)

    slow, fast = plan(4.0), plan(8.0)
    assert len(slow) > 3000
    assert len(fast) > len(slow)
    assert _lengths(fast[: len(slow)]) == _lengths(slow)
    assert [r.scheduled_s * 2 for r in fast[: len(slow)]] == pytest.approx([r.scheduled_s for r in slow])


def test_more_users_leave_the_first_ones_as_they_are() -> None:
    few, many = (_plan(_stream("users", traffic.ClosedLoop(users=n))).users for n in (2, 5))
    assert many[:2] == few


def test_a_plan_survives_being_written_down() -> None:
    plan = _plan(
        _stream("chat", traffic.Poisson(rate_per_s=5)),
        _stream("users", traffic.ClosedLoop(users=2)),
        traffic.Stream(name="azure", arrivals=traffic.ClosedLoop(users=1), lengths="azure-conv-like"),
    )
    assert msgspec.json.decode(msgspec.json.encode(plan), type=LoadPlan) == plan


# --- refusals -------------------------------------------------------------------------------------------------


def test_a_time_at_the_end_of_the_duration_is_refused() -> None:
    message = _refused(_stream("probe", traffic.At(times_s=(1.0, 20.0))))
    assert message.startswith("stream probe: a request at 20s is not before the end of duration 20s")


def test_users_who_would_never_start_are_refused() -> None:
    assert "stream users: with ramp_s 40" in _refused(_stream("users", traffic.ClosedLoop(users=2, ramp_s=40)))


def test_a_trace_that_was_not_read_is_refused() -> None:
    other = traffic.Stream(name="other", arrivals=traffic.Trace(file="other.csv"))
    assert _refused(other) == "stream other: the trace other.csv has not been read"


def test_a_trace_of_one_instant_cannot_be_rescaled() -> None:
    stream = msgspec.structs.replace(REPLAY, arrivals=traffic.Trace(file="t.csv", rate_per_s=2))
    with pytest.raises(ConfigError, match=r"t\.csv come at one instant"):
        plan_load(_workload(stream), {"replay": Trace((TraceRow(0.0, 1, 1),))})


@pytest.mark.parametrize(
    "arrivals",
    [traffic.Poisson(rate_per_s=1e9), traffic.Constant(rate_per_s=1e9), traffic.Gamma(rate_per_s=1e9, burstiness=0.1)],
)
def test_more_requests_than_a_machine_can_hold_are_refused_at_once(arrivals: traffic.Arrivals) -> None:
    assert "at most 200000 are possible" in _refused(_stream("flood", arrivals))


def test_a_workload_that_sends_nothing_is_refused() -> None:
    message = _refused(_stream("rare", traffic.Poisson(rate_per_s=1e-9)))
    assert message == "workload: no request falls within 20s: raise duration or a rate"


def test_a_stream_named_like_a_user_of_another_is_refused() -> None:
    users = _stream("users", traffic.ClosedLoop(users=4))
    message = _refused(users, _stream("users-u03", traffic.Poisson(rate_per_s=1)))
    assert "request ids would be those of a user of stream users" in message
    assert _plan(users, _stream("users-u04", traffic.Poisson(rate_per_s=1))).open


# --- rates and stated lengths ---------------------------------------------------------------------------------


def test_scaling_keeps_proportions_and_leaves_what_has_no_rate() -> None:
    probe, users = _stream("probe", traffic.At(times_s=(5.0,))), _stream("users", traffic.ClosedLoop(users=2))
    workload = _workload(
        _stream("chat", traffic.Poisson(rate_per_s=3)),
        _stream("bursts", traffic.Gamma(rate_per_s=2, burstiness=0.5)),
        _stream("ticks", traffic.Constant(rate_per_s=0.5)),
        REPLAY,
        probe,
        users,
    )
    traces = {"replay": TRACE}
    assert open_rate_per_s(workload, traces) == 6.0
    scaled = scale_rate(workload, 12.0, traces)
    assert [stream.arrivals for stream in scaled.streams] == [
        traffic.Poisson(rate_per_s=6),
        traffic.Gamma(rate_per_s=4, burstiness=0.5),
        traffic.Constant(rate_per_s=1),
        traffic.Trace(file="t.csv", rate_per_s=1),
        probe.arrivals,
        users.arrivals,
    ]
    assert open_rate_per_s(scaled) == pytest.approx(12.0)
    assert msgspec.structs.replace(scaled, streams=workload.streams) == workload


@pytest.mark.parametrize("rate_per_s", [0.0, -1.0, 1e-7, 1e7, float("nan"), float("inf")])
def test_scaling_to_a_rate_that_is_none_is_refused(rate_per_s: float) -> None:
    with pytest.raises(ConfigError, match="to 1,000,000 requests per second"):
        scale_rate(_workload(_stream("chat", traffic.Poisson(rate_per_s=3))), rate_per_s)


def test_scaling_without_a_stream_that_has_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="no stream has a rate to scale"):
        scale_rate(_workload(_stream("users", traffic.ClosedLoop(users=2))), 3.0)


def test_scaling_a_trace_at_its_own_pace_needs_the_trace() -> None:
    with pytest.raises(ConfigError, match=r"t\.csv has not been read"):
        scale_rate(_workload(REPLAY), 3.0)


def test_a_rate_holds_in_the_window_that_is_sent_however_quiet_the_file_begins() -> None:
    quiet_start = [float(n) for n in range(10)]
    busy_rest = [10.0 + n / 100 for n in range(990)]
    trace = Trace(tuple(TraceRow(time_s, 100, 10) for time_s in quiet_start + busy_rest))
    stream = traffic.Stream(name="trace", arrivals=traffic.Trace(file="t.csv", rate_per_s=5.0))
    plan = plan_load(_workload(stream, duration_s=4.0), {"trace": trace})
    assert len(plan.open) == 20
    gaps = [b.scheduled_s - a.scheduled_s for a, b in itertools.pairwise(plan.open)]
    assert gaps[0] / gaps[-1] == pytest.approx(1.0 / 0.01), "the shape is kept"
