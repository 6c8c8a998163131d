"""Exact bounds from counts: Clopper-Pearson limits, tolerance bounds by order statistics, least numbers of samples."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from pefll.core.errors import PefllError
from pefll.guarantees.intervals import checked_delta, checked_share

Array = npt.NDArray[Any]

LEAST_WIDTH = 0.001  # a smaller width needs more than 3.8 million samples
_PRECISION = 1e-12  # of quantiles, relative; rounding in sums of logarithms allows no better for a million samples
_MOST_STEPS = 100_000  # of the continued fraction, which needs about sqrt(a + b)


class _Beta:
    """The distributions Beta(a, b) of arrays a and b, whose constants are computed once."""

    def __init__(self, a: Array, b: Array) -> None:
        log_gamma = np.vectorize(math.lgamma, otypes=[np.float64])
        self.a, self.b = a, b
        self.log_scale = log_gamma(a + b) - log_gamma(a) - log_gamma(b)

    def cdf(self, x: Array) -> Array:
        """The regularised incomplete beta function I_x(a, b)."""
        # The continued fraction converges fast on this side of the mean. I_x(a, b) = 1 - I_{1-x}(b, a) gives the other.
        turned = x > (self.a + 1) / (self.a + self.b + 2)
        near, a, b = (np.where(turned, *pair) for pair in ((1 - x, x), (self.b, self.a), (self.a, self.b)))
        inside = (near > 0) & (near < 1)
        near = np.where(inside, near, 0.5)
        log_power = a * np.log(near) + b * np.log1p(-near) + self.log_scale - np.log(a)
        tail = np.where(inside, np.exp(log_power) * _continued_fraction(near, a, b), 0.0)
        return np.asarray(np.clip(np.where(turned, 1 - tail, tail), 0.0, 1.0))

    def density(self, x: Array) -> Array:
        """The density at 0 < x < 1."""
        return np.asarray(np.exp(self.log_scale + (self.a - 1) * np.log(x) + (self.b - 1) * np.log1p(-x)))


def beta_cdf(x: Any, a: Any, b: Any) -> Array:
    """The regularised incomplete beta function I_x(a, b) of arrays, elementwise: the distribution of Beta(a, b).

    For whole numbers, P(Binomial(n, p) >= k) = I_p(k, n - k + 1).
    """
    x, a, b = np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in (x, a, b)))
    return _Beta(a, b).cdf(x)


def _continued_fraction(x: Array, a: Array, b: Array) -> Array:
    """The continued fraction of the incomplete beta function, by the method of Lentz."""
    tiny = 1e-300
    c = np.ones_like(x)
    d = 1 / (1 - (a + b) * x / (a + 1))
    value = d.copy()
    for k in range(1, _MOST_STEPS):
        even = k * (b - k) * x / ((a + 2 * k - 1) * (a + 2 * k))
        odd = -(a + k) * (a + b + k) * x / ((a + 2 * k) * (a + 2 * k + 1))
        for numerator in (even, odd):
            d, c = 1 + numerator * d, 1 + numerator / c
            d, c = 1 / np.where(d == 0, tiny, d), np.where(c == 0, tiny, c)
            value *= d * c
        if np.all(np.abs(d * c - 1) < 1e-15):
            break
    return np.asarray(value)


def beta_quantile(level: float, a: Any, b: Any) -> Array:
    """The x with I_x(a, b) = level, elementwise, for a and b of at least 1."""
    a, b = np.broadcast_arrays(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64))
    beta = _Beta(a, b)
    below, above, x = np.zeros_like(a), np.ones_like(a), a / (a + b)
    for _ in range(200):
        value = beta.cdf(x)
        small = value <= level
        below, above = np.where(small, x, below), np.where(small, above, x)
        # Newton's method on log I_x, which is concave. A step that leaves the bracket is a bisection instead.
        with np.errstate(all="ignore"):
            step = x - np.log(value / level) * value / beta.density(x)
        before, x = x, np.where((step >= below) & (step <= above), step, (below + above) / 2)
        if np.all((np.abs(x - before) <= _PRECISION * x) | (above - below <= _PRECISION * above)):
            break
    return np.asarray(x)


def clopper_pearson_lower(correct: Any, samples: Any, delta: float) -> Array:
    """The Clopper-Pearson limit below each probability of success: exact, one-sided, with confidence 1 - δ.

    It is the p with P(Binomial(samples, p) >= correct) = δ, and 0 if nothing is correct.

    Args:
        correct: [n] or a number, successes; between 0 and `samples`.
        samples: [n] or a number, at least 1.
        delta: the probability with which the limit may lie above the probability of success.
    """
    correct, samples = np.broadcast_arrays(np.asarray(correct, np.float64), np.asarray(samples, np.float64))
    # Many clients have equal counts.
    (k, n), places = np.unique([correct.ravel(), samples.ravel()], axis=1, return_inverse=True)
    limits = np.where(k > 0, beta_quantile(checked_delta(delta), np.maximum(k, 1), n - np.maximum(k, 1) + 1), 0.0)
    return np.asarray(limits[places.ravel()].reshape(correct.shape))


def clopper_pearson_upper(correct: Any, samples: Any, delta: float) -> Array:
    """The Clopper-Pearson limit above each probability of success; see `clopper_pearson_lower`."""
    wrong = np.asarray(samples, np.float64) - np.asarray(correct, np.float64)
    return 1 - clopper_pearson_lower(wrong, samples, delta)


def tolerance_rank(clients: int, share: float, delta: float) -> int:
    """The rank r of an order statistic that at least `share` of new values reach, with confidence 1 - δ; 0 if none.

    Let q be the (1 - share)-quantile. The r-th smallest of n values is above q only if fewer than r of them are at
    most q, so with probability at most P(Binomial(n, 1 - share) <= r - 1). The largest r that keeps this at most δ is
    returned. It holds for values with ties, too.
    """
    share, delta = checked_share(share, "the share of clients"), checked_delta(delta)
    ranks = np.arange(1, clients + 1)
    above = beta_cdf(share, clients - ranks + 1, ranks)  # P(Binomial(n, 1 - share) <= r - 1)
    return int((above <= delta).sum())


def least_clients_for_share(share: float, delta: float) -> int:
    """The least number of clients whose smallest value is a bound for `share` of new clients: share**n <= δ."""
    share, delta = checked_share(share, "the share of clients"), checked_delta(delta)
    return math.ceil(math.log(delta) / math.log(share) - 1e-9)


def _width(samples: int, delta: float, accuracy: float = 0.5) -> float:
    """The width of the two-sided interval if a share `accuracy` of the samples is correct."""
    # The nearest possible count to one half is the worst case; other accuracies are expectations, not counts.
    correct = samples // 2 if accuracy == 0.5 else accuracy * samples
    lower = clopper_pearson_lower(correct, samples, delta / 2)
    return float(clopper_pearson_upper(correct, samples, delta / 2) - lower)


def least_samples(width: float, delta: float, accuracy: float = 0.5) -> int:
    """The least number of samples that makes the two-sided Clopper-Pearson interval at most `width` wide.

    Args:
        width: between 0.001 and 1.
        delta: the probability with which the interval may miss.
        accuracy: the accuracy that is expected; 0.5 is the worst case, which covers every accuracy.
    """
    width, delta = checked_share(width, "the width"), checked_delta(delta)
    accuracy = checked_share(accuracy, "the expected accuracy")
    if width < LEAST_WIDTH:
        raise PefllError(
            f"the width is {width:g}, which needs more than 3 million samples; give at least {LEAST_WIDTH}",
            code="PEFLL-G107",
        )
    # The normal approximation is close, and slightly too small.
    normal = 4 * NormalDist().inv_cdf(1 - delta / 2) ** 2 * accuracy * (1 - accuracy) / width**2
    too_few, enough = 0, math.ceil(normal + 2 / width)
    while _width(enough, delta, accuracy) > width:
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:
        # The width is nearly proportional to 1 / sqrt(samples), which finds the place in few steps.
        guess = math.ceil(enough * (_width(enough, delta, accuracy) / width) ** 2)
        for trial in (guess, guess - 1, (too_few + enough) // 2):
            if too_few < trial < enough:
                if _width(trial, delta, accuracy) > width:
                    too_few = trial
                else:
                    enough = trial
    return enough
