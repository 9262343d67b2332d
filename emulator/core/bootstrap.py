"""The paired bootstrap: how sure a mean difference between two runs of the same requests is.

Pairing by request removes what the traffic itself varies (a long prompt is long on both sides), so that a hundred
requests can decide. Requests that arrive together share a queue, so their differences are not independent and the
intervals are somewhat narrow; a verdict therefore also asks that a difference be material.
"""

from __future__ import annotations

import numpy as np

from emulator.core.metrics import Floats

RESAMPLES = 2_000
SEED = 20_240_607
"""Fixed, so that the same records always give the same verdict."""

_MOST_UNITS = 2_000
_DRAWS_AT_ONCE = 2_000_000


def interval_of_mean(differences: Floats) -> tuple[float, float]:
    """The 95 % percentile interval of the mean of `differences` (two or more, in order of arrival).

    Above two thousand, neighbours are first averaged in blocks of near-equal size and the blocks are resampled:
    it costs as much as a small run, and keeps what neighbours share.
    """
    if not differences.any():  # as where both met, or missed, an SLO with every request
        return 0.0, 0.0
    units = _blocks(differences) if differences.size > _MOST_UNITS else differences
    rng = np.random.default_rng(SEED)
    per_batch = max(1, _DRAWS_AT_ONCE // units.size)
    means = np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, per_batch):
        stop = min(start + per_batch, RESAMPLES)
        drawn = rng.integers(0, units.size, size=(stop - start, units.size))
        means[start:stop] = units[drawn].mean(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def _blocks(values: Floats) -> Floats:
    """Means of consecutive blocks, at most _MOST_UNITS; the blocks' sizes differ by one at most."""
    edges = np.linspace(0, values.size, _MOST_UNITS + 1).astype(np.int64)
    return np.add.reduceat(values, edges[:-1]) / np.diff(edges)
