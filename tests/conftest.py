"""What tests may need of the machine; with CI=true what CI is meant to have must be there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ("tests.in_process",)


def _live_problem() -> str | None:
    """Why processes on loopback cannot be run here, or None."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
        subprocess.run([sys.executable, "-c", ""], check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no processes or sockets on loopback: {error}"
    return None


def _netns_problem() -> str | None:
    """Why network namespaces with a shaped interface cannot be made here, or None."""
    if sys.platform != "linux":
        return "network namespaces are a feature of Linux"
    code = "from tests.live.namespaces import try_shaping; try_shaping()"
    root = Path(__file__).parent.parent
    tried = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=root, capture_output=True, text=True, timeout=30
    )
    if tried.returncode:
        return f"no network namespace with a token bucket: {tried.stderr.strip().splitlines()[-1]}"
    return None


def _compose_problem() -> str | None:
    """Why containers cannot be run here, or None."""
    from emulator.core.errors import ConfigError
    from emulator.lab.docker import compose_command

    try:
        compose_command()
    except ConfigError as error:
        return str(error)
    return None


def _gpu_problem() -> str | None:
    return "no CUDA device is used in these tests yet"


_PROBLEMS = {"live": _live_problem, "netns": _netns_problem, "compose": _compose_problem, "gpu": _gpu_problem}
_REQUIRED_IN_CI = {"live"} | ({"netns"} if sys.platform == "linux" and os.geteuid() == 0 else set())
if os.environ.get("PDEMU_TEST_COMPOSE") == "required":  # whoever runs CI has brought up an engine for it
    _REQUIRED_IN_CI |= {"compose"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here, unless this is CI and it has to."""
    problems = {
        name: problem() for name, problem in _PROBLEMS.items() if any(item.get_closest_marker(name) for item in items)
    }
    required = _REQUIRED_IN_CI if os.environ.get("CI") == "true" else set()
    for item in items:
        for name, problem in problems.items():
            if problem is None or item.get_closest_marker(name) is None:
                continue
            if name in required:
                raise pytest.UsageError(f"CI must be able to run tests marked {name!r}: {problem}")
            item.add_marker(pytest.mark.skip(reason=problem))
