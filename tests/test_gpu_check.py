"""The GPU acceptance: what it makes of what it finds, and that it ends in one line where there is no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emulator.lab.calibration_files import write_calibration
from tests.lab.test_calibrate import measured

ROOT = Path(__file__).parent.parent
TESTS = '<testsuites><testsuite tests="30" failures="{}" errors="0" skipped="2"/></testsuites>'
ITL_MS = {"colocated": (21.0, 160.0), "simulated": (21.0, 22.0), "shared": (23.0, 40.0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Everything as it is where all holds."""
    write_calibration(tmp_path / "calibration.toml", measured()[0])
    (tmp_path / "tests.xml").write_text(TESTS.format(0))
    (tmp_path / "steps.tsv").write_text("tests\t0\t20\tfine\ncalibrate\t0\t90\t\nshared\t\t0\tno time left\n")
    for run, (p50, p99) in ITL_MS.items():
        _write_itl(tmp_path, run, p50, p99)
    return tmp_path


def _write_itl(folder: Path, run: str, p50: float, p99: float) -> None:
    (folder / run).mkdir(exist_ok=True)
    summary = {"runs": [{"itl_ms": {"p50": p50, "p99": p99}}]}
    (folder / run / "summary.json").write_bytes(msgspec.json.encode(summary))


def summarized(folder: Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, str(ROOT / "tools" / "gpu_check_summary.py"), str(folder), "cuda", "110"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert ended.stdout == (folder / "summary.txt").read_text()
    return ended.returncode, msgspec.json.decode((folder / "summary.json").read_bytes())


def test_all_holds(folder: Path) -> None:
    status, found = summarized(folder)
    # The fake device copies within at 2,800 GB/s, read and written, and reads 3,000.
    assert [figure["holds"] for figure in found["figures"]] == [True] * 6
    assert (status, found["holds"]) == (0, True)
    assert [part["exit_status"] for part in found["parts"]] == [0, 0, None]


@pytest.mark.parametrize(
    ("missing", "figures"),
    [
        ("tests.xml", ["tests that failed"]),
        ("calibration.toml", ["steps of", "decode steps' reads", "prefill steps' GEMMs"]),
        ("colocated/summary.json", ["colocated"]),
        ("simulated/summary.json", ["1P1D"]),
    ],
)
def test_what_was_not_measured_does_not_hold(folder: Path, missing: str, figures: list[str]) -> None:
    (folder / missing).unlink()
    status, found = summarized(folder)
    assert status == 1
    missed = [figure["name"] for figure in found["figures"] if not figure["holds"]]
    assert len(missed) == len(figures)
    assert all(name.startswith(start) for name, start in zip(missed, figures, strict=True))


def test_failed_tests_and_contention_that_is_not_seen_do_not_hold(folder: Path) -> None:
    (folder / "tests.xml").write_text(TESTS.format(1))
    _write_itl(folder, "shared", 21.0, 22.0)
    status, found = summarized(folder)
    assert status == 1
    assert [figure["holds"] for figure in found["figures"]] == [False, True, True, True, True, False]


@pytest.mark.parametrize(
    ("status", "told"),
    [("124", "out of time after 110 s"), ("137", "killed after 110 s"), ("2", "exit 2 after 110 s"), ("", "")],
)
def test_tests_that_did_not_come_to_their_end_have_not_passed(folder: Path, status: str, told: str) -> None:
    """Whatever they had written until then."""
    (folder / "steps.tsv").write_text(f"tests\t{status}\t110\t!!! KeyboardInterrupt !!!\n")
    exit_status, found = summarized(folder)
    assert exit_status == 1
    first = found["figures"][0]
    assert (first["holds"], first["value"]) == (False, None)
    assert (told or "not run") in first["note"]


def test_the_tests_marked_gpu_are_in_the_files_that_are_run() -> None:
    """Those that mark one themselves, or take what another module of the tests has marked."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    marking = [path for path, text in texts.items() if "pytest.mark.gpu" in text and path != Path(__file__)]
    shared = [path.stem for path in marking if not path.name.startswith("test_")]
    users = [path for path, text in texts.items() if any(f"tests.live.{stem} import" in text for stem in shared)]
    files = {path for path in (*marking, *users) if path.name.startswith("test_")}
    listed = re.search(r"^gpu_tests=\((.*)\)$", (ROOT / "tools" / "gpu_check.sh").read_text(), re.MULTILINE)
    assert listed is not None
    assert {ROOT / name for name in listed[1].split()} == files


def test_tests_that_were_all_skipped_are_not_passed(folder: Path) -> None:
    (folder / "tests.xml").write_text(
        '<testsuites><testsuite tests="30" failures="0" errors="0" skipped="30"/></testsuites>'
    )
    assert summarized(folder)[0] == 1


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize(
    ("device", "expected"), [("cuda", "no GPU here: there is no nvidia-smi"), ("tpu", "must be cuda or numpy")]
)
def test_it_cannot_be_run_in_one_line_with_status_2(tmp_path: Path, device: str, expected: str) -> None:
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "date"):
        found = next(Path(folder) / tool for folder in os.get_exec_path() if (Path(folder) / tool).exists())
        (tmp_path / "bin" / tool).symlink_to(found)
    ended = subprocess.run(
        ["bash", ROOT / "tools" / "gpu_check.sh", tmp_path / "out"],
        env={"PATH": str(tmp_path / "bin"), "PDEMU_CHECK_DEVICE": device},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("gpu_check: ")
    assert expected in line
    assert not (tmp_path / "out").exists()
