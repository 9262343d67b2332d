"""Which device runs the steps of a run's nodes, and within which limits."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from emulator.core.calibrated_units import CalibratedUnits
from emulator.core.quantities import Bytes
from emulator.core.spec_base import Spec

DeviceName = Literal["virtual", "numpy", "cuda"]
GpuNumber = Annotated[int, msgspec.Meta(ge=0, le=1023)]


class DeviceSpec(Spec, frozen=True, kw_only=True):
    """`virtual` keeps the cost model's time without computing; `numpy` and `cuda` compute, and hold KV in their memory.

    Each node may take `memory` of its device, by default an equal share of what is free for each node on it. `gpus` are
    the CUDA devices of the nodes in turn, by default all that are visible; they begin anew when there are fewer than
    nodes, and a number that is there twice is that of two nodes. `calibration` is a file of `pdemu calibrate`, by which
    steps are planned; without one each node measures what units of work take. Nodes that share a device contend: no
    verdict is made of such runs unless `allow_shared_gpu`.
    """

    kind: DeviceName = "virtual"
    memory: Bytes | None = None
    gpus: Annotated[tuple[GpuNumber, ...], msgspec.Meta(min_length=1)] | None = None
    allow_shared_gpu: bool = False
    calibration: str | None = None

    def __post_init__(self) -> None:
        computing = {
            "memory": self.memory is not None,
            "allow_shared_gpu": self.allow_shared_gpu,
            "calibration": self.calibration is not None,
        }
        if self.kind == "virtual" and any(computing.values()):
            key = next(key for key, given in computing.items() if given)
            raise ValueError(f'{key} is for devices that compute; set kind = "numpy" or "cuda", or leave it out')
        if self.kind != "cuda" and self.gpus:
            raise ValueError('gpus are CUDA devices; set kind = "cuda", or leave them out')

    def of_kind(self, kind: DeviceName) -> DeviceSpec:
        """Another kind of device, with what is no less true of it; a calibration is of one kind."""
        if kind == self.kind:
            return self
        if kind == "virtual":
            return DeviceSpec()
        return DeviceSpec(kind=kind, memory=self.memory, allow_shared_gpu=self.allow_shared_gpu)

    def plan(self, calibration: CalibratedUnits | None = None) -> DevicePlan:
        """What processes are given, with what the file `calibration` says."""
        return DevicePlan(
            kind=self.kind,
            memory_bytes=None if self.memory is None else int(self.memory),
            gpus=self.gpus or (),
            allow_shared_gpu=self.allow_shared_gpu,
            calibration=calibration,
        )


class DevicePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A `DeviceSpec` as processes are given it; without a `calibration` each node measures its device."""

    kind: DeviceName = "virtual"
    memory_bytes: int | None = None
    gpus: tuple[int, ...] = ()
    allow_shared_gpu: bool = False
    calibration: CalibratedUnits | None = None

    @property
    def computes(self) -> bool:
        """Whether steps are real work, and KV lies in named blocks of the device's memory."""
        return self.kind != "virtual"

    @property
    def measures(self) -> bool:
        """Whether nodes measure their device when they start, for which they must have it for themselves."""
        return self.computes and self.calibration is None

    def gpu_of(self, number: int) -> int:
        """The GPU of a run's node of this number where a machine is not asked what it has: one each, unless told."""
        return self.gpus[number % len(self.gpus)] if self.gpus else number

    def of_node(self, number: int) -> DevicePlan:
        """The plan as far as it is of a node of this number, whatever GPUs the others have."""
        return msgspec.structs.replace(self, gpus=(self.gpu_of(number),)) if self.gpus else self

    def seen_from(self, number: int, nodes: int, gpu: int) -> DevicePlan:
        """The plan for a node of this number whose GPU is number `gpu` where it is, as in a container of its own.

        The other nodes keep the GPUs that they share with it, and have others than it otherwise.
        """
        planned = [self.gpu_of(n) for n in range(nodes)]
        seen = tuple(gpu if other == planned[number] else gpu + 1 + other for other in planned)
        return msgspec.structs.replace(self, gpus=seen)
