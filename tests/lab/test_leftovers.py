"""State files, and what `clean` does with them: only what belongs to dead runs, only by recorded name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from emulator.core.errors import ConfigError
from emulator.lab.leftovers import (
    STATE_DIR_ENV,
    ComposeProject,
    Ledger,
    Leftovers,
    Process,
    Remover,
    clean,
    end_process,
    identify,
    is_alive,
    new_run_id,
    state_folder,
)


class FakeKernel:
    """Namespaces, projects and processes that can be removed, or refuse to be."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.stubborn: set[str] = set()

    @property
    def remover(self) -> Remover:
        """Removers of what this kernel has."""
        return Remover(
            process=lambda process: self._remove(f"pid {process.pid}"),
            namespace=self._remove,
            compose=lambda compose: self._remove(compose.project),
        )

    def _remove(self, name: str) -> bool:
        if name in self.stubborn:
            raise OSError(16, "device or resource busy")
        there = name in self.names
        self.names.discard(name)
        return there


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own."""
    monkeypatch.setenv(STATE_DIR_ENV, str(tmp_path / "state"))
    return state_folder()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, until it is ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def dead() -> Process:
    """A process that was."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = identify(process.pid)
        process.kill()
    assert found is not None
    return found


def living() -> Process:
    """This process."""
    found = identify(os.getpid())
    assert found is not None
    return found


def record(folder: Path, run_id: str, owner: Process, *namespaces: str, **fields: object) -> Path:
    """Write a run's state file."""
    path = folder / f"{run_id}.json"
    leftovers = msgspec.structs.replace(Leftovers(run_id, owner, 1.0, namespaces), **fields)
    path.write_bytes(msgspec.json.encode(leftovers))
    return path


def test_a_ledger_holds_what_was_noted_until_it_is_gone(state: Path) -> None:
    ledger = Ledger.open("run-1")
    path = state / "run-1.json"
    ledger.note_namespace("a", "b")
    ledger.note_link("l")
    ledger.note_compose("project", Path("/x/docker-compose.yml"))
    found = msgspec.json.decode(path.read_bytes(), type=Leftovers)
    assert is_alive(found.owner)
    assert found.owner.pid == os.getpid()
    assert (found.namespaces, found.links) == (("a", "b"), ("l",))
    assert found.compose == ComposeProject("project", "/x/docker-compose.yml")
    ledger.close()
    ledger.drop_namespace("a")
    ledger.drop_namespace("b")
    ledger.close()
    assert path.exists(), "the project is still up"
    ledger.drop_compose()
    ledger.close()
    ledger.close()
    assert list(state.iterdir()) == []


def test_a_ledger_stays_while_a_process_of_its_run_lives(state: Path, sleeper: subprocess.Popen[bytes]) -> None:
    ledger = Ledger.open("run-1")
    ledger.note_process(sleeper.pid)
    ledger.close()
    assert (state / "run-1.json").exists()
    sleeper.kill()
    sleeper.wait()
    ledger.note_process(sleeper.pid)
    ledger.close()
    assert list(state.iterdir()) == []


def test_a_run_id_is_given_once(state: Path) -> None:
    ledger = Ledger.open("run-1")
    with pytest.raises(ConfigError, match=r"'run-1' is taken by .*run-1\.json"):
        Ledger.open("run-1")
    assert [path.name for path in state.iterdir()] == ["run-1.json"]
    ledger.close()
    Ledger.open("run-1").close()


@pytest.mark.parametrize("run_id", ["", "A", "../x", "a b", "-a", "a" * 49, "a/b", "a.b"])
def test_a_run_id_that_cannot_stand_in_names_is_refused(run_id: str) -> None:
    with pytest.raises(ConfigError, match="run id"):
        Ledger.open(run_id)


@pytest.mark.parametrize("name", ["quickstart", "Two pools, 1Gbps!", "", "x" * 200, "--"])
def test_new_run_ids_are_valid_and_differ(name: str) -> None:
    first, second = new_run_id(name), new_run_id(name)
    assert first != second
    Ledger.open(first).close()


def test_clean_removes_what_a_dead_run_left_and_only_once(state: Path, dead: Process) -> None:
    kernel = FakeKernel("ns-a", "ns-b", "ns-of-somebody", "project", "pid 7")
    path = record(
        state,
        "killed",
        dead,
        "ns-a",
        "ns-b",
        links=("l",),
        compose=ComposeProject("project", "/x.yml"),
        processes=(Process(7, 1.0),),
    )
    assert clean(kernel.remover) == [
        "removed process 7 of run killed",
        "removed network namespace ns-a of run killed",
        "removed network namespace ns-b of run killed",
        "removed compose project project of run killed",
    ]
    assert kernel.names == {"ns-of-somebody"}
    assert not path.exists()
    assert clean(kernel.remover) == []


