"""Opening the device that a node's steps run on: which piece of hardware, how much memory of it, and how fast it is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from emulator.core.calibrated_units import CalibratedUnits
from emulator.core.kv_content import KvContent
from emulator.core.run_spec import NodeSpec, RunSpec
from emulator.core.scaling import Scaling
from emulator.core.step_work import UnitTimes
from emulator.live.backend import Backend, KvStore
from emulator.live.compute import ComputeDevice, Hardware
from emulator.live.device import Device, StepDone, StepProgress, VirtualDevice
from emulator.live.device_lock import Patience, device_lock
from emulator.live.numpy_device import NumpyBackend, NumpyKvStore
from emulator.live.status import Assignment
from emulator.live.unit_times import measure_units

OPEN_S = 30.0
"""What opening one device may take: on a GPU, CuPy and CUDA's libraries are loaded from a cold disk."""
TELL_AFTER_S = 2.0
"""Nodes that measure one device in turn wait for each other, so that a wait is worth a word from here on."""


def open_limit_s(run: RunSpec) -> float:
    """How long a node of the run may take to open its device; where nodes measure one, they may do so in turn."""
    return OPEN_S * (len(run.nodes) if run.device.measures else run.device.computes)


async def open_device(
    task: Assignment,
    node: NodeSpec,
    *,
    step_done: StepDone,
    step_progress: StepProgress,
    failed: Callable[[Exception], None],
    waiting: Callable[[str], None] = lambda _: None,
) -> Device:
    """The device of a node of the run, ready to use.

    `failed` is told on the running loop what goes wrong with it later, `waiting` in a sentence what is waited for.
    Raises ConfigError for a device that is not here or was not the one calibrated, CapacityError for memory that it
    does not have, DeadlineError for one that another process measures for too long.
    """
    loop, run = asyncio.get_running_loop(), task.run
    if not run.device.computes:
        return VirtualDevice(loop, step_done, step_progress, node.name)
    opening = _numpy if run.device.kind == "numpy" else _cuda
    open_backend, open_store, sharers = await asyncio.to_thread(opening, task, node)  # which may load CuPy

    def open_hardware(stop: threading.Event) -> Hardware:
        backend = open_backend()

        def told() -> None:
            what = f"{node.name}: waits for {backend.description}, which another process measures"
            loop.call_soon_threadsafe(waiting, f"{what}; for {limit_s:g} s at most")

        limit_s = open_limit_s(run)
        patience = Patience(limit_s, told, TELL_AFTER_S, stop)
        try:
            units = unit_times(backend, run.device.calibration, node.name, patience)
            return Hardware(backend, units, open_store(backend))
        except BaseException:
            backend.close()
            raise

    device = ComputeDevice(
        loop,
        open_hardware,
        step_done=step_done,
        step_progress=step_progress,
        failed=failed,
        scaling=Scaling(run.scale),
        alone=sharers == 1,
        name=node.name,
    )
    await device.opened()
    return device


def unit_times(backend: Backend, calibration: CalibratedUnits | None, node: str, patience: Patience) -> UnitTimes:
    """What units of work take on a device, which is warm then: as calibrated, else measured in half a second.

    Raises ConfigError for a calibration of another device, DeadlineError when others measure it for too long.
    """
    if calibration is None:
        with device_lock(backend.device_id, patience, f"{node}: {backend.description}"):
            backend.warm_up()
            return measure_units(backend)
    calibration.check_kind(backend.name)
    calibration.check_device(node, backend.description)
    calibration.check_gemms(node, backend.mn, backend.gemm_ks)
    backend.warm_up(calibration.units)
    return calibration.units


def gpu_of(run: RunSpec, node: str, gpus: tuple[int, ...]) -> int:
    """The GPU of a node: the nodes take them in turn, and begin anew when there are fewer."""
    return gpus[[other.name for other in run.nodes].index(node) % len(gpus)]


_Opening = tuple[Callable[[], Any], Callable[..., KvStore], int]
"""How to open a backend and, on it, a KV store, and how many nodes of the run are known to use the same hardware."""


def _numpy(task: Assignment, node: NodeSpec) -> _Opening:
    store = partial(
        NumpyKvStore,
        block_bytes=task.run.wire_block_bytes(node),
        expected_bytes=task.expected_kv_bytes,
        limit_bytes=min(task.host_memory_bytes, task.run.device.memory_bytes or task.host_memory_bytes),
        content=KvContent(task.run.seed),
        node=node.name,
    )
    return partial(NumpyBackend, node.name), store, len(task.run.nodes)


def _cuda(task: Assignment, node: NodeSpec) -> _Opening:
    from emulator.live.cuda import CudaKvStore, open_cuda, visible_gpus  # noqa: PLC0415 - CuPy is there for few

    run, plan = task.run, task.run.device
    gpus = plan.gpus or tuple(range(visible_gpus()))
    gpu = gpu_of(run, node.name, gpus)
    sharers = [gpu_of(run, other.name, gpus) for other in run.nodes].count(gpu)
    store = partial(
        CudaKvStore,
        block_bytes=run.wire_block_bytes(node),
        expected_bytes=task.expected_kv_bytes,
        content=KvContent(run.seed),
        node=node.name,
        scale_bytes=run.scale.bytes,
    )
    return partial(open_cuda, gpu, plan.memory_bytes, sharers), store, sharers
