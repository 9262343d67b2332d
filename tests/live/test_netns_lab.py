"""The lab in network namespaces: kernel-shaped links, proved before the run, and nothing left behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from emulator.live.namespace import FOLDER
from tests.live.lab import (
    PDEMU,
    SMALL,
    all_gone,
    check_kernel_shaped_transfers,
    children_of,
    eventually,
    json_of,
    pdemu,
)

pytestmark = pytest.mark.netns

RUN = ("run", SMALL, "--deployment", "1P1D", "--launcher", "netns")


def _namespaces() -> set[str]:
    names = {path.name for path in FOLDER.iterdir()} if FOLDER.exists() else set()
    return {name for name in names if name.startswith("pdemu-small-")}


def test_a_kernel_shaped_run_keeps_the_links_rate_and_leaves_nothing(tmp_path: Path) -> None:
    before = _namespaces()
    document = json_of(pdemu(*RUN, "--json", "--verify-kv", "--out", tmp_path / "o"))
    (run,) = document["runs"]
    assert (document["launcher"], document["shaping"]) == ("netns", "kernel")
    assert run["completed"] == run["requests"] == 15
    check_kernel_shaped_transfers(tmp_path / "o" / "1P1D@0.2Gbps")
    assert _namespaces() == before


def test_each_node_has_the_nic_of_its_pool_in_each_direction(tmp_path: Path) -> None:
    text = SMALL.read_text(encoding="utf-8")
    text = text.replace('role = "prefill"', 'role = "prefill", kv_egress = "100Mbps"')
    text = text.replace('role = "decode"', 'role = "decode", kv_ingress = "150Mbps"')
    text = text.replace('bandwidth = ["200Mbps"]', 'bandwidth = ["200Mbps"]\ndelay = "4ms"\njitter = "1ms"')
    (tmp_path / "uneven.toml").write_text(text, encoding="utf-8")
    document = json_of(
        pdemu("run", tmp_path / "uneven.toml", *RUN[2:], "--json", "--duration", "1", "--out", tmp_path / "o")
    )
    (run,) = document["runs"]
    assert run["shaping"] == "kernel", "proved by the probe: 100 Mbps and 4 ms"
    payload_bps = 1e8 * 1448 / 1514
    assert 0.9 * payload_bps < run["kv"]["achieved_bps"] <= 1.05 * payload_bps


def test_links_in_namespaces_may_be_paced_instead(tmp_path: Path) -> None:
    document = json_of(pdemu(*RUN, "--shaping", "paced", "--json", "--duration", "0.5", "--out", tmp_path / "o"))
    assert (document["launcher"], document["shaping"]) == ("netns", "paced")


def test_what_sigkill_leaves_is_removed_by_clean_and_a_run_in_progress_is_not(tmp_path: Path) -> None:
    before = _namespaces()
    killed, living = (_started(tmp_path / name) for name in ("killed", "living"))
    children = children_of(killed.pid)
    try:
        killed.kill()
        killed.communicate(timeout=20)
        assert all_gone(children, within_s=10)
        everything = _namespaces() - before
        assert len(everything) == 2 * 5, "router, client, two nodes and the hub of each run"
        cleaned = pdemu("clean")
        assert cleaned.returncode == 0, cleaned.stderr
        left = _namespaces() - before
        assert len(left) == 5
        assert all(name in cleaned.stdout for name in everything - left)
        assert living.poll() is None
    finally:
        living.terminate()
        living.communicate(timeout=20)
        pdemu("clean")
    assert _namespaces() == before


def test_kernel_shaping_on_loopback_is_refused_with_the_ways_out() -> None:
    refused = pdemu("run", SMALL, "--deployment", "1P1D", "--shaping", "kernel")
    assert refused.returncode == 2
    assert "--launcher netns" in refused.stderr
    assert "--shaping paced" in refused.stderr


def _started(out: Path) -> subprocess.Popen[bytes]:
    """A long run under way in its namespaces."""
    command = [*PDEMU, *map(str, RUN), "--duration", "60", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    assert eventually((out / "1P1D@0.2Gbps" / "logs" / "client.log").exists), "the run did not start"
    return process
