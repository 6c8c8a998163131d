"""Bounds for means against computations by hand, against each other, and against simulated worlds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from pefll.core.errors import PefllError
from pefll.core.randomness import generator
from pefll.guarantees.intervals import (
    LOWER_BOUNDS,
    MOST_AT_STAKE,
    MOST_NUMBERS,
    ORDERS,
    bernstein_lower,
    bernstein_radius,
    betting_lower,
    hoeffding_lower,
    hoeffding_radius,
    in_orders,
    interval,
    least_clients,
)

VALUES = np.array([0.9, 0.7, 1.0, 0.8, 0.95, 0.6, 0.85, 1.0])
WORLDS = 500
# (name, draw n values, their expectation)
DISTRIBUTIONS = {
    "beta(9, 1)": (lambda random, n: random.beta(9, 1, n), 0.9),
    "beta(1/2, 1/2)": (lambda random, n: random.beta(0.5, 0.5, n), 0.5),
}


def coin_flips(n, p):
    """Yield all possible values of n flips of a coin, up to their order, with their probabilities."""
    for heads in range(n + 1):
        yield np.repeat([1.0, 0.0], [heads, n - heads]), math.comb(n, heads) * p**heads * (1 - p) ** (n - heads)


def test_hoeffding_by_hand():
    # sqrt(ln(20) / 16) = sqrt(2.995732 / 16) = 0.432705, and the mean is 6.8 / 8 = 0.85
    assert hoeffding_radius(8, 0.05) == pytest.approx(0.432705, abs=1e-6)
    assert hoeffding_lower(VALUES, 0.05) == pytest.approx(0.85 - 0.432705, abs=1e-6)
    # Two sides: sqrt(ln(40) / 16) = 0.480162
    assert interval(VALUES, 0.05, "hoeffding").lower == pytest.approx(0.85 - 0.480162, abs=1e-6)
    assert interval(VALUES, 0.05, "hoeffding").upper == 1


def test_bernstein_by_hand():
    # Of 200 values, half 0.8 and half 0.9, the variance is 0.0025 * 200 / 199, and ln(2 / 0.05) = 3.688879.
    values = np.tile([0.8, 0.9], 100)
    wanted = math.sqrt(2 * 0.0025 * 200 / 199 * 3.688879 / 200) + 7 * 3.688879 / (3 * 199)
    assert bernstein_lower(values, 0.05) == pytest.approx(0.85 - wanted, abs=1e-6)
    # Two sides share the bound of the variance, so the logarithm is ln(3 / δ), not ln(4 / δ).
    log = math.log(60)
    wanted = math.sqrt(2 * 0.0025 * 200 / 199 * log / 200) + 7 * log / (3 * 199)
    found = interval(values, 0.05, "bernstein")
    assert (found.upper - found.lower) / 2 == pytest.approx(wanted, abs=1e-12)
    assert bernstein_radius(values, 0.05) < bernstein_radius(values, 0.05, 2)


def slow_betting_lower(orders, delta: float) -> float:
    """The betting bound by loops over a grid and over orders of the values, written from the paper."""
    refuted = 0.0
    for m in np.linspace(0.005, 0.995, 199):
        capitals = []
        for values in orders:
            capital, total, squares, deviation = 1.0, 0.5, 0.25, 0.25
            for t, x in enumerate(values, start=1):
                bet = math.sqrt(2 * math.log(1 / delta) / (len(values) * deviation))
                capital *= 1 + min(bet, MOST_AT_STAKE / m) * (x - m)
                total += x
                squares += (x - total / (t + 1)) ** 2
                deviation = squares / (t + 1)
            capitals.append(capital)
        if sum(capitals) / len(capitals) >= 1 / delta and m <= np.mean(orders[0]):
            refuted = max(refuted, m)
    return refuted


@pytest.mark.parametrize("delta", [0.01, 0.05, 0.3])
def test_betting_is_the_mean_of_loops_over_orders(delta):
    values = generator(3, "betting test").beta(6, 2, 5)
    for orders in (in_orders(values), list(itertools.permutations(values))):  # those drawn, and all 120
        assert betting_lower(values, delta) == pytest.approx(slow_betting_lower(orders, delta), abs=6e-3)
    assert betting_lower(VALUES, delta) == pytest.approx(slow_betting_lower(in_orders(VALUES)[:150], delta), abs=6e-3)


def test_orders_are_of_the_same_values_and_fit_into_memory():
    values = generator(7, "order").random(50)
    found = in_orders(values)
    assert found.shape == (ORDERS, 50)
    assert (np.sort(found, axis=1) == np.sort(values)).all()
    assert len({tuple(one) for one in found}) == ORDERS
    assert (in_orders(values[::-1]) == found).all()
    assert len(in_orders(np.zeros(MOST_NUMBERS // 10))) == 10


def test_a_gambler_who_cannot_win_proves_nothing():
    assert betting_lower(np.zeros(30), 0.05) == 0
    upper = interval(np.zeros(30), 0.05).upper
    # Of 30 zeros, a coin with this probability shows none with probability δ/2, so no interval may be shorter.
    assert 1 - 0.025 ** (1 / 30) - 1e-9 <= upper < 0.3
    assert interval(1 - VALUES, 0.1).lower == pytest.approx(1 - interval(VALUES, 0.1).upper, abs=1e-12)


@pytest.mark.parametrize("kind", LOWER_BOUNDS)
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_bounds_of_coins_fail_at_most_as_often_as_promised(kind, p):
    """The probability of failure is exact: the bound of a coin depends on the number of heads alone.

    One order of the values for all data, and one that is a function of the values, fail here in up to half of the
    worlds and in up to a third.
    """
    for n, delta in ((10, 0.1), (33, 0.05), (100, 0.05)):
        failed = sum(chance for values, chance in coin_flips(n, p) if LOWER_BOUNDS[kind](values, delta) > p)
        assert failed <= delta
        missed = 0.0
        for values, chance in coin_flips(n, p) if n < 100 else ():
            low, high = interval(values, 2 * delta, kind)
            missed += chance * (not low <= p <= high)
        assert missed <= 2 * delta
    if kind == "betting" and p == 0.9:
        assert failed > 0  # a bound that never fails would be too careful


@pytest.mark.parametrize(("n", "delta"), [(5, 0.05), (12, 0.1), (40, 0.05)])
def test_the_betting_bound_of_coins_holds_at_the_worst_probability(n, delta):
    """Failures are most probable just below a bound. They are exact for the orders that are drawn once for all data."""
    bounds = np.array([betting_lower(values, delta) for values, _ in coin_flips(n, 0.5)])
    worst = max(
        sum(chance for (_, chance), bound in zip(coin_flips(n, p), bounds, strict=True) if bound > p)
        for p in bounds[bounds > 0] - 1e-9
    )
    assert delta / 2 < worst <= delta


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_bounds_fail_at_most_as_often_as_promised(name):
    draw, expectation = DISTRIBUTIONS[name]
    delta, random = 0.1, generator(11, f"coverage {name}")
    failed = dict.fromkeys(LOWER_BOUNDS, 0)
    for _ in range(WORLDS):
        values = draw(random, 40)
        for kind, lower in LOWER_BOUNDS.items():
            failed[kind] += lower(values, delta) > expectation
    assert max(failed.values()) / WORLDS <= delta + 3 * math.sqrt(delta * (1 - delta) / WORLDS)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_two_sided_intervals_miss_at_most_as_often_as_promised(name):
    draw, expectation = DISTRIBUTIONS[name]
    delta, random = 0.2, generator(12, f"two sides {name}")
    missed = dict.fromkeys(LOWER_BOUNDS, 0)
    for _ in range(WORLDS):
        values = draw(random, 30)
        for kind in LOWER_BOUNDS:
            low, high = interval(values, delta, kind)
            missed[kind] += not low <= expectation <= high
    assert max(missed.values()) / WORLDS <= delta + 3 * math.sqrt(delta * (1 - delta) / WORLDS)


def test_bounds_are_useful():
    """Widths in worlds of Beta(9, 1), whose figures were measured once; half of the room is for chance."""
    random = generator(5, "widths")
    worlds = [random.beta(9, 1, 100) for _ in range(60)]
    mean = {kind: float(np.mean([0.9 - lower(x, 0.05) for x in worlds])) for kind, lower in LOWER_BOUNDS.items()}
    assert mean["betting"] < 0.035
    assert 0.1 < mean["bernstein"] < 0.12
    assert mean["hoeffding"] == pytest.approx(math.sqrt(math.log(20) / 200), abs=0.005)
    # For many values the betting bound is close to that of the normal distribution, 1.645 deviations of the mean.
    many = random.beta(9, 1, 20_000)
    assert betting_lower(many, 0.05) > 0.9 - 3 * 1.645 * math.sqrt(0.09 / 11 / 20_000)


def test_the_least_number_of_clients():
    n = least_clients(0.05, 0.05)
    assert n == 600
    assert hoeffding_radius(n, 0.05) <= 0.05 < hoeffding_radius(n - 1, 0.05)


@pytest.mark.parametrize("lower", LOWER_BOUNDS.values(), ids=LOWER_BOUNDS)
def test_bad_values_are_refused(lower):
    for delta in (0, 1, -0.1, math.nan, "0.05"):
        with pytest.raises(PefllError, match=r"PEFLL-(G103|A00)"):
            lower(VALUES, delta)
    for values in ([0.5], [], [[0.5, 0.5]]):
        with pytest.raises(PefllError, match="PEFLL-G105"):
            lower(values, 0.05)
    for values in ([0.5, 1.01], [0.5, -0.1], [0.5, math.nan], [math.inf, 0.5]):
        with pytest.raises(PefllError, match="PEFLL-G106"):
            lower(values, 0.05)
    assert 0 <= lower([0.0, 1.0], 0.05) <= 0.5
