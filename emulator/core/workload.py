"""From a topology's `Workload` to what is sent and when: a plan that can be written down and replayed.

Deployments are compared on the same requests, so everything random is drawn here, before any of them runs, each
stream from a seed made of the workload's and the stream's name: adding a stream changes no other, and changing a
rate moves a stream's arrivals closer together but leaves their order, their lengths and their ids. Only when a
closed-loop user sends again depends on the deployment; its n-th request is still the same.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np
from numpy.typing import NDArray

from emulator.core import traffic
from emulator.core.errors import ConfigError
from emulator.core.lengths import Lengths, LengthSource, stream_lengths
from emulator.core.trace import Trace, check_rate

MAX_REQUESTS = 200_000
_CHUNK = 4096  # fixed, so that sums of gaps are the same whatever the rate
_NO_TRACES: Mapping[str, Trace] = MappingProxyType({})

RandomArrivals = traffic.Poisson | traffic.Gamma
RatedArrivals = traffic.Poisson | traffic.Gamma | traffic.Constant | traffic.Trace


class PlannedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to send `scheduled_s` model seconds after the start of the run."""

    request_id: str
    stream: str
    scheduled_s: float
    prompt_tokens: int
    max_tokens: int


class UserPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A closed-loop user: the first request at `start_s`, each further one `think_s` after the last has ended.

    Its lengths are those of `LengthSource(lengths, seed)`, one pair a request.
    """

    stream: str
    user: int
    start_s: float
    think_s: float
    lengths: Lengths
    seed: int

    def request_id(self, n: int) -> str:
        """The id of this user's n-th request, from 0."""
        return f"{self.prefix}-{n:05d}"

    @property
    def prefix(self) -> str:
        """What the ids of this user's requests begin with."""
        return f"{self.stream}-u{self.user:02d}"


class LoadPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All traffic of a run: open-loop requests in order of time, and closed-loop users. Model seconds.

    Nothing is sent at or after `duration_s`, the arrival window; what still runs then has `drain_s` more.
    """

    open: tuple[PlannedRequest, ...]
    users: tuple[UserPlan, ...]
    duration_s: float
    drain_s: float

    @property
    def at_once(self) -> bool:
        """Whether everything is due at one instant, so that there is no schedule that could be kept."""
        return not self.users and len({request.scheduled_s for request in self.open}) <= 1


def plan_load(workload: traffic.Workload, traces: Mapping[str, Trace]) -> LoadPlan:
    """Draw every request of a run; `traces` has, by the stream's name, the trace of each stream that replays one.

    Where all traffic is of traces that end before the workload's duration, so does the arrival window, and the time to
    drain is longer by as much: a rate over the silence after them would be nobody's.

    Raises ConfigError for traffic that cannot be: times at or after the end, users that would never start, a trace
    that is missing or cannot be rescaled, ids of two streams that would coincide, more than MAX_REQUESTS, or none.
    """
    requests: list[PlannedRequest] = []
    users: list[UserPlan] = []
    for stream in workload.streams:
        if isinstance(stream.arrivals, traffic.ClosedLoop):
            users += _plan_users(stream, stream.arrivals, workload)
        elif isinstance(stream.arrivals, traffic.Trace):
            requests += _replay(stream, stream.arrivals, workload, traces)
        else:
            requests += _plan_open(stream, stream.arrivals, workload)
    duration_s = float(workload.duration)
    _check_ids(workload, users)
    if len(requests) > MAX_REQUESTS:
        raise ConfigError(f"workload: {len(requests)} requests in {duration_s:g}s; at most {MAX_REQUESTS} are possible")
    if not requests and not users:
        raise ConfigError(f"workload: no request falls within {duration_s:g}s: raise duration or a rate")
    requests.sort(key=lambda request: (request.scheduled_s, request.request_id))
    window_s = min(duration_s, _end_of_traces_s(workload, traces, requests))
    return LoadPlan(tuple(requests), tuple(users), window_s, duration_s + float(workload.drain) - window_s)


def open_rate_per_s(workload: traffic.Workload, traces: Mapping[str, Trace] = _NO_TRACES) -> float:
    """Requests per second of all streams that have a rate: poisson, constant, gamma, and traces (their mean rate).

    `at` streams are single events without a rate, closed-loop users make theirs as they go: neither counts.
    """
    return math.fsum(_rate_per_s(stream, arrivals, traces) for stream, arrivals in _rated(workload))


def scale_rate(
    workload: traffic.Workload, rate_per_s: float, traces: Mapping[str, Trace] = _NO_TRACES
) -> traffic.Workload:
    """The same workload at a total open-loop rate (see `open_rate_per_s`) of `rate_per_s`, all streams in proportion.

    `traces` is needed where a trace stream keeps its own pace. Raises ConfigError when there is no stream with a
    rate, it is no possible one, or such a trace is missing or has no rate.
    """
    check_rate(rate_per_s, f"workload: a rate of {rate_per_s:g}")
    rates = _rates(workload, traces)
    if not rates:
        raise ConfigError(
            "workload: no stream has a rate to scale: at least one must be poisson, constant, gamma or trace"
        )
    factor = rate_per_s / math.fsum(rates.values())
    streams = [
        msgspec.structs.replace(
            stream,
            arrivals=msgspec.structs.replace(stream.arrivals, rate_per_s=rates[stream.name] * factor),
        )
        if stream.name in rates
        else stream
        for stream in workload.streams
    ]
    return msgspec.structs.replace(workload, streams=tuple(streams))


def _rates(workload: traffic.Workload, traces: Mapping[str, Trace]) -> dict[str, float]:
    """The rate of each stream that has one; that of a trace without times may be any when it is the only one."""
    rated = list(_rated(workload))
    if len(rated) == 1 and (trace := traces.get(rated[0][0].name)) is not None and not trace.timed:
        return {rated[0][0].name: 1.0}
    return {stream.name: _rate_per_s(stream, arrivals, traces) for stream, arrivals in rated}


def _rated(workload: traffic.Workload) -> Iterator[tuple[traffic.Stream, RatedArrivals]]:
    for stream in workload.streams:
        if isinstance(stream.arrivals, RatedArrivals):
            yield stream, stream.arrivals


def _rate_per_s(stream: traffic.Stream, arrivals: RatedArrivals, traces: Mapping[str, Trace]) -> float:
    if arrivals.rate_per_s is not None:
        return arrivals.rate_per_s
    assert isinstance(arrivals, traffic.Trace)
    return _own_rate_per_s(stream, arrivals, traces)


# --- streams --------------------------------------------------------------------------------------------------


def _seed(workload: traffic.Workload, *key: str | int) -> int:
    """A seed that depends on the workload's and on `key` alone."""
    words = [int.from_bytes(hashlib.sha256(str(part).encode()).digest()[:8], "big") for part in key]
    sequence = np.random.SeedSequence(entropy=workload.seed, spawn_key=tuple(words))
    return int(sequence.generate_state(1, np.uint64)[0])


def _plan_open(
    stream: traffic.Stream,
    arrivals: RandomArrivals | traffic.Constant | traffic.At,
    workload: traffic.Workload,
) -> Iterator[PlannedRequest]:
    duration_s = float(workload.duration)
    if isinstance(arrivals, traffic.At):
        times = sorted(arrivals.times_s)
        if times and times[-1] >= duration_s:
            raise ConfigError(
                f"stream {stream.name}: a request at {times[-1]:g}s is not before the end of duration "
                f"{duration_s:g}s: raise duration or remove it"
            )
    else:
        _check_count(stream, arrivals.rate_per_s, duration_s)
        if isinstance(arrivals, traffic.Constant):
            times = _constant_times(arrivals.rate_per_s, duration_s)
        else:
            rng = np.random.default_rng(_seed(workload, stream.name, "arrivals"))
            times = _random_times(stream, arrivals, rng, duration_s)
    source = LengthSource(stream_lengths(stream), _seed(workload, stream.name, "lengths"))
    lengths = source.draw(len(times))
    for n, (time_s, (prompt, output)) in enumerate(zip(times, lengths, strict=True)):
        yield PlannedRequest(f"{stream.name}-{n:05d}", stream.name, time_s, prompt, output)


