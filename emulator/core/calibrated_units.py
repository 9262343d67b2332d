"""The unit times of a calibration as the nodes of a run are given them: figures, whatever became of the file."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from emulator.core.errors import ConfigError
from emulator.core.step_work import UnitTimes


class CalibrationUsed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which calibration steps were planned by: its file's name, the device that was measured, and when."""

    file: str
    device: str
    measured_at: str


class CalibratedUnits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a unit of work takes on a `device` of this kind; `mn` are M and N of its GEMMs, `file` has no folder."""

    file: str
    kind: str
    device: str
    measured_at: str
    mn: int
    units: UnitTimes

    @property
    def used(self) -> CalibrationUsed:
        """Which calibration it is, without figures."""
        return CalibrationUsed(file=self.file, device=self.device, measured_at=self.measured_at)

    def check_kind(self, kind: str) -> None:
        """Raise ConfigError for another kind of device."""
        if kind != self.kind:
            raise ConfigError(
                f"calibration {self.file}: is of device {self.kind}, and steps are to run on {kind}; "
                f"calibrate with --device {kind}, or leave the calibration out"
            )

    def check_device(self, whose: str, device: str) -> None:
        """Raise ConfigError where `whose` device is another one by its description, drivers included."""
        if device != self.device:
            raise self._of_another(whose, device)

    def check_hardware(self, whose: str, name: str) -> None:
        """The same where the name of the hardware alone is known, with which a description begins."""
        if self.device != name and not self.device.startswith(f"{name} ("):
            raise self._of_another(whose, name)

    def check_gemms(self, whose: str, mn: int, ks: Collection[int]) -> None:
        """Raise ConfigError for GEMMs that a device does not have."""
        if mn != self.mn or not {k for k, _ in self.units.gemm_s} <= set(ks):
            raise ConfigError(
                f"calibration {self.file}: has GEMMs that {whose} does not know; calibrate anew with this version"
            )

    def _of_another(self, whose: str, device: str) -> ConfigError:
        return ConfigError(
            f"calibration {self.file}: was measured on {self.device}, and {whose} has {device}; "
            "calibrate that, or leave the calibration out"
        )
