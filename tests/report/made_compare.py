"""A small comparison with everything in it: a stall, a saturated run, one that was not faithful, and steps."""

from __future__ import annotations

from collections.abc import Sequence

from emulator.core.compare_summary import CompareSummary
from emulator.core.records import Record, StepRecord
from emulator.core.run_summary import Fidelity, RunResult
from emulator.core.specs import Scale, Slo
from emulator.core.verdict import judge
from tests.core.made_records import made_record, made_run

SLO = Slo(ttft_ms=1000, tpot_ms=40, itl_p99_ms=100)


def made_results(name: str = "1p1d") -> list[RunResult]:
    """Two colocated baselines, and a disaggregated deployment called `name` at three bandwidths."""
    stalled = [_request(i, gaps_ms=[20.0] * 9 + [300.0]) for i in range(20)]
    cut = [made_record(f"r{i}", scheduled_s=i / 2, outcome="unfinished") for i in range(10, 20)]
    late = Fidelity(ok=False, reasons=("loop lag p99 4.2 ms is above 2 ms",), suggested_scale_time=2.0)
    return [
        made_run(stalled, SLO, deployment="colocated-prefill-first", steps=_steps("colocated-0")),
        made_run([_request(i) for i in range(20)], SLO, deployment="colocated-chunked-512"),
        made_run([*_moved(400.0)[:10], *cut], SLO, deployment=name, kv_bandwidth_bps=1e9),
        made_run(_moved(80.0), SLO, deployment=name, kv_bandwidth_bps=5e9, fidelity=late),
        made_run(_moved(12345.0), SLO, deployment=name, kv_bandwidth_bps=1e10, steps=_steps("decode-0")),
    ]


def made_compare(results: Sequence[RunResult], topology: str = "quickstart") -> CompareSummary:
    """The document of `results`, judged."""
    judgement = judge(results, SLO)
    return CompareSummary(
        topology=topology,
        launcher="local",
        shaping="paced",
        scale=Scale(),
        first_token="handoff",
        seed=1,
        slo=SLO,
        runs=tuple(result.summary for result in results),
        verdict=judgement.verdicts,
        withheld=judgement.withheld,
    )


def _request(i: int, gaps_ms: Sequence[float] = (20.0,) * 10) -> Record:
    return made_record(f"r{i}", scheduled_s=i / 2, ttft_ms=200 + 20 * (i % 7), gaps_ms=gaps_ms)


def _moved(wire_ms: float) -> list[Record]:
    return [
        made_record(
            f"r{i}", scheduled_s=i / 2, ttft_ms=200 + 20 * (i % 7) + wire_ms, gaps_ms=[18.0] * 10, wire_ms=wire_ms
        )
        for i in range(20)
    ]


def _steps(node: str) -> list[StepRecord]:
    return [
        StepRecord(
            node=node,
            kind=("prefill", "decode", "mixed")[i % 3],
            start_s=i * 0.025,
            end_s=(i + 1) * 0.025,
            planned_s=0.025,
            prefill_tokens=100 * (i % 3),
            decode_batch=4,
            requests=4,
        )
        for i in range(200)
    ]
