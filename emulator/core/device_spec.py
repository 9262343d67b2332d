"""Which device runs the steps of a run's nodes, and within which limits."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from emulator.core.quantities import Bytes
from emulator.core.spec_base import Spec

DeviceName = Literal["virtual", "numpy", "cuda"]


class DeviceSpec(Spec, frozen=True, kw_only=True):
    """`virtual` keeps the cost model's time without computing; `numpy` and `cuda` compute, and hold KV in their memory.

    Each node may take `memory` of its device, by default what is free (shared by the nodes that are on it). `gpus` are
    the CUDA devices of the nodes in turn, by default all that are visible; they begin anew when there are fewer than
    nodes. Nodes that share a device contend: no verdict is made of such runs unless `allow_shared_gpu`.
    """

    kind: DeviceName = "virtual"
    memory: Bytes | None = None
    gpus: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    allow_shared_gpu: bool = False


class DevicePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A `DeviceSpec` as processes are given it."""

    kind: DeviceName = "virtual"
    memory_bytes: int | None = None
    gpus: tuple[int, ...] = ()
    allow_shared_gpu: bool = False

    @property
    def computes(self) -> bool:
        """Whether steps are real work, and KV lies in named blocks of the device's memory."""
        return self.kind != "virtual"
