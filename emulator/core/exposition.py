"""Prometheus' text format, version 0.0.4: counters, gauges and histograms, and what a scrape of them says."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """One value: what is added to the family's name, its labels, and the value."""

    suffix: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """All samples of one metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: Sequence[Sample]


class Histogram:
    """Observations counted by upper bounds, which ascend; one above all of them counts too."""

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds must ascend"
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a bound belongs to the bucket below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, labels: Mapping[str, str]) -> list[Sample]:
        """The buckets, cumulative, the sum and the count."""
        totals = list(itertools.accumulate(self._counts))
        names = [*(number(bound) for bound in self._bounds), "+Inf"]
        buckets = [Sample("_bucket", {**labels, "le": name}, n) for name, n in zip(names, totals, strict=True)]
        return [*buckets, Sample("_count", labels, totals[-1]), Sample("_sum", labels, self._sum)]


def render(families: Iterable[Family]) -> bytes:
    """What a scrape is answered with."""
    lines = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for sample in family.samples:
            labels = ",".join(f'{name}="{_escaped(value, quoted=True)}"' for name, value in sample.labels.items())
            braces = f"{{{labels}}}" if labels else ""
            lines.append(f"{family.name}{sample.suffix}{braces} {number(sample.value)}")
    return "".join(f"{line}\n" for line in lines).encode()


def number(value: float) -> str:
    """A value as Prometheus' own client writes it."""
    return repr(float(value)).replace("inf", "Inf").replace("nan", "NaN")


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text