def test_clean_leaves_runs_in_progress_alone(state: Path, dead: Process, sleeper: subprocess.Popen[bytes]) -> None:
    other = identify(sleeper.pid)
    assert other is not None
    kernel = FakeKernel("ns-dead", "ns-other", "ns-own")
    record(state, "dead", dead, "ns-dead")
    record(state, "other", other, "ns-other")
    Ledger.open("own").note_namespace("ns-own")
    assert clean(kernel.remover) == ["removed network namespace ns-dead of run dead"]
    assert kernel.names == {"ns-other", "ns-own"}
    assert sorted(path.name for path in state.iterdir()) == ["other.json", "own.json"]


def test_a_recycled_pid_is_not_the_owner(state: Path) -> None:
    own = living()
    kernel = FakeKernel("ns")
    record(state, "killed", Process(own.pid, own.started_s - 60.0), "ns")
    assert clean(kernel.remover) == ["removed network namespace ns of run killed"]


def test_a_process_of_which_only_the_exit_status_is_left_is_dead(sleeper: subprocess.Popen[bytes]) -> None:
    found = identify(sleeper.pid)
    assert found is not None
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(found)


def test_what_is_gone_already_needs_no_line(state: Path, dead: Process) -> None:
    path = record(state, "killed", dead, "ns")
    assert clean(FakeKernel().remover) == []
    assert not path.exists()


def test_what_will_not_go_is_reported_and_tried_again(state: Path, dead: Process) -> None:
    kernel = FakeKernel("ns-a", "ns-b")
    kernel.stubborn = {"ns-a"}
    path = record(state, "killed", dead, "ns-a", "ns-b")
    assert clean(kernel.remover) == [
        "left network namespace ns-a of run killed: [Errno 16] device or resource busy",
        "removed network namespace ns-b of run killed",
    ]
    assert path.exists()
    kernel.stubborn = set()
    assert clean(kernel.remover) == ["removed network namespace ns-a of run killed"]
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"{", b'{"run_id":"x"}', b"[1]", b"\xff\xfe"])
def test_a_corrupt_state_file_is_reported_and_left(state: Path, dead: Process, content: bytes) -> None:
    corrupt = state / "corrupt.json"
    corrupt.write_bytes(content)
    record(state, "killed", dead, "ns")
    lines = clean(FakeKernel("ns").remover)
    assert lines[0].startswith(f"left {corrupt}: not a state file that can be read (")
    assert lines[1:] == ["removed network namespace ns of run killed"]
    assert corrupt.read_bytes() == content


def test_without_an_engine_a_compose_project_is_left_and_told_how_to_remove(
    state: Path, dead: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    path = record(state, "killed", dead, compose=ComposeProject("project", "/x.yml"))
    (line,) = clean()
    assert "docker compose -p project down" in line
    assert path.exists()


def test_clean_ends_the_recorded_process_itself(state: Path, dead: Process, sleeper: subprocess.Popen[bytes]) -> None:
    found = identify(sleeper.pid)
    assert found is not None
    earlier = Process(found.pid, found.started_s - 60.0)
    assert not end_process(earlier), "that one had the pid before"
    assert sleeper.poll() is None
    record(state, "killed", dead, processes=(earlier, found))
    assert clean() == [f"removed process {sleeper.pid} of run killed"]
    assert sleeper.wait() == -9


def test_a_state_folder_that_others_may_write_to_is_refused(state: Path) -> None:
    state.chmod(0o777)
    with pytest.raises(ConfigError, match="cannot be trusted"):
        clean()
    with pytest.raises(ConfigError, match="cannot be trusted"):
        Ledger.open("run-1")


def test_a_state_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(STATE_DIR_ENV, str(tmp_path / "file" / "state"))
    with pytest.raises(ConfigError, match="cannot be used"):
        clean()


def test_a_user_without_root_has_a_state_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATE_DIR_ENV)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    uid = os.geteuid()
    if uid == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(ConfigError, match="belongs to somebody else"):
            state_folder()
    else:
        assert state_folder() == tmp_path / "pdemu"
    assert [path.name for path in tmp_path.iterdir() if path.name != "state"] == ["pdemu"]
