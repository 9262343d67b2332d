"""A cluster started by hand, process by process, on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import msgspec
import pytest

from emulator.core.records import read_records
from emulator.live.device_lock import LOCKS_ENV, Patience, device_lock
from emulator.live.processor import processor_id
from tests.live.lab import PDEMU, SMALL, pdemu

pytestmark = pytest.mark.live

PLANNED = {"PDEMU_TOPOLOGY": str(SMALL), "PDEMU_DEPLOYMENT": "1P1D", "PDEMU_SHAPING": "paced"}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _start(environment: dict[str, str], *arguments: str, clock_ahead_s: int = 0) -> subprocess.Popen[str]:
    """A member; with `clock_ahead_s` in a time namespace whose monotonic clock is so far ahead."""
    elsewhere = ["unshare", "--time", "--monotonic", str(clock_ahead_s)] if clock_ahead_s else []
    if elsewhere and os.geteuid() != 0:
        elsewhere += ["--user", "--map-root-user"]
    return subprocess.Popen(
        [*elsewhere, *PDEMU, *arguments],
        env={**os.environ, **PLANNED, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "in the clear"])
def test_members_started_one_by_one_make_the_run_of_a_launcher(tmp_path: Path, keys: bool) -> None:
    made = dict(line.split(" ")[1].split("=", 1) for line in pdemu("keys").stdout.splitlines())
    every = {name: value.strip("'") for name, value in made.items()} if keys else {}
    secret_key = {"PDEMU_ROUTER_SECRET_KEY": every.pop("PDEMU_ROUTER_SECRET_KEY")} if keys else {}
    endpoint = f"127.0.0.1:{_free_port()}"
    joining = ("--router", endpoint)
    members = [
        _start(every, "node", "--name", "decode-0", "--kv-address", "localhost", *joining),
        _start(every, "node", "--name", "prefill-0", "--kv-network", "127.0.0.0/8", *joining),
        _start(every, "client", "--json", "--out", str(tmp_path / "o"), *joining),
        _start(every | secret_key, "router", "--listen", endpoint),
    ]
    try:
        printed, said = members[2].communicate(timeout=60)
        assert members[2].returncode == 0, said
        document = msgspec.json.decode(printed)
        assert (document["launcher"], document["shaping"]) == ("members", "paced")
        (run,) = document["runs"]
        assert run["completed"] == run["requests"] == 15
        assert (tmp_path / "o" / "1P1D@0.2Gbps" / "records.jsonl").exists()
        for member in members:
            assert member.wait(timeout=20) == 0
    finally:
        for member in members:
            member.kill()
            member.communicate(timeout=20)


def test_a_node_that_waits_for_its_device_says_so_and_ends_when_told_to(tmp_path: Path) -> None:
    """Nobody measures here, but somebody holds the lock; there is no router either."""
    locks = {"PDEMU_LOCKS": str(tmp_path), "PDEMU_DEVICE": "numpy"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOCKS_ENV, str(tmp_path))
        with device_lock(processor_id(), Patience(60.0)):
            node = _start(locks, "node", "--name", "prefill-0", "--kv-address", "localhost")
            try:
                assert node.stderr is not None
                line = node.stderr.readline()
                assert line.startswith("prefill-0: waits for ")
                assert "which another process measures" in line
                node.send_signal(signal.SIGTERM)
                assert node.wait(timeout=60) == 130
                assert node.stderr.read() == "pdemu: interrupted\n"
            finally:
                node.kill()
                node.communicate(timeout=20)


def test_members_serve_metrics_where_they_are_told_to(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{_free_port()}"
    joining = ("--router", endpoint)
    members = [
        _start({"PDEMU_METRICS": "127.0.0.1:0"}, "router", "--listen", endpoint),
        _start({"PDEMU_METRICS": "127.0.0.1:0"}, "node", "--name", "decode-0", "--kv-address", "localhost", *joining),
        _start({}, "node", "--name", "prefill-0", "--kv-address", "localhost", *joining),
    ]
    try:
        told = [member.stderr.readline().strip() for member in members if member.stderr is not None]
        assert told[2] == "prefill-0: ready"
        pages = []
        for line, name in zip(told, ("router", "decode-0"), strict=False):
            assert line.startswith(f"{name}: ready; metrics at http://127.0.0.1:")
            with urllib.request.urlopen(line.rpartition(" ")[2], timeout=20) as answer:
                pages.append(answer.read().decode())
        assert "vllm:time_to_first_token_seconds_count" in pages[0]
        assert 'vllm:kv_cache_usage_perc{engine="decode-0",model_name="tiny",role="decode"} 0.0' in pages[1]
        members.append(_start({}, "client", "--json", "--out", str(tmp_path / "o"), *joining))
        printed, said = members[-1].communicate(timeout=60)
        assert members[-1].returncode == 0, said
        assert msgspec.json.decode(printed)["runs"][0]["completed"] == 15
        for member in members:
            assert member.wait(timeout=20) == 0
    finally:
        for member in members:
            member.kill()
            member.communicate(timeout=20)


@pytest.mark.skipif(not Path("/proc/self/ns/time").exists(), reason="needs time namespaces")
@pytest.mark.alone
def test_members_on_hosts_whose_clocks_differ_make_the_same_run(tmp_path: Path) -> None:
    """Each node's monotonic clock is some hours off, as that of another machine would be."""
    endpoint = f"127.0.0.1:{_free_port()}"
    joining = ("--router", endpoint)
    members = [
        _start({}, "node", "--name", "decode-0", "--kv-address", "localhost", *joining, clock_ahead_s=20_000),
        _start({}, "node", "--name", "prefill-0", "--kv-network", "127.0.0.0/8", *joining, clock_ahead_s=5_000),
        _start({}, "client", "--json", "--out", str(tmp_path / "o"), *joining, clock_ahead_s=9_000),
        _start({}, "router", "--listen", endpoint),
    ]
    try:
        printed, said = members[2].communicate(timeout=60)
        assert members[2].returncode == 0, said
        (run,) = msgspec.json.decode(printed)["runs"]
        assert run["completed"] == run["requests"] == 15
        records = read_records((tmp_path / "o" / "1P1D@0.2Gbps" / "records.jsonl").read_bytes())
        for record in records:
            instants = (record.sent_s, record.prefill_start_s, record.prefill_end_s, record.kv_end_s, record.finish_s)
            known = [instant for instant in instants if instant is not None]
            assert len(known) == 5
            assert known == sorted(known), "in the order of events, on one clock"
            assert record.kv_start_s is not None
            assert known[0] < record.kv_start_s < known[3]
    finally:
        for member in members:
            member.kill()
            member.communicate(timeout=20)


