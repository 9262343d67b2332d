"""What hardware computed the steps of a run, which nodes shared a piece of it, and how much that stretched their steps.

Nodes on one device contend, as roles on one GPU do: their steps take longer than modelled, each when the other one
computes. No bound on lateness can hold then; how much longer they took is told instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from emulator.core.calibrated_units import CalibrationUsed
from emulator.core.device_spec import DeviceName, DevicePlan
from emulator.core.records import StepRecord


class NodeDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a node computed on, by its own word.

    `device_id` is the same for all on one piece of hardware. In what is written down it is a digest, which does not
    tell whose hardware that is.
    """

    node: str
    device_id: str
    description: str


class SharedDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A piece of hardware on which several nodes computed.

    `stretch_p50` and `stretch_p99` are percentiles of what their steps took over what was planned; null without steps.
    """

    description: str
    nodes: tuple[str, ...]
    stretch_p50: float | None = None
    stretch_p99: float | None = None


class DeviceUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The devices of a run: their kind, what each node computed on, what was shared, and what steps were planned by.

    A virtual device is nobody's. Without a `calibration` nodes measured their devices themselves.
    """

    kind: DeviceName = "virtual"
    nodes: tuple[NodeDevice, ...] = ()
    shared: tuple[SharedDevice, ...] = ()
    sharing_allowed: bool = False
    calibration: CalibrationUsed | None = None

    @property
    def contending(self) -> frozenset[str]:
        """The nodes that did not have their device for themselves."""
        return frozenset(name for shared in self.shared for name in shared.nodes)

    @property
    def hardware(self) -> str:
        """GPU or CPU."""
        return "GPU" if self.kind == "cuda" else "CPU"

    def sharing(self) -> list[str]:
        """`prefill-0 and decode-0 compute on one NVIDIA H200`, for each device that is shared."""
        return [f"{listed(shared.nodes)} compute on one {shared.description}" for shared in self.shared]

    def objections(self) -> list[str]:
        """Why nothing may be concluded from a run whose nodes shared a device without being allowed to."""
        if self.sharing_allowed:
            return []
        own = "a GPU" if self.kind == "cuda" else "a machine"
        cure = f"give each {own} of its own, or use --allow-shared-gpu"
        return [f"{shares}; their steps stretch each other; {cure}" for shares in self.sharing()]

    def stamps(self) -> list[str]:
        """What must be said beside every number of a run whose nodes were allowed to share a device."""
        if not self.sharing_allowed:
            return []
        return [f"SHARED {self.hardware}: {shares}; their steps stretch each other" for shares in self.sharing()]

    def contention(self) -> list[str]:
        """How much longer than planned the steps took, for each device that is shared."""
        return [
            f"steps of {listed(shared.nodes)} took {shared.stretch_p50:.2f} times as long as planned at the median, "
            f"{shared.stretch_p99:.2f} times at p99"
            for shared in self.shared
            if shared.stretch_p50 is not None
        ]


def device_use(plan: DevicePlan, nodes: Iterable[NodeDevice], steps: Sequence[StepRecord]) -> DeviceUse:
    """What the nodes of a run say they computed on, with the nodes that have one `device_id` put together."""
    if not plan.computes:
        return DeviceUse()
    known = tuple(msgspec.structs.replace(node, device_id=device_digest(node.device_id)) for node in nodes)
    on: dict[str, list[NodeDevice]] = {}
    for node in known:
        if node.device_id:
            on.setdefault(node.device_id, []).append(node)
    shared = [group for group in on.values() if len(group) > 1]
    stretches = _stretches(steps) if shared else {}
    return DeviceUse(
        kind=plan.kind,
        nodes=known,
        shared=tuple(_shared(group, stretches) for group in shared),
        sharing_allowed=plan.allow_shared_gpu,
        calibration=plan.calibration.used if plan.calibration is not None else None,
    )


def foreseen_sharing(plan: DevicePlan, nodes: Sequence[str], gpus: int | None) -> list[str]:
    """What will be shared, as far as it is known before a run on one machine that has so many `gpus` (None: enough).

    Nothing of what is allowed to be.
    """
    if not plan.computes or plan.allow_shared_gpu:
        return []
    on: dict[str, list[str]] = {}
    for number, node in enumerate(nodes):
        gpu = plan.gpu_of(number) if plan.gpus or gpus is None else number % gpus
        on.setdefault(f"GPU {gpu}" if plan.kind == "cuda" else "CPU", []).append(node)
    return [
        f"{listed(group)} will compute on one {hardware}: their steps stretch each other, and no verdict is made of it "
        "without --allow-shared-gpu"
        for hardware, group in on.items()
        if len(group) > 1
    ]


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def device_digest(device_id: str) -> str:
    """What stands for a `device_id` in files: the same for the same hardware, and it does not tell whose that is."""
    return hashlib.blake2s(device_id.encode(), digest_size=4).hexdigest() if device_id else ""


def _shared(group: Sequence[NodeDevice], stretches: Mapping[str, Sequence[float]]) -> SharedDevice:
    taken = [stretch for node in group for stretch in stretches.get(node.node, ())]
    p50, p99 = np.percentile(taken, (50, 99)).tolist() if taken else (None, None)
    return SharedDevice(
        description=group[0].description, nodes=tuple(node.node for node in group), stretch_p50=p50, stretch_p99=p99
    )


def _stretches(steps: Sequence[StepRecord]) -> dict[str, list[float]]:
    """What each node's steps took over what was planned."""
    found: dict[str, list[float]] = {}
    for step in steps:
        if (planned_s := step.whole_planned_s) > 0:
            found.setdefault(step.node, []).append((step.end_s - step.start_s) / planned_s)
    return found
