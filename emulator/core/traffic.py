"""The traffic of a topology file: how long requests are, when they arrive, and the streams that send them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from emulator.core.errors import ConfigError
from emulator.core.quantities import Seconds, parse_span
from emulator.core.spec_base import Name, PositiveFloat, PositiveInt, Spec

TraceFormat = Literal["azure", "burstgpt", "vidur", "splitwise", "mooncake", "bailian", "ragpulse", "aibrix"]
TimeUnit = Literal["s", "ms", "us", "ns"]
MaxContext = Literal["fail", "drop", "truncate"]


class FixedLength(Spec, frozen=True, kw_only=True, tag_field="distribution", tag="fixed"):
    """Always `tokens`."""

    tokens: PositiveInt


class UniformLength(Spec, frozen=True, kw_only=True, tag_field="distribution", tag="uniform"):
    """Whole numbers from `low` to `high`, both included."""

    low: PositiveInt
    high: PositiveInt

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")


class LognormalLength(Spec, frozen=True, kw_only=True, tag_field="distribution", tag="lognormal"):
    """Lognormal by its median and the sigma of its logarithm, clipped to low..high tokens."""

    median: PositiveFloat
    sigma: PositiveFloat
    low: PositiveInt = 1
    high: PositiveInt = 1_000_000

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")


Length = FixedLength | UniformLength | LognormalLength


class Poisson(Spec, frozen=True, kw_only=True, tag_field="process", tag="poisson"):
    """Independent arrivals at `rate_per_s`."""

    rate_per_s: PositiveFloat


class Constant(Spec, frozen=True, kw_only=True, tag_field="process", tag="constant"):
    """One arrival every 1/rate_per_s seconds."""

    rate_per_s: PositiveFloat


class Gamma(Spec, frozen=True, kw_only=True, tag_field="process", tag="gamma"):
    """Gamma inter-arrivals: burstiness 1 is Poisson, below 1 burstier (CV = 1/√burstiness), as vLLM's benchmark."""

    rate_per_s: PositiveFloat
    burstiness: PositiveFloat


class At(Spec, frozen=True, kw_only=True, tag_field="process", tag="at"):
    """One arrival at each of the given times."""

    times_s: tuple[Annotated[float, msgspec.Meta(ge=0)], ...]


class ClosedLoop(Spec, frozen=True, kw_only=True, tag_field="process", tag="closed_loop"):
    """`users` who each send the next request `think_s` after the previous one has ended.

    User i of N sends the first one at i × ramp_s / N.
    """

    users: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    think_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    ramp_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class TraceOptions(Spec, frozen=True, kw_only=True):
    """How a trace file is read (null: as it shows by itself), and which of its requests are used.

    `slice` is START:END in time after the first request, END excluded and either left out at will; `limit` the most
    requests to use. What exceeds the model's context fails at the node, is left out, or is cut to fit.
    """

    format: TraceFormat | None = None
    time_unit: TimeUnit | None = None
    sort: bool = False
    slice: str | None = None
    limit: PositiveInt | None = None
    max_context: MaxContext = "fail"

    def __post_init__(self) -> None:
        if self.slice is not None:
            try:
                parse_span(self.slice)
            except ConfigError as error:
                raise ValueError(f"slice: {error}") from None


class Trace(TraceOptions, frozen=True, kw_only=True, tag_field="process", tag="trace"):
    """Replays a trace file: its times (rescaled when `rate_per_s` is given) and its lengths."""

    file: str
    rate_per_s: PositiveFloat | None = None


Arrivals = Poisson | Constant | Gamma | At | ClosedLoop | Trace


class Stream(Spec, frozen=True, kw_only=True):
    """One source of requests. Lengths come as a pair of distributions, or as one named joint set."""

    name: Name
    arrivals: Arrivals
    prompt_tokens: PositiveInt | Length | None = None
    output_tokens: PositiveInt | Length | None = None
    lengths: Literal["azure-conv-like"] | None = None

    def __post_init__(self) -> None:
        has_pair = self.prompt_tokens is not None and self.output_tokens is not None
        has_any = self.prompt_tokens is not None or self.output_tokens is not None
        if isinstance(self.arrivals, Trace):
            if has_any or self.lengths is not None:
                raise ValueError("a trace brings its own lengths: remove prompt_tokens, output_tokens, lengths")
        elif self.lengths is not None:
            if has_any:
                raise ValueError("give either lengths or prompt_tokens and output_tokens, not both")
        elif not has_pair:
            raise ValueError("prompt_tokens and output_tokens are both needed (or lengths)")


class Workload(Spec, frozen=True, kw_only=True):
    """The traffic: sources of requests over `duration`, then up to `drain` for what is still running."""

    streams: Annotated[tuple[Stream, ...], msgspec.Meta(min_length=1)]
    duration: Seconds
    drain: Seconds = Seconds(15.0)
    seed: Annotated[int, msgspec.Meta(ge=0)] = 1

    def __post_init__(self) -> None:
        names = [stream.name for stream in self.streams]
        if len(set(names)) != len(names):
            raise ValueError(f"stream names must differ, got {', '.join(names)}")
        if self.duration <= 0:
            raise ValueError("duration must be greater than 0s")
