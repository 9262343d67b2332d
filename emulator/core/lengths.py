"""How many tokens requests have: distributions of prompt and output lengths, drawn from a seed.

Apart from arrivals because closed-loop users draw theirs one at a time during a run and open-loop streams all at
once before it; both must get the same lengths for the same seed whatever the rate. Request n of a source therefore
depends on the seed and n alone: prompts and outputs come from two generators of their own, each consumed in order.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from emulator.core import traffic

JointName = Literal["azure-conv-like"]


class LengthPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompt and output lengths drawn independently of each other."""

    prompt: traffic.Length
    output: traffic.Length


Lengths = LengthPair | JointName


class StatedLengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The largest lengths that a stream states, in tokens."""

    stream: str
    prompt_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_tokens + self.output_tokens


class PublishedQuantiles(NamedTuple):
    """What is published of a length distribution, in tokens."""

    minimum: int
    p50: int
    mean: int
    p90: int
    p99: int
    maximum: int


# Azure 2023 conversation trace, all 19,366 requests: data/AzureLLMInferenceTrace_conv.csv of
# github.com/Azure/AzurePublicDataset (CC-BY 4.0); Patel et al., Splitwise, ISCA 2024.
AZURE_CONV_PROMPT = PublishedQuantiles(minimum=2, p50=1020, mean=1155, p90=2734, p99=4142, maximum=14050)
AZURE_CONV_OUTPUT = PublishedQuantiles(minimum=7, p50=129, mean=211, p90=424, p99=601, maximum=1000)


def stream_lengths(stream: traffic.Stream) -> Lengths:
    """The lengths that a stream draws."""
    if stream.lengths is not None:
        return stream.lengths
    assert stream.prompt_tokens is not None, f"stream {stream.name} has no lengths of its own"
    assert stream.output_tokens is not None, f"stream {stream.name} has no lengths of its own"
    return LengthPair(_as_length(stream.prompt_tokens), _as_length(stream.output_tokens))


def _as_length(length: int | traffic.Length) -> traffic.Length:
    return traffic.FixedLength(tokens=length) if isinstance(length, int) else length


def stated_lengths(workload: traffic.Workload) -> tuple[StatedLengths, ...]:
    """The largest prompt and output that each stream states, so that what can never fit is refused before a run.

    A fixed length and a uniform's `high` are stated; of a lognormal only `low` is certain. Traces and named sets
    state nothing: their rare giants are requests that fail, not runs that cannot be.
    """
    stated = []
    for stream in workload.streams:
        if stream.prompt_tokens is not None:
            lengths = stream_lengths(stream)
            assert isinstance(lengths, LengthPair)
            stated.append(StatedLengths(stream.name, _stated(lengths.prompt), _stated(lengths.output)))
    return tuple(stated)


def stated_shortest_prompts(workload: traffic.Workload) -> tuple[tuple[str, int], ...]:
    """The shortest prompt that each stream states, by the stream's name; of a lognormal only `high` is certain."""
    stated = []
    for stream in workload.streams:
        if stream.prompt_tokens is not None:
            lengths = stream_lengths(stream)
            assert isinstance(lengths, LengthPair)
            stated.append((stream.name, _stated_shortest(lengths.prompt)))
    return tuple(stated)


def _stated(length: traffic.Length) -> int:
    if isinstance(length, traffic.FixedLength):
        return length.tokens
    return length.high if isinstance(length, traffic.UniformLength) else length.low


def _stated_shortest(length: traffic.Length) -> int:
    if isinstance(length, traffic.FixedLength):
        return length.tokens
    return length.low if isinstance(length, traffic.UniformLength) else length.high


class LengthSource:
    """Draws (prompt, output) lengths in tokens, always the same sequence for one seed."""

    def __init__(self, lengths: Lengths, seed: int) -> None:
        self._lengths = lengths
        prompts, outputs = np.random.SeedSequence(seed).spawn(2)
        self._prompts = np.random.default_rng(prompts)
        self._outputs = np.random.default_rng(outputs)

    def draw(self, n: int) -> list[tuple[int, int]]:
        """The next `n` pairs of (prompt_tokens, output_tokens), each at least 1."""
        if isinstance(self._lengths, LengthPair):
            prompts = _draw(self._lengths.prompt, self._prompts, n)
            outputs = _draw(self._lengths.output, self._outputs, n)
        else:
            # Drawn independently: no correlation is published with the quantiles (in the trace's first 2,000
            # requests it is −0.1).
            prompts = _tokens(quantile_function(AZURE_CONV_PROMPT, self._prompts.random(n)))
            outputs = _tokens(quantile_function(AZURE_CONV_OUTPUT, self._outputs.random(n)))
        return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def _draw(length: traffic.Length, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
    if isinstance(length, traffic.FixedLength):
        return np.full(n, length.tokens, dtype=np.int64)
    if isinstance(length, traffic.UniformLength):
        return length.low + np.floor(rng.random(n) * (length.high - length.low + 1)).astype(np.int64)
    # Clipped before exp, where a large sigma would overflow.
    logs = math.log(length.median) + length.sigma * rng.standard_normal(n)
    return _tokens(np.exp(np.clip(logs, math.log(length.low), math.log(length.high))))


def _tokens(lengths: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.maximum(np.rint(lengths), 1).astype(np.int64)


def quantile_function(published: PublishedQuantiles, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Lengths in tokens at the given shares (0 to 1) of a distribution with the published quantiles and mean.

    Between two published quantiles a and b, with t from 0 to 1 across the segment:
    above p90 straight, a + (b − a)·t, except above p99, where ln q is straight (a tail that thins out);
    below p90 a + (b − a)·t^k, the same k in both segments. The mean of such a segment is a + (b − a)/(k + 1), so
    the one k for which the whole mean is the published one follows in closed form: the quantiles are met exactly
    and the mean too, up to rounding to whole tokens. k > 1 bends towards short lengths (Azure's prompts), k < 1
    towards long ones (its outputs).
    """
    q = published
    exponent = _body_exponent(q)
    u = np.asarray(shares, dtype=np.float64)
    low = q.minimum + (q.p50 - q.minimum) * (np.clip(u, 0, 0.5) / 0.5) ** exponent
    middle = q.p50 + (q.p90 - q.p50) * (np.clip(u - 0.5, 0, 0.4) / 0.4) ** exponent
    high = q.p90 + (q.p99 - q.p90) * np.clip(u - 0.9, 0, 0.09) / 0.09
    tail = q.p99 * (q.maximum / q.p99) ** (np.clip(u - 0.99, 0, 0.01) / 0.01)
    return np.select([u < 0.5, u < 0.9, u < 0.99], [low, middle, high], tail)


def _body_exponent(q: PublishedQuantiles) -> float:
    """k of `quantile_function`: solves the published mean for the two segments below p90."""
    above_p90 = 0.09 * (q.p90 + q.p99) / 2 + 0.01 * (q.maximum - q.p99) / math.log(q.maximum / q.p99)
    floor = 0.5 * q.minimum + 0.4 * q.p50
    reach = 0.5 * (q.p50 - q.minimum) + 0.4 * (q.p90 - q.p50)
    share = (q.mean - above_p90 - floor) / reach
    assert 0 < share < 1, f"no distribution of this shape has the mean {q.mean}"
    return 1 / share - 1
