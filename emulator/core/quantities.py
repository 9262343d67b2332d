"""Quantities that users write with a unit: bandwidth, sizes and times.

A bandwidth is in bits per second and always names its unit (`10Gbps`), because a bare number, or a `bps` that
somebody means as bytes, is wrong by a factor of eight that no result shows. In memory each quantity is a float
(bits per second, bytes or seconds); the types exist so that strict conversion of a TOML file can parse them.
"""

from __future__ import annotations

import math
import re

from emulator.core.errors import ConfigError

_NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)"
_QUANTITY = re.compile(rf"^\s*{_NUMBER}\s*(?P<unit>[A-Za-zµμ/]*)\s*$")

_BANDWIDTH = {"bps": 1.0, "kbps": 1e3, "Mbps": 1e6, "Gbps": 1e9, "Tbps": 1e12}
_BYTES = {
    "B": 1.0,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}


MIN_BANDWIDTH_BPS = 1.0
MAX_BANDWIDTH_BPS = 1e15


class BitsPerSecond(float):
    """A bandwidth in bits per second; written `2.5Gbps`."""

    @classmethod
    def parse(cls, text: str) -> BitsPerSecond:
        """Read `10Gbps`; raises ConfigError for a missing, unknown or byte-based unit and for 0."""
        rate = cls(_parse(text, _BANDWIDTH, "a bandwidth", "10Gbps", allow_zero=False))
        if not MIN_BANDWIDTH_BPS <= rate <= MAX_BANDWIDTH_BPS:
            raise ConfigError(f"{text!r} is not a bandwidth that can be emulated: it must be from 1bps to 1000Tbps")
        return rate

    def __str__(self) -> str:
        return _format(self, _BANDWIDTH, ("Tbps", "Gbps", "Mbps", "kbps", "bps"))


class Bytes(float):
    """A size in bytes; written `64MiB` or `64MB`."""

    @classmethod
    def parse(cls, text: str) -> Bytes:
        """Read `64MiB`; raises ConfigError for a missing or unknown unit and for 0."""
        return cls(_parse(text, _BYTES, "a size", "64MiB", allow_zero=False))

    def __str__(self) -> str:
        return _format(self, _BYTES, ("GB", "MB", "kB", "B"))


class Seconds(float):
    """A time in seconds; written `50us`, `20s`."""

    @classmethod
    def parse(cls, text: str) -> Seconds:
        """Read `50us`; raises ConfigError for a missing or unknown unit."""
        return cls(_parse(text, _SECONDS, "a time", "50us", allow_zero=True))

    def __str__(self) -> str:
        return _format(self, _SECONDS, ("s", "ms", "us", "ns"))


def parse_span(text: str) -> tuple[float, float]:
    """Read `10min:20min`, `600:1200`, `:60` or `600:` into seconds, the end after the start; else ConfigError."""
    example = "write START:END in seconds or with a unit, such as 600:1200, 10min:20min, :60 or 600:"
    parts = [part.strip() for part in text.split(":")]
    if len(parts) != 2 or not any(parts):
        raise ConfigError(f"{text!r} is not a span of time: {example}")
    try:
        bounds = [
            Seconds.parse(f"{part}s" if part.replace(".", "", 1).isdecimal() else part) if part else unbounded
            for part, unbounded in zip(parts, (Seconds(0.0), Seconds(math.inf)), strict=True)
        ]
    except ConfigError:
        raise ConfigError(f"{text!r} is not a span of time: {example}") from None
    if not bounds[0] < bounds[1]:
        raise ConfigError(f"{text!r} is not a span of time: its end must come after its start")
    return float(bounds[0]), float(bounds[1])


Quantity = BitsPerSecond | Bytes | Seconds
QUANTITIES: tuple[type[Quantity], ...] = (BitsPerSecond, Bytes, Seconds)


def _parse(text: str, units: dict[str, float], what: str, example: str, *, allow_zero: bool) -> float:
    match = _QUANTITY.match(text)
    choices = ", ".join(u for u in units if u.isascii())
    if match is None:
        raise ConfigError(f"{text!r} is not {what}: write a number and a unit, such as {example}")
    unit = match["unit"]
    if unit not in units:
        raise ConfigError(f"{text!r} is not {what}: {_unit_problem(unit, units)}; units are {choices}")
    value = float(match["number"]) * units[unit]
    if not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
        raise ConfigError(f"{text!r} is not {what}: it must be greater than 0, such as {example}")
    return value


def _unit_problem(unit: str, units: dict[str, float]) -> str:
    if not unit:
        return "the unit is missing"
    for known in units:
        if known.lower() == unit.lower():
            return f"{unit!r} is not a unit (did you mean {known}?)"
    if units is _BANDWIDTH and ("B" in unit or "/" in unit):
        return f"{unit!r} is not a unit (bandwidth is in bits per second, so multiply bytes by 8)"
    return f"{unit!r} is not a unit"


def _format(value: float, units: dict[str, float], order: tuple[str, ...]) -> str:
    for unit in order:
        if value >= units[unit]:
            return f"{value / units[unit]:.4g}{unit}"
    return f"{value / units[order[-1]]:.4g}{order[-1]}"
