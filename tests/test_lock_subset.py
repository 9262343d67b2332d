"""The part of the lock file that goes into an image."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _subset(*packages: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "lock_subset.py"), *packages]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def _names(entries: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+)==", entries, re.MULTILINE))


def test_a_package_brings_what_it_needs_with_its_hashes() -> None:
    found = _subset("rich").stdout
    assert _names(found) == {"rich", "markdown-it-py", "mdurl", "pygments"}
    assert found.count("--hash=sha256:") >= 2 * 4


def test_the_projects_own_dependencies_come_without_development() -> None:
    found = _names(_subset().stdout)
    assert {"pyzmq", "msgspec", "numpy", "typer"} <= found
    assert not found & {"pytest", "ruff", "mypy", "hatchling", "hypothesis"}


def test_entries_stand_as_in_the_lock_file() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert all(entry in lock for entry in re.split(r"^(?=[a-z])", _subset("plotly").stdout, flags=re.MULTILINE))


def test_a_package_that_is_not_locked_is_refused() -> None:
    refused = _subset("no-such-package")
    assert refused.returncode == 1
    assert "no-such-package" in refused.stderr
