"""Which GPU of the catalog a device is, by the name that its driver gives, and how much of its datasheet it reaches."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from emulator.core.calibration import Calibration
from emulator.core.hardware import Gpu

_OTHER_FORMS = ("pcie", "nvl", "laptop")
"""Forms of a GPU that are slower or faster than its namesake; a datasheet is of one form alone."""


class Share(NamedTuple):
    """A measured rate beside the datasheet's and beside the efficiency that the catalog has for the GPU."""

    what: str
    unit: str
    measured: float
    datasheet: float
    catalog: float | None

    @property
    def share(self) -> float:
        """Of the datasheet's figure."""
        return self.measured / self.datasheet


def find_gpu(device: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """The GPU that a device's name (`NVIDIA A100-SXM4-80GB`) means: all parts of its own name are in it; or None."""
    words = re.findall(r"[a-z0-9]+", device.casefold())
    words += ["".join(pair) for pair in itertools.pairwise(words)]
    for gpu in gpus:
        name, *others = re.findall(r"[a-z0-9]+", gpu.name.casefold())
        if name not in words or not all(any(word.startswith(other) for word in words) for other in others):
            continue
        source = gpu.source.casefold()
        if all(form in source for form in _OTHER_FORMS if form in words):
            return gpu
    return None


def shares(calibration: Calibration, gpu: Gpu) -> list[Share]:
    """GEMMs with random operands and reads of memory, as far as they were measured."""
    found = []
    if (tflops := calibration.gemm_tflops("random")) is not None:
        found.append(Share("GEMM, random operands", "TFLOP/s", tflops, gpu.bf16_dense_tflops, gpu.mfu_linear))
    if calibration.read is not None:
        found.append(Share("read", "GB/s", calibration.read.gb_per_s.median, gpu.memory_gb_per_s, gpu.mbu))
    return found
