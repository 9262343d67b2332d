"""How fast, how precise and how heavy the KV link is, against what it is built on.

Kinds of connection take turns (A B C D A B C D ...) on loopback within one run, because a machine's speed
drifts more between runs than the kinds differ: judge by the ratios. Each end is a process of its own.

A KV link stores what arrives. That costs any transport the caches that it has while it reuses one buffer, so
the bare ZeroMQ pair is measured both ways, storing as much as the link and dropping each frame at once, and so
is the link; the bound holds for like against like. Plain sockets always reuse one buffer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kv_bench_peers import Plan, plan_json

from emulator.core.pacing import MAX_FRAME_BYTES
from emulator.live.allocator import NODE_ALLOCATOR_ENV

GIB = 1 << 30
MIB = 1 << 20
MIN_OF_ZMQ = 0.95
MIN_OF_SOCKETS = 0.75
MAX_GROWTH_MIB = 128
MAX_PACED_ERROR = 0.01
MAX_SHARE_ERROR = 0.03
PACED_BYTES = 100_000_000
WARM_BYTES = 256 * MIB
ZMQ_FRAMES = (512 * 1024, MIB, 2 * MIB)
SOCKET_BUFFERS = (0, 2 * MIB, 4 * MIB)
LINK = "KV link"
ZMQ = "bare ZeroMQ"
LINK_DROPPING = "KV link, dropping"
ZMQ_DROPPING = "bare ZeroMQ, dropping"
SOCKETS = "plain sockets"
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Run:
    """One timed transfer: Gbit/s, CPU seconds of both ends per GiB, the growth of the larger end in MiB."""

    gbps: float
    cpu_s_per_gib: float
    growth_mib: float | None


class Peer:
    """A child process that answers in JSON lines."""

    def __init__(self, kind: str, side: str, plan: Plan) -> None:
        script = Path(__file__).with_name("kv_bench_peers.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), kind, side, plan_json(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **NODE_ALLOCATOR_ENV},
        )
        self._name = f"{kind} {side}"
        self._watchdog = threading.Timer(DEADLINE_S, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    def hear(self) -> dict[str, Any]:
        """The next message; raises RuntimeError if the process ended or took too long."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self._name} process ended early or took more than {DEADLINE_S:.0f} s")
        return dict(json.loads(line))

    def tell(self) -> None:
        """Let it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Wait shortly, then kill."""
        self._watchdog.cancel()
        try:
            self._process.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


@contextmanager
def peer(kind: str, side: str, plan: Plan) -> Iterator[Peer]:
    """A child process that has ended when the block is left."""
    child = Peer(kind, side, plan)
    try:
        yield child
    finally:
        child.end()


def converse(kind: str, plan: Plan) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run one receiver and its senders; what they report."""
    with ExitStack() as stack:
        rx = stack.enter_context(peer(kind, "rx", plan))
        plan = replace(plan, endpoint=rx.hear()["endpoint"])
        senders = [stack.enter_context(peer(kind, "tx", replace(plan, sender=i))) for i in range(plan.senders)]
        for child in (rx, *senders):
            child.hear()
        for child in senders:
            child.tell()
        received = rx.hear()
        for child in senders:
            child.tell()
        return received, [child.hear() for child in senders]


def stream(kind: str, plan: Plan) -> Run:
    """One unshaped transfer of `plan.total` bytes."""
    received, (sent,) = converse(kind, plan)
    gib = plan.total / GIB
    return Run(
        gbps=plan.total * 8 / (received["end_s"] - sent["start_s"]) / 1e9,
        cpu_s_per_gib=(received["cpu_s"] + sent["cpu_s"]) / gib,
        growth_mib=max(received["growth"], sent["growth"]) / MIB,
    )


def iperf3(nbytes: int) -> Run:
    """The same volume by iperf3."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        ["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port, "--forceflush"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            if server.poll() is not None:
                raise RuntimeError("iperf3 did not start")
        client = subprocess.run(
            ["iperf3", "-c", "127.0.0.1", "-p", port, "-n", str(nbytes), "-J"],
            capture_output=True,
            text=True,
            check=True,
            timeout=DEADLINE_S,
        )
    finally:
        server.kill()
        server.communicate()
    end = json.loads(client.stdout)["end"]
    received = end["sum_received"]
    cpu = end["cpu_utilization_percent"]
    cpu_s = (cpu["host_total"] + cpu["remote_total"]) / 100 * received["seconds"]
    return Run(received["bits_per_second"] / 1e9, cpu_s / (received["bytes"] / GIB), None)


