"""The devices of a comparison in words: what its steps were computed on, and which runs had nodes share one."""

from __future__ import annotations

from collections.abc import Sequence

from emulator.core.device_use import DeviceUse, listed
from emulator.core.run_summary import RunSummary


def device_lines(runs: Sequence[RunSummary]) -> list[str]:
    """One sentence for each piece of hardware, naming all nodes that computed on it, and for each calibration.

    None for virtual devices.
    """
    on: dict[tuple[str, str, str], dict[str, None]] = {}
    for use in (run.device for run in runs):
        for node in use.nodes:
            on.setdefault((use.kind, node.description, node.device_id), {})[node.node] = None
    lines = [f"Device {kind}: {listed(list(nodes))} on {what}" for (kind, what, _), nodes in on.items()]
    calibrations = dict.fromkeys(run.device.calibration for run in runs if run.device.calibration is not None)
    return lines + [f"Steps planned by {used.file}: {used.device}, {used.measured_at}" for used in calibrations]


def sharing_lines(use: DeviceUse) -> list[str]:
    """The stamps of a run whose nodes shared a device, and how much that stretched their steps."""
    return [*use.stamps(), *use.contention()]
