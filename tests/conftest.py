"""What tests may need of the machine; with CI=true what CI is meant to have must be there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from emulator.__main__ import SINGLE_THREADED

for _name in SINGLE_THREADED:  # as for the command, and before anything imports NumPy
    os.environ.setdefault(_name, "1")

settings.register_profile("all", deadline=None)  # on top of the default, or of hypothesis's own profile for CI
settings.register_profile("quick", settings.get_profile("all"), max_examples=25)  # of 100; see tests.examples
settings.load_profile("all")  # unless --hypothesis-profile says otherwise

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
    """Why no GPU can be used here, or None; asked of the driver, since CuPy is slow to load."""
    from emulator.core.device_spec import DeviceSpec
    from emulator.core.errors import ConfigError
    from emulator.lab.devices import check_device

    try:
        check_device(DeviceSpec(kind="cuda"), "local")
    except ConfigError as error:
        return f"no GPU: {error}"
    return None


def _nvrtc_problem() -> str | None:
    """Why CUDA kernels cannot be compiled here, or None."""
    try:
        import cupy

        cupy.cuda.nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        return f"no CuPy with CUDA's run-time compiler: {str(error).strip().splitlines()[0]}; see `make nvrtc`"
    return None


_PROBLEMS = {
    "live": _live_problem,
    "netns": _netns_problem,
    "compose": _compose_problem,
    "gpu": _gpu_problem,
    "nvrtc": _nvrtc_problem,
}
_REQUIRED_IN_CI = {"live"} | ({"nvrtc"} if sys.platform == "linux" else set())
if sys.platform == "linux" and os.geteuid() == 0:
    _REQUIRED_IN_CI |= {"netns"}
if os.environ.get("PDEMU_TEST_COMPOSE") == "required":  # whoever runs CI has brought up an engine for it
    _REQUIRED_IN_CI |= {"compose"}


_LIVE = frozenset({"live"})
"""The marks of tests with processes or sockets that wait for what is to come, however slow a neighbour makes it."""

_ALONE = frozenset({"alone", "netns", "compose", "gpu"})
"""The marks of tests that a neighbour would disturb: they judge times, or use what this machine has but once."""

_STAGES = ("virtual", "live", "alone")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stage", choices=_STAGES, help="only the tests of this stage: see tools/test.sh")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the other stages' tests out; skip what cannot run here, unless this is CI and it has to."""
    stage = config.getoption("--stage")
    if stage is not None:
        config.hook.pytest_deselected(items=[item for item in items if _stage(item) != stage])
        items[:] = [item for item in items if _stage(item) == stage]
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


def _stage(item: pytest.Item) -> str:
    marks = {marker.name for marker in item.iter_markers()}
    if marks & _ALONE:
        return "alone"
    return "live" if marks & _LIVE else "virtual"
