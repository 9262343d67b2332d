"""A real GPU: steps keep their length on it, rates reach what was measured, and whoever shares it is felt."""

from __future__ import annotations

import functools

import msgspec
import pytest

from emulator.core.calibration import Calibration
from emulator.core.errors import PdemuError
from emulator.core.time_budget import TimeBudget
from emulator.lab.calibrate import measured_alone
from emulator.lab.interference import measure_interference
from emulator.lab.measured_device import measured_device, open_device
from emulator.lab.measuring import Bench, Clock, Plan
from emulator.lab.paced_steps import measure_steps
from emulator.lab.rivals import rival
from emulator.live.cuda import CudaBackend, open_cuda
from emulator.live.timers import sharpen_timers

pytestmark = pytest.mark.gpu

STEP_ERROR = 0.02
RATE_SHARE = 0.85
FELT = 1.3
"""Somebody else's GEMMs in another process make ours take longer by half at least; a third is told apart from noise."""


@pytest.fixture(scope="module")
def bench(gpu: CudaBackend) -> Bench:
    sharpen_timers()
    plan = Plan(60.0, most=5, beside_s=0.02, step_targets_s=(5e-3, 20e-3, 50e-3, 200e-3))
    return Bench(gpu, plan, Clock(), lambda _: None)


def within(bench: Bench, seconds: float) -> TimeBudget:
    return TimeBudget(bench.clock.now_s() + seconds, bench.clock.now_s)


@pytest.fixture(scope="module")
def calibration(bench: Bench) -> Calibration:
    found = measured_alone(bench, "cuda", within(bench, 8))
    steps = tuple(measure_steps(bench, within(bench, 12), found.unit_times()))
    return msgspec.structs.replace(found, steps=steps)


def test_steps_from_5_ms_on_keep_their_length(calibration: Calibration) -> None:
    assert len(calibration.steps) == 16
    for step in calibration.steps:
        assert abs(step.error.median) <= STEP_ERROR, step


def test_reads_and_gemms_of_steps_reach_what_was_measured(calibration: Calibration) -> None:
    ceilings = {"prefill": calibration.gemm_tflops("low-toggle"), "decode": calibration.copy_gb_per_s("within")}
    assert {step.activity for step in calibration.steps} == {"prefill", "decode"}
    for step in calibration.steps:
        ceiling = ceilings[step.activity]
        assert ceiling is not None
        assert step.rate is not None
        assert step.rate.median >= RATE_SHARE * ceiling, step


def test_whoever_shares_the_gpu_from_another_process_is_felt(bench: Bench) -> None:
    open_rival = functools.partial(rival, open_backend=measured_device("cuda", 0).open)
    cells = {
        (cell.sharing, cell.activity, cell.beside): cell.slowdown.median
        for cell in measure_interference(bench, within(bench, 60), open_rival)
    }
    assert cells["two processes", "prefill", "prefill"] > FELT
    assert cells["two processes", "decode", "decode"] > FELT


def test_memory_that_is_too_little_is_said_in_one_line() -> None:
    with pytest.raises(PdemuError) as refused:
        open_cuda(0, 8 << 20).close()
    assert len(str(refused.value).splitlines()) == 1


def test_a_gpu_that_is_not_there_is_said_in_one_line() -> None:
    with pytest.raises(PdemuError, match="999") as refused:
        open_device("cuda", 999)
    assert len(str(refused.value).splitlines()) == 1
