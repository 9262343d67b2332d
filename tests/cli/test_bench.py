"""`pdemu bench`: options, what is printed and written, and refusals."""

from __future__ import annotations

import base64
import itertools
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from emulator.core.records import read_records
from emulator.core.vocabulary import count
from tests.in_process import Pdemu
from tests.live.lab import SMALL
from tests.live.scripted_server import Request, ScriptedServer, event, text_chunk, well_behaved

URL = ("--url", "http://127.0.0.1:9")
ROUTER = ("--url", "tcp://127.0.0.1:9")
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
@pytest.mark.parametrize(
    ("failing", "status", "told"),
    [
        (range(3), 1, "no request completed: 3 of 3 requests failed (3 error in the stream)"),
        (range(1, 3), 0, "2 of 3 requests failed (2 error in the stream)"),
    ],
)
def test_failures_are_counted_and_no_failure_of_the_command_unless_nothing_completed(
    failing: range, status: int, told: str, pdemu: Pdemu
) -> None:
    numbers = itertools.count()

    async def breaks(request: Request) -> AsyncIterator[bytes]:
        if request.max_tokens == 3 and len(request.body["prompt"].split()) == 50 and next(numbers) in failing:
            yield event(text_chunk(" a")) + event({"error": {"message": "boom"}})
            return
        async for piece in well_behaved(request):
            yield piece

    with ScriptedServer(breaks).in_thread() as server:
        args = ("--num-prompts", "3", "--input-len", "50", "--output-len", "3", "--max-concurrency", "1")
        ended = pdemu("bench", "--url", server.url, *args, "--json")
    found = msgspec.json.decode(ended.out)
    assert ended.code == status
    assert told in ended.err.splitlines()
    assert (found["completed"], found["failed"]) == (3 - len(failing), len(failing))
    assert found["failed_by_reason"] == {"error in the stream": len(failing)}
    assert (found["mean_ttft_ms"] is None) == (found["completed"] == 0)


@pytest.mark.live
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_prints_what_there_is(number: signal.Signals, pdemu: Pdemu) -> None:
    async def interrupts(request: Request) -> AsyncIterator[bytes]:
        if len(scripted.requests) == 2 + 4:
            os.kill(os.getpid(), number)
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
def test_prompts_have_their_length_where_the_server_tells_of_its_tokenizer(pdemu: Pdemu) -> None:
    short = ("--num-prompts", "6", "--input-len", "333", "--output-len", "2", "--disable-tqdm")
    with ScriptedServer(counts=count, tokenizes=True).in_thread() as server:
        found = _bench(pdemu, server, *short)
        chat = _bench(pdemu, server, *short, "--endpoint", "/v1/chat/completions")
    for exact in (found, chat):
        assert (exact["prompt_fit"], exact["total_input_tokens"]) == ("exact", 6 * 333)
        assert (exact["tokens"]["input_mismatches"], exact["tokens"]["input_deviation"]) == (0, 0.0)  # type: ignore[index]
    with ScriptedServer(counts=count).in_thread() as server:
        guessed = _bench(pdemu, server, *short)
    assert guessed["prompt_fit"] == "calibrated"
    assert 0 < abs(guessed["tokens"]["input_deviation"]) < 0.05  # type: ignore[index]


@pytest.mark.live
def test_headers_ids_and_further_fields_reach_the_server(server: ScriptedServer, pdemu: Pdemu) -> None:
    found = _bench(
        pdemu, server, "--num-prompts", "3", "--input-len", "9", "--output-len", "2", "--request-id-prefix", "run-",
        "--header", "X-Tenant=blue", "--header", "accept-encoding = gzip",
        "--extra-body", '{"top_k": 3, "temperature": 1}', "--label", "nightly",
        "--metadata", "tp=2", "--metadata", "note=a=b",
    )  # fmt: skip
    assert {headers["x-tenant"] for headers in server.heard} == {"blue"}
    assert {headers["accept-encoding"] for headers in server.heard} == {"gzip"}
    ids = [request.headers.get("x-request-id") for request in server.requests]
    assert sorted(found_id for found_id in ids if found_id) == ["run-0", "run-1", "run-2"]
    assert {(request.body["top_k"], request.body["temperature"]) for request in server.requests} == {(3, 1)}
    assert (found["label"], found["tp"], found["note"], found["request_id_prefix"]) == ("nightly", "2", "a=b", "run-")


