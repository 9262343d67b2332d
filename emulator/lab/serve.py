"""Serving: one deployment of a topology, kept up for others' requests; what came is judged in the end as a run is.

The run has no load of its own. What came is in the endpoint's report, as a plan that could be run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from emulator.core.compare_summary import CompareSummary
from emulator.core.deploy import plan_runs
from emulator.core.errors import ConfigError
from emulator.core.hardware import Catalog
from emulator.core.listen import Listen
from emulator.core.run_spec import RunSpec
from emulator.core.specs import Topology
from emulator.lab.experiment import (
    Conditions,
    Experiment,
    calibrated,
    conclude,
    launcher_for,
    perform,
)
from emulator.lab.kept_kv import granted_memory_bytes
from emulator.lab.launch import NO_LOAD, Launcher, ProcessLauncher, Service
from emulator.lab.run_folder import new_folder
from emulator.lab.sites import choose_shaping
from emulator.live.status import Interim


def prepare(
    topology: Topology,
    catalog: Catalog,
    how: Conditions,
    *,
    deployment: str,
    out: Path | None,
    metrics: Listen | None = None,
) -> Experiment:
    """Plan the one run and make its folder; from `metrics` on there must be an address for each process.

    Raises ConfigError or CapacityError for whatever a user has to mend.
    """
    shaping = choose_shaping(how.launcher, how.shaping)
    topology, calibration = calibrated(topology)
    runs = plan_runs(
        topology,
        catalog,
        NO_LOAD,
        deployments=[deployment],
        verify_kv=how.verify_kv,
        force=how.force,
        calibration=calibration,
    )
    if len(runs) != 1:
        raise ConfigError(f"{topology.name}, {deployment}: an endpoint serves one deployment; give one --kv-bandwidth")
    if metrics is not None:
        metrics.following(len(runs[0].nodes))
    granted = granted_memory_bytes(runs[0])
    folder = new_folder(out, topology.name)
    return Experiment(topology, tuple(runs), granted, (0,), how.launcher, shaping, folder)


def serve(experiment: Experiment, service: Service) -> CompareSummary:
    """Serve until SIGINT comes, then judge what was served; a second one interrupts (KeyboardInterrupt)."""
    try:
        return asyncio.run(_serve(experiment, service))
    except asyncio.CancelledError:  # which is what the second one does
        raise KeyboardInterrupt from None


def targets_file(urls: Mapping[str, str]) -> bytes:
    """Those who serve metrics, by name, as Prometheus reads it from a file (`file_sd_configs`)."""
    targets = [{"targets": [urlsplit(url).netloc], "labels": {"process": name}} for name, url in urls.items()]
    return msgspec.json.format(msgspec.json.encode(targets)) + b"\n"


async def _serve(experiment: Experiment, service: Service) -> CompareSummary:
    def launcher(
        prepared: Experiment, run: RunSpec, expected: int, logs: Path, on_progress: Callable[[Interim], None]
    ) -> Launcher:
        found = launcher_for(prepared, run, expected, logs, on_progress)
        assert isinstance(found, ProcessLauncher), "only processes of this machine are served by"
        return dataclasses.replace(found, service=service)

    with _told_by_interrupt(service.stop):
        results = await perform(experiment, lambda *_: None, lambda *_: None, launcher)
    return conclude(experiment, results)


@contextlib.contextmanager
def _told_by_interrupt(stop: asyncio.Event) -> Iterator[None]:
    """Within it, the first SIGINT sets `stop`, and the next one cancels this task; what is to be undone then is."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def told() -> None:
        if stop.is_set() and not task.cancelling():
            task.cancel()
        stop.set()

    loop.add_signal_handler(signal.SIGINT, told)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
