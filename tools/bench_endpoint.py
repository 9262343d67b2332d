"""What the endpoint adds: the same closed loop of streams by the native client, and by HTTP clients of `pdemu up`.

    python tools/bench_endpoint.py [--streams 64] [--step-ms 25] [--seconds 15] [--rounds 3]

Prints P50 TTFT and P99 ITL (ms) of the native client, of the HTTP clients, and of the endpoint's own records of these;
the aim is at most 5 ms more P50 TTFT and 2 ms more P99 ITL. All processes share this machine, so it should be idle. The
HTTP clients stop a request's clock when its bytes are there, without reading them closely.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from emulator.core.records import Record, read_records

TOPOLOGY = """
name = "endpoint"
model = "tiny"
gpu = "h100"
cost = "fitted"
profile = "constant"
[slo]
[workload]
duration = "{seconds}s"
drain = "20s"
[[workload.streams]]
name = "loop"
arrivals = {{ process = "closed_loop", users = {streams}, ramp_s = {ramp_s} }}
prompt_tokens = {prompt}
output_tokens = {output}
[kv_network]
bandwidth = ["1Gbps"]
[[deployments]]
name = "1P1D"
pools = [{{ role = "prefill" }}, {{ role = "decode" }}]
[[models]]
name = "tiny"
layers = 4
hidden = 256
heads = 4
kv_heads = 4
head_dim = 64
intermediate = 1024
vocab = 32000
params_b = 0.02
active_params_b = 0.02
gated_mlp = true
context_tokens = 4096
source = "made for this benchmark"
[[profiles]]
name = "constant"
model = "tiny"
gpu = "h100"
tp = 1
prefill_base_ms = 1.0
prefill_per_token_ms = 0.01
prefill_per_token2_ms = 0.0
decode = {{ base_ms = {step_ms}, per_context_token_ms = 0.0, per_sequence_ms = 0.0 }}
source = "made for this benchmark"
"""
PROMPT_TOKENS, OUTPUT_TOKENS, RAMP_S = 64, 64, 1.6
PDEMU = [sys.executable, "-m", "emulator"]
READY_S = 60.0


def topology_text(streams: int, step_ms: float, seconds: float) -> str:
    """A pair of nodes whose decode steps all take as long, and a closed loop of streams."""
    return TOPOLOGY.format(
        seconds=seconds, streams=streams, ramp_s=RAMP_S, prompt=PROMPT_TOKENS, output=OUTPUT_TOKENS, step_ms=step_ms
    )


@dataclass
class Seen:
    """Latencies of one way to drive the cluster, milliseconds."""

    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)

    def add(self, sent_s: float, times_s: Sequence[float]) -> None:
        """A request and the instants of its tokens."""
        self.ttft_ms.append((times_s[0] - sent_s) * 1e3)
        self.itl_ms += [float(gap) * 1e3 for gap in np.diff(times_s)]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Seen:
        """Those of a run's completed requests."""
        seen = cls()
        for record in records:
            if record.outcome == "completed" and record.sent_s is not None:
                seen.add(record.sent_s, record.times().tolist())
        return seen

    def row(self, name: str) -> str:
        """A line of the table."""
        ttft, itl = np.percentile(self.ttft_ms, 50), np.percentile(self.itl_ms, 99)
        return f"{name:34} {len(self.ttft_ms):8} {ttft:12.2f} {np.percentile(self.itl_ms, 50):12.2f} {itl:12.2f}"


class _Stream(asyncio.Protocol):
    """One HTTP client: sends the next request when the last answer is complete."""

    def __init__(self, seen: Seen, until_s: float) -> None:
        self._seen, self._until_s = seen, until_s
        body = msgspec.json.encode({"prompt": [5] * PROMPT_TOKENS, "max_tokens": OUTPUT_TOKENS, "stream": True})
        self._request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        self._times_s: list[float] = []
        self._sent_s = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def _next(self) -> None:
        self._times_s, self._sent_s = [], time.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        self._times_s += [now_s] * data.count(b'"finish_reason"')
        if b"[DONE]" not in data:
            return
        assert len(self._times_s) == OUTPUT_TOKENS, "one chunk a token"
        self._seen.add(self._sent_s, self._times_s)
        if now_s < self._until_s:
            self._next()
        elif not self.ended.done():
            self._transport.close()
            self.ended.set_result(None)


async def _drive(port: int, streams: int, seconds: float) -> Seen:
    seen, loop = Seen(), asyncio.get_running_loop()
    until_s = time.monotonic() + seconds
    clients = []
    for _ in range(streams):
        _, client = await loop.create_connection(lambda: _Stream(seen, until_s), "127.0.0.1", port)
        clients.append(client)
        await asyncio.sleep(RAMP_S / streams)
    await asyncio.gather(*(client.ended for client in clients))
    return seen


def _native(topology: Path, out: Path) -> Seen:
    command = [*PDEMU, "run", str(topology), "--deployment", "1P1D", "--out", str(out), "--json"]
    subprocess.run(command, check=True, capture_output=True)
    return Seen.of(records_of(out))


def _by_http(topology: Path, out: Path, streams: int, seconds: float) -> tuple[Seen, Seen]:
    with serving(topology, out) as served:
        seen = asyncio.run(_drive(served.port, streams, seconds))
    return seen, Seen.of(records_of(out))


class Served(NamedTuple):
    """Where a cluster is reached: its port for HTTP, its router's URL, and the secret that lets clients join there."""

    port: int
    router: str
    secret: str


@contextmanager
def serving(topology: Path, out: Path) -> Iterator[Served]:
    """The topology served by `pdemu up` on loopback; its results are in `out` afterwards."""
    log = out.with_suffix(".log")
    command = [*PDEMU, "up", str(topology), "--http", "127.0.0.1:0", "--out", str(out), "--json"]
    secret = secrets.token_hex(8)
    environment = {**os.environ, "PDEMU_SECRET": secret}
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment)
    try:
        deadline_s = time.monotonic() + READY_S
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)/v1, and at (tcp://\S+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline_s:
                sys.exit(f"pdemu up: {log.read_text()}")
            time.sleep(0.05)
        yield Served(int(found[1]), found[2], secret)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def records_of(out: Path) -> list[Record]:
    """The records of the one run in a folder of results."""
    (path,) = out.glob("*/records.jsonl")
    return read_records(path.read_bytes())


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    text = topology_text(given.streams, given.step_ms, given.seconds)
    print(f"{'':34} {'requests':>8} {'TTFT p50':>12} {'ITL p50':>12} {'ITL p99':>12}")
    with tempfile.TemporaryDirectory() as folder:
        topology = Path(folder) / "endpoint.toml"
        topology.write_text(text)
        for n in range(given.rounds):
            print(_native(topology, Path(folder) / f"native-{n}").row("native client"))
            clients, records = _by_http(topology, Path(folder) / f"http-{n}", given.streams, given.seconds)
            print(clients.row("HTTP clients"))
            print(records.row("the endpoint's records of them"))


if __name__ == "__main__":
    main()
