"""`pdemu calibrate`, as a user types it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from emulator.cli import calibrate as cli
from emulator.lab.calibration_files import read_calibration
from emulator.live.device_lock import LOCKS_ENV
from tests.in_process import Pdemu
from tests.lab.test_calibrate import measured
from tests.live.lab import eventually


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--device", "virtual"], ["--device virtual", "choose cuda or numpy"]),
        (["--device", "numpy", "--gpu", "1"], ["--gpu 1", "--device cuda"]),
        (["--device", "numpy", "--limit", "1s"], ["--limit 1s", "from 5 s"]),
        (["--device", "numpy", "--limit", "long"], ["--limit", "not a time"]),
        (
            ["--device", "numpy", "--out", "no/such/folder/c.toml"],
            ["--out no/such/folder/c.toml", "folder that exists"],
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(options: list[str], expected: list[str], pdemu: Pdemu) -> None:
    pdemu("calibrate", *options).check_refusal(expected)


@pytest.mark.skipif(sys.platform == "win32", reason="FIFOs")
def test_what_is_no_regular_file_is_refused_before_measuring_and_left_as_it_is(tmp_path: Path, pdemu: Pdemu) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    for path in (fifo, link, tmp_path):
        pdemu("calibrate", "--device", "numpy", "--out", path).check_refusal([f"--out {path}", "not a regular file"])
    assert fifo.is_fifo()
    assert link.is_symlink()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_where_no_file_can_be_made_that_is_said_before_measuring(pdemu: Pdemu) -> None:
    pdemu("calibrate", "--device", "numpy", "--out", "/proc/c.toml").check_refusal(["--out /proc/c.toml", "cannot be"])


def test_a_file_that_cannot_be_written_after_all_costs_no_figures(
    tmp_path: Path, pdemu: Pdemu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "c.toml")

    monkeypatch.setattr(cli, "calibrate", lambda *_: measured()[0])
    monkeypatch.setattr(cli, "write_calibration", full)
    ended = pdemu("calibrate", "--device", "numpy", "--out", tmp_path / "c.toml")
    assert ended.code == 1
    assert "Interference" in ended.out
    assert "No space left on device" in ended.err.splitlines()[-1]


def test_a_link_is_written_through(tmp_path: Path, pdemu: Pdemu, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "kept" / "file.toml", tmp_path / "link.toml"
    file.parent.mkdir()
    link.symlink_to(file)
    found, _ = measured()
    monkeypatch.setattr(cli, "calibrate", lambda *_: found)
    assert pdemu("calibrate", "--device", "numpy", "--out", link).code == 0
    assert link.is_symlink()
    assert read_calibration(file) == found
    assert [path.name for path in file.parent.iterdir()] == ["file.toml"]


@pytest.mark.live
@pytest.mark.alone
@pytest.mark.slow
def test_a_table_on_standard_output_progress_beside_and_a_file(
    tmp_path: Path, pdemu: Pdemu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCKS_ENV, str(tmp_path))  # nobody is waited for
    path = tmp_path / "here.toml"
    ended = pdemu("calibrate", "--device", "numpy", "--quick", "--limit", "20s", "--out", path)
    assert ended.code == 0
    for heading in ("Alone", "Interference"):
        assert heading in ended.out
    assert [line.split(",")[0] for line in ended.err.splitlines()[:4]] == [
        "1/4 rates",
        "2/4 steps",
        "3/4 interference",
        "4/4 mixed steps",
    ]
    found = read_calibration(path)
    assert found.quick
    assert found.took_s <= 20.0


@pytest.mark.live
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupt_leaves_nothing_running_and_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "emulator", "calibrate", "--device", "numpy", "--quick", "--limit", "20s"]
    with subprocess.Popen([*command, "--out", tmp_path / "c.toml"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("3/4"):
            assert process.poll() is None
        own = psutil.Process(process.pid)
        assert eventually(lambda: bool(own.children(recursive=True)))  # the second process of the interference
        children = own.children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().strip().splitlines()[-1] == "pdemu: interrupted"
        assert process.wait() == 130
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not list(tmp_path.iterdir())
