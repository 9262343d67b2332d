"""What is left of clients that leave, and of an endpoint that ends: nothing but its records."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from emulator.core.records import read_records
from emulator.lab import unprivileged
from tests.http_client import ask, connected
from tests.live.endpoint import Up, check_refusal, completion_body, up
from tests.live.lab import PDEMU, SMALL, all_gone, children_of
from tests.sse import events_of, read_stream

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("up")) as it:
        yield it


# --- who leaves, and what is left -----------------------------------------------------------------------------------


async def metrics(port: int) -> dict[str, float]:
    """Every sample of a scrape."""
    answer = await ask(port, "GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in answer.body.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def idle(port: int) -> bool:
    """Whether every node has said that all its KV blocks are free, and that nobody runs or waits there."""
    gauges = ("vllm:kv_cache_usage_perc{", "vllm:num_requests_running{", "vllm:num_requests_waiting{")
    values = [value for name, value in (await metrics(port)).items() if name.startswith(gauges)]
    return len(values) == 2 * len(gauges) and not any(values)


async def becomes_idle(port: int) -> None:
    """Wait until all is free; what a node says of itself may be a second old, so it has to say so twice."""
    in_turn = 0
    for _ in range(20):
        in_turn = in_turn + 1 if await idle(port) else 0
        if in_turn == 2:
            return
        await asyncio.sleep(1.1)
    pytest.fail("something is still held")


@pytest.mark.parametrize("leaving", [200, pytest.param(1_000, marks=pytest.mark.slow)])
async def test_clients_that_leave_at_any_moment_leave_nothing(tmp_path: Path, leaving: int) -> None:
    """A hundred a second of them, while others read to the end; what became of each is in the records."""
    draw = random.Random(5)

    async def leave(port: int, n: int) -> None:
        await asyncio.sleep(draw.uniform(0, leaving / 100))
        async with connected(port) as client:
            body = completion_body(prompt=[5] * draw.randint(1, 600), max_tokens=100, stream=n % 2 == 0)
            client.send("POST", "/v1/completions", body)
            await client.writer.drain()
            await asyncio.sleep(draw.choice([0.0, draw.uniform(0, 0.05), draw.uniform(0, 0.5)]))
            if n % 3 == 0:
                client.writer.transport.abort()

    async def stay(port: int) -> int:
        answer = await ask(port, "POST", "/v1/completions", completion_body(max_tokens=60, stream=True))
        return read_stream(answer.body, chat=False).chunks

    with up(tmp_path) as it:
        before = psutil.Process(it.process.pid).children(recursive=True)
        chunks = await asyncio.gather(*(stay(it.port) for _ in range(4)), *(leave(it.port, n) for n in range(leaving)))
        assert chunks[:4] == [60] * 4
        await becomes_idle(it.port)
        sockets = sum(len(child.net_connections("tcp")) for child in before)
        assert sockets < 100, "the connections of those who left are closed"
        found = await metrics(it.port)
        assert it.stop() == 0
        records = read_records((it.run_folder / "records.jsonl").read_bytes())
    aborted = [record for record in records if record.outcome == "failed"]
    assert leaving // 2 < len(records) <= leaving + 4, "a request may be lost with the connection that it came by"
    assert all(record.reason == "aborted" for record in aborted)
    assert len(aborted) > leaving // 2
    assert found['vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'] == len(aborted)


@contextmanager
def load_generator(url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Far more requests than anybody waits for; killed in the end."""
    load = ["--num-prompts", "1000", "--request-rate", "20", "--input-len", "50", "--output-len", "200"]
    command = [*PDEMU, "bench", "--url", url, *load, "--ready-check-timeout-sec", "60"]
    env = {**os.environ, "PDEMU_SECRET": "of the test"}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        try:
            yield bench
        finally:
            bench.kill()


@pytest.mark.parametrize("scheme", ["http", "tcp"])
async def test_a_load_generator_that_is_killed_leaves_aborted_requests_and_nothing_else(
    tmp_path: Path, scheme: str
) -> None:
    with up(tmp_path, "--force", "--secret", "of the test") as it:
        found = re.search(rf"{scheme}://127\.0\.0\.1:\d+", it.log.read_text())
        assert found is not None
        with load_generator(found[0]) as bench:
            while not any(n for name, n in (await metrics(it.port)).items() if "running{" in name and "decode" in name):
                assert bench.poll() is None
                await asyncio.sleep(0.1)
        await becomes_idle(it.port)
        assert await asyncio.to_thread(it.stop) == 0
        records = read_records((it.run_folder / "records.jsonl").read_bytes())
        (run,) = msgspec.json.decode((it.out / "summary.json").read_bytes())["runs"]
    aborted = [record for record in records if record.outcome == "failed"]
    assert aborted
    assert {record.reason for record in aborted} == {"aborted"}
    assert {record.outcome for record in records} <= {"completed", "failed"}
    assert run["requests"] == len(records)
    assert not [why for why in run["fidelity"]["reasons"] if "physics" in why or "dropped" in why]


