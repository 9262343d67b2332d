"""What a hand-over shows of itself on the wire, beside what theory says: layer-wise overlap and the first-token modes.

    python tools/bench_handover.py [--launcher netns|local] [--kv-bandwidth 5Gbps,10Gbps] [--scale-time K]

One request at a time on an idle 1P1D cluster, so nothing waits for anything else. Step times are made for this: a
prefill of 700 ms for 1,000 tokens of Llama-3.1-70B (327.68 MB of KV), decode steps of 50 ms.

- Layer-wise, what is visible of the transfer after the prefill is the last group's: its bytes at the link's payload
  rate. Serialized, it is the whole transfer.
- With the first token streamed by prefill, the second one comes a transfer and a step later. What the transfer adds to
  that gap is the second token's penalty; layer-wise over serialized it should be about one group's share.
- The modes differ by the transfer and by a step: TTFT is prefill (`prefill`), prefill + transfer (`handoff`), and
  prefill + transfer + step (`recompute`); the first gap is transfer + step (`prefill`) or a step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from emulator.core.pacing import payload_bits_per_s
from emulator.core.quantities import BitsPerSecond
from emulator.core.records import Record, read_records

KV_BYTES = 327_680_000
PREFILL_S = 0.7
STEP_S = 0.0501
GROUPS = 8

COMMON = """
name = "handover"
model = "Llama-3.1-70B"
gpu = "l40s"
cost = "fitted"
profile = "even-prefill"
slo = { ttft_ms = 2000 }

[workload]
duration = "11s"
drain = "5s"

[[workload.streams]]
name = "one"
arrivals = { process = "at", times_s = [0.5, 2.5, 4.5, 6.5, 8.5] }
prompt_tokens = 1000
output_tokens = 4

[[profiles]]
name = "even-prefill"
model = "Llama-3.1-70B"
gpu = "l40s"
tp = 4
prefill_base_ms = 0.0
prefill_per_token_ms = 0.7
prefill_per_token2_ms = 0.0
decode = { base_ms = 50.0, per_context_token_ms = 0.0, per_sequence_ms = 0.1 }
source = "made for this measurement"
"""

DEPLOYMENT = """
[[deployments]]
name = "{name}"
pools = [{{ role = "prefill", tp = 4 }}, {{ role = "decode", tp = 4 }}]
{keys}
"""

WAYS = {
    "serialized": 'first_token = "prefill"',
    "layer": f'overlap = "layer"\nlayer_groups = {GROUPS}\nfirst_token = "prefill"',
    "handoff": "",
    "recompute": 'first_token = "recompute"',
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run every way at every bandwidth; print the table; 1 if a run could not be made."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--launcher", default="netns", choices=("netns", "local", "compose", "simulate"))
    parser.add_argument("--kv-bandwidth", default="5Gbps,10Gbps")
    parser.add_argument("--scale-time", type=float, default=1.0)
    options = parser.parse_args(argv)
    bandwidths = [BitsPerSecond.parse(text) for text in options.kv_bandwidth.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        topology, out = Path(folder, "handover.toml"), Path(folder, "out")
        rates = ", ".join(f'"{bandwidth}"' for bandwidth in bandwidths)
        text = COMMON + f"\n[kv_network]\nbandwidth = [{rates}]\n"
        text += f"\n[scale]\ntime = {options.scale_time}\n"
        topology.write_text(text + "".join(DEPLOYMENT.format(name=n, keys=keys) for n, keys in WAYS.items()))
        command = [sys.executable, "-m", "emulator", "compare", str(topology), "--launcher", options.launcher]
        done = subprocess.run([*command, "--out", str(out), "--json"], stdout=subprocess.PIPE, check=False)
        if done.returncode:
            return 1
        faithful = {
            (run["deployment"], run["kv_bandwidth_bps"]): "; ".join(run["fidelity"]["reasons"]) or "ok"
            for run in json.loads(done.stdout)["runs"]
        }
        for bandwidth in bandwidths:
            records = {
                name: read_records((out / f"{name}@{bandwidth / 1e9:g}Gbps" / "records.jsonl").read_bytes())
                for name in WAYS
            }
            _print(bandwidth, records)
            for name in WAYS:
                print(f"  fidelity of {name}: {faithful[name, float(bandwidth)]}")
    return 0


def _print(bandwidth: BitsPerSecond, records: dict[str, list[Record]]) -> None:
    transfer_s = KV_BYTES * 8 / payload_bits_per_s(float(bandwidth), "line")
    group_s = transfer_s / GROUPS
    print(f"\n{bandwidth}: transfer {1e3 * transfer_s:.2f} ms, of one of {GROUPS} groups {1e3 * group_s:.2f} ms")
    print(f"  {'':34}{'theory ms':>10}{'median ms':>10}{'off by':>12}{'  all':<5}")
    for name, theory_s in (("layer", group_s), ("serialized", transfer_s)):
        _row(f"{name}: visible after prefill", theory_s, [_visible_s(r) for r in records[name]], relative=True)
    for name, theory_s in (("layer", group_s), ("serialized", transfer_s)):
        _row(f"{name}: second token's penalty", theory_s, [_gap_s(r) - STEP_S for r in records[name]], relative=True)
    penalties = {name: median(_gap_s(r) - STEP_S for r in records[name]) for name in ("layer", "serialized")}
    print(f"  penalty, layer over serialized: {penalties['layer'] / penalties['serialized']:.3f}")
    for name, mode, theory_s in (
        ("serialized", "prefill", PREFILL_S),
        ("handoff", "handoff", PREFILL_S + transfer_s),
        ("recompute", "recompute", PREFILL_S + transfer_s + STEP_S),
    ):
        _row(f"first_token {mode}: TTFT", theory_s, [_ttft_s(r) for r in records[name]])
    for name, mode, theory_s in (
        ("serialized", "prefill", transfer_s + STEP_S),
        ("handoff", "handoff", STEP_S),
        ("recompute", "recompute", STEP_S),
    ):
        _row(f"first_token {mode}: first gap", theory_s, [_gap_s(r) for r in records[name]])


def _row(what: str, theory_s: float, measured_s: Sequence[float], *, relative: bool = False) -> None:
    middle = median(measured_s)
    off = f"{100 * (middle / theory_s - 1):+.1f} %" if relative else f"{1e3 * (middle - theory_s):+.2f} ms"
    everything = ", ".join(f"{1e3 * value:.1f}" for value in measured_s)
    print(f"  {what:34}{1e3 * theory_s:10.2f}{1e3 * middle:10.2f}{off:>12}  {everything}")


def _visible_s(record: Record) -> float:
    assert record.kv_end_s is not None
    assert record.prefill_end_s is not None
    return record.kv_end_s - record.prefill_end_s


def _ttft_s(record: Record) -> float:
    assert record.first_token_s is not None
    return record.first_token_s - record.scheduled_s


def _gap_s(record: Record) -> float:
    times = record.times()
    return float(times[1] - times[0])


if __name__ == "__main__":
    sys.exit(main())
