"""The inverses of the binary KL divergence against scipy's root finder and cases that are solved by hand."""

from __future__ import annotations

import math

import pytest
from scipy.optimize import brentq
from scipy.special import rel_entr

from pefll.core.errors import PefllError
from pefll.guarantees.intervals import binary_kl, kl_lower_inverse, kl_upper_inverse


def scipy_kl(p: float, q: float) -> float:
    return float(rel_entr(p, q) + rel_entr(1 - p, 1 - q))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.77, 0.999])
@pytest.mark.parametrize("c", [0.001, 0.02, 0.3, 2.0])
def test_scipy_finds_the_same_inverses(p: float, c: float) -> None:
    assert binary_kl(p, 0.3) == pytest.approx(scipy_kl(p, 0.3), abs=1e-14)
    least, most = 1e-300, 1 - 1e-15
    if scipy_kl(p, least) > c:
        lower = brentq(lambda q: scipy_kl(p, q) - c, least, p, xtol=1e-14)
        assert kl_lower_inverse(p, c) == pytest.approx(lower, abs=1e-9)
    if scipy_kl(p, most) > c:
        upper = brentq(lambda q: scipy_kl(p, q) - c, p, most, xtol=1e-14)
        assert kl_upper_inverse(p, c) == pytest.approx(upper, abs=1e-9)


def test_the_ends_are_solved_by_hand() -> None:
    # kl(0||q) = -log(1 - q), and kl(1||q) = -log(q)
    assert kl_upper_inverse(0, 0.3) == pytest.approx(1 - math.exp(-0.3), abs=1e-12)
    assert kl_lower_inverse(1, 0.3) == pytest.approx(math.exp(-0.3), abs=1e-12)
    assert kl_lower_inverse(0, 0.3) == 0
    assert kl_upper_inverse(1, 0.3) == 1
    assert kl_upper_inverse(0.4, 337.0) == 1
    assert kl_upper_inverse(0.4, math.inf) == 1
    assert kl_upper_inverse(0.4, 0) == pytest.approx(0.4, abs=1e-7)


def test_pinskers_inequality_is_never_tighter() -> None:
    for p in (0.05, 0.3, 0.8):
        for c in (0.001, 0.05, 0.4):
            assert p < kl_upper_inverse(p, c) <= p + math.sqrt(c / 2)


@pytest.mark.parametrize(("p", "c"), [(-0.1, 0.1), (1.1, 0.1), (0.5, -0.1), (math.nan, 0.1), (0.5, math.nan)])
def test_impossible_values_are_refused(p: float, c: float) -> None:
    with pytest.raises(PefllError, match="PEFLL-G102"):
        kl_upper_inverse(p, c)
