"""The scale of steps on a device that drifts: it follows what lasts, and nothing that only disturbs."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.step_scale import HIGHEST, LEAST_PLANNED_S, LOWEST, StepScale

AIM_S = 0.025
NOISE = 0.01


class FakeDevice:
    """Takes `drift` times what its units took when they were measured, a little more or less, and what disturbs it."""

    def __init__(self, drift: float = 1.0, seed: int = 1) -> None:
        self.scale = StepScale()
        self.drift = drift
        self._rng = random.Random(seed)

    def run(self, steps: int, disturbed: Callable[[int], float] = lambda _: 1.0, *, told: bool = False) -> list[float]:
        """What steps that aim at `AIM_S` would have taken undisturbed and without noise, as shares of that.

        `disturbed` says by how much each takes longer, and the device knows it where it is `told`.
        """
        shares = []
        for n in range(steps):
            planned_s = AIM_S * self.scale.factor
            took_s = planned_s * self.drift * disturbed(n) * self._rng.gauss(1.0, NOISE)
            shares.append(planned_s * self.drift / AIM_S)
            self.scale.note(planned_s, took_s, alone=not (told and disturbed(n) != 1.0))
        return shares


def _every_third(n: int) -> float:
    return 1.3 if n % 3 == 0 else 1.0


def _in_bursts(n: int) -> float:
    return 1.3 if n % 60 < 20 else 1.0


def _assert_within(shares: list[float], share: float) -> None:
    assert max(abs(s - 1.0) for s in shares) < share


@given(drift=st.floats(-0.1, 0.1), seed=st.integers(0, 1_000_000))
def test_a_drift_is_followed_to_within_one_percent(drift: float, seed: int) -> None:
    device = FakeDevice(1.0 + drift, seed)
    device.run(240)
    _assert_within(device.run(500), 0.01)


@pytest.mark.parametrize("drift", [0.95, 1.05])
def test_a_drift_of_five_percent_is_followed_slowly(drift: float) -> None:
    device = FakeDevice()
    device.run(200)
    device.drift = drift
    begins, goes_on = device.run(10), device.run(200)
    assert fmean(begins) == pytest.approx(drift, abs=0.005), "a handful of steps is no reason"
    _assert_within(goes_on[-50:], 0.01)


@pytest.mark.parametrize("disturbed", [_every_third, _in_bursts])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("drift", [0.95, 1.0, 1.05])
def test_contention_for_a_third_of_the_steps_is_not_corrected(
    drift: float, disturbed: Callable[[int], float], told: bool
) -> None:
    device = FakeDevice(drift)
    device.run(200)
    _assert_within(device.run(600, disturbed, told=told), 0.01)


@given(seed=st.integers(0, 1_000_000), told=st.booleans())
def test_contention_at_random_does_not_keep_a_drift_from_being_followed(seed: int, told: bool) -> None:
    rng = random.Random(seed)
    longer = [1.3 if rng.random() < 1 / 3 else 1.0 for _ in range(900)]
    device = FakeDevice(1.05, seed)
    _assert_within(device.run(900, longer.__getitem__, told=told)[400:], 0.01)


def test_what_is_taken_for_a_drift_is_given_back_when_it_is_over() -> None:
    device = FakeDevice()
    device.run(300, lambda _: 1.08)
    assert device.scale.factor < 0.95, "nobody could tell it from a slower clock"
    device.run(200)
    _assert_within(device.run(100), 0.01)


def test_a_step_in_ten_that_takes_a_tenth_longer_hardly_counts() -> None:
    device = FakeDevice()
    _assert_within(device.run(1_000, lambda n: 1.1 if n % 10 == 0 else 1.0), 0.01)


@pytest.mark.parametrize("took", [0.0, -1.0, 1e-9, 10.0, 100.0])
def test_hiccups_and_clocks_that_stand_still_say_nothing(took: float) -> None:
    scale = StepScale()
    for _ in range(100):
        scale.note(AIM_S, took, alone=True)
    assert scale.factor == 1.0


def test_steps_of_a_few_milliseconds_and_steps_in_company_say_nothing() -> None:
    scale = StepScale()
    for _ in range(100):
        scale.note(LEAST_PLANNED_S * 0.99, LEAST_PLANNED_S * 1.04, alone=True)
        scale.note(AIM_S, AIM_S * 1.05, alone=False)
    assert scale.factor == 1.0
    scale.note(LEAST_PLANNED_S, LEAST_PLANNED_S * 1.05, alone=True)
    assert scale.factor < 1.0


@pytest.mark.parametrize(("slower", "bound", "inside"), [(1.0005, LOWEST, 0.88), (0.9995, HIGHEST, 1.14)])
def test_the_factor_is_bounded_and_comes_back_from_its_bound(slower: float, bound: float, inside: float) -> None:
    device = FakeDevice()
    for _ in range(1_500):
        device.drift *= slower
        device.run(1)
    assert device.scale.factor == pytest.approx(bound)
    device.drift = 1 / inside
    device.run(400)
    _assert_within(device.run(100), 0.01)
