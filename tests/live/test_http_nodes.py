"""A served cluster whose nodes die, fill up, or serve for longer than anybody wants to have recorded."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import msgspec
import psutil
import pytest

from emulator.core.bench.arrivals import Pace
from emulator.core.bench.plan import lengths_plan
from emulator.core.bench.target import RouterTarget
from emulator.core.records import read_records, read_steps
from emulator.live.bench import LoadTest
from emulator.live.router_client import RouterClient
from tests.http_client import Answer, ask, connected
from tests.live.endpoint import Up, check_refusal, completion_body, up
from tests.live.lab import PDEMU, SMALL, children_of, eventually
from tests.live.test_http_leaving import idle, metrics
from tests.sse import events_of, read_stream

pytestmark = pytest.mark.live

ONE_DECODE = '{ role = "decode" }'


def variant(folder: Path, decode_pool: str) -> Path:
    """The small lab with another decode pool."""
    file = folder / "variant.toml"
    text = SMALL.read_text()
    assert ONE_DECODE in text
    file.write_text(text.replace(ONE_DECODE, decode_pool))
    return file


def node_process(it: Up, n: int) -> psutil.Process:
    """The process of the n-th node, in the order of the deployment: they are started one by one after the router."""
    return sorted(children_of(it.process.pid), key=lambda child: child.create_time())[1 + n]


async def complete(it: Up, **more: object) -> Answer:
    return await ask(it.port, "POST", "/v1/completions", completion_body(**more))


async def health(it: Up) -> tuple[int, dict[str, object]]:
    answer = await ask(it.port, "GET", "/health")
    return answer.status, answer.json()


# --- nodes that die -------------------------------------------------------------------------------------------------


async def test_a_node_that_dies_is_told_and_the_others_serve_on(tmp_path: Path) -> None:
    file = variant(tmp_path, '{ role = "decode", nodes = 2 }')
    with up(tmp_path, "--force", topology=file) as it:
        assert await health(it) == (200, {"status": "ok", "lost_nodes": []})
        async with connected(it.port) as first, connected(it.port) as second:
            ended = []
            for client in (first, second):  # one on each decode node
                client.send("POST", "/v1/completions", completion_body(max_tokens=300, stream=True))
                await client.head()
                ended.append(await client.piece())
            node_process(it, 1).kill()
            for n, client in enumerate((first, second)):
                while piece := await client.piece():
                    ended[n] += piece
        cut, whole = sorted(ended, key=len)
        error = events_of(cut)[-1]["error"]
        assert error["type"] == "service_unavailable_error"
        assert "node decode-0 was lost after" in error["message"]
        assert read_stream(whole, chat=False).chunks == 300
        assert await health(it) == (200, {"status": "degraded", "lost_nodes": ["decode-0"]})
        for _ in range(4):
            assert (await complete(it)).status == 200
        found = await metrics(it.port)
        assert found['pdemu_node_up{engine="decode-0",model_name="tiny",role="decode"}'] == 0
        assert found['pdemu_node_up{engine="decode-1",model_name="tiny",role="decode"}'] == 1
        assert await asyncio.to_thread(it.stop) == 0
        (told,) = [line for line in it.log.read_text().splitlines() if "decode-0" in line]
        assert "process decode-0 ended unexpectedly (signal 9)" in told
        assert told.endswith("; prefill-0, decode-1 serve on")
        records = read_records((it.run_folder / "records.jsonl").read_bytes())
        assert [record.outcome for record in records].count("completed") == 5
        assert {record.decode_node for record in records[2:]} == {"decode-1"}
        summary = msgspec.json.decode((it.out / "summary.json").read_bytes())
    (run,) = summary["runs"]
    assert not run["fidelity"]["ok"]
    assert any("the router lost decode-0" in reason for reason in run["fidelity"]["reasons"])
    assert not [reason for reason in run["fidelity"]["reasons"] if "physics" in reason]


async def test_a_node_that_hangs_is_lost_as_well_and_the_end_comes_without_it(tmp_path: Path) -> None:
    with up(tmp_path, deployment="colocated") as it:
        node = node_process(it, 0)
        node.send_signal(signal.SIGSTOP)

        def degraded() -> bool:
            with urllib.request.urlopen(f"http://127.0.0.1:{it.port}/health", timeout=10) as answer:
                return b"colocated-0" in answer.read()

        assert await asyncio.to_thread(eventually, degraded)
        assert await asyncio.to_thread(eventually, lambda: "colocated-0 is silent, so" in it.log.read_text())
        for _ in range(3):
            assert (await complete(it)).status == 200
        assert await asyncio.to_thread(it.stop) == 0
        assert len(read_records((it.run_folder / "records.jsonl").read_bytes())) == 3
        assert "no report from" not in (it.run_folder / "logs" / "router.log").read_text(), "it was not waited for"


async def test_a_node_that_hung_and_goes_on_serves_again_without_what_it_had(tmp_path: Path) -> None:
    with up(tmp_path, "--force") as it:
        node = node_process(it, 0)
        node.send_signal(signal.SIGSTOP)
        assert (await complete(it)).status == 503, "no other node prefills"
        assert await health(it) == (503, {"status": "down", "lost_nodes": ["prefill-0"]})
        node.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(eventually, lambda: "prefill-0 is back" in it.log.read_text())
        assert await health(it) == (200, {"status": "ok", "lost_nodes": []})
        assert (await complete(it)).status == 200
        assert (await metrics(it.port))['pdemu_node_up{engine="prefill-0",model_name="tiny",role="prefill"}'] == 1
        for _ in range(100):
            if await idle(it.port):
                break
            await asyncio.sleep(0.1)
        assert await idle(it.port), "it holds nothing of the request that failed"
        assert await asyncio.to_thread(it.stop) == 0
        assert [line for line in it.log.read_text().splitlines() if line.startswith("prefill-0")] == [
            "prefill-0 is silent, so the router lost it; is its process stopped?",
            "prefill-0 is back, and serves again",
        ]
        (run,) = msgspec.json.decode((it.out / "summary.json").read_bytes())["runs"]
    assert any("the router lost prefill-0" in reason for reason in run["fidelity"]["reasons"])


async def test_without_a_node_for_a_phase_everything_ends_and_what_was_served_is_kept(tmp_path: Path) -> None:
    with up(tmp_path, "--force") as it:
        assert (await complete(it)).status == 200
        async with connected(it.port) as waiting:
            waiting.send("POST", "/v1/completions", completion_body(max_tokens=900))
            await waiting.writer.drain()
            node_process(it, 0).kill()
            check_refusal(await waiting.answer(), 503)
        assert await asyncio.to_thread(it.process.wait, 30) == 1
        last = it.log.read_text().strip().splitlines()[-1]
        first, *_ = read_records((it.run_folder / "records.jsonl").read_bytes())
        (run,) = msgspec.json.decode((it.out / "summary.json").read_bytes())["runs"]
    assert last.startswith("pdemu: process prefill-0 ended unexpectedly (signal 9)")
    assert first.outcome == "completed"
    assert any("the router lost prefill-0" in reason for reason in run["fidelity"]["reasons"])


# --- what cannot be served ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_what_fits_no_nodes_memory_is_a_bad_request_before_anything_is_sent(tmp_path: Path, stream: bool) -> None:
    file = variant(tmp_path, '{ role = "decode", gpu_memory_utilization = 0.00052 }')
    with up(tmp_path, "--force", topology=file) as it:
        answer = await complete(it, prompt=[5] * 300, max_tokens=200, stream=stream)
        check_refusal(answer, 400)
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
        assert "need KV for 500 tokens, decode-0 has room for" in error["message"]
        assert (await complete(it, prompt=[5] * 200, max_tokens=20)).status == 200
        assert it.stop() == 0
        assert len(read_records((it.run_folder / "records.jsonl").read_bytes())) == 1


# --- metrics of each process ----------------------------------------------------------------------------------------


async def test_router_and_nodes_serve_metrics_of_their_own(tmp_path: Path) -> None:
    targets = tmp_path / "targets.json"
    with up(tmp_path, "--force", "--metrics", "127.0.0.1:0", "--metrics-targets", str(targets)) as it:
        found = {
            target["labels"]["process"]: int(target["targets"][0].rpartition(":")[2])
            for target in msgspec.json.decode(targets.read_bytes())
        }
        assert list(found) == ["router", "prefill-0", "decode-0"]
        for _ in range(3):
            await complete(it)
        router, prefill, decode = [await metrics(port) for port in found.values()]
        told = it.log.read_text()
        for name, port in found.items():
            assert f"metrics of {name}: http://127.0.0.1:{port}/metrics" in told
        whole = {name.partition("{")[0] for name in router}
        assert whole == {name.partition("{")[0] for name in await metrics(it.port)}, "what the endpoint shows"
        cluster = '{engine="0",model_name="tiny"}'
        for name in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"):
            assert router[f"{name}_count{cluster}"] == 3
        assert router[f"vllm:inter_token_latency_seconds_count{cluster}"] == 33
        queue = 'vllm:request_queue_time_seconds_count{engine="%s",model_name="tiny"}'
        assert (prefill[queue % "prefill-0"], decode[queue % "decode-0"]) == (3, 0)
        kv_bytes = 'pdemu_kv_transfer_bytes_total{engine="decode-0",model_name="tiny"}'
        assert decode[kv_bytes] == router[f"pdemu_kv_transfer_bytes_total{cluster}"] > 0
        sent = 'pdemu_kv_transfer_sent_bytes_total{engine="prefill-0",model_name="tiny"}'
        assert prefill[sent] == decode[kv_bytes], "probes are no transfers"
        assert decode['pdemu_kv_transfer_seconds_count{engine="decode-0",model_name="tiny"}'] == 3
        waited = 'pdemu_kv_transfer_queue_seconds_count{engine="%s",model_name="tiny"}'
        assert (prefill[waited % "prefill-0"], decode[waited % "decode-0"]) == (3, 0), "probes did not wait"
        assert router[waited % "0"] == 3
        for name, of in (("prefill", prefill), ("decode", decode)):
            assert of[f'pdemu_node_up{{engine="{name}-0",model_name="tiny",role="{name}"}}'] == 1
        assert await asyncio.to_thread(it.stop) == 0
    for port in found.values():
        with pytest.raises(ConnectionError):
            await metrics(port)


def test_a_metrics_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        out = tmp_path / "out"
        command = [*PDEMU, "up", str(SMALL), "--http", "127.0.0.1:0", "--metrics", address, "--out", str(out)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines() == [
        f"pdemu: --metrics {address}: cannot listen there (Address already in use); give a free port, or 0 for any"
    ]


# --- how much is recorded -------------------------------------------------------------------------------------------


async def test_so_many_requests_are_recorded_and_the_rest_served_all_the_same(tmp_path: Path) -> None:
    with up(tmp_path, "--force", "--records", "3") as it:
        for _ in range(3):
            assert (await complete(it)).status == 200
        assert "the record ends" not in it.log.read_text(), "there is nothing beyond it"
        for _ in range(5):
            assert (await complete(it)).status == 200
        assert eventually(lambda: "the record ends with 3 requests" in it.log.read_text())
        found = await metrics(it.port)
        ended = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'
        assert found[ended] == 8, "metrics go on"
        assert await asyncio.to_thread(it.stop) == 0
        records = read_records((it.run_folder / "records.jsonl").read_bytes())
        steps = read_steps((it.run_folder / "steps.jsonl").read_bytes())
        transfers = (it.run_folder / "transfers.jsonl").read_bytes().splitlines()
        summary = msgspec.json.decode((it.out / "summary.json").read_bytes())
    assert [record.outcome for record in records] == ["completed"] * 3
    prompts = sum(record.prompt_tokens for record in records)
    assert sum(step.prefill_tokens for step in steps) == prompts
    assert len(transfers) == 3
    (run,) = summary["runs"]
    assert (run["ended_by"], run["saturated"]) == ("limit", False)
    assert not [reason for reason in run["fidelity"]["reasons"] if "physics" in reason]


async def test_requests_that_came_to_the_router_count_and_none_is_recorded_after_the_end(tmp_path: Path) -> None:
    with up(tmp_path, "--force", "--records", "4", "--secret", "open sesame") as it:
        native = next(word for word in it.log.read_text().split() if word.startswith("tcp://"))
        assert (await complete(it)).status == 200
        for prefix in ("a-", "b-"):
            target = RouterTarget(endpoint=native, secret="open sesame", request_id_prefix=prefix, ready_s=20.0)
            async with RouterClient(target) as guest:
                await guest.prepare(None)
                observed = await LoadTest(lengths_plan(50, 3, 5, Pace(50.0), 0), guest).run(lambda _: None)
            assert [exchange.outcome for exchange in observed.exchanges] == ["completed"] * 5
        assert (await complete(it)).status == 200
        assert await asyncio.to_thread(it.stop) == 0
        assert "the record ends with 4 requests" in it.log.read_text()
        records = read_records((it.run_folder / "records.jsonl").read_bytes())
        (run,) = msgspec.json.decode((it.out / "summary.json").read_bytes())["runs"]
    assert sorted(record.request_id for record in records) == ["a-0", "a-1", "a-2", "http-0"]
    assert not [reason for reason in run["fidelity"]["reasons"] if "physics" in reason]
    assert all(record.scheduled_s < run["duration_s"] for record in records)


async def test_every_completed_request_of_one_token_has_all_its_times(tmp_path: Path) -> None:
    with up(tmp_path, "--force") as it:
        answers = await asyncio.gather(*(complete(it, max_tokens=1) for _ in range(100)))
        assert {answer.status for answer in answers} == {200}
        cluster = '_count{engine="0",model_name="tiny"}'
        found = await metrics(it.port)
        names = [
            f"vllm:{name}_seconds" for name in ("request_queue_time", "request_prefill_time", "e2e_request_latency")
        ]
        names += ["pdemu_kv_transfer_seconds", "pdemu_kv_transfer_queue_seconds"]
        ended = found['vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}']
        assert {name: found[name + cluster] for name in names} == dict.fromkeys(names, ended)
        assert it.stop() == 0
        records = read_records((it.run_folder / "records.jsonl").read_bytes())
    assert [record.outcome for record in records] == ["completed"] * 100
    for record in records:
        times = (record.queued_s, record.prefill_start_s, record.prefill_end_s, record.kv_ready_s, record.kv_start_s)
        assert None not in times, record
