"""`pdemu calibrate`, as a user types it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from emulator.lab.calibration_files import read_calibration
from emulator.live.device_lock import LOCKS_ENV
from tests.in_process import Pdemu
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