def _check_count(stream: traffic.Stream, rate_per_s: float, duration_s: float) -> None:
    if (n := rate_per_s * duration_s) > MAX_REQUESTS:
        raise ConfigError(
            f"stream {stream.name}: {rate_per_s:g} requests per second over {duration_s:g}s are {n:.3g}; "
            f"at most {MAX_REQUESTS} are possible"
        )


def _constant_times(rate_per_s: float, duration_s: float) -> list[float]:
    """0, 1/rate, 2/rate, … below the duration."""
    times = (n / rate_per_s for n in itertools.count())
    return list(itertools.takewhile(lambda time_s: time_s < duration_s, times))


def _random_times(
    stream: traffic.Stream, arrivals: RandomArrivals, rng: np.random.Generator, duration_s: float
) -> list[float]:
    """Sums of gaps below the duration, the first gap counting from 0.

    Gaps are drawn at rate 1 and divided by the rate afterwards, so that one seed at two rates gives one pattern.
    """
    end = duration_s * arrivals.rate_per_s
    chunks: list[NDArray[np.float64]] = []
    reached = 0.0
    while reached < end:
        if len(chunks) * _CHUNK > MAX_REQUESTS:
            raise ConfigError(f"stream {stream.name}: more than {MAX_REQUESTS} requests; lower its rate or burstiness")
        chunks.append(reached + np.cumsum(_unit_gaps(arrivals, rng)))
        reached = float(chunks[-1][-1])
    times: NDArray[np.float64] = np.concatenate(chunks) / arrivals.rate_per_s
    return list(times[times < duration_s].tolist())


def _unit_gaps(arrivals: RandomArrivals, rng: np.random.Generator) -> NDArray[np.float64]:
    """Gaps of mean 1; gamma with shape = burstiness, as vLLM's benchmark (`vllm bench serve --burstiness`)."""
    if isinstance(arrivals, traffic.Poisson):
        return rng.standard_exponential(_CHUNK)
    return rng.standard_gamma(arrivals.burstiness, _CHUNK) / arrivals.burstiness


def _plan_users(stream: traffic.Stream, loop: traffic.ClosedLoop, workload: traffic.Workload) -> Iterator[UserPlan]:
    duration_s = float(workload.duration)
    if loop.users > MAX_REQUESTS:
        raise ConfigError(f"stream {stream.name}: {loop.users} users; at most {MAX_REQUESTS} are possible")
    if (last_s := (loop.users - 1) * loop.ramp_s / loop.users) >= duration_s:
        raise ConfigError(
            f"stream {stream.name}: with ramp_s {loop.ramp_s:g} the last user would start at {last_s:g}s, "
            f"not before the end of duration {duration_s:g}s: lower ramp_s or raise duration"
        )
    lengths = stream_lengths(stream)
    for user in range(loop.users):
        start_s = user * loop.ramp_s / loop.users
        seed = _seed(workload, stream.name, "user", user)
        yield UserPlan(stream.name, user, start_s, loop.think_s, lengths, seed)


