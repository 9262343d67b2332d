"""Records with known latencies, for the tests of what folds over them."""

from __future__ import annotations

from collections.abc import Sequence

from emulator.core.deployments import FirstToken
from emulator.core.device_use import DeviceUse
from emulator.core.records import Outcome, Record, StepRecord
from emulator.core.run_summary import EndedBy, Fidelity, RunResult, summarize
from emulator.core.specs import Slo
from emulator.core.upkeep import Holdings

HOLDINGS = Holdings(
    usd_per_h=7.2, watts=1_000.0, weight_bytes=32_000_000_000, weight_copies=2, kv_capacity_bytes=57_800_000_000
)
"""Two nodes with a model of 16 GB each, for 7.20 dollars an hour and 1 kW."""


def made_record(
    request_id: str = "r0",
    *,
    scheduled_s: float = 0.0,
    ttft_ms: float = 100.0,
    gaps_ms: Sequence[float] = (20.0, 20.0),
    wire_ms: float | None = None,
    outcome: Outcome = "completed",
) -> Record:
    """A request of len(gaps_ms) + 1 tokens; with `wire_ms` its KV crossed a network just before the first token."""
    first = scheduled_s + ttft_ms / 1e3
    times = [first]
    for gap in gaps_ms:
        times.append(times[-1] + gap / 1e3)
    done = outcome == "completed"
    prefilled = first - (wire_ms or 0.0) / 1e3
    return Record(
        request_id=request_id,
        stream="chat",
        scheduled_s=scheduled_s,
        sent_s=scheduled_s,
        prompt_tokens=1000,
        max_tokens=len(times),
        output_tokens=len(times) if done else 0,
        first_token_s=first if done else None,
        finish_s=times[-1] if done else None,
        token_times_s=list(times) if done else [],
        prefill_node="prefill-0",
        decode_node="decode-0",
        kv_bytes=0 if wire_ms is None else 10_000_000,
        kv_start_s=None if wire_ms is None else prefilled,
        kv_end_s=None if wire_ms is None else first,
        outcome=outcome,
        reason="" if done else "made so",
        queued_s=scheduled_s,
        prefill_start_s=scheduled_s + 0.2 * (prefilled - scheduled_s),
        prefill_end_s=prefilled,
        kv_ready_s=None if wire_ms is None else prefilled,
    )


def made_run(
    records: Sequence[Record],
    slo: Slo,
    *,
    deployment: str = "colocated",
    kv_bandwidth_bps: float | None = None,
    gpus: int = 2,
    fidelity: Fidelity | None = None,
    steps: Sequence[StepRecord] = (),
    holdings: Holdings | None = HOLDINGS,
    first_token: FirstToken | None = None,
    device: DeviceUse | None = None,
    ended_by: EndedBy = "load",
) -> RunResult:
    """A run of ten seconds of arrivals."""
    summary = summarize(
        records,
        deployment=deployment,
        gpus=gpus,
        slo=slo,
        duration_s=10.0,
        kv_bandwidth_bps=kv_bandwidth_bps,
        seed=1,
        fidelity=fidelity,
        holdings=holdings,
        first_token=first_token,
        device=device,
        ended_by=ended_by,
    )
    return RunResult(summary, records, steps)