async def test_leaving_after_the_end_is_no_abort(served: Up) -> None:
    before = await metrics(served.port)
    for _ in range(5):
        async with connected(served.port) as client:
            client.send("POST", "/v1/completions", completion_body(stream=True, max_tokens=3))
            data = b""
            while b"[DONE]" not in data:
                data += await client.reader.read(1 << 16)
            client.writer.transport.abort()
    after = await metrics(served.port)
    ended = {name: after[name] - before[name] for name in after if name.startswith("vllm:request_success_total")}
    by_reason = {re.findall(r'finished_reason="(\w+)"', name)[0]: n for name, n in ended.items()}
    assert by_reason == {"length": 5, "stop": 0, "abort": 0, "error": 0}


async def test_a_client_that_does_not_read_keeps_no_other_one_waiting(served: Up) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = b'{"prompt": "ba", "max_tokens": 500, "stream": true}'
        unread.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        answer = await ask(served.port, "POST", "/v1/completions", completion_body(stream=True))
        assert read_stream(answer.body, chat=False).chunks == 12
        assert unread.recv(15) == b"HTTP/1.1 200 OK"


# --- how it ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
async def test_it_ends_with_a_signal_tells_its_streams_and_leaves_records(tmp_path: Path, signal_number: int) -> None:
    with up(tmp_path) as it:
        children = children_of(it.process.pid)
        assert len(children) == 4
        await ask(it.port, "POST", "/v1/completions", completion_body())
        async with connected(it.port) as client, connected(it.port) as waiting:
            client.send("POST", "/v1/completions", completion_body(max_tokens=900, stream=True))
            waiting.send("POST", "/v1/completions", completion_body(max_tokens=900))
            await client.head()
            data = await client.piece()
            it.process.send_signal(signal_number)
            while piece := await client.piece():
                data += piece
            check_refusal(await waiting.answer(), 503)
        assert events_of(data)[-1]["error"]["message"] == "the endpoint is shutting down"
        assert await asyncio.to_thread(it.process.wait, 30) == 0
        assert all_gone(children, within_s=5.0)
        records = read_records((it.run_folder / "records.jsonl").read_bytes())
    assert [record.outcome for record in records] == ["completed", "unfinished", "unfinished"]
    assert records[0].output_tokens == records[0].max_tokens == 12
    assert records[0].kv_bytes == 4096 * records[0].prompt_tokens
    assert (it.out / "report.html").exists()
    summary = msgspec.json.decode((it.out / "summary.json").read_bytes())
    (run,) = summary["runs"]
    assert (run["requests"], run["completed"], run["unfinished"]) == (3, 1, 2)
    assert not [reason for reason in run["fidelity"]["reasons"] if "physics" in reason]


def test_one_that_served_nobody_ends_as_well(tmp_path: Path) -> None:
    with up(tmp_path, deployment="colocated") as it:
        assert it.stop() == 0
        assert (it.run_folder / "records.jsonl").read_bytes() == b""


@pytest.mark.netns
async def test_it_is_reached_from_outside_the_namespaces_of_its_processes(tmp_path: Path) -> None:
    if unprivileged.missing_capabilities():
        pytest.skip("needs root: a user's own namespaces are cut off from this machine's network")
    with up(tmp_path, "--launcher", "netns") as it:
        answer = await ask(it.port, "POST", "/v1/completions", completion_body(stream=True))
        assert read_stream(answer.body, chat=False).chunks == 12
        assert await asyncio.to_thread(it.stop) == 0
        (record,) = read_records((it.run_folder / "records.jsonl").read_bytes())
        assert record.kv_bytes == 4096 * record.prompt_tokens


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [*PDEMU, "up", str(SMALL), "--http", address, "--out", str(tmp_path / "out")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines() == [
        f"pdemu: --http {address}: cannot listen there (Address already in use); give a free port, or 0 for any"
    ]