def _replay(
    stream: traffic.Stream, arrivals: traffic.Trace, workload: traffic.Workload, traces: Mapping[str, Trace]
) -> Iterator[PlannedRequest]:
    """The trace's rows at its own pace; with a rate, its first rate × duration rows, their times stretched to fit.

    So the rate is that of the rows that are sent, whatever the rest of the file is like. A file with fewer rows is sent
    whole at that mean rate, and ends early. Requests of a file without times come at random (poisson), in its order.
    """
    trace = _trace(stream, arrivals, traces)
    if not trace.timed:
        rate_per_s = arrivals.rate_per_s or _own_rate_per_s(stream, arrivals, traces)
        yield from _replay_at_random(stream, trace, rate_per_s, workload)
        return
    stretch = 1.0
    if arrivals.rate_per_s is not None:
        wanted = round(arrivals.rate_per_s * float(workload.duration))
        if wanted < len(trace.rows) and trace.rows[wanted].time_s > 0:
            stretch = float(workload.duration) / trace.rows[wanted].time_s
        else:
            stretch = _own_rate_per_s(stream, arrivals, traces) / arrivals.rate_per_s
    for n, row in enumerate(trace.rows):
        time_s = row.time_s * stretch
        if time_s >= float(workload.duration):
            break
        yield PlannedRequest(f"{stream.name}-{n:05d}", stream.name, time_s, row.prompt_tokens, row.output_tokens)


def _end_of_traces_s(
    workload: traffic.Workload, traces: Mapping[str, Trace], requests: Sequence[PlannedRequest]
) -> float:
    """When all traffic has ended: a mean gap after the last request of each trace. Infinite if other traffic goes on.

    So are the ends of traces of which not everything is sent, or whose requests have no gap.
    """
    times: dict[str, list[float]] = {stream.name: [] for stream in workload.streams}
    for request in requests:
        times[request.stream].append(request.scheduled_s)
    ends = []
    for stream in workload.streams:
        n, last_s = len(times[stream.name]), max(times[stream.name], default=0.0)
        traced = isinstance(stream.arrivals, traffic.Trace)
        if not traced or n < len(traces[stream.name].rows) or n < 2 or last_s <= 0:
            return math.inf
        ends.append(last_s * n / (n - 1))
    return max(ends)


def _replay_at_random(
    stream: traffic.Stream, trace: Trace, rate_per_s: float, workload: traffic.Workload
) -> Iterator[PlannedRequest]:
    _check_count(stream, rate_per_s, float(workload.duration))
    rng = np.random.default_rng(_seed(workload, stream.name, "arrivals"))
    times = _random_times(stream, traffic.Poisson(rate_per_s=rate_per_s), rng, float(workload.duration))
    for n, (time_s, row) in enumerate(zip(times, trace.rows, strict=False)):
        yield PlannedRequest(f"{stream.name}-{n:05d}", stream.name, time_s, row.prompt_tokens, row.output_tokens)


def _trace(stream: traffic.Stream, arrivals: traffic.Trace, traces: Mapping[str, Trace]) -> Trace:
    if stream.name not in traces:
        raise ConfigError(f"stream {stream.name}: the trace {arrivals.file} has not been read")
    return traces[stream.name]


def _own_rate_per_s(stream: traffic.Stream, arrivals: traffic.Trace, traces: Mapping[str, Trace]) -> float:
    trace = _trace(stream, arrivals, traces)
    if not trace.timed:
        raise ConfigError(
            f"stream {stream.name}: {arrivals.file} has lengths and no times, so it has no rate of its own: give one "
            "by --rate (rate_per_s), and its requests come at random (poisson) in the order of the file"
        )
    rate_per_s = trace.rate_per_s
    if rate_per_s is None:
        raise ConfigError(
            f"stream {stream.name}: all requests of {arrivals.file} come at one instant, so it has no rate to scale: "
            "use a trace of two instants or more, without rate_per_s and at its own pace"
        )
    return rate_per_s


def _check_ids(workload: traffic.Workload, users: list[UserPlan]) -> None:
    """A stream named like one of another stream's users (`users-u03`) would give the same ids."""
    prefixes = {user.prefix: user.stream for user in users}
    for stream in workload.streams:
        if stream.name in prefixes and not isinstance(stream.arrivals, traffic.ClosedLoop):
            raise ConfigError(
                f"stream {stream.name}: its request ids would be those of a user of stream {prefixes[stream.name]}: "
                "rename one of the two"
            )
