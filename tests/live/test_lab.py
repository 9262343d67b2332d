"""The lab from the outside: real processes, real sockets, and nothing left behind however it ends."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from emulator.core.records import read_memory, read_records, read_steps
from tests.live.lab import PDEMU, SMALL, all_gone, children_of, eventually, json_of, pdemu

pytestmark = pytest.mark.live

KV_BYTES_PER_TOKEN = 4096


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], Path]:
    """One comparison of the small lab, whose parts the tests look at."""
    out = tmp_path_factory.mktemp("lab") / "out"
    result = pdemu("compare", SMALL, "--json", "--verify-kv", "--out", out)
    return json_of(result), out


def test_compare_prints_one_document_with_every_run(compared: tuple[dict[str, object], Path]) -> None:
    document, _ = compared
    runs = document["runs"]
    assert isinstance(runs, list)
    assert [(run["deployment"], run["kv_bandwidth_bps"]) for run in runs] == [("colocated", None), ("1P1D", 2e8)]
    assert all(run["completed"] == run["requests"] == 15 for run in runs)
    assert [run["costs"]["requests_per_usd"] for run in runs] == pytest.approx([36_000 / 5.90] * 2), "10/s on two H100"
    assert document["launcher"] == "local"
    assert document["shaping"] == "paced"
    assert {"topology", "scale", "first_token", "verdict"} <= document.keys()


def test_kv_bytes_are_the_formula_times_the_prompt_to_the_byte(compared: tuple[dict[str, object], Path]) -> None:
    document, out = compared
    records = read_records((out / "1P1D@0.2Gbps" / "records.jsonl").read_bytes())
    assert all(record.kv_bytes == KV_BYTES_PER_TOKEN * record.prompt_tokens for record in records)
    runs = document["runs"]
    assert isinstance(runs, list)
    assert runs[1]["kv"]["bytes"] == KV_BYTES_PER_TOKEN * sum(record.prompt_tokens for record in records)
    assert runs[0]["kv"]["bytes"] == 0


def test_every_request_gets_all_its_tokens_in_order(compared: tuple[dict[str, object], Path]) -> None:
    _, out = compared
    for folder in ("colocated", "1P1D@0.2Gbps"):
        for record in read_records((out / folder / "records.jsonl").read_bytes()):
            times = record.times()
            assert record.outcome == "completed"
            assert len(times) == record.output_tokens == record.max_tokens
            assert (times[1:] >= times[:-1]).all()
            assert record.sent_s is not None
            assert record.scheduled_s <= record.sent_s < times[0]


def test_a_transfer_is_not_faster_than_its_link(compared: tuple[dict[str, object], Path]) -> None:
    _, out = compared
    payload_bytes_per_s = 2e8 * 1448 / 1514 / 8
    for record in read_records((out / "1P1D@0.2Gbps" / "records.jsonl").read_bytes()):
        assert record.kv_start_s is not None
        assert record.kv_end_s is not None
        assert record.kv_end_s - record.kv_start_s >= 0.999 * record.kv_bytes / payload_bytes_per_s


def test_steps_last_at_least_what_the_cost_model_says(compared: tuple[dict[str, object], Path]) -> None:
    _, out = compared
    steps = read_steps((out / "colocated" / "steps.jsonl").read_bytes())
    assert {step.node for step in steps} == {"colocated-0", "colocated-1"}
    assert all(step.lateness_s > -1e-6 for step in steps)


def test_the_folder_has_everything_from_which_its_numbers_are_made(compared: tuple[dict[str, object], Path]) -> None:
    _, out = compared
    assert {"summary.json", "report.html"} <= {path.name for path in out.iterdir()}
    for folder in ("colocated", "1P1D@0.2Gbps"):
        names = {path.name for path in (out / folder).iterdir()}
        assert names == {
            "manifest.json", "records.jsonl", "steps.jsonl", "memory.jsonl", "transfers.jsonl", "summary.json", "logs",
        }  # fmt: skip


def test_memory_over_time_has_a_row_where_kv_changed_hands(compared: tuple[dict[str, object], Path]) -> None:
    document, out = compared
    rows = read_memory((out / "1P1D@0.2Gbps" / "memory.jsonl").read_bytes())
    assert {row.node for row in rows} == {"prefill-0", "decode-0"}
    assert any(row.held_blocks for row in rows if row.node == "prefill-0")
    assert any(row.reserved_blocks for row in rows if row.node == "decode-0")
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(rows))
    runs = document["runs"]
    assert isinstance(runs, list)
    (memory,) = [run["kv_memory"] for run in runs if run["deployment"] == "1P1D"]
    assert all(row.used_blocks <= memory["blocks"][row.node] for row in rows)
    for role, whose in (("prefill", "prefill-0"), ("decode", "decode-0")):
        usage = memory["by_role"][role]
        mine = [row for row in rows if row.node == whose]
        assert usage["peak_reserved"] == max(row.reserved_blocks for row in mine) / memory["blocks"][whose]
        assert usage["peak_held"] == max(row.held_blocks for row in mine) / memory["blocks"][whose]
        assert 0 < usage["mean_used"] < usage["peak_used"] <= 1


@pytest.mark.alone
def test_stretched_time_gives_results_in_model_time(tmp_path: Path) -> None:
    topology = tmp_path / "stretched.toml"
    topology.write_text(SMALL.read_text() + "\n[scale]\ntime = 3\nbytes = 4\n")
    started = time.monotonic()
    document = json_of(
        pdemu("run", topology, "--deployment", "1P1D", "--duration", "1", "--json", "--out", tmp_path / "o")
    )
    assert time.monotonic() - started >= 3.0
    (run,) = document["runs"]
    assert document["scale"] == {"time": 3.0, "bytes": 4.0}
    assert run["completed"] == run["requests"] == 10
    assert run["tpot_ms"]["p50"] == pytest.approx(8.3, abs=0.8)
    records = read_records((tmp_path / "o" / "1P1D@0.2Gbps" / "records.jsonl").read_bytes())
    assert all(record.kv_bytes == KV_BYTES_PER_TOKEN * record.prompt_tokens for record in records)


def test_a_deployment_that_does_not_keep_up_is_cut_and_said_to_be_saturated(tmp_path: Path) -> None:
    topology = tmp_path / "slow.toml"
    topology.write_text(SMALL.read_text().replace('drain = "5s"', 'drain = "1s"'))
    result = pdemu(
        "run", topology, "--deployment", "1P1D", "--kv-bandwidth", "2Mbps", "--json", "--out", tmp_path / "o"
    )
    (run,) = json_of(result)["runs"]
    assert run["saturated"]
    assert run["unfinished"] > 0
    assert run["completed"] + run["failed"] + run["unfinished"] == run["requests"] == 15
    assert run["slo_attainment"] < 0.5
    assert not any("dropped" in reason for reason in run["fidelity"]["reasons"]), "KV under way at the cut is no fault"


def test_a_link_that_this_machine_cannot_be_is_refused_before_the_run(tmp_path: Path) -> None:
    command: list[str | Path] = ["run", SMALL, "--deployment", "1P1D", "--kv-bandwidth", "1Tbps", "--json"]
    refused = pdemu(*command, "--out", tmp_path / "refused")
    assert refused.returncode == 2
    assert "prefill-0 → decode-0 carried" in refused.stderr
    assert "956.407 Gbps were asked for" in refused.stderr
    assert "CPU bound" in refused.stderr
    assert "--force" in refused.stderr
    document = json_of(pdemu(*command, "--force", "--out", tmp_path / "forced"))
    (run,) = document["runs"]
    assert document["shaping"] == run["shaping"] == "UNSHAPED"
    assert not run["fidelity"]["ok"]
    assert any("UNSHAPED" in reason for reason in run["fidelity"]["reasons"])
    assert document["verdict"] == []


def _started(tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A long run under way, with its processes."""
    command = [*PDEMU, "run", str(SMALL), "--deployment", "1P1D", "--duration", "60", "--out", str(tmp_path / "o")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    log = tmp_path / "o" / "1P1D@0.2Gbps" / "logs" / "client.log"
    assert eventually(lambda: log.exists() and len(children_of(process.pid)) == 4), "the run did not start"
    return process, children_of(process.pid)


def test_ctrl_c_ends_everything_with_one_line(tmp_path: Path) -> None:
    process, children = _started(tmp_path)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert stderr.decode().strip().splitlines()[-1] == "pdemu: interrupted"
    assert b"Traceback" not in stderr
    assert all_gone(children, within_s=5)


def test_sigkill_of_the_parent_leaves_no_process(tmp_path: Path) -> None:
    process, children = _started(tmp_path)
    process.kill()
    process.communicate(timeout=20)
    assert all_gone(children, within_s=5)


def test_a_killed_node_ends_the_run_with_one_line(tmp_path: Path) -> None:
    process, children = _started(tmp_path)
    children[1].kill()
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "ended unexpectedly (signal 9)" in stderr.decode()
    assert b"Traceback" not in stderr
    assert all_gone(children, within_s=5)


def test_a_taken_control_port_is_one_line_and_exit_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        topology = tmp_path / "taken.toml"
        topology.write_text(f"control_port = {port}\n" + SMALL.read_text())
        result = pdemu("run", topology, "--deployment", "colocated", "--out", tmp_path / "o")
    assert result.returncode == 2
    assert f"127.0.0.1:{port}" in result.stderr
    assert "control_port = 0" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("command", [["models"], ["kv-size", "Llama-2-70B", "1", "--json"], ["--version"]])
def test_output_that_cannot_be_written_is_one_line(command: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([*PDEMU, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "No space left on device" in ended.stderr


def test_no_process_of_this_package_is_left(tmp_path: Path) -> None:
    own = os.getpid()
    left = [p for p in psutil.Process(own).children(recursive=True) if "emulator.live.process" in " ".join(p.cmdline())]
    assert left == []
