"""The part of the lock file that goes into an image."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_kernels_are_compiled_without_the_large_libraries() -> None:
    """What tests install, and what an image with CUDA installs, come from one file."""
    found = _subset("--lock", "requirements-cuda12.lock", "cupy-cuda12x", "nvidia-cuda-nvrtc-cu12").stdout
    assert _names(found) == {"cupy-cuda12x", "cuda-pathfinder", "numpy", "nvidia-cuda-nvrtc-cu12"}


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_what_an_extra_adds_agrees_with_the_rest(extra: str) -> None:
    """Both files are installed one after the other, so they pin what they share alike."""

    def pins(name: str) -> dict[str, str]:
        return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE))

    rest, added = pins("requirements.lock"), pins(f"requirements-{extra}.lock")
    assert {f"cupy-{extra}x"} <= added.keys()
    assert any(name.startswith("nvidia-cublas") for name in added)
    assert all(rest[name] == pin for name, pin in added.items() if name in rest)


def test_a_package_that_is_not_locked_is_refused() -> None:
    refused = _subset("no-such-package")
    assert refused.returncode == 1
    assert "not in requirements.lock: no-such-package" in refused.stderr
