"""Bounds for the mean of independent values between 0 and 1, and the inverses of the binary KL divergence."""

from __future__ import annotations

import math

from pefll.core.errors import PefllError


def binary_kl(p: float, q: float) -> float:
    """KL divergence of a coin with probability p from one with probability q, in nats."""
    if not (0 <= p <= 1 and 0 <= q <= 1):
        raise PefllError(f"The KL divergence needs probabilities between 0 and 1, not {p} and {q}.", code="PEFLL-G101")
    return _part(p, q) + _part(1 - p, 1 - q)


def kl_upper_inverse(p: float, c: float) -> float:
    """The largest q with kl(p||q) <= c. A computed value is never below the exact one by more than rounding."""
    return 1 - kl_lower_inverse(1 - p, c)


def kl_lower_inverse(p: float, c: float) -> float:
    """The smallest q with kl(p||q) <= c."""
    if not (0 <= p <= 1 and c >= 0):
        raise PefllError(
            f"The inverse of the KL divergence needs 0 <= p <= 1 and c >= 0, not p = {p} and c = {c}.",
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


def _part(p: float, q: float) -> float:
    """P log(p / q), which is 0 at p = 0 and infinite at q = 0."""
    if p == 0:
        return 0.0
    return p * math.log(p / q) if q > 0 else math.inf
