"""What is to be made of a run: bounds, metrics and percentiles, in the words of `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from emulator.core.errors import ConfigError
from emulator.core.specs import Slo

Latency = Literal["ttft", "tpot", "itl", "e2el"]
LATENCIES: tuple[Latency, ...] = get_args(Latency)
BOUNDS = ("ttft", "tpot", "e2el", "itl_p99")


@dataclass(frozen=True, slots=True)
class Measures:
    """Bounds that a good request meets, the latencies that are reported, and their percentiles."""

    slo: Slo = Slo()  # noqa: RUF009 - frozen
    latencies: tuple[Latency, ...] = LATENCIES
    percentiles: tuple[float, ...] = (99.0,)


def parse_goodput(bounds: Sequence[str]) -> Slo:
    """The bounds of `ttft:200 tpot:50`, milliseconds; raises ConfigError for anything else."""
    found: dict[str, float] = {}
    for bound in " ".join(bounds).replace(",", " ").split():
        name, _, text = bound.partition(":")
        value = _number(text)
        if name not in BOUNDS or value is None or not 0 < value < math.inf:
            raise ConfigError(
                f"--goodput {bound}: give NAME:MILLISECONDS above 0, such as ttft:200; names are {', '.join(BOUNDS)}"
            )
        if name in found:
            raise ConfigError(f"--goodput {bound}: {name} is bounded twice")
        found[name] = value
    return Slo(**{f"{name}_ms": value for name, value in found.items()})


def parse_latencies(text: str) -> tuple[Latency, ...]:
    """Names separated by commas, each once, in one order."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in LATENCIES]
    if unknown:
        raise ConfigError(f"--percentile-metrics {text}: {unknown[0]!r} is not one of {', '.join(LATENCIES)}")
    return tuple(name for name in LATENCIES if name in names)


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Percentiles separated by commas, 0 to 100, in order."""
    found: set[float] = set()
    for part in text.split(","):
        value = _number(part)
        if value is None or not 0 <= value <= 100:
            raise ConfigError(f"--metric-percentiles {text}: {part.strip()!r} is not a number from 0 to 100")
        found.add(value)
    return tuple(sorted(found))


def percentile_word(q: float) -> str:
    """How keys name a percentile: p99, p99.9."""
    return f"p{int(q)}" if q == int(q) else f"p{q}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
