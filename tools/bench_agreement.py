"""Whether clients of `pdemu up` measure what it says of them: `pdemu bench`, by HTTP and by the control network, and
OpenAI's client timing its own chunks.

    python tools/bench_agreement.py [--streams 2] [--step-ms 25] [--requests 40] [--json]

Each client keeps so many requests open at a time and measures TTFT from its send and TPOT; beside them stand the
figures of the same requests in the records of the run's folder. They agree where the P50 of TTFT differs by at most
10 ms, the mean TPOT by at most 2 %, and no request failed or had another number of tokens than was asked for; otherwise
the exit status is 1. All processes share this machine, so it should be idle.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from bench_endpoint import PDEMU, PROMPT_TOKENS, Served, records_of, serving, topology_text
from openai import APIError, DefaultHttpxClient, OpenAI

from emulator.core.records import Record, read_records

TTFT_MS, TPOT_SHARE = 10.0, 0.02
BENCH_TOKENS, NATIVE_TOKENS, OPENAI_TOKENS = 64, 56, 48
"""Output tokens of the requests of each client, by which their records are told apart."""


@dataclass
class Measured:
    """Latencies of one client's requests, milliseconds, and what went wrong."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    failed: int = 0
    mismatches: int = 0

    def add(self, sent_s: float, times_s: Sequence[float]) -> None:
        """A request and the instants of its tokens."""
        self.ttft_ms.append((times_s[0] - sent_s) * 1e3)
        self.tpot_ms.append((times_s[-1] - times_s[0]) / (len(times_s) - 1) * 1e3)

    @classmethod
    def of(cls, records: Sequence[Record], output_tokens: int) -> Measured:
        """What records say, of requests of so many tokens each."""
        found = cls()
        for record in records:
            times_s = record.times().tolist()
            asked = (PROMPT_TOKENS, output_tokens, output_tokens)
            if record.outcome != "completed" or record.sent_s is None:
                found.failed += 1
                continue
            found.mismatches += (record.prompt_tokens, record.output_tokens, len(times_s)) != asked
            found.add(record.sent_s, times_s)
        return found

    def figures(self) -> dict[str, float]:
        """What is compared."""
        if not self.ttft_ms:
            return {"requests": 0, "ttft_p50_ms": np.nan, "ttft_max_ms": np.nan, "tpot_mean_ms": np.nan}
        return {
            "requests": len(self.ttft_ms),
            "ttft_p50_ms": float(np.percentile(self.ttft_ms, 50)),
            "ttft_max_ms": max(self.ttft_ms),
            "tpot_mean_ms": float(np.mean(self.tpot_ms)),
        }


@dataclass(frozen=True)
class Agreement:
    """One client's figures beside those of the records of its requests."""

    name: str
    client: dict[str, float]
    records: dict[str, float]
    failed: int
    mismatches: int
    ttft_difference_ms: float
    tpot_difference_share: float

    @classmethod
    def between(cls, name: str, client: Measured, records: Measured) -> Agreement:
        """Compare them; requests that only one of the two knows of have failed."""
        seen, said = client.figures(), records.figures()
        unknown = abs(len(client.ttft_ms) + client.failed - len(records.ttft_ms) - records.failed)
        return cls(
            name=name,
            client=seen,
            records=said,
            failed=max(client.failed, records.failed) + unknown,
            mismatches=client.mismatches + records.mismatches,
            ttft_difference_ms=seen["ttft_p50_ms"] - said["ttft_p50_ms"],
            tpot_difference_share=seen["tpot_mean_ms"] / said["tpot_mean_ms"] - 1,
        )

    @property
    def holds(self) -> bool:
        """Whether the two agree."""
        return (
            not self.failed
            and not self.mismatches
            and abs(self.ttft_difference_ms) <= TTFT_MS
            and abs(self.tpot_difference_share) <= TPOT_SHARE
        )

    def rows(self) -> Iterator[str]:
        """Its lines of the table."""
        for name, figures in ((self.name, self.client), ("its records", self.records)):
            yield (
                f"{name:16} {figures['requests']:8.0f} {figures['ttft_p50_ms']:12.2f} "
                f"{figures['ttft_max_ms']:12.2f} {figures['tpot_mean_ms']:12.3f}"
            )
        yield (
            f"{'agree' if self.holds else 'DO NOT AGREE':16} TTFT {self.ttft_difference_ms:+.2f} ms, "
            f"TPOT {self.tpot_difference_share:+.2%}, {self.failed} failed, {self.mismatches} with other tokens"
        )


