"""Owns the intervals within which means over cases lie: the percentile bootstrap (Efron 1979), seeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
METHOD = f"percentile bootstrap over cases, {RESAMPLES} resamples, {LEVEL:.0%}, seed 0"
_FEWEST = 2
_BLOCK = 1 << 22
"""Values that are drawn at a time."""


@dataclass(frozen=True)
class Interval:
    """Of a mean over cases."""

    low: float
    high: float


def bootstrap_intervals(
    values: Sequence[Sequence[float | None]], resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> tuple[Interval | None, tuple[Interval | None, ...]]:
    """The interval of the headline (the mean over classes of each class's mean over its counted cases), and that of each class.

    values: [case][class], None where a case does not count. Whole cases are drawn with replacement, so that classes of one
    patient stay together; a resample in which a class counts nowhere leaves it out. None with fewer than two counted cases.
    """
    table = np.array([[np.nan if one is None else one for one in row] for row in values], dtype=np.float64)
    if table.ndim != 2 or len(table) < _FEWEST:
        return None, (None,) * (table.shape[1] if table.ndim == 2 else 0)
    generator = np.random.default_rng(seed)
    counted = ~np.isnan(table)
    filled = np.where(counted, table, 0.0)
    means = []
    step = max(_BLOCK // table.size, 1)
    for first in range(0, resamples, step):
        drawn = generator.integers(len(table), size=(min(step, resamples - first), len(table)))
        with np.errstate(invalid="ignore"):
            means.append(filled[drawn].sum(axis=1) / counted[drawn].sum(axis=1))
    by_class = np.concatenate(means)
    some = ~np.isnan(by_class)
    with np.errstate(invalid="ignore"):
        headline = np.where(some, by_class, 0.0).sum(axis=1) / some.sum(axis=1)
    enough = counted.sum(axis=0) >= _FEWEST
    return (
        _interval(headline, level) if enough.any() else None,
        tuple(_interval(column, level) if two else None for column, two in zip(by_class.T, enough, strict=True)),
    )


def _interval(means: np.ndarray, level: float) -> Interval:
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(means[~np.isnan(means)], (tail, 100.0 - tail))
    return Interval(float(low), float(high))
