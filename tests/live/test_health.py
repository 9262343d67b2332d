"""The health check of a member: what it wrote down when it was ready still answers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from emulator.live import health

pytestmark = pytest.mark.live


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this member's health is noted."""
    path = tmp_path / "health.json"
    monkeypatch.setenv(health.FILE_ENV, str(path))
    return path


def test_a_member_that_is_not_ready_is_not_well(file: Path) -> None:
    assert "not ready" in (health.problem() or "")


def test_a_member_is_well_while_its_ports_answer(file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        health.write([endpoint], "")
        assert health.problem() is None
    assert f"{endpoint} does not answer" in (health.problem() or "")


@pytest.mark.netns
def test_a_link_that_should_be_shaped_and_is_not_is_found(file: Path) -> None:
    health.write([], "127.0.0.1")
    assert "not shaped in both directions" in (health.problem() or "")


def test_nothing_is_written_where_nobody_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(health.FILE_ENV, raising=False)
    health.write(["tcp://127.0.0.1:1"], "")
