"""`pdemu bench`: options, what is printed and written, and refusals."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from emulator.core.records import read_records
from tests.in_process import Pdemu
from tests.live.lab import SMALL
from tests.live.scripted_server import Request, ScriptedServer, event, text_chunk, well_behaved

URL = ("--url", "http://127.0.0.1:9")
RAMP = (*URL, "--ramp-up-strategy", "linear")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer().in_thread() as running:
        yield running


def _bench(pdemu: Pdemu, server: ScriptedServer, *args: str | Path) -> dict[str, object]:
    ended = pdemu("bench", "--url", server.url, "--json", *args)
    assert ended.code == 0, ended.err
    found: dict[str, object] = msgspec.json.decode(ended.out)
    return found


@pytest.mark.live
def test_a_bench_prints_a_table(server: ScriptedServer, pdemu: Pdemu) -> None:
    ended = pdemu(
        "bench", "--url", server.url, "--num-prompts", "12", "--input-len", "50", "--output-len", "3",
        "--request-rate", "100", "--goodput", "ttft:5000", "tpot:5000",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "12 of 12 requests completed" in ended.out
    assert "from" in ended.out
    assert "goodput, requests/s (ttft 5000 ms, tpot 5000 ms)" in ended.out
    assert "fidelity" in ended.out
    assert len(server.requests) == 2 + 12


@pytest.mark.live
def test_a_bench_prints_and_writes_what_vllm_does(server: ScriptedServer, pdemu: Pdemu, tmp_path: Path) -> None:
    found = _bench(
        pdemu, server, "--num-prompts", "5", "--input-len", "50", "--output-len", "3", "--num-warmups", "2",
        "--max-concurrency", "2", "--metric-percentiles", "50,99", "--percentile-metrics", "ttft,itl",
        "--save-detailed", "--result-dir", tmp_path / "results", "--out", tmp_path / "run", "--seed", "7",
    )  # fmt: skip
    assert (found["completed"], found["num_prompts"], found["max_concurrency"]) == (5, 5, 2)
    assert (found["model_id"], found["backend"], found["request_rate"]) == ("scripted", "openai", "inf")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (250, 15)
    assert {"p50_ttft_ms", "p99_itl_ms", "mean_ttft_ms_from_schedule"} <= found.keys()
    assert not {"p99_tpot_ms", "ttfts"} & found.keys()
    beginnings = {" ".join(request.body["prompt"].split()[:16]) for request in server.requests}
    assert len(server.requests) == len(beginnings) == 2 + 2 + 5
    (saved,) = (tmp_path / "results").iterdir()
    assert saved.name.startswith("openai-infqps-concurrency2-scripted-")
    detailed = msgspec.json.decode(saved.read_bytes())
    assert len(detailed["ttfts"]) == len(detailed["itls"]) == 5
    assert detailed["generated_texts"] == [" a a a"] * 5
    assert len(read_records((tmp_path / "run" / "records.jsonl").read_bytes())) == 5
    assert msgspec.json.decode((tmp_path / "run" / "bench.json").read_bytes())["completed"] == 5


@pytest.mark.live
def test_a_trace_is_replayed(server: ScriptedServer, pdemu: Pdemu, tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *(f"{n + 50},{n + 1}" for n in range(8))]))
    found = _bench(pdemu, server, "--trace", trace, "--limit", "4", "--endpoint", "/v1/chat/completions")
    assert (found["completed"], found["num_prompts"], found["backend"]) == (4, 4, "openai-chat")
    assert found["total_output_tokens"] == 1 + 2 + 3 + 4
    assert found["total_input_tokens"] == sum(range(50, 54))
    assert found["traces"]["trace"]["rows_read"] == 8  # type: ignore[index]


@pytest.mark.live
def test_a_topologys_traffic_is_sent(server: ScriptedServer, pdemu: Pdemu) -> None:
    found = _bench(pdemu, server, "--topology", SMALL, "--num-prompts", "6", "--request-rate", "50")
    assert (found["completed"], found["num_prompts"]) == (6, 6)


@pytest.mark.live
def test_failures_are_counted_and_no_failure_of_the_command(pdemu: Pdemu) -> None:
    async def breaks(request: Request) -> AsyncIterator[bytes]:
        if request.max_tokens == 3 and len(request.body["prompt"].split()) == 50:
            yield event(text_chunk(" a")) + event({"error": {"message": "boom"}})
            return
        async for piece in well_behaved(request):
            yield piece

    with ScriptedServer(breaks).in_thread() as server:
        found = _bench(pdemu, server, "--num-prompts", "3", "--input-len", "50", "--output-len", "3")
    assert (found["completed"], found["failed"]) == (0, 3)
    assert found["failed_by_reason"] == {"error in the stream": 3}
    assert found["mean_ttft_ms"] is None


@pytest.mark.live
def test_an_interrupted_bench_prints_what_there_is(pdemu: Pdemu) -> None:
    async def interrupts(request: Request) -> AsyncIterator[bytes]:
        if len(scripted.requests) == 2 + 4:
            os.kill(os.getpid(), signal.SIGINT)
        async for piece in well_behaved(request, token_s=0.02):
            yield piece

    scripted = ScriptedServer(interrupts)
    with scripted.in_thread():
        ended = pdemu(
            "bench", "--url", scripted.url, "--num-prompts", "500", "--output-len", "5", "--max-concurrency", "2"
        )
    assert ended.code == 130
    assert "of 500 requests completed" in ended.out
    assert "unfinished" in ended.out
    assert "interrupted: this is what there was until then" in ended.out
    assert ended.err.strip().endswith("pdemu: interrupted")


@pytest.mark.live
def test_a_server_that_is_not_there_is_one_line(pdemu: Pdemu) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    pdemu("bench", "--url", f"http://127.0.0.1:{port}").check_refusal(
        [f"--url http://127.0.0.1:{port}", "cannot be reached"]
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], ["--url"]),
        (["--url", "127.0.0.1:8000"], ["--url 127.0.0.1:8000", "http://127.0.0.1:8000"]),
        (["--url", "http://127.0.0.1:99999"], ["--url http://127.0.0.1:99999", "such as"]),
        ([*URL, "--endpoint", "/v1/embeddings"], ["--endpoint /v1/embeddings", "/v1/chat/completions"]),
        ([*URL, "--request-rate", "0"], ["--request-rate 0", "above 0"]),
        ([*URL, "--request-rate", "nan"], ["--request-rate nan", "above 0"]),
        ([*URL, "--burstiness", "0"], ["--burstiness 0", "above 0"]),
        ([*URL, "--num-prompts", "0"], ["--num-prompts 0", "at least 1"]),
        ([*URL, "--num-warmups", "-1"], ["--num-warmups -1", "at least 0"]),
        ([*URL, "--max-concurrency", "0"], ["--max-concurrency 0", "at least 1"]),
        ([*URL, "--timeout", "0"], ["--timeout 0", "above 0"]),
        ([*URL, "--goodput", "ttft"], ["--goodput ttft", "NAME:MILLISECONDS"]),
        ([*URL, "tpot:50"], ["tpot:50", "no option"]),
        ([*URL, "--percentile-metrics", "x"], ["--percentile-metrics", "'x'"]),
        ([*URL, "--metric-percentiles", "x"], ["--metric-percentiles", "'x'"]),
        (RAMP, ["--ramp-up-start-rps"]),
        ([*URL, "--ramp-up-start-rps", "3"], ["--ramp-up-strategy"]),
        (
            [*RAMP, "--ramp-up-start-rps", "3", "--ramp-up-end-rps", "2"],
            ["0 < start <= end"],
        ),
        (
            [*RAMP, "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2", "--request-rate", "3"],
            ["--request-rate", "leave one of the two out"],
        ),
        ([*URL, "--slice", "1:2"], ["--slice", "--trace FILE"]),
        ([*URL, "--topology", SMALL, "--input-len", "3"], ["--input-len 3", "--topology"]),
        ([*URL, "--topology", SMALL, "--burstiness", "2"], ["--burstiness", "arrivals of their own"]),
        ([*URL, "--prompt-token-ids", "--endpoint", "/v1/chat/completions"], ["--prompt-token-ids", "text"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(args: list[str | Path], expected: list[str], pdemu: Pdemu) -> None:
    pdemu("bench", *args).check_refusal(expected)
