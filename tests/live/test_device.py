"""The virtual device on a real event loop: what it tells within a step, and when at the earliest."""

from __future__ import annotations

import asyncio
import time

import pytest

from emulator.live.device import DeviceStep, VirtualDevice


async def _run(steps: list[tuple[list[float], float]]) -> list[tuple[str, float]]:
    """What the device tells of steps one after the other, given by offsets from now, and when (from now too)."""
    told: list[tuple[str, float]] = []
    ended = asyncio.Event()
    began_s = time.monotonic()
    left = list(steps)

    def begin() -> None:
        within_s, end_s = left.pop(0)
        device.run(DeviceStep(began_s + end_s, [began_s + at_s for at_s in within_s]))

    def progress(passed: int) -> None:
        told.append((f"passed {passed}", time.monotonic() - began_s))

    def done(woke_s: float, slipped_s: float) -> None:
        assert slipped_s == 0.0
        told.append(("done", woke_s - began_s))
        begin() if left else ended.set()

    device = VirtualDevice(asyncio.get_running_loop(), done, progress, "test")
    try:
        begin()
        await asyncio.wait_for(ended.wait(), 10.0)
    finally:
        device.close()
    return told


def test_a_step_tells_its_progress_in_order_and_then_its_end_never_early() -> None:
    steps = [([0.004, 0.008, 0.012], 0.016), ([], 0.020), ([0.024], 0.028)]
    told = asyncio.run(_run(steps))
    assert [what for what, _ in told] == ["passed 1", "passed 2", "passed 3", "done", "done", "passed 1", "done"]
    due_s = [0.004, 0.008, 0.012, 0.016, 0.020, 0.024, 0.028]
    assert all(at_s >= due for (_, at_s), due in zip(told, due_s, strict=True))


def test_instants_that_are_past_are_told_at_once_and_in_order() -> None:
    told = asyncio.run(_run([([-3.0, -2.0], -1.0), ([-0.5], 0.0)]))
    assert [what for what, _ in told] == ["passed 1", "passed 2", "done", "passed 1", "done"]


@pytest.mark.parametrize("within_s", [[], [0.02]])
def test_a_closed_device_tells_nothing_more(within_s: list[float]) -> None:
    async def closed() -> list[float]:
        told: list[float] = []
        loop = asyncio.get_running_loop()
        device = VirtualDevice(loop, lambda woke_s, _: told.append(woke_s), told.append, "test")
        began_s = time.monotonic()
        device.run(DeviceStep(began_s + 0.03, [began_s + at_s for at_s in within_s]))
        device.close()
        await asyncio.sleep(0.06)
        return told

    assert asyncio.run(closed()) == []
