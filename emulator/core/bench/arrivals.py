"""When so many requests are sent: the arrival process of `vllm bench serve`, which is by number and not by duration.

Gaps are gamma with shape `burstiness` (1: Poisson) and the mean that the rate says. A fixed rate is kept exactly: the
gaps are stretched so that n requests take n/rate seconds, as vLLM does. While it ramps up, the rate of a request
goes by its place among all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RampUpStrategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class RampUp:
    """A rate that grows from the first to the last request, in requests per second."""

    strategy: RampUpStrategy
    start_rps: float
    end_rps: float

    def rates(self, n: int) -> NDArray[np.float64]:
        """The rate of each of n requests."""
        progress = np.arange(n) / max(n - 1, 1)
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * (self.end_rps / self.start_rps) ** progress

    def steps(self, n: int) -> list[tuple[int, int]]:
        """Each whole rate that is reached after the first request, with the place of the request that has it."""
        reached = np.floor(self.rates(n)).astype(np.int64)
        places = np.searchsorted(reached, np.arange(int(self.start_rps) + 1, reached[-1] + 1)) if n else ()
        return [(int(reached[0]) + step, int(place)) for step, place in enumerate(places, start=1)]


@dataclass(frozen=True, slots=True)
class Pace:
    """Requests per second, infinite for all at once; `burstiness` above 0, infinite for equal gaps."""

    request_rate: float = math.inf
    burstiness: float = 1.0
    ramp_up: RampUp | None = None

    @property
    def at_once(self) -> bool:
        """Whether all requests are sent at one instant, so that there is no schedule to keep."""
        return self.ramp_up is None and math.isinf(self.request_rate)


def arrival_times_s(n: int, pace: Pace, seed: int) -> list[float]:
    """The instants of n requests, seconds, in order; the same for one seed."""
    if pace.at_once:
        return [0.0] * n
    rates = np.full(n, pace.request_rate) if pace.ramp_up is None else pace.ramp_up.rates(n)
    gaps = np.ones(n)
    if math.isfinite(pace.burstiness):
        gaps = np.random.default_rng([seed, 1]).standard_gamma(pace.burstiness, n) / pace.burstiness
    times = np.cumsum(gaps / rates)
    if pace.ramp_up is None and times[-1] > 0:
        times *= n / pace.request_rate / times[-1]
    return [float(time_s) for time_s in times]
