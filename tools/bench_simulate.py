"""How fast a simulation is: CPU seconds from reading a trace to the written run directory, each case in a process of
its own on one core.

W1    2,000 requests at 4/s (Poisson) on 1P1D       bound 0.7 s beyond start-up
W1×10 20,000 requests at 4/s on 1P1D                how cost and memory grow with requests
W2    20,000 requests at 64/s on 16P16D             bound 10 s beyond start-up

Lengths are those of a trace's rows, repeated as needed (default: Azure conversation 2023); Llama-3.1-8B on H100 over
100 Gbps, which none of the cases saturates. Start-up is the interpreter, the imports and the catalog. With --check
the exit status is 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from emulator.core import specs, strict, traffic
from emulator.core.deploy import plan_runs
from emulator.core.hardware import Catalog
from emulator.core.run_spec import RunSpec
from emulator.core.trace import Trace
from emulator.core.workload import LoadPlan, PlannedRequest, plan_load
from emulator.lab.catalog_files import load_catalog
from emulator.lab.run_folder import RunFolder
from emulator.lab.simulated import MODELLED, SIMULATE, simulated_result, transfer_rows
from emulator.lab.topology_files import load_trace

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "azure_2023_conv_first2000.csv"


class Case(NamedTuple):
    """Requests at a rate on `pairs` prefill and as many decode nodes, and the most CPU seconds beyond start-up."""

    requests: int
    rate_per_s: float
    pairs: int
    bound_s: float | None


CASES = {
    "W1": Case(2_000, 4.0, 1, 0.7),
    "W1x10": Case(20_000, 4.0, 1, None),
    "W2": Case(20_000, 64.0, 16, 10.0),
}


class Figures(msgspec.Struct, frozen=True):
    """What one case took: CPU seconds, model seconds, and the largest resident memory after start-up and in all."""

    startup_s: float
    cpu_s: float
    model_s: float
    completed: int
    output_tokens: int
    startup_bytes: int
    peak_bytes: int
    written_bytes: int


def topology(case: Case) -> specs.Topology:
    """The case as a topology; its lengths are then replaced by the trace's."""
    data = {
        "name": "bench-simulate",
        "model": "Llama-3.1-8B",
        "gpu": "h100",
        "slo": {"ttft_ms": 1000, "tpot_ms": 40, "itl_p99_ms": 100},
        "workload": {
            "duration": f"{1.2 * case.requests / case.rate_per_s + 10}s",
            "drain": "600s",
            "streams": [
                {
                    "name": "conversation",
                    "arrivals": {"process": "poisson", "rate_per_s": case.rate_per_s},
                    "lengths": "azure-conv-like",
                }
            ],
        },
        "kv_network": {"bandwidth": ["100Gbps"]},
        "deployments": [
            {
                "name": f"{case.pairs}P{case.pairs}D",
                "pools": [{"role": "prefill", "nodes": case.pairs}, {"role": "decode", "nodes": case.pairs}],
            }
        ],
    }
    return strict.convert(data, specs.Topology, "bench_simulate")


def plan(case: Case, planned: specs.Topology, trace: Trace, catalog: Catalog) -> RunSpec:
    """The run: instants as the topology plans them, lengths of the trace's rows one after the other."""
    arrivals = plan_load(planned.workload, {}).open[: case.requests]
    rows = trace.rows
    requests = tuple(
        PlannedRequest(
            arrival.request_id,
            arrival.stream,
            arrival.scheduled_s,
            rows[n % len(rows)].prompt_tokens,
            rows[n % len(rows)].output_tokens,
        )
        for n, arrival in enumerate(arrivals)
    )
    load = LoadPlan(requests, (), requests[-1].scheduled_s + 1.0, float(planned.workload.drain))
    (run,) = plan_runs(planned, catalog, load)
    return run


def measure(case: Case, trace_file: str) -> Figures:
    """Run one case in this process, of which nothing but start-up has gone before."""
    catalog = load_catalog()
    startup_s, startup_bytes = time.process_time(), _peak_bytes()
    planned = topology(case)
    trace = load_trace(Path(trace_file), traffic.TraceOptions())
    run = plan(case, planned, trace, catalog)
    with tempfile.TemporaryDirectory() as out:
        folder = RunFolder(Path(out), run, planned, launcher=SIMULATE, shaping=MODELLED)
        result = simulated_result(run)
        folder.write(result, transfer_rows(result))
        cpu_s = time.process_time() - startup_s
        written = sum(file.stat().st_size for file in folder.path.iterdir() if file.is_file())
    return Figures(
        startup_s=startup_s,
        cpu_s=cpu_s,
        model_s=max(record.finish_s or 0.0 for record in result.records),
        completed=result.summary.completed,
        output_tokens=sum(record.output_tokens for record in result.records),
        startup_bytes=startup_bytes,
        peak_bytes=_peak_bytes(),
        written_bytes=written,
    )


def _peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _measure_apart(name: str, trace: Path) -> Figures:
    command = [sys.executable, str(Path(__file__)), "--trace", str(trace), "--case", name]
    return msgspec.json.decode(subprocess.run(command, check=True, capture_output=True).stdout, type=Figures)


def _row(name: str, figures: Figures) -> str:
    case = CASES[name]
    return (
        f"{name:6s} {case.requests:8,d} {figures.output_tokens:10,d} {figures.startup_s:9.2f} {figures.cpu_s:8.3f} "
        f"{figures.model_s / figures.cpu_s:9,.0f} x {figures.cpu_s / case.requests * 1e6:8.0f} us "
        f"{(figures.peak_bytes - figures.startup_bytes) / 1e6:7.0f} MB {figures.written_bytes / 1e6:7.1f} MB"
    )


def main() -> int:
    """Measure and print; 1 when --check finds a bound missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trace", type=Path, default=TRACE, help="trace with the lengths")
    parser.add_argument("--repeat", type=int, default=3, help="the fastest of so many runs of each case counts")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bound is missed")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        sys.stdout.buffer.write(msgspec.json.encode(measure(CASES[options.case], str(options.trace))))
        return 0
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(
        f"{'case':6s} {'requests':>8s} {'tokens':>10s} {'start-up':>9s} {'CPU s':>8s} {'real time':>11s} "
        f"{'a request':>11s} {'memory':>10s} {'written':>10s}"
    )
    missed, per_request = [], {}
    for name, case in CASES.items():
        best = min((_measure_apart(name, options.trace) for _ in range(options.repeat)), key=lambda f: f.cpu_s)
        print(_row(name, best), flush=True)
        per_request[name] = best.cpu_s / case.requests
        if best.completed != case.requests:
            missed.append(f"{name}: {best.completed} of {case.requests} requests completed")
        if case.bound_s is not None and best.cpu_s > case.bound_s:
            missed.append(f"{name}: {best.cpu_s:.3f} s of CPU, bound {case.bound_s:g} s")
    print(f"ten times the requests of W1 cost {10 * per_request['W1x10'] / per_request['W1']:.1f} times as much")
    print("BOUND MISSED: " + "; ".join(missed) if missed else "within bounds")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