# --- the clients ----------------------------------------------------------------------------------------------------


def by_bench(url: str, out: Path, requests: int, streams: int, *, tokens: int, secret: str = "") -> Measured:
    """`pdemu bench`; what it says of itself."""
    options = {
        "--url": url,
        "--num-prompts": requests,
        "--max-concurrency": streams,
        "--input-len": PROMPT_TOKENS,
        "--output-len": tokens,
        "--out": out,
    }
    words = [str(word) for option in options.items() for word in option]
    command = [*PDEMU, "bench", "--json", *words]
    environment = {**os.environ, "PDEMU_SECRET": secret}
    told = msgspec.json.decode(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)
    found = Measured.of(read_records((out / "records.jsonl").read_bytes()), tokens)
    counted = told["tokens"]
    found.mismatches += sum(counted[f"{what}_mismatches"] for what in ("input", "output", "usage_chunk"))
    found.failed = max(found.failed, told["requests"] - told["completed"])
    return found


def by_openai(port: int, requests: int, streams: int) -> Measured:
    """OpenAI's client in as many threads as streams, each timing its own chunks.

    Its TTFT, too, counts from the send: before it, the library prepares a request for some milliseconds.
    """
    found, sent = Measured(), threading.local()

    def sending(_: object) -> None:
        sent.at_s = time.monotonic()

    timed = DefaultHttpxClient(event_hooks={"request": [sending]})
    url = f"http://127.0.0.1:{port}/v1"
    with (
        OpenAI(base_url=url, api_key="none", max_retries=0, http_client=timed) as client,
        ThreadPoolExecutor(streams) as threads,
    ):
        list(threads.map(lambda _: _by_openai(client, sent, found), range(requests)))
    return found


def _by_openai(client: OpenAI, sent: threading.local, found: Measured) -> None:
    times_s: list[float] = []
    usage = (0, 0)
    try:
        for chunk in client.completions.create(
            model="tiny",
            prompt=[5] * PROMPT_TOKENS,
            max_tokens=OPENAI_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices:
                times_s.append(time.monotonic())
            elif chunk.usage is not None:
                usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
    except APIError:
        found.failed += 1
        return
    found.mismatches += (*usage, len(times_s)) != (PROMPT_TOKENS, OPENAI_TOKENS, OPENAI_TOKENS)
    found.add(sent.at_s, times_s)


def _measured(served: Served, folder: Path, requests: int, streams: int) -> dict[str, tuple[int, Measured]]:
    """What each client measures, one after the other, with the output tokens by which its records are told apart."""
    http = by_bench(f"http://127.0.0.1:{served.port}", folder / "http", requests, streams, tokens=BENCH_TOKENS)
    native = by_bench(served.router, folder / "native", requests, streams, tokens=NATIVE_TOKENS, secret=served.secret)
    return {
        "pdemu bench": (BENCH_TOKENS, http),
        "… tcp://": (NATIVE_TOKENS, native),
        "OpenAI's client": (OPENAI_TOKENS, by_openai(served.port, requests, streams)),
    }


def compare(requests: int, streams: int, step_ms: float) -> list[Agreement]:
    """Serve, let both clients measure in turn, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        topology, results = Path(folder) / "topology.toml", Path(folder) / "served"
        topology.write_text(topology_text(streams, step_ms, 1.0))
        with serving(topology, results) as served:
            clients = _measured(served, Path(folder), requests, streams)
        records = records_of(results)
    return [
        Agreement.between(name, seen, Measured.of([r for r in records if r.max_tokens == tokens], tokens))
        for name, (tokens, seen) in clients.items()
    ]


def main() -> int:
    """Compare, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--requests", type=int, default=40, help="of each client")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = compare(given.requests, given.streams, given.step_ms)
    if given.json:
        document: list[dict[str, Any]] = [asdict(agreement) | {"holds": agreement.holds} for agreement in found]
        print(msgspec.json.encode(document).decode())
    else:
        print(f"{'':16} {'requests':>8} {'TTFT p50':>12} {'TTFT max':>12} {'TPOT mean':>12}   milliseconds")
        print("\n".join(row for agreement in found for row in agreement.rows()))
    return 0 if all(agreement.holds for agreement in found) else 1


if __name__ == "__main__":
    sys.exit(main())
