"""What a device was measured to do: the file that `pdemu calibrate` writes, and what follows from it.

Rates are 1e12 FLOP/s and 1e9 bytes/s. Every figure is a spread over repeated measurements.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from emulator.core import strict, toml_text
from emulator.core.calibrated_units import CalibratedUnits
from emulator.core.errors import ConfigError
from emulator.core.step_shape import MIXED_NORM
from emulator.core.step_work import UnitTimes, usable_gemms

Operands = Literal["random", "low-toggle"]
"""What GEMMs multiply: random numbers cost most power, so their rate is what real prefill can reach; numbers of which
few bits toggle keep the clocks steady, and pace steps."""

Direction = Literal["out", "in", "within"]
"""From device to pinned host memory, back, and from device memory to device memory."""

Activity = Literal["prefill", "decode", "copy"]
"""GEMMs, reads of device memory, and copies to pinned host memory."""
ACTIVITIES: tuple[Activity, ...] = ("prefill", "decode", "copy")

Sharing = Literal["one stream", "two streams", "two processes"]
"""How two activities share the device: in turn on one stream, side by side on two of one process, or of two."""
SHARINGS: tuple[Sharing, ...] = ("one stream", "two streams", "two processes")

Loop = Literal["open", "closed"]
"""Whether the work of a step stays as planned or is corrected by a moving average (`core.step_scale`)."""

FORMAT: Literal[1] = 1
"""Of the file. Another one is not read: a calibration is quickly made anew."""
LARGEST_NORM = 32.0
DIGITS = 6

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all parts of a calibration."""


class Spread(_Strict, frozen=True):
    """The median, least and largest of `n` measurements of one figure."""

    median: float
    min: float
    max: float
    n: _Count

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """The spread of at least one sample, to six digits."""
        median, least, largest = (
            float(f"{value:.{DIGITS}g}") for value in (statistics.median(samples), min(samples), max(samples))
        )
        return cls(median=median, min=least, max=largest, n=len(samples))


class GemmRate(_Strict, frozen=True):
    """Products of (mn × k) by (k × mn), back to back."""

    k: _Count
    operands: Operands
    tflops: Spread


class ReadRate(_Strict, frozen=True):
    """Streaming reads of device memory; `launch_us` is what one costs beside its bytes."""

    gb_per_s: Spread
    launch_us: Spread


class FillTime(_Strict, frozen=True):
    """The small arithmetic kernel: one iteration of it, and what a launch costs beside its iterations."""

    iteration_us: Spread
    launch_us: Spread


class CopyRate(_Strict, frozen=True):
    """Copies in one direction. Within the device every byte that is copied counts twice: it is read and written."""

    direction: Direction
    gb_per_s: Spread


class LaunchTime(_Strict, frozen=True):
    """A kernel that computes next to nothing: by the device's clock one after another, which is as fast as the slower
    of device and host is, and the call on the host that enqueues it."""

    device_us: Spread
    call_us: Spread


class StepAccuracy(_Strict, frozen=True):
    """Steps of one length alone on the device, of GEMMs (prefill) or reads (decode).

    `error` is how much longer than its target a step took, to its end; `work_error` the same of its work alone against
    what was planned of it, before padding; `rate` what that work reached (prefill TFLOP/s, decode GB/s), null where it
    has none; `factor` the closed loop's correction at the end.
    """

    activity: Literal["prefill", "decode"]
    loop: Loop
    target_ms: _Positive
    error: Spread
    work_error: Spread
    rate: Spread | None = None
    factor: _Positive = 1.0


class Interference(_Strict, frozen=True):
    """How many times longer `activity` takes while `beside` runs without a pause."""

    sharing: Sharing
    activity: Activity
    beside: Activity
    slowdown: Spread


class MixedPoint(_Strict, frozen=True):
    """GEMMs of so many tokens and a read of device memory: each alone, and both at once on two streams."""

    tokens: _Count
    gemm_ms: Spread
    read_ms: Spread
    together_ms: Spread


class MixedSteps(_Strict, frozen=True):
    """What mixed steps cost beside their parts; `norm` is the p of the p-norm that fits these points best."""

    norm: _Positive
    points: tuple[MixedPoint, ...]


