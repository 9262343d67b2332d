"""Loop lag: a process that did not run owes the samples that it could not take."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.live.loop_lag import SAMPLE_INTERVAL_S, owed_samples


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