@pytest.mark.live
def test_results_are_appended_as_lines(server: ScriptedServer, pdemu: Pdemu, tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text('{"completed": 0}')
    for n in (1, 2):
        _bench(
            pdemu, server, "--num-prompts", str(n), "--input-len", "9", "--output-len", "2", "--append-result",
            "--result-dir", tmp_path, "--result-filename", "all.jsonl",
        )  # fmt: skip
    assert [msgspec.json.decode(line)["completed"] for line in path.read_bytes().splitlines()] == [0, 1, 2]


@pytest.mark.live
def test_neither_keys_nor_passwords_are_told(pdemu: Pdemu, tmp_path: Path) -> None:
    """By a server that repeats them in its errors, the first of which comes after the calibrating requests."""
    key, password, header = "sk-0123456789", "open%20sesame", "header-secret"

    async def repeats(request: Request) -> AsyncIterator[bytes]:
        if request.max_tokens == 1:
            async for piece in well_behaved(request):
                yield piece
            return
        said = f"{request.headers['authorization']} {key} open sesame {header}"
        yield event(text_chunk(" a")) + event({"error": {"message": f"no: {said}"}})

    with ScriptedServer(repeats).in_thread() as server:
        ended = pdemu(
            "bench", "--url", server.url.replace("//", f"//me:{password}@"), "--api-key", key,
            "--json", "--out", tmp_path, "--header", f"X-Api-Key={header}", "--num-prompts", "2",
            "--save-detailed", "--result-dir", tmp_path,
        )  # fmt: skip
        given = {headers["authorization"] for headers in server.heard}
    assert ended.code == 1, "nothing completed"
    (basic,) = given
    assert basic == "Basic " + base64.b64encode(b"me:open sesame").decode()
    found = msgspec.json.decode(ended.out)
    assert (found["base_url"], found["failed"]) == (server.url, 2)
    told = ended.out + ended.err + "".join(path.read_text() for path in tmp_path.iterdir())
    assert "no: Basic *** *** *** ***" in told
    for secret in (key, password, "open sesame", header, basic.removeprefix("Basic ")):
        assert secret not in told


@pytest.mark.live
def test_a_server_that_refuses_a_key_is_not_quoted_with_it(pdemu: Pdemu) -> None:
    async def refuses(request: Request) -> AsyncIterator[bytes]:
        yield msgspec.json.encode({"error": {"message": f"wrong key: {request.headers['authorization']}"}})

    with ScriptedServer(refuses, status=401, content_type="application/json").in_thread() as server:
        ended = pdemu("bench", "--url", server.url, "--api-key", "sk-0123456789")
    ended.check_refusal(["HTTP 401: wrong key: Bearer ***"])


@pytest.mark.live
def test_a_server_that_is_not_ready_is_waited_for(pdemu: Pdemu) -> None:
    """It names no model at first."""
    server = ScriptedServer(models=())

    def load(*_: object) -> None:
        server.models = ("scripted",)

    with server.in_thread():
        pdemu("bench", "--url", server.url).check_refusal(["names no model"])
        loading = threading.Timer(0.5, load)
        loading.start()
        short = ("--num-prompts", "1", "--input-len", "9", "--output-len", "1")
        assert _bench(pdemu, server, *short, "--ready-check-timeout-sec", "60")["completed"] == 1
        loading.join()


@pytest.mark.live
def test_a_server_that_is_not_there_is_one_line(pdemu: Pdemu) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    pdemu("bench", "--url", f"http://127.0.0.1:{port}").check_refusal(
        [f"--url http://127.0.0.1:{port}", "cannot be reached"]
    )


def test_its_help_has_every_option(pdemu: Pdemu) -> None:
    ended = pdemu("bench", "--help")
    assert ended.code == 0
    for option in ("--url", "--extra-body", "--goodput", "--append-result"):
        assert option in ended.out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], ["--url"]),
        (["--url", "127.0.0.1:8000"], ["--url 127.0.0.1:8000", "http://127.0.0.1:8000"]),
        (["--url", "http://127.0.0.1:99999"], ["--url http://127.0.0.1:99999", "such as"]),
        ([*URL, "--endpoint", "/v1/embeddings"], ["--endpoint /v1/embeddings", "/v1/chat/completions"]),
        ([*URL, "--request-rate", "0"], ["--request-rate 0", "from 0.000001 to 1,000,000"]),
        ([*URL, "--request-rate", "nan"], ["--request-rate nan", "from 0.000001"]),
        ([*URL, "--request-rate", "-inf"], ["--request-rate -inf", "from 0.000001"]),
        ([*URL, "--request-rate", "1e300"], ["--request-rate 1e+300", "to 1,000,000"]),
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
        (["--url", "http://me:hidden@host:x"], ["--url http://***@host:x", "such as"]),
        (["--url", "http://host/?key=hidden"], ["--url http://host/", "without ?"]),
        ([*URL, "--header", "X-Key"], ["--header", "KEY=VALUE"]),
        ([*URL, "--header", "X Key=hidden"], ["--header", "KEY=VALUE"]),
        ([*URL, "--header", "X-Key=hid\nden"], ["--header X-Key", "printable"]),
        ([*URL, "--header", "X-Key=a", "--header", "x-key=b"], ["--header x-key", "twice"]),
        ([*URL, "--extra-body", "[1]"], ["--extra-body", "JSON object"]),
        ([*URL, "--extra-body", "{"], ["--extra-body", "JSON object"]),
        ([*URL, "--extra-body", '{"stream": false}'], ["--extra-body", "stream cannot be changed"]),
        ([*URL, "--metadata", "tp"], ["--metadata tp", "KEY=VALUE"]),
        ([*URL, "--metadata", "completed=3"], ["completed is a key that every result has"]),
        ([*URL, "--metadata", "p99_ttft_ms=3"], ["p99_ttft_ms is a key that every result has"]),
        ([*URL, "--metadata", "a=1", "--metadata", "a=2"], ["a is given twice"]),
        ([*URL, "--label", "a/b"], ["--label", "without /"]),
        ([*URL, "--request-id-prefix", "a\n"], ["--request-id-prefix", "printable"]),
        ([*URL, "--ready-check-timeout-sec", "-1"], ["--ready-check-timeout-sec -1", "at least 0"]),
        (["--url", "tcp://127.0.0.1"], ["--url tcp://127.0.0.1", "host:port"]),
        (["--url", "tcp://192.0.2.1:5555"], ["192.0.2.1", "PDEMU_SECRET"]),
        (["--url", "tcp://me:hidden@127.0.0.1:5555"], ["--url tcp://***@127.0.0.1:5555", "PDEMU_SECRET"]),
        ([*ROUTER, "--header", "a=b"], ["--header", "HTTP server"]),
        ([*ROUTER, "--endpoint", "/v1/completions"], ["--endpoint", "HTTP server"]),
        ([*ROUTER, "--no-ignore-eos"], ["--no-ignore-eos", "HTTP server"]),
        ([*ROUTER, "--request-id-prefix", "a~"], ["--request-id-prefix a~", "~"]),
        ([*URL, "--prompt-token-ids", "--endpoint", "/v1/chat/completions"], ["--prompt-token-ids", "text"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(args: list[str | Path], expected: list[str], pdemu: Pdemu) -> None:
    ended = pdemu("bench", *args)
    ended.check_refusal(expected)
    assert "hidden" not in ended.err