def fastest(kind: str, plans: dict[str, Plan], rounds: int) -> Plan:
    """The one of the named plans with which a kind is fastest here."""
    speeds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name, plan in plans.items():
            speeds[name].append(stream(kind, plan).gbps)
    for name, found in speeds.items():
        print(f"{kind}, {name}: {statistics.median(found):.1f} Gbps", flush=True)
    return plans[max(speeds, key=lambda name: statistics.median(speeds[name]))]


def kinds_of(plan: Plan, rounds: int) -> dict[str, Callable[[], Run]]:
    """What takes turns: the link and a bare pair, both storing and dropping what arrives, sockets, iperf3."""
    short = replace(plan, total=min(plan.total, GIB))
    frames = {f"{size // 1024} KiB frames": replace(short, frame=size, store=False) for size in ZMQ_FRAMES}
    buffers = {f"{size // MIB} MiB kernel buffers": replace(short, buffer=size) for size in SOCKET_BUFFERS}
    bare = replace(plan, frame=fastest("zmq", frames, rounds).frame)
    tuned = replace(plan, buffer=fastest("sockets", buffers, rounds).buffer)
    kinds: dict[str, Callable[[], Run]] = {
        LINK: lambda: stream("link", plan),
        ZMQ: lambda: stream("zmq", bare),
        LINK_DROPPING: lambda: stream("link", replace(plan, store=False)),
        ZMQ_DROPPING: lambda: stream("zmq", replace(bare, store=False)),
        SOCKETS: lambda: stream("sockets", tuned),
    }
    if shutil.which("iperf3"):
        kinds["iperf3"] = lambda: iperf3(plan.total)
    return kinds


def compare(plan: Plan, rounds: int) -> tuple[str, list[str]]:
    """Print the table of unshaped streams; a summary and the bounds missed."""
    kinds = kinds_of(plan, min(rounds, 3))
    runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind, measure in kinds.items():
            runs[kind].append(measure())
        speeds = ", ".join(f"{kind} {found[-1].gbps:.1f}" for kind, found in runs.items())
        print(f"round {number + 1}: {speeds} Gbps", flush=True)
    print(f"\n{'kind':<26}{'Gbps':>8}{'link/kind':>11}{'CPU s/GiB':>11}{'growth MiB':>12}")
    for kind, found in runs.items():
        growths = [run.growth_mib for run in found if run.growth_mib is not None]
        print(
            f"{kind:<26}{statistics.median(run.gbps for run in found):>8.2f}{_ratio(runs, LINK, kind):>11.3f}"
            f"{statistics.median(run.cpu_s_per_gib for run in found):>11.3f}"
            + (f"{max(growths):>12.0f}" if growths else f"{'-':>12}")
        )
    growth = max(run.growth_mib or 0.0 for run in runs[LINK])
    missed = [
        f"{ratio:.3f} of {theirs} is below {bound}"
        for ours, theirs, bound in (
            (LINK, ZMQ, MIN_OF_ZMQ),
            (LINK_DROPPING, ZMQ_DROPPING, MIN_OF_ZMQ),
            (LINK, SOCKETS, MIN_OF_SOCKETS),
        )
        if (ratio := _ratio(runs, ours, theirs)) < bound
    ]
    if growth >= MAX_GROWTH_MIB:
        missed.append(f"memory grew by {growth:.0f} MiB, not less than {MAX_GROWTH_MIB}")
    summary = (
        f"link {statistics.median(run.gbps for run in runs[LINK]):.1f} Gbps, "
        f"of bare ZeroMQ {_ratio(runs, LINK, ZMQ):.3f} storing, "
        f"{_ratio(runs, LINK_DROPPING, ZMQ_DROPPING):.3f} dropping, "
        f"of sockets {_ratio(runs, LINK, SOCKETS):.3f}, +{growth:.0f} MiB"
    )
    return summary, missed