def test_a_node_that_the_deployment_does_not_have_is_refused() -> None:
    process = _start({}, "node", "--name", "decode-7", "--kv-address", "127.0.0.1")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "prefill-0, decode-0" in said


def test_a_router_beyond_loopback_needs_keys() -> None:
    process = _start({}, "router", "--listen", "0.0.0.0:5555")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "--insecure" in said


@pytest.mark.parametrize(("address", "part"), [("0.0.0.0:9100", "--insecure"), ("9100", "ADDRESS:PORT")])
def test_metrics_go_beyond_loopback_on_purpose_alone(address: str, part: str) -> None:
    process = _start({}, "router", "--metrics", address)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    (line,) = said.strip().splitlines()
    assert f"--metrics {address}" in line
    assert part in line


def test_a_node_that_falls_silent_before_the_run_is_named(tmp_path: Path) -> None:
    joining = ("--router", f"127.0.0.1:{_free_port()}", "--kv-address", "localhost")
    members = [
        _start({}, "router", "--listen", joining[1]),
        _start({}, "node", "--name", "decode-0", *joining),
    ]
    try:
        for member in members:
            assert member.stderr is not None
            assert member.stderr.readline().strip().endswith(": ready")
        members[1].send_signal(signal.SIGSTOP)
        members += [
            _start({}, "node", "--name", "prefill-0", *joining),
            _start({}, "client", "--out", str(tmp_path / "o"), *joining[:2]),
        ]
        _, said = members[-1].communicate(timeout=60)
        assert members[-1].returncode == 1
        assert said.strip().splitlines()[-1].startswith("pdemu: decode-0 fell silent before the run")
    finally:
        for member in members:
            member.kill()
            member.communicate(timeout=20)
