"""A run in virtual time, with the same records and summary as a live one."""

from __future__ import annotations

from emulator.core.kv_memory import kv_memory
from emulator.core.physics import violations
from emulator.core.run_spec import RunSpec
from emulator.core.run_summary import Fidelity, RunResult, summarize
from emulator.live.reports import TransferRow
from emulator.simulate import simulate

SIMULATE = "simulate"
MODELLED = "modelled"


def simulated_result(run: RunSpec) -> RunResult:
    """Simulate `run`. Nothing is late in it; its fidelity is ok unless it breaks a law of physics."""
    simulated = simulate(run)
    impossible = violations(run, simulated.records, simulated.steps, memory=simulated.memory, simulated=True)
    summary = summarize(
        simulated.records,
        deployment=run.deployment,
        gpus=run.gpus,
        slo=run.slo,
        duration_s=run.load.duration_s,
        kv_bandwidth_bps=run.link.bandwidth_bps if run.link is not None else None,
        launcher=SIMULATE,
        shaping=MODELLED if run.link is not None else "none",
        seed=run.seed,
        fidelity=Fidelity(ok=not impossible, reasons=tuple(impossible)),
        holdings=run.holdings,
        first_token=run.first_token,
        kv_memory=kv_memory(run, simulated.records, simulated.steps, simulated.memory),
    )
    return RunResult(summary=summary, records=simulated.records, steps=simulated.steps, memory=simulated.memory)


def transfer_rows(result: RunResult) -> list[TransferRow]:
    """One row for each transfer, in one part from first to last byte."""
    return [
        TransferRow(r.request_id, r.decode_node or "", ((r.kv_start_s, r.kv_end_s, r.kv_bytes),), r.prefill_node or "")
        for r in result.records
        if r.kv_start_s is not None and r.kv_end_s is not None
    ]
