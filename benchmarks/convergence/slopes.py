"""Slopes of measurements on logarithmic axes, with bootstrap intervals over repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.convergence.problem import Array
from pefll.core.randomness import generator

DRAWS = 2000


class Estimate(NamedTuple):
    """A value with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def log_slope(x: Sequence[float] | Array, y: Sequence[float] | Array) -> float:
    """Return the least-squares slope of log y [points] against log x [points]."""
    return float(_slopes(x, np.asarray(y)[None])[0])


def slope_estimate(
    x: Sequence[float] | Array, repetitions: Sequence[Array], seed: int, confidence: float = 0.95
) -> Estimate:
    """Return the slope of the means against x, with a percentile bootstrap interval.

    Args:
        x: [points], all positive.
        repetitions: for each point, the measurements of its repetitions [R]. Their means must be positive.
        seed: seed of the bootstrap.
        confidence: of the interval.
    """
    random = generator(seed, "convergence/bootstrap")
    again = np.stack([each[random.integers(0, len(each), (DRAWS, len(each)))].mean(axis=1) for each in repetitions], 1)
    slopes = _slopes(x, again[(again > 0).all(axis=1)])
    tail = (1 - confidence) / 2
    low, high = np.quantile(slopes, [tail, 1 - tail])
    return Estimate(log_slope(x, [each.mean() for each in repetitions]), float(low), float(high))


def mean_estimate(values: Array) -> Estimate:
    """Return the mean of repetitions [R], with a normal interval of 95%."""
    error = 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5
    return Estimate(float(values.mean()), float(values.mean()) - error, float(values.mean()) + error)


def _slopes(x: Sequence[float] | Array, y: Array) -> Array:
    """Return the slope of each row of y [rows, points]."""
    at = np.log(np.asarray(x, dtype=float))
    at -= at.mean()
    found: Array = np.log(y) @ at / (at @ at)
    return found
