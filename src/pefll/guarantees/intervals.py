"""Bounds for the mean of independent values between 0 and 1, and the inverses of the binary KL divergence.

Every bound holds for a fixed number of values with a common mean, whatever else their distribution is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pefll.core import randomness
from pefll.core.arguments import number
from pefll.core.errors import PefllError

Array = npt.NDArray[np.float64]

# A bet may lose at most this share of the capital if a value is 0. It was chosen on simulated Beta distributions.
MOST_AT_STAKE = 0.95
# Orders of the values whose gamblers' capitals are averaged; fewer for so many values that memory would be short.
ORDERS, MOST_NUMBERS = 400, 4_000_000


class Interval(NamedTuple):
    """A two-sided interval."""

    lower: float
    upper: float


def hoeffding_radius(n: int, delta: float, sides: int = 1) -> float:
    """sqrt(log(sides / δ) / 2n): how far the mean of n values may lie from their expectation."""
    return math.sqrt(math.log(sides / delta) / (2 * n))


def bernstein_radius(values: Array, delta: float, sides: int = 1) -> float:
    """The radius of the empirical Bernstein bound of Maurer and Pontil (2009, Theorem 4), from values [n].

    Bennett's inequality holds with probability 1 - δ' for each side, and a bound of the standard deviation with
    probability 1 - δ' for both. So δ' is δ/2 for one side and δ/3 for two.
    """
    n, log = len(values), math.log((sides + 1) / delta)
    return math.sqrt(2 * float(np.var(values, ddof=1)) * log / n) + 7 * log / (3 * (n - 1))


def hoeffding_lower(values: Any, delta: float) -> float:
    """A bound below the expectation of values [n] with probability at least 1 - δ."""
    known, delta = checked_values(values), checked_delta(delta)
    return max(0.0, float(known.mean()) - hoeffding_radius(len(known), delta))


def bernstein_lower(values: Any, delta: float) -> float:
    """A bound below the expectation of values [n] with probability at least 1 - δ; good for a small variance."""
    known, delta = checked_values(values), checked_delta(delta)
    return max(0.0, float(known.mean()) - bernstein_radius(known, delta))


def betting_lower(values: Any, delta: float) -> float:
    """A bound below the expectation of values [n] with probability at least 1 - δ (Waudby-Smith and Ramdas 2023).

    A gambler starts with capital 1 and bets on each value in turn that the expectation is above m. If the expectation
    is m, the last capital has expectation 1. So does its mean over many random orders of the values, which reaches 1/δ
    with probability at most δ (Markov). The bound is the largest m where it does.
    """
    known, wealth = in_orders(checked_values(values)), math.log(1 / checked_delta(delta))
    stakes = _stakes(known, wealth)

    def reaches(m: float) -> bool:
        limited = np.minimum(stakes, MOST_AT_STAKE / m)  # so that no factor below is negative
        logs = np.log1p(limited * (known - m)).sum(axis=1)
        return float(np.logaddexp.reduce(logs)) - math.log(len(logs)) >= wealth

    # The mean capital falls in m: so does each factor of each gambler, whether the stake is limited or not.
    refuted, open_ = 0.0, float(known[0].mean())
    while refuted < (middle := (refuted + open_) / 2) < open_ and open_ - refuted > 1e-10:
        if reaches(middle):
            refuted = middle
        else:
            open_ = middle
    return refuted


def in_orders(values: Array) -> Array:
    """Values [n] in many random orders, [orders, n].

    The orders are drawn once for all data of this size. The values are sorted first, so that it does not matter how a
    federation lists its clients.
    """
    n = len(values)
    orders = int(np.clip(MOST_NUMBERS // n, 1, ORDERS))
    drawn = randomness.generator(0, "orders of bets").permuted(np.tile(np.arange(n), (orders, 1)), axis=1)
    return np.asarray(np.sort(values)[drawn])


def _stakes(values: Array, wealth: float) -> Array:
    """The stake [orders, n] on each value, from the values before it: sqrt(2 log(1/δ) / (n times their variance))."""
    orders, n = values.shape
    count = np.arange(2, n + 2)
    means = (0.5 + values.cumsum(axis=1)) / count
    variances = (0.25 + ((values - means) ** 2).cumsum(axis=1)) / count
    before = np.concatenate((np.full((orders, 1), 0.25), variances[:, :-1]), axis=1)
    stakes: Array = np.sqrt(2 * wealth / (n * before))
    return stakes


# Each lower bound by name. The certificate is the betting one, which was named before any result was seen.
LOWER_BOUNDS: Mapping[str, Callable[[Any, float], float]] = {
    "betting": betting_lower,
    "bernstein": bernstein_lower,
    "hoeffding": hoeffding_lower,
}


def interval(values: Any, delta: float, by: str = "betting") -> Interval:
    """The two-sided interval that holds the expectation of values [n] with probability at least 1 - δ.

    Args:
        values: [n] between 0 and 1.
        delta: the probability with which the interval may miss the expectation.
        by: betting, bernstein or hoeffding.
    """
    known, delta = checked_values(values), checked_delta(delta)
    if by == "betting":  # two gamblers, each with half of δ
        return Interval(betting_lower(known, delta / 2), 1 - betting_lower(1 - known, delta / 2))
    radius = hoeffding_radius(len(known), delta, 2) if by == "hoeffding" else bernstein_radius(known, delta, 2)
    return Interval(max(0.0, float(known.mean()) - radius), min(1.0, float(known.mean()) + radius))


def least_clients(margin: float, delta: float) -> int:
    """The least number of values whose mean lies at most `margin` above the expectation, by Hoeffding."""
    delta, margin = checked_delta(delta), checked_share(margin, "the margin")
    return max(2, math.ceil(math.log(1 / delta) / (2 * margin**2) - 1e-9))


def checked_delta(delta: Any) -> float:
    """Return δ as a float; PefllError unless it lies between 0 and 1."""
    found = number(delta, "delta")
    if not 0 < found < 1:
        raise PefllError(
            f"delta is {found:g}, the probability that a guarantee fails; give a number between 0 and 1, such as 0.05",
            code="PEFLL-G103",
        )
    return found


def checked_share(share: Any, name: str) -> float:
    """Return a share as a float; PefllError unless it lies between 0 and 1, both excluded."""
    found = number(share, name)
    if not 0 < found < 1:
        raise PefllError(f"{name} is {found:g}; give a number between 0 and 1, such as 0.1", code="PEFLL-G104")
    return found


def checked_values(values: Any) -> Array:
    """Return values [n] in float64; PefllError unless there are at least two, all between 0 and 1."""
    known = np.asarray(values, dtype=np.float64)
    if known.ndim != 1 or len(known) < 2:
        raise PefllError(
            f"a bound for a mean needs at least 2 values in a list, not an array of shape {known.shape}; give more",
            code="PEFLL-G105",
        )
    if not (known >= 0).all() or not (known <= 1).all():  # NaN fails both
        bad = float(known[~((known >= 0) & (known <= 1))][0])
        raise PefllError(f"{bad:g} is not between 0 and 1; leave such values out, or scale all of them", "PEFLL-G106")
    return known


def binary_kl(p: float, q: float) -> float:
    """KL divergence of a coin with probability p from one with probability q, in nats."""
    if not (0 <= p <= 1 and 0 <= q <= 1):
        raise PefllError(f"the KL divergence needs probabilities between 0 and 1, not {p} and {q}", code="PEFLL-G101")
    return _kl_part(p, q) + _kl_part(1 - p, 1 - q)


def kl_upper_inverse(p: float, c: float) -> float:
    """The largest q with kl(p||q) <= c. A computed value is never below the exact one by more than rounding."""
    return 1 - kl_lower_inverse(1 - p, c)


def kl_lower_inverse(p: float, c: float) -> float:
    """The smallest q with kl(p||q) <= c."""
    if not (0 <= p <= 1 and c >= 0):
        raise PefllError(
            f"the inverse of the KL divergence needs 0 <= p <= 1 and c >= 0, not p = {p} and c = {c}",
            code="PEFLL-G102",
        )
    # kl(p||q) falls in q on [0, p]: `outside` always has kl > c or is 0, `inside` always has kl <= c.
    outside, inside = 0.0, p
    while outside < (middle := (outside + inside) / 2) < inside:
        if binary_kl(p, middle) <= c:
            inside = middle
        else:
            outside = middle
    return outside  # the safe side: at most one rounding step below the exact value


def _kl_part(p: float, q: float) -> float:
    """P log(p / q), which is 0 at p = 0 and infinite at q = 0."""
    if p == 0:
        return 0.0
    return p * math.log(p / q) if q > 0 else math.inf
