"""The [device] of a topology: what it may say, and what processes are given of it."""

from __future__ import annotations

from typing import Any

import pytest

from emulator.core import strict
from emulator.core.device_spec import DevicePlan, DeviceSpec
from emulator.core.errors import ConfigError
from emulator.core.quantities import Bytes
from emulator.core.spec_base import Spec
from tests.core.test_calibrated_units import CALIBRATED


class Lab(Spec, frozen=True, kw_only=True):
    """As much of a topology as has a device."""

    device: DeviceSpec


def _device(**data: Any) -> DeviceSpec:
    return strict.convert({"device": data}, Lab, "lab.toml").device


def test_what_is_said_reaches_the_plan() -> None:
    device = _device(kind="cuda", memory="20GiB", gpus=[1, 0], allow_shared_gpu=True)
    assert device.plan() == DevicePlan(kind="cuda", memory_bytes=20 * 2**30, gpus=(1, 0), allow_shared_gpu=True)
    assert device.plan().computes
    assert DeviceSpec().plan() == DevicePlan()
    assert not DevicePlan().computes


def test_a_node_measures_its_device_unless_it_is_calibrated() -> None:
    calibrated = _device(kind="cuda", calibration="h200.toml").plan(CALIBRATED)
    assert calibrated.calibration == CALIBRATED
    assert [plan.measures for plan in (DevicePlan(), DevicePlan(kind="cuda"), calibrated)] == [False, True, False]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"kind": "gpu"}, ["device.kind", "'gpu'", "virtual, numpy, cuda"]),
        ({"memory": "1GB"}, ["memory is for devices that compute", '"numpy" or "cuda"']),
        ({"allow_shared_gpu": True}, ["allow_shared_gpu is for devices that compute"]),
        ({"calibration": "c.toml"}, ["calibration is for devices that compute", '"numpy" or "cuda"']),
        ({"kind": "numpy", "gpus": [0]}, ["gpus are CUDA devices", 'kind = "cuda"']),
        ({"kind": "cuda", "gpus": [-1]}, ["device.gpus[0] = -1", ">= 0"]),
        ({"kind": "cuda", "gpus": []}, ["device.gpus", ">= 1"]),
        ({"kind": "cuda", "gpus": [0, 10**20]}, ["device.gpus[1]"]),
        ({"kind": "cuda", "gpus": [1024]}, ["device.gpus[0] = 1024", "<= 1023"]),
        ({"kind": "cuda", "memory": "20"}, ["device.memory", "unit is missing"]),
        ({"kind": "cuda", "memory": "0GB"}, ["device.memory", "greater than 0"]),
        ({"kind": "cuda", "gpu": 0}, ["unknown key 'gpu'", "did you mean 'gpus'"]),
    ],
)
def test_a_key_that_would_be_ignored_or_misread_is_refused(data: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        _device(**data)
    for part in expected:
        assert part in str(refused.value)


def test_a_node_in_a_container_has_gpu_0_and_shares_it_with_whom_it_is_planned_to() -> None:
    plan = DevicePlan(kind="cuda", gpus=(3, 0, 1))
    assert [plan.gpu_of(number) for number in range(4)] == [3, 0, 1, 3]
    for number in range(4):
        seen = plan.seen_from(number, 4, 0)
        sharers = [other for other in range(4) if seen.gpu_of(other) == 0]
        assert sharers == ([0, 3] if number in (0, 3) else [number])
    assert [DevicePlan(kind="cuda").gpu_of(number) for number in range(3)] == [0, 1, 2]
    assert DevicePlan(kind="cuda", gpus=(5,)).seen_from(1, 2, 0).gpus == (0, 0)
    assert [plan.seen_from(number, 4, 0).of_node(number).gpus for number in range(4)] == [(0,)] * 4
    assert DevicePlan(kind="cuda").of_node(1).gpus == ()


def test_another_kind_keeps_the_limits_that_it_has_too_and_no_calibration() -> None:
    cuda = _device(kind="cuda", memory="20GiB", gpus=[1, 0], allow_shared_gpu=True, calibration="h200.toml")
    assert cuda.of_kind("cuda") is cuda
    assert cuda.of_kind("numpy") == DeviceSpec(kind="numpy", memory=Bytes(20 * 2**30), allow_shared_gpu=True)
    assert cuda.of_kind("virtual") == DeviceSpec()
