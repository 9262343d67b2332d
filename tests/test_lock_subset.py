"""The part of the lock file that goes into an image."""

from __future__ import annotations

import re

import pytest

from tools.lock_subset import ROOT, subset

LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")


def _names(entries: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+)==", entries, re.MULTILINE))


def test_a_package_brings_what_it_needs_with_its_hashes() -> None:
    found = subset(LOCK, {"rich>=13.9"})
    assert {"rich", "markdown-it-py", "mdurl", "pygments"} <= _names(found)
    assert "pytest" not in _names(found)
    assert found.count("--hash=sha256:") >= 2 * len(_names(found))


def test_entries_stand_as_in_the_lock_file() -> None:
    assert all(entry in LOCK for entry in re.split(r"^(?=[a-z])", subset(LOCK, {"plotly>=6"}), flags=re.MULTILINE))


def test_a_package_that_is_not_locked_is_refused() -> None:
    with pytest.raises(SystemExit, match="no-such-package"):
        subset(LOCK, {"no-such-package"})
