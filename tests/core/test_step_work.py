"""Work of a step: it takes what was asked for, on any device, however prefill and decode share it."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.step_work import MOST_GEMM_S, StepWork, UnitTimes, plan_work, work_s

H200_LIKE = UnitTimes(
    gemm_s=((512, 26e-6), (1024, 50e-6), (4096, 196e-6)),
    fill_s=0.8e-6,
    fill_launch_s=3e-6,
    read_bytes_per_s=4e12,
    read_launch_s=4e-6,
)
KINDS = ("prefill", "decode", "mixed")
Device = Callable[[random.Random], UnitTimes]


def _gpu(rng: random.Random) -> UnitTimes:
    shortest_s = rng.uniform(25e-6, 60e-6)
    return UnitTimes(
        gemm_s=((512, shortest_s), (1024, shortest_s * rng.uniform(1.5, 2)), (4096, shortest_s * rng.uniform(3, 4))),
        fill_s=rng.uniform(0.05e-6, 1e-6),
        fill_launch_s=rng.uniform(2e-6, 5e-6),
        read_bytes_per_s=rng.uniform(0.3e12, 8e12),
        read_launch_s=rng.uniform(2e-6, 5e-6),
    )


def _cpu(rng: random.Random) -> UnitTimes:
    shortest_s = rng.uniform(50e-6, 1e-3)
    return UnitTimes(
        gemm_s=((512, shortest_s), (1024, shortest_s * rng.uniform(1.5, 2.2)), (4096, shortest_s * rng.uniform(4, 8))),
        fill_s=rng.uniform(0.1e-6, 3e-6),
        fill_launch_s=rng.uniform(0.5e-6, 10e-6),
        read_bytes_per_s=rng.uniform(2e9, 40e9),
        read_launch_s=rng.uniform(0.5e-6, 10e-6),
    )


def _split(rng: random.Random, total_s: float, kind: str) -> tuple[float, float]:
    """Shares down to a thousandth, so that either part may be too short to be launched."""
    part = {"prefill": 1.0, "decode": 0.0, "mixed": rng.choice([rng.random(), 10 ** rng.uniform(-3, 0)])}[kind]
    if kind == "mixed" and rng.random() < 0.5:
        part = 1.0 - part
    return part * total_s, (1.0 - part) * total_s


def _seconds_of_gemms(work: StepWork, units: UnitTimes) -> float:
    return work_s(StepWork(work.gemms), units)


@pytest.mark.parametrize("device", [_gpu, _cpu])
def test_ten_thousand_steps_from_a_fifth_of_a_millisecond_to_two_seconds_are_met_within_one_percent(
    device: Device,
) -> None:
    rng = random.Random(1)
    for n in range(10_000):
        units, total_s = device(rng), 0.2e-3 * 10 ** rng.uniform(0, 4)
        prefill_s, decode_s = _split(rng, total_s, KINDS[n % len(KINDS)])
        work = plan_work(prefill_s, decode_s, units)
        assert abs(work_s(work, units) / total_s - 1.0) < 0.01, (units, prefill_s, decode_s)


@given(
    prefill_s=st.floats(0, 2) | st.floats(0, 2e-5),
    decode_s=st.floats(0, 2) | st.floats(0, 2e-5),
    seed=st.integers(0, 1_000),
    device=st.sampled_from([_gpu, _cpu]),
)
def test_a_step_is_met_to_half_an_iteration_or_is_shorter_than_a_launch(
    prefill_s: float, decode_s: float, seed: int, device: Device
) -> None:
    units = device(random.Random(seed))
    work, total_s = plan_work(prefill_s, decode_s, units), prefill_s + decode_s
    if work == StepWork():
        assert total_s <= max(units.read_launch_s, units.fill_launch_s) + units.fill_s / 2
        return
    byte_s = 1 / units.read_bytes_per_s
    assert work_s(work, units) == pytest.approx(total_s, abs=units.fill_s / 2 + byte_s, rel=1e-12)
    assert work.fill_iterations > 0 or work.gemms == ()
    assert min([work.fill_iterations, work.read_bytes, *(times for _, times in work.gemms)]) >= 0


@given(prefill_s=st.floats(1e-4, 2), decode_s=st.floats(1e-4, 2))
def test_prefill_is_arithmetic_and_decode_is_reading(prefill_s: float, decode_s: float) -> None:
    work = plan_work(prefill_s, decode_s, H200_LIKE)
    assert work_s(work._replace(read_bytes=0), H200_LIKE) == pytest.approx(prefill_s, abs=H200_LIKE.fill_s)
    assert work_s(StepWork(read_bytes=work.read_bytes), H200_LIKE) == pytest.approx(decode_s, abs=H200_LIKE.fill_s)
    assert plan_work(0.0, decode_s, H200_LIKE)[:2] == ((), 0)
    assert plan_work(prefill_s, 0.0, H200_LIKE).read_bytes == 0


def test_whole_gemms_are_all_but_the_rest_the_longest_first() -> None:
    work = plan_work(0.1, 0.0, H200_LIKE)
    assert work.gemms == ((4096, 510), (512, 1))
    assert _seconds_of_gemms(work, H200_LIKE) > 0.1 - 26e-6 - 2 * 3e-6


def test_gemms_that_keep_others_waiting_are_used_only_where_there_is_nothing_shorter() -> None:
    slow = msgspec.structs.replace(H200_LIKE, gemm_s=((512, 150e-6), (1024, 290e-6), (4096, 1.1e-3)))
    assert [k for k, _ in plan_work(1.0, 0.0, slow).gemms] == [512]
    assert slow.gemm_s[0][1] <= MOST_GEMM_S < slow.gemm_s[1][1]
    slower = msgspec.structs.replace(H200_LIKE, gemm_s=((4096, 40e-3), (512, 5e-3)))
    assert plan_work(1.0, 0.0, slower).gemms == ((512, 199),)
    assert plan_work(0.004, 0.0, slower).gemms == ()


def test_a_device_without_gemms_computes_by_the_small_kernel_alone() -> None:
    units = msgspec.structs.replace(H200_LIKE, gemm_s=())
    assert plan_work(3e-6 + 800e-6, 0.0, units) == StepWork(fill_iterations=1_000)


def test_what_is_too_short_for_its_launch_is_done_by_the_other_or_left_to_the_pad() -> None:
    computed = plan_work(1e-3, 3.9e-6, H200_LIKE)
    assert computed.read_bytes == 0
    assert work_s(computed, H200_LIKE) == pytest.approx(1.0039e-3, abs=0.5e-6)
    read = plan_work(3e-6, 1e-3, H200_LIKE)
    assert (read.gemms, read.fill_iterations) == ((), 0)
    assert read.read_bytes == pytest.approx(0.999e-3 * 4e12, rel=1e-9)
    for nothing in ((0.0, 0.0), (3e-6, 0.0), (0.0, 3.9e-6)):
        assert plan_work(*nothing, H200_LIKE) == StepWork()


@pytest.mark.parametrize(
    "wrong",
    [
        {"fill_s": 0.0},
        {"read_bytes_per_s": -1.0},
        {"gemm_s": ((512, 0.0),)},
        {"fill_launch_s": -1e-6},
        {"read_launch_s": float("nan")},
        {"fill_s": float("nan")},
        {"fill_s": 1e-300},
        {"read_bytes_per_s": 1e300},
    ],
    ids=str,
)
def test_unit_times_that_nothing_can_take_are_refused(wrong: dict[str, object]) -> None:
    asked = msgspec.structs.asdict(H200_LIKE) | wrong
    with pytest.raises(ValueError, match="must"):
        UnitTimes(**asked)
    if "nan" not in str(wrong):
        with pytest.raises(msgspec.ValidationError, match="must"):
            msgspec.json.decode(msgspec.json.encode(asked), type=UnitTimes)
