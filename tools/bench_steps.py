"""How punctual emulated steps are: four nodes decode 1,000 steps of 25 ms each, all at once.

Prints for each node the 99th percentile of step lateness and how far 1,000 steps drift from 25 s. With --check the
exit status is 1 when a bound is missed: lateness within 1 ms, drift within 0.1 %.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np

from emulator.core import specs, strict
from emulator.core.records import StepRecord
from emulator.lab.catalog_files import load_catalog
from emulator.lab.experiment import perform, prepare

LATENESS_MS = 1.0
DRIFT = 0.001


def topology(nodes: int, steps: int, step_ms: float) -> specs.Topology:
    """`nodes` colocated nodes, each with one request of `steps` decode steps of the same length."""
    data = {
        "name": "steps",
        "model": "Llama-3.1-8B",
        "gpu": "h100",
        "cost": "fitted",
        "profile": "constant",
        "slo": {},
        "workload": {
            "duration": "1s",
            "drain": f"{steps * step_ms / 1e3 + 10}s",
            "streams": [
                {
                    "name": "steady",
                    "arrivals": {"process": "at", "times_s": [0.0] * nodes},
                    "prompt_tokens": 16,
                    "output_tokens": steps + 1,
                }
            ],
        },
        "deployments": [
            {"name": "colocated", "routing": "round_robin", "pools": [{"role": "colocated", "nodes": nodes}]}
        ],
        "profiles": [
            {
                "name": "constant",
                "model": "Llama-3.1-8B",
                "gpu": "h100",
                "tp": 1,
                "prefill_base_ms": step_ms,
                "prefill_per_token_ms": 0.0,
                "prefill_per_token2_ms": 0.0,
                "decode": {"base_ms": step_ms, "per_context_token_ms": 0.0, "per_sequence_ms": 0.0},
                "source": "constant steps for this benchmark",
            }
        ],
    }
    return strict.convert(data, specs.Topology, "bench_steps")


def run(nodes: int, steps: int, step_ms: float) -> dict[str, list[StepRecord]]:
    """The decode steps of every node."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(topology(nodes, steps, step_ms), load_catalog(), {}, out=Path(folder) / "out")
        (result,) = asyncio.run(perform(prepared, lambda *_: None, lambda *_: None))
    by_node: dict[str, list[StepRecord]] = {}
    for step in result.steps:
        if step.kind == "decode":
            by_node.setdefault(step.node, []).append(step)
    return by_node


def main() -> int:
    """Run and print; 1 when --check finds a bound missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--check", action="store_true", help="exit 1 when a bound is missed")
    options = parser.parse_args()
    worst_ms = worst_drift = 0.0
    print(f"{'node':14s} {'steps':>6s} {'lateness p50':>13s} {'p99':>8s} {'max':>8s} {'drift':>9s}")
    for node, steps in sorted(run(options.nodes, options.steps, options.step_ms).items()):
        late_ms = np.array([step.lateness_s for step in steps]) * 1e3
        planned_s = sum(step.planned_s for step in steps)
        drift = (steps[-1].end_s - steps[0].start_s) / planned_s - 1
        p50, p99, most = np.percentile(late_ms, [50, 99, 100])
        print(f"{node:14s} {len(steps):6d} {p50:10.3f} ms {p99:5.3f} ms {most:5.2f} ms {drift:+9.5%}")
        worst_ms, worst_drift = max(worst_ms, float(p99)), max(worst_drift, abs(drift))
    ok = worst_ms <= LATENESS_MS and worst_drift <= DRIFT
    print(
        f"{'within bounds' if ok else 'BOUND MISSED'}: worst p99 lateness {worst_ms:.3f} ms (bound {LATENESS_MS} ms), "
        f"worst drift {worst_drift:.4%} (bound {DRIFT:.1%})"
    )
    return 1 if options.check and not ok else 0


if __name__ == "__main__":
    sys.exit(main())
