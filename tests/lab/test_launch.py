"""Who is named when a run's processes are late."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from emulator.core.errors import DeadlineError
from emulator.lab import launch
from emulator.lab.launch import Child, ProcessLauncher
from emulator.lab.sites import Site
from emulator.live.status import Ready
from tests.builders import load_plan, pair, run_spec


def _launcher(*names: str) -> ProcessLauncher:
    """A launcher with children of these names, of which nothing has been heard."""
    loop = asyncio.get_running_loop()
    launcher = ProcessLauncher(
        run_spec(pair(), load_plan()), cast(Site, None), Path("logs"), 0, 0, False, on_progress=lambda _: None
    )
    nobody = cast(asyncio.subprocess.Process, None)
    launcher.children = [Child(name, nobody, Path(), loop.create_future(), loop.create_future()) for name in names]
    return launcher


async def test_a_client_that_waits_for_a_node_is_not_the_one_that_is_late() -> None:
    launcher = _launcher("prefill-0", "decode-0", "client")
    launcher.children[0].ready.set_result(Ready())
    with pytest.raises(DeadlineError, match=r"^decode-0 did not start within 0 s"):
        await launcher._settle([child.ready for child in launcher.children], 0.0, "start")
    launcher.children[1].ready.set_result(Ready())
    with pytest.raises(DeadlineError, match=r"^client did not start within 0 s"):
        await launcher._settle([child.ready for child in launcher.children], 0.0, "start")


async def test_a_lost_node_that_is_silent_still_is_named_and_one_that_ends_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "STOP_S", 0.0)
    launcher = _launcher("prefill-0", "decode-0")
    launcher.children[0].done.set_result(None)
    with pytest.raises(DeadlineError, match=r"^decode-0: silent for 5 s, so lost by the router, and silent still"):
        await launcher._settle_silent(launcher.children)
    launcher.children[1].done.set_result(None)
    await launcher._settle_silent(launcher.children)
