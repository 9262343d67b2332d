"""The lab in containers: kernel-shaped links, results as elsewhere, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from emulator.lab.docker import compose_command
from tests.live.lab import PDEMU, SMALL, TOPOLOGIES, check_kernel_shaped_transfers, eventually, json_of, pdemu

pytestmark = [pytest.mark.compose, pytest.mark.timeout(400)]

RUN = ("run", SMALL, "--deployment", "1P1D", "--launcher", "compose")
BUILD_AND_RUN_S = 300.0
ROOT = TOPOLOGIES.parent


def _docker(*arguments: str) -> list[str]:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def _things(project: str = "pdemu-small-") -> set[str]:
    """Containers and networks of projects whose names begin so."""
    containers = _docker("ps", "--all", "--format", "{{.Names}}")
    networks = _docker("network", "ls", "--format", "{{.Name}}")
    return {name for name in (*containers, *networks) if name.startswith(project)}


def test_a_run_in_containers_keeps_the_links_rate_and_leaves_nothing(tmp_path: Path) -> None:
    before = _things()
    document = json_of(pdemu(*RUN, "--json", "--verify-kv", "--out", tmp_path / "o", timeout_s=BUILD_AND_RUN_S))
    (run,) = document["runs"]
    assert (document["launcher"], document["shaping"]) == ("compose", "kernel")
    assert run["completed"] == run["requests"] == 15
    check_kernel_shaped_transfers(tmp_path / "o" / "1P1D@0.2Gbps")
    assert _things() == before


def test_what_sigkill_leaves_is_removed_by_clean_and_a_run_in_progress_is_not(tmp_path: Path) -> None:
    before = _things()
    killed, living = (_started(tmp_path / name) for name in ("killed", "living"))
    try:
        killed.kill()
        killed.communicate(timeout=20)
        everything = _things() - before
        assert len(everything) == 2 * 6, "router, client, two nodes and two networks of each run"
        cleaned = pdemu("clean")
        assert cleaned.returncode == 0, cleaned.stderr
        assert "removed compose project pdemu-small-" in cleaned.stdout
        assert len(_things() - before) == 6
        assert living.poll() is None
    finally:
        living.terminate()
        living.communicate(timeout=60)
        pdemu("clean")
    assert _things() == before


def test_the_compose_file_by_hand_prints_the_table_and_ends_with_the_clients_status(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.read_text())
    file = tmp_path / "lab.yml"
    printed = pdemu("compose", tmp_path / "small.toml", "--deployment", "1P1D")
    assert printed.returncode == 0, printed.stderr
    file.write_text(printed.stdout)
    done = _up("--file", str(file), project="pdemu-test-printed")
    assert done.returncode == 0, done.stdout
    assert "Comparison (latencies in ms)" in done.stdout
    assert "15/15" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "1P1D@0.2Gbps" / "records.jsonl").exists()


def test_a_run_that_is_refused_ends_the_lab_with_the_clients_status(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # the client writes there as the image's own user
    asked = {"PDEMU_KV_BANDWIDTH": "400Gbps", "PDEMU_SHAPING": "paced", "PDEMU_RUNS": str(tmp_path)}
    done = _up(project="pdemu-test-root", **asked)
    assert done.returncode == 2, done.stdout
    assert "prefill-0 → decode-0 carried" in done.stdout
    assert "--force runs it all the same" in done.stdout


def test_an_error_of_any_member_ends_the_lab() -> None:
    done = _up(project="pdemu-test-root", PDEMU_MODEL="no-such-model")
    assert done.returncode != 0
    assert "no-such-model" in done.stdout


def _up(*options: str, project: str, **environment: str) -> subprocess.CompletedProcess[str]:
    compose = [*compose_command(), *options, "--project-name", project]
    up = ["up", "--build", "--no-color", "--abort-on-container-exit", "--exit-code-from", "client"]
    try:
        return subprocess.run(
            [*compose, *up],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
            timeout=BUILD_AND_RUN_S,
            check=False,
        )
    finally:
        down = ["down", "--volumes", "--remove-orphans"]
        subprocess.run([*compose, *down], capture_output=True, cwd=ROOT, timeout=60, check=False)


def _started(out: Path) -> subprocess.Popen[bytes]:
    """A long run under way in its containers."""
    command = [*PDEMU, *map(str, RUN), "--duration", "60", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    log = out / "1P1D@0.2Gbps" / "logs" / "compose.log"

    def started() -> bool:
        assert process.poll() is None, process.communicate()[1].decode()
        return log.exists() and '"underway"' in log.read_text(errors="replace")

    assert eventually(started, BUILD_AND_RUN_S), "the run did not start"
    return process
