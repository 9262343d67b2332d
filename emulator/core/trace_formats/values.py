"""Times and numbers of tokens as trace files write them: exact, or not at all."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from emulator.core.traffic import TimeUnit

MAX_TOKENS_DIGITS = 9
NS_PER: dict[TimeUnit, int] = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_MAX_NS = 2**63 - 1

_TOKENS = re.compile(r"(?P<whole>[0-9]{1,9})(?:\.0*)?")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?")
_DATE = re.compile(
    r"(?P<second>[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2})"
    r"(?:\.(?P<fraction>[0-9]{1,9}))?(?P<zone>Z|[+-][0-9]{2}:[0-9]{2})?"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)


def time_ns(value: object, unit: TimeUnit | None) -> int | None:
    """Nanoseconds of a number in `unit`, or since 1970 of a date (without a unit); None when it is no such time."""
    if unit is None:
        return _date_ns(value) if isinstance(value, str) else None
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = int(value) if value.isdecimal() and len(value) < 20 else Decimal(value)
    if isinstance(value, Decimal):
        if not 0 <= value <= _MAX_NS:
            return None
        value = value * NS_PER[unit]
        exact = int(value.to_integral_value())
    elif isinstance(value, int) and not isinstance(value, bool):
        exact = value * NS_PER[unit]
    else:
        return None
    return exact if 0 <= exact <= _MAX_NS else None


def _date_ns(text: str) -> int | None:
    """UTC where no zone is written, as in Azure's traces."""
    match = _DATE.fullmatch(text)
    if match is None:
        return None
    second, fraction, zone = match.groups()
    try:
        instant = datetime.fromisoformat(f"{second}{zone or '+00:00'}")
    except ValueError:
        return None
    ns = (instant - _EPOCH) // _SECOND * 1_000_000_000 + int((fraction or "").ljust(9, "0"))
    return ns if 0 <= ns <= _MAX_NS else None


def tokens(value: object) -> int | None:
    """A whole number of 0 or more, of at most MAX_TOKENS_DIGITS digits; None for anything else."""
    if isinstance(value, str):
        match = _TOKENS.fullmatch(value)
        return int(match["whole"]) if match and value.isascii() else None
    if isinstance(value, Decimal):
        value = int(value) if value == value.to_integral_value() else None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**MAX_TOKENS_DIGITS:
        return value
    return None


def time_problem(column: str, value: object, unit: TimeUnit | None) -> str:
    """What is wrong with a value that is no time, and what would be right."""
    if unit is None:
        wanted = "expected one like 2023-11-16 18:17:03.9799600, or numbers and --trace-time-unit (time_unit)"
        return f"{column} {shorten(value)} is not a time; {wanted}"
    wanted = f"expected a number of 0 or more, in {unit} or else as --trace-time-unit (time_unit) says"
    if isinstance(value, str) and _date_ns(value) is not None:
        wanted = f"expected a number in {unit}; dates go without --trace-time-unit (time_unit)"
    return f"{column} {shorten(value)} is not a time; {wanted}"


def tokens_problem(column: str, value: object) -> str:
    """What is wrong with a value that is no number of tokens, and what would be right."""
    return (
        f"{column} {shorten(value)} is not a number of tokens; "
        f"expected a whole number of at most {MAX_TOKENS_DIGITS} digits"
    )


def shorten(value: object, limit: int = 60) -> str:
    """A value of a file as an error shows it."""
    text = str(value) if isinstance(value, str | int | Decimal) else repr(value)
    shown = text.strip() if len(text) <= limit else text[:limit].strip() + "…"
    return repr(shown) if isinstance(value, str) else shown