class Calibration(_Strict, frozen=True):
    """One device, measured; what is missing is said in `left_out`. `mn` are M and N of its GEMMs.

    `device_id` is a digest, as in the manifest of a run (see `core.device_use`).
    """

    format: Literal[1]
    pdemu: str
    kind: str
    device: str
    device_id: str
    driver: str
    measured_at: str
    quick: bool
    limit_s: _Positive
    took_s: _NotNegative
    mn: _Count
    left_out: tuple[str, ...] = ()
    read: ReadRate | None = None
    fill: FillTime | None = None
    launch: LaunchTime | None = None
    gemms: tuple[GemmRate, ...] = ()
    copies: tuple[CopyRate, ...] = ()
    steps: tuple[StepAccuracy, ...] = ()
    interference: tuple[Interference, ...] = ()
    mixed: MixedSteps | None = None

    def unit_times(self) -> UnitTimes:
        """What steps are planned by; raises ConfigError where the calibration ended before it was measured."""
        paced = [gemm for gemm in self.gemms if gemm.operands == "low-toggle"]
        if not paced or self.read is None or self.fill is None:
            missing = [
                name for name, found in (("gemms", paced), ("read", self.read), ("fill", self.fill)) if not found
            ]
            raise ConfigError(
                f"the calibration of {self.device} has no {' and '.join(missing)}: steps cannot be planned by it; "
                "calibrate with a longer --limit"
            )
        try:
            return self._unit_times(paced, self.read, self.fill)
        except (ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"steps cannot be planned by the calibration of {self.device}: {error}") from None

    def units_in(self, file: str) -> CalibratedUnits:
        """What steps are planned by, for a run that is told of the file of this name; raises as `unit_times` does."""
        return CalibratedUnits(
            file=file,
            kind=self.kind,
            device=self.device,
            measured_at=self.measured_at,
            mn=self.mn,
            units=self.unit_times(),
        )

    def _unit_times(self, paced: Sequence[GemmRate], read: ReadRate, fill: FillTime) -> UnitTimes:
        return UnitTimes(
            gemm_s=tuple((gemm.k, self._gemm_s(gemm)) for gemm in paced),
            fill_s=fill.iteration_us.median * 1e-6,
            fill_launch_s=fill.launch_us.median * 1e-6,
            read_bytes_per_s=read.gb_per_s.median * 1e9,
            read_launch_s=read.launch_us.median * 1e-6,
        )

    def _gemm_s(self, gemm: GemmRate) -> float:
        return gemm_flops(self.mn, self.mn, gemm.k) / (gemm.tflops.median * 1e12)

    def gemm_tflops(self, operands: Operands) -> float | None:
        """The fastest with such operands of the GEMMs that steps use."""
        paced = [gemm for gemm in self.gemms if gemm.operands == "low-toggle"]
        used = {k for k, _ in usable_gemms((gemm.k, self._gemm_s(gemm)) for gemm in paced)}
        rates = [
            gemm.tflops.median for gemm in self.gemms if gemm.operands == operands and (gemm.k in used or not used)
        ]
        return max(rates, default=None)

    def copy_gb_per_s(self, direction: Direction) -> float | None:
        """The rate of copies in a direction."""
        return next((copy.gb_per_s.median for copy in self.copies if copy.direction == direction), None)


def gemm_flops(rows: int, columns: int, k: int) -> float:
    """A product of (rows × k) by (k × columns): a multiplication and an addition for each of its terms."""
    return 2.0 * rows * columns * k


def fit_norm(points: Sequence[tuple[float, float, float]]) -> float:
    """p with which (gemm^p + read^p)^(1/p) comes nearest to `together`, by least squares of relative errors.

    From 1 (the parts take turns) to 32 (the longer part alone), in steps of a hundredth.
    """
    norms = np.arange(100, round(LARGEST_NORM * 100) + 1) / 100
    errors = np.zeros_like(norms)
    for gemm, read, together in points:
        longer, ratio = max(gemm, read), min(gemm, read) / max(gemm, read)
        errors += (longer * (1 + ratio**norms) ** (1 / norms) / together - 1) ** 2
    return float(norms[int(np.argmin(errors))])


def norm_error(point: MixedPoint, norm: float = MIXED_NORM) -> float:
    """What a p-norm of the parts says of a mixed step, over what was measured, less 1."""
    gemm, read = point.gemm_ms.median, point.read_ms.median
    joined: float = (gemm**norm + read**norm) ** (1 / norm)
    return joined / point.together_ms.median - 1


# --- the file -----------------------------------------------------------------------------------------------------


def to_toml(calibration: Calibration) -> str:
    """The calibration as a file; `parse` reads it back as it was. What was not measured is not in it."""
    return toml_text.document(_without_null(msgspec.to_builtins(calibration)))


def parse(text: str, where: str) -> Calibration:
    """Read a calibration; raises ConfigError naming `where`, the key and what is allowed."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    if (found := data.get("format")) != FORMAT:
        what = f"is no calibration of format {FORMAT}" if found is None else f"has format {found!r}, and not {FORMAT}"
        raise ConfigError(f"{where}: {what}, which this version reads; calibrate anew by `pdemu calibrate`")
    return strict.convert(data, Calibration, where)


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(below) for key, below in value.items() if below is not None}
    if isinstance(value, list | tuple):
        return [_without_null(below) for below in value]
    return value
