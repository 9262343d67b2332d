"""Whether a load generator kept its schedule, so that what it measured is the server and not itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from emulator.core.bench.exchange import Exchange

SCHEDULE_DELAY_MS = 5.0
LOOP_LAG_MS = 2.0
RATE_TOLERANCE = 0.03
RATE_JUDGED_REQUESTS = 20


class BenchFidelity(msgspec.Struct, frozen=True, kw_only=True):
    """Its delay counts from when a request was due (see `Exchange`), so not what `max_concurrency` kept back."""

    ok: bool
    schedule_delay_ms_p99: float | None
    loop_lag_ms_p99: float | None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests per second from the start of the run to the last one: as scheduled, as due, and as sent.

    One that is scheduled for the very start ends no gap and is not counted. None where all are at the start.
    """

    requested: float | None
    due: float | None
    achieved: float | None

    @classmethod
    def of(cls, exchanges: Sequence[Exchange]) -> Rates:
        """The rates of the requests that were sent."""
        sent = [(e.request.scheduled_s, e.due_s, e.sent_s) for e in exchanges if e.sent_s is not None]
        gaps = len(sent) - (min(sent)[0] == 0.0 if sent else 0)
        return cls(*(_rate(gaps, [instants[which] for instants in sent]) for which in range(3)))


def judge(exchanges: Sequence[Exchange], rates: Rates, loop_lag_s: Sequence[float], *, at_once: bool) -> BenchFidelity:
    """Hold the generator against its bounds; where all was to be sent at once there is no schedule to keep."""
    delay_ms = _p99([(e.sent_s - e.due_s) * 1e3 for e in exchanges if e.sent_s is not None])
    lag_ms = _p99([lag * 1e3 for lag in loop_lag_s])
    reasons = []
    if not at_once and delay_ms is not None and delay_ms > SCHEDULE_DELAY_MS:
        reasons.append(
            f"the generator could not keep its schedule: p99 schedule delay {delay_ms:.2f} ms is above "
            f"{SCHEDULE_DELAY_MS:g} ms"
        )
    if not at_once and rates.due and rates.achieved and len(exchanges) >= RATE_JUDGED_REQUESTS:
        kept = rates.achieved / rates.due
        if abs(kept - 1) > RATE_TOLERANCE:
            reasons.append(f"it sent {rates.achieved:.4g} requests/s where {rates.due:.4g} were due ({kept:.1%})")
    if lag_ms is not None and lag_ms > LOOP_LAG_MS:
        reasons.append(f"p99 lag of its event loop {lag_ms:.2f} ms is above {LOOP_LAG_MS:g} ms")
    return BenchFidelity(ok=not reasons, schedule_delay_ms_p99=delay_ms, loop_lag_ms_p99=lag_ms, reasons=tuple(reasons))


def _rate(gaps: int, instants_s: Sequence[float]) -> float | None:
    last_s = max(instants_s, default=0.0)
    return gaps / last_s if last_s > 0 else None


def _p99(values: Sequence[float]) -> float | None:
    return float(np.percentile(values, 99)) if values else None
