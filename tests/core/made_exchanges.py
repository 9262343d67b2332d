"""Exchanges for tests, as a driver would leave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emulator.core.bench.arrivals import Pace
from emulator.core.bench.exchange import Exchange
from emulator.core.bench.measures import Measures
from emulator.core.bench.result import Asked, Observed, fold
from emulator.core.specs import Slo
from emulator.core.workload import PlannedRequest


def exchange(
    number: int = 0,
    *,
    scheduled_s: float = 0.0,
    due_s: float | None = None,
    sent_s: float | None = 0.0,
    times_s: Sequence[float] = (),
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    reason: str = "",
    message: str = "",
    ended: bool = True,
) -> Exchange:
    """One that asked for 100 and 3 tokens; it has ended with its last piece of output unless told otherwise."""
    request = PlannedRequest(f"r{number}", "bench", scheduled_s, 100, 3)
    made = Exchange(number, request, scheduled_s if due_s is None else due_s, sent_s)
    made.seen.token_times_s = list(times_s)
    made.seen.counts.token_chunks = len(times_s)
    made.seen.prompt_tokens, made.seen.output_tokens = prompt_tokens, output_tokens
    if reason:
        made.seen.fail(reason, message)
    if ended:
        made.end_s = times_s[-1] if times_s else sent_s
    return made


SLO = Slo(ttft_ms=150.0, tpot_ms=60.0)
TWO = (
    exchange(0, sent_s=0.0, times_s=(0.1, 0.15, 0.2), prompt_tokens=100, output_tokens=3),
    exchange(1, scheduled_s=0.5, due_s=0.9, sent_s=1.0, times_s=(1.1, 1.2, 1.3), prompt_tokens=98, output_tokens=5),
)


def document(
    exchanges: Sequence[Exchange],
    *,
    duration_s: float = 2.0,
    pace: Pace = Pace(1.0),  # noqa: B008 - frozen
    measures: Measures = Measures(slo=SLO, percentiles=(50.0, 99.9)),  # noqa: B008 - frozen
    max_concurrency: int | None = None,
    detailed: bool = False,
    interrupted: bool = False,
) -> dict[str, Any]:
    """What is made of them."""
    asked = Asked({"model_id": "m"}, pace, measures, max_concurrency)
    return fold(Observed(exchanges, (0.0,), duration_s, interrupted), asked, detailed=detailed)


def sent_late(delays_s: Sequence[float], *, gap_s: float = 0.1) -> list[Exchange]:
    """Requests due one every `gap_s`, each sent so much later and answered 0.1 s after that."""
    return [
        exchange(n, scheduled_s=n * gap_s, sent_s=n * gap_s + delay_s, times_s=(n * gap_s + delay_s + 0.1,))
        for n, delay_s in enumerate(delays_s)
    ]