def _ratio(runs: dict[str, list[Run]], ours: str, theirs: str) -> float:
    """Median over the rounds of one kind's speed over another's."""
    pairs = zip(runs[ours], runs[theirs], strict=True)
    return statistics.median(one.gbps / other.gbps for one, other in pairs)


def paced(rounds: int) -> tuple[str, list[str]]:
    """Print how exactly paced transfers keep their rate; a summary and the bounds missed."""
    missed: list[str] = []
    summary: list[str] = []
    print(f"\n{'paced':<26}{'median error':>14}{'each':>8}")
    for rate_bps, senders, bound in (
        (100e6, 1, MAX_PACED_ERROR),
        (1e9, 1, MAX_PACED_ERROR),
        (5e9, 1, MAX_PACED_ERROR),
        (1e9, 2, MAX_SHARE_ERROR),
    ):
        total = PACED_BYTES // senders
        warm = min(total, int(rate_bps / 8 / senders))  # a second of it, or as much memory as is then needed
        plan = Plan(total=total, warm=warm, frame=0, ticket=total, rate=rate_bps / 8, senders=senders)
        errors = [_rate_error(plan) for _ in range(rounds)]
        error = statistics.median(errors)
        label = f"{rate_bps / 1e9:g} Gbps, {senders} sender{'s' * (senders > 1)}"
        print(f"{label:<26}{error:>+14.2%}   " + " ".join(f"{each:+.2%}" for each in errors), flush=True)
        summary.append(f"{label} {error:+.2%}")
        if abs(error) > bound:
            missed.append(f"{label}: {error:+.2%} is beyond {bound:.0%}")
    return "; ".join(summary), missed


def _rate_error(plan: Plan) -> float:
    """Achieved over asked rate, less one, from the first frame's start to the last arrival."""
    received, _ = converse("link", plan)
    arrivals = received["arrivals"]
    elapsed_s = max(end_s for _, end_s, _ in arrivals) - min(start_s for start_s, _, _ in arrivals)
    assert plan.rate is not None
    return float(sum(nbytes for _, _, nbytes in arrivals) / elapsed_s / plan.rate - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and with --check return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind (default 5)")
    parser.add_argument("--gib", type=float, default=4.0, help="GiB per unshaped stream (default 4)")
    parser.add_argument("--ticket-mib", type=int, default=64, help="MiB per transfer of the KV link (default 64)")
    parser.add_argument("--paced", action="store_true", help="measure paced transfers too")
    parser.add_argument("--only-paced", action="store_true", help="measure only paced transfers")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a bound is missed")
    options = parser.parse_args(arguments)
    total = int(options.gib * GIB) // (2 * MIB) * (2 * MIB)
    plan = Plan(total=total, warm=WARM_BYTES, frame=MAX_FRAME_BYTES, ticket=options.ticket_mib * MIB)
    summaries: list[str] = []
    missed: list[str] = []
    if not options.only_paced:
        summary, misses = compare(plan, options.rounds)
        summaries.append(summary)
        missed += misses
    if options.paced or options.only_paced:
        summary, misses = paced(options.rounds)
        summaries.append(summary)
        missed += misses
    verdict = "; ".join(missed) if missed else "every bound met"
    print(f"\n{' | '.join(summaries)} | {verdict}")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
