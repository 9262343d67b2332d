"""Loop lag: a process that did not run owes the samples that it could not take."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from emulator.live.loop_lag import SAMPLE_INTERVAL_S, LoopLag, owed_samples


def test_a_sample_on_time_counts_from_when_it_was_posted() -> None:
    assert owed_samples(10.0, 10.0) == [10.0]
    assert owed_samples(10.0, 10.0 + 0.9 * SAMPLE_INTERVAL_S) == [10.0 + 0.9 * SAMPLE_INTERVAL_S]


def test_a_stall_counts_as_long_as_it_lasted() -> None:
    stall_s = 8.0
    owed = owed_samples(10.0, 10.0 + stall_s)
    lags = np.array([10.0 + stall_s - instant for instant in owed])
    assert len(owed) == pytest.approx(stall_s / SAMPLE_INTERVAL_S, abs=1)
    assert lags.max() == pytest.approx(stall_s)
    assert lags.mean() == pytest.approx(stall_s / 2, rel=0.02)
    quiet = np.zeros(20 * int(1 / SAMPLE_INTERVAL_S))
    assert np.percentile(np.concatenate([quiet, lags]), 99) > 2.0, "a stall of 8 s in a run of 28 s is seen"


async def test_what_is_kept_is_bounded_and_stands_for_all_of_the_time() -> None:
    lag = LoopLag(asyncio.get_running_loop(), most=100)
    now_s = time.monotonic()
    for n in range(10_000):
        lag._note([now_s - n])
        assert len(lag.samples_s) <= 100
    kept = np.round(lag.samples_s)
    assert len(kept) > 50
    assert len(set(np.diff(kept))) == 1, "evenly, from the first on"
    assert kept[0] == 0
    assert kept[-1] > 9_800
