"""A calibration's unit times as nodes are given them: of this device, or refused in one line."""

from __future__ import annotations

import msgspec
import pytest

from emulator.core.calibrated_units import CalibratedUnits, CalibrationUsed
from emulator.core.errors import ConfigError
from emulator.core.step_work import UnitTimes

H200 = "NVIDIA H200 (driver 570.1, CUDA 12.8)"
UNITS = UnitTimes(
    gemm_s=((512, 30e-6), (1024, 60e-6)), fill_s=1e-6, fill_launch_s=5e-6, read_bytes_per_s=4e12, read_launch_s=5e-6
)
CALIBRATED = CalibratedUnits(
    file="h200.toml", kind="cuda", device=H200, measured_at="2026-11-30T07:00:00+00:00", mn=4096, units=UNITS
)


def test_what_is_recorded_of_it_has_no_figures() -> None:
    assert CALIBRATED.used == CalibrationUsed(file="h200.toml", device=H200, measured_at="2026-11-30T07:00:00+00:00")


def test_it_travels_as_it_is() -> None:
    assert msgspec.json.decode(msgspec.json.encode(CALIBRATED), type=CalibratedUnits) == CALIBRATED


def test_its_own_device_is_accepted() -> None:
    CALIBRATED.check_kind("cuda")
    CALIBRATED.check_device("prefill-0", H200)
    CALIBRATED.check_hardware("GPU 0 here", "NVIDIA H200")
    CALIBRATED.check_gemms("prefill-0", 4096, (512, 1024, 4096))


def test_another_device_is_refused_with_both_named() -> None:
    with pytest.raises(ConfigError, match=r"h200\.toml: is of device cuda, .* run on numpy; calibrate with .*numpy"):
        CALIBRATED.check_kind("numpy")
    for device in ("NVIDIA H200 (driver 580.0, CUDA 13.0)", "NVIDIA H200 NVL (driver 570.1, CUDA 12.8)"):
        with pytest.raises(ConfigError) as refused:
            CALIBRATED.check_device("prefill-0", device)
        text = str(refused.value)
        assert text.startswith(f"calibration h200.toml: was measured on {H200}, and prefill-0 has {device}; calibrate")
        assert "\n" not in text
    for name in ("NVIDIA H200 NVL", "NVIDIA H20", "H200"):
        with pytest.raises(ConfigError, match=f"GPU 0 here has {name};"):
            CALIBRATED.check_hardware("GPU 0 here", name)


@pytest.mark.parametrize(("mn", "ks"), [(128, (512, 1024)), (4096, (512,)), (4096, ())])
def test_gemms_that_a_device_does_not_have_are_refused(mn: int, ks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="GEMMs that decode-0 does not know; calibrate anew"):
        CALIBRATED.check_gemms("decode-0", mn, ks)
