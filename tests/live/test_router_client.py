"""The native driver of `pdemu bench`: beside a router that is a script, and in clusters as users start them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emulator.core.bench.arrivals import Pace
from emulator.core.bench.exchange import Exchange
from emulator.core.bench.plan import lengths_plan
from emulator.core.bench.target import RouterTarget
from emulator.core.errors import ConfigError, FidelityError, NotReadyError
from emulator.core.message_codec import decode_to_router
from emulator.core.messages import (
    Abort,
    Assembled,
    Begin,
    ClockReading,
    ClusterLoad,
    EndRecord,
    Finished,
    Hello,
    Message,
    ReadClock,
    ReadLoad,
    Report,
    Stop,
    Submit,
    TokenCount,
    Tokens,
    Welcome,
)
from emulator.core.records import Record, read_records
from emulator.core.workload import PlannedRequest
from emulator.live import router_client
from emulator.live.bench import LoadTest
from emulator.live.control import RouterSocket
from emulator.live.reports import GuestReport
from emulator.live.router_client import RouterClient
from tests.live.lab import PDEMU, SMALL, eventually

pytestmark = pytest.mark.live

READY = Assembled(label="1P1D", model="tiny", t0_s=0.0)
Answer = Callable[["ScriptedRouter", Submit], None]


def _tokens(router: ScriptedRouter, submit: Submit) -> None:
    """All tokens asked for, each in a message of its own, and the end."""
    for _ in range(submit.max_tokens):
        router.say(Tokens((TokenCount(submit.request_id, 1), TokenCount("another's", 1))))
    router.say(Finished(submit.request_id, "length"))


def _nothing(_router: ScriptedRouter, _submit: Submit) -> None:
    """Silence."""


class ScriptedRouter:
    """Lets one client in, says how the cluster is, and answers each request as it is told."""

    def __init__(self, assembled: Assembled | None = READY, answer: Answer = _tokens) -> None:
        self._assembled, self._answer = assembled, answer
        self._socket = RouterSocket("tcp://127.0.0.1:*")
        self._client = ""
        self.endpoint = self._socket.endpoint
        self.heard: list[Message] = []
        self.answers_load = True

    def say(self, message: Message) -> None:
        assert self._socket.send(self._client, message)

    def of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def serve(self) -> None:
        while True:
            self._client, data = await self._socket.receive()
            message = decode_to_router(data)
            self.heard.append(message)
            match message:
                case Hello():
                    self.say(Welcome())
                    if self._assembled is not None:
                        self.say(self._assembled)
                case ReadClock():
                    self.say(ClockReading(message.sent_s, time.monotonic()))
                case Begin():
                    self.say(message)
                case ReadLoad():
                    if self.answers_load:
                        self.say(ClusterLoad(()))
                case Submit():
                    self._answer(self, message)

    def close(self) -> None:
        self._socket.close(0)


@contextlib.asynccontextmanager
async def _routing(assembled: Assembled | None = READY, answer: Answer = _tokens) -> AsyncIterator[ScriptedRouter]:
    router = ScriptedRouter(assembled, answer)
    serving = asyncio.create_task(router.serve())
    try:
        yield router
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        router.close()


def _client(router: ScriptedRouter, **more: object) -> RouterClient:
    target = {"endpoint": router.endpoint, "request_id_prefix": "b-", "ready_s": 5.0} | more
    return RouterClient(RouterTarget(**target))  # type: ignore[arg-type]


async def _one(router: ScriptedRouter, **more: object) -> Exchange:
    """One request of 50 and 4 tokens."""
    async with _client(router, **more) as client:
        await client.prepare(None)
        exchange = Exchange(7, PlannedRequest("r", "bench", 0.0, 50, 4), 0.0)
        await client.perform(exchange, time.monotonic)
        exchange.end_s = time.monotonic()
    return exchange


async def test_a_request_is_its_lengths_and_its_tokens_are_counted() -> None:
    async with _routing() as router:
        found = await _one(router)
        assert router.of(Submit) == [Submit("b-7", 50, 4)]
        assert not router.of(Begin), "this run has begun"
        assert not router.of(Stop), "the cluster stays as it was"
        assert not router.of(Abort)
    assert (found.outcome, found.prompt_tokens, found.output_tokens) == ("completed", 50, 4)
    assert len(found.seen.token_times_s) == found.seen.counts.token_chunks == 4
    assert found.seen.token_times_s == sorted(found.seen.token_times_s)


async def test_a_run_that_nobody_has_begun_is_begun_once() -> None:
    async with _routing(msgspec.structs.replace(READY, t0_s=None)) as router:
        assert (await _one(router)).outcome == "completed"
        (begin,) = router.of(Begin)
        assert begin.t0_s <= time.monotonic()


async def test_its_records_are_handed_in_on_the_runs_clock() -> None:
    began_s = time.monotonic() - 10.0
    async with _routing(msgspec.structs.replace(READY, t0_s=began_s, scale_time=2.0)) as router:
        async with _client(router) as client:
            await client.prepare("tiny")
            assert (client.model, client.scale_time) == ("tiny", 2.0)
            await client.warm_up(PlannedRequest("r", "bench", 0.0, 9, 2), 0, time.monotonic)
            plan = lengths_plan(50, 3, 4, Pace(100.0), 0)
            observed = await LoadTest(plan, client, scale_time=client.scale_time).run(lambda _: None)
        await asyncio.sleep(0.1)
        pieces = router.of(Report)
    assert [e.outcome for e in observed.exchanges] == ["completed"] * 4
    report = msgspec.json.decode(b"".join(piece.data for piece in pieces), type=GuestReport)
    assert [r.request_id for r in report.records] == ["b-warmup-0", "b-0", "b-1", "b-2", "b-3"]
    assert [r.output_tokens for r in report.records] == [2, 3, 3, 3, 3]
    warm_up = report.records[0]
    assert warm_up.sent_s is not None
    assert 5.0 <= warm_up.scheduled_s <= warm_up.sent_s
    for record, exchange in zip(report.records[1:], observed.exchanges, strict=True):
        assert record.sent_s is not None
        assert exchange.sent_s is not None
        assert record.sent_s >= 5.0, "model seconds since the run began"
        assert record.sent_s - record.scheduled_s == pytest.approx(exchange.sent_s - exchange.request.scheduled_s)


async def _handed_in(router: ScriptedRouter) -> list[Record]:
    assert await asyncio.to_thread(eventually, lambda: bool(router.of(Report)))
    return list(msgspec.json.decode(b"".join(p.data for p in router.of(Report)), type=GuestReport).records)


@pytest.mark.parametrize("scheduled", [True, False])
async def test_a_request_counts_from_when_it_had_a_place_or_without_a_schedule_from_its_send(scheduled: bool) -> None:
    async with _routing() as router:
        target = RouterTarget(endpoint=router.endpoint, request_id_prefix="b-", ready_s=5.0)
        async with RouterClient(target, scheduled=scheduled) as client:
            await client.prepare(None)
            plan = lengths_plan(50, 3, 4, Pace(), 0)
            assert plan.at_once
            observed = await LoadTest(plan, client, max_concurrency=1).run(lambda _: None)
        records = await _handed_in(router)
    for record, exchange in zip(records, observed.exchanges, strict=True):
        assert record.sent_s is not None
        assert exchange.sent_s is not None
        delay_s = exchange.sent_s - exchange.due_s if scheduled else 0.0
        assert record.sent_s - record.scheduled_s == pytest.approx(delay_s)
    waited = [exchange.due_s - exchange.request.scheduled_s for exchange in observed.exchanges]
    assert waited == sorted(waited)
    assert waited[-1] > 0, "the last one had to wait for its place"


async def test_what_the_record_has_no_place_for_is_not_handed_in() -> None:
    def ends_with_the_third(router: ScriptedRouter, submit: Submit) -> None:
        if submit.request_id == "b-2":
            router.say(EndRecord(2))
        _tokens(router, submit)

    async with _routing(answer=ends_with_the_third) as router:
        async with _client(router) as client:
            await client.prepare(None)
            observed = await LoadTest(lengths_plan(50, 3, 5, Pace(50.0), 0), client).run(lambda _: None)
        records = await _handed_in(router)
    assert [e.outcome for e in observed.exchanges] == ["completed"] * 5
    assert [(r.request_id, r.outcome) for r in records] == [("b-0", "completed"), ("b-1", "completed")]


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        (lambda router, s: router.say(Finished(s.request_id, "error", "no node")), "error in the cluster", "no node"),
        (lambda router, s: router.say(Finished(s.request_id, "aborted")), "aborted in the cluster", ""),
        (lambda router, s: router.say(Finished(s.request_id, "length")), "no output", "finish_reason length"),
        (lambda router, _: router.say(Stop()), "the cluster has stopped", ""),
    ],
    ids=["refused", "aborted", "empty", "stopped"],
)
async def test_what_goes_wrong_is_a_failure_by_its_reason(answer: Answer, reason: str, message: str) -> None:
    async with _routing(answer=answer) as router:
        found = await _one(router)
    assert (found.outcome, found.seen.reason, found.seen.message) == ("failed", reason, message)


async def test_a_request_that_takes_too_long_is_aborted() -> None:
    async with _routing(answer=_nothing) as router:
        assert (await _one(router, timeout_s=0.2)).seen.reason == "timeout"
        assert router.of(Abort) == [Abort("b-7")]


async def test_a_router_that_says_nothing_any_more_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "ASK_S", 0.05)
    monkeypatch.setattr(router_client, "SILENT_S", 0.3)
    async with _routing(answer=_nothing) as router:
        router.answers_load = False
        assert (await _one(router)).seen.reason == "the router is silent"


async def test_the_end_of_the_cluster_fails_what_is_still_to_come() -> None:
    def ends(router: ScriptedRouter, submit: Submit) -> None:
        if submit.request_id == "b-2":
            router.say(Stop())
        else:
            _tokens(router, submit)

    async with _routing(answer=ends) as router, _client(router) as client:
        await client.prepare(None)
        observed = await LoadTest(lengths_plan(50, 3, 6, Pace(50.0), 0), client, max_concurrency=1).run(lambda _: None)
        assert [e.outcome for e in observed.exchanges] == ["completed"] * 2 + ["failed"] * 4
        assert router.of(Report), "records are handed in before the router goes"
        assert len(router.of(Submit)) == 3


@pytest.mark.parametrize(
    ("assembled", "error", "expected"),
    [
        (msgspec.structs.replace(READY, problem="a → b carried too little"), FidelityError, "1P1D: a → b carried"),
        (None, NotReadyError, "is not complete"),
    ],
    ids=["link", "incomplete"],
)
async def test_a_cluster_that_cannot_be_used_is_refused(
    assembled: Assembled | None, error: type[Exception], expected: str
) -> None:
    async with _routing(assembled) as router, _client(router, ready_s=0.5) as client:
        with pytest.raises(error, match=expected):
            await client.prepare(None)
        assert not router.of(Begin)


async def test_another_model_is_refused() -> None:
    async with _routing() as router, _client(router) as client:
        with pytest.raises(ConfigError, match=r"--model other: .* serves tiny"):
            await client.prepare("other")


async def test_a_router_that_does_not_answer_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = RouterTarget(endpoint=f"tcp://127.0.0.1:{silent.getsockname()[1]}", ready_s=0.3)
        async with RouterClient(target) as client:
            with pytest.raises(NotReadyError, match=r"no router that takes this client answered within 0\.3 s"):
                await client.prepare(None)


# --- clusters -----------------------------------------------------------------------------------------------------

PLANNED = {"PDEMU_TOPOLOGY": str(SMALL), "PDEMU_DEPLOYMENT": "colocated", "PDEMU_SHAPING": "paced"}


def _start(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PDEMU, *map(str, arguments)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def _ended(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Whatever happens, none of them is left."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=20)


BENCH = ("--json", "--num-prompts", "8", "--input-len", "60", "--output-len", "5", "--request-rate", "20")


def test_members_started_by_hand_serve_one_bench_after_another_and_two_at_a_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    members = [
        _start("router", "--listen", endpoint, **PLANNED),
        *(_start("node", "--name", f"colocated-{n}", "--router", endpoint, **PLANNED) for n in range(2)),
    ]
    with _ended(members):
        url = ("--url", f"tcp://{endpoint}", "--ready-check-timeout-sec", "60")
        for benches in (1, 2):
            running = [_start("bench", *url, *BENCH) for _ in range(benches)]
            with _ended(running):
                for bench in running:
                    printed, said = bench.communicate(timeout=60)
                    assert bench.returncode == 0, said
                    found = msgspec.json.decode(printed)
                    assert (found["completed"], found["backend"], found["model_id"]) == (8, "pdemu", "tiny")
                    assert (found["total_input_tokens"], found["total_output_tokens"]) == (8 * 60, 8 * 5)
                    assert (found["prompts"], found["prompt_fit"], found["scale_time"]) == ("counts", "exact", 1.0)
        late = _start("client", "--router", endpoint, **PLANNED)
        with _ended([late]):
            _, said = late.communicate(timeout=60)
            assert late.returncode == 2, said
            assert "another client has begun this run" in said


def test_both_drivers_measure_a_served_cluster_and_all_their_requests_are_in_its_records(tmp_path: Path) -> None:
    command = ("up", SMALL, "--deployment", "colocated", "--http", "127.0.0.1:0", "--out", tmp_path / "out", "--json")
    log = tmp_path / "log"
    with log.open("w") as stderr:
        served = subprocess.Popen(
            [*PDEMU, *map(str, command)],
            env={**os.environ, "PDEMU_SECRET": "open sesame"},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        assert eventually(lambda: "Ctrl-C ends it" in log.read_text() or served.poll() is not None)
        words = log.read_text().split()
        http, native = (next(word for word in words if word.startswith(scheme)) for scheme in ("http://", "tcp://"))
        benches = [
            _start("bench", "--url", http.removesuffix(","), *BENCH),
            _start("bench", "--url", native, "--request-id-prefix", "native-", *BENCH, PDEMU_SECRET="open sesame"),
        ]
        with _ended(benches):
            for bench in benches:
                printed, said = bench.communicate(timeout=60)
                assert bench.returncode == 0, said
                found = msgspec.json.decode(printed)
                assert (found["completed"], found["prompt_fit"]) == (8, "exact")
                assert (found["tokens"]["input_mismatches"], found["tokens"]["output_mismatches"]) == (0, 0)
                assert (found["total_input_tokens"], found["total_output_tokens"]) == (8 * 60, 8 * 5)
        served.send_signal(signal.SIGINT)
        assert served.wait(30) == 0
    finally:
        served.kill()
        served.wait()
    assert "open sesame" not in log.read_text()
    (path,) = (tmp_path / "out").glob("*/records.jsonl")
    records = read_records(path.read_bytes())
    ours = [record for record in records if record.request_id.startswith("native-")]
    assert len(ours) == 8
    assert len(records) == 8 + 8 + 2, "two more told the length of text prompts"
    for record in records:
        assert record.outcome == "completed"
        if record.max_tokens == 5:
            assert (record.prompt_tokens, record.output_tokens, record.times().size) == (60, 5, 5)
    summary = msgspec.json.decode((tmp_path / "out" / "summary.json").read_bytes())
    broken = summary["runs"][0]["fidelity"]["reasons"]
    assert not [reason for reason in broken if "do not agree" in reason]
