"""Bounds for means against computations by hand, against each other, and against simulated worlds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pefll.core.errors import PefllError
from pefll.core.randomness import generator
from pefll.guarantees.intervals import (
    LOWER_BOUNDS,
    MOST_AT_STAKE,
    bernstein_lower,
    bernstein_radius,
    betting_lower,
    hoeffding_lower,
    hoeffding_radius,
    interval,
    least_clients,
    shuffled,
)

VALUES = np.array([0.9, 0.7, 1.0, 0.8, 0.95, 0.6, 0.85, 1.0])
WORLDS = 2_000
# (name, draw n values, their expectation)
DISTRIBUTIONS = {
    "beta(9, 1)": (lambda random, n: random.beta(9, 1, n), 0.9),
    "beta(1/2, 1/2)": (lambda random, n: random.beta(0.5, 0.5, n), 0.5),
    "bernoulli 0.9": (lambda random, n: (random.random(n) < 0.9).astype(float), 0.9),
    "bernoulli 0.5": (lambda random, n: (random.random(n) < 0.5).astype(float), 0.5),
    "bernoulli 0.05": (lambda random, n: (random.random(n) < 0.05).astype(float), 0.05),
}


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


def slow_betting_lower(values: list[float], delta: float) -> float:
    """The betting bound by a loop over a fine grid, written from the paper."""
    refuted = 0.0
    for m in np.linspace(0.0005, 0.9995, 1_999):
        capital, total, squares, deviation, most = 1.0, 0.5, 0.25, 0.25, 1.0
        for t, x in enumerate(values, start=1):
            bet = math.sqrt(2 * math.log(1 / delta) / (len(values) * deviation))
            capital *= 1 + min(bet, MOST_AT_STAKE / m) * (x - m)
            most = max(most, capital)
            total += x
            squares += (x - total / (t + 1)) ** 2
            deviation = squares / (t + 1)
        if most >= 1 / delta and m <= np.mean(values):
            refuted = max(refuted, m)
    return refuted


@pytest.mark.parametrize("delta", [0.01, 0.05, 0.3])
def test_betting_is_the_loop_of_the_paper(delta):
    values = generator(3, "betting test").beta(6, 2, 40)
    assert betting_lower(values, delta) == pytest.approx(slow_betting_lower(list(values), delta), abs=6e-4)
    assert betting_lower(VALUES, delta) == pytest.approx(slow_betting_lower(list(VALUES), delta), abs=6e-4)


def test_a_gambler_who_cannot_win_proves_nothing():
    assert betting_lower(np.zeros(30), 0.05) == 0
    upper = interval(np.zeros(30), 0.05).upper
    # Of 30 zeros, a coin with this probability shows none with probability δ/2, so no interval may be shorter.
    assert 1 - 0.025 ** (1 / 30) - 1e-9 <= upper < 0.3
    assert interval(1 - VALUES, 0.1).lower == pytest.approx(1 - interval(VALUES, 0.1).upper, abs=1e-12)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("n", [10, 100])
def test_bounds_fail_at_most_as_often_as_promised(name, n):
    draw, expectation = DISTRIBUTIONS[name]
    delta, random = 0.1, generator(11, f"coverage {name} {n}")
    failed = dict.fromkeys(LOWER_BOUNDS, 0)
    for _ in range(WORLDS):
        values = draw(random, n)
        for kind, lower in LOWER_BOUNDS.items():
            failed[kind] += lower(values, delta) > expectation
    allowed = delta + 3 * math.sqrt(delta * (1 - delta) / WORLDS)
    assert {kind: count / WORLDS for kind, count in failed.items() if count / WORLDS > allowed} == {}
    if name == "bernoulli 0.9" and n == 100:
        assert failed["betting"] > 0  # a bound that never fails would be too careful


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_two_sided_intervals_miss_at_most_as_often_as_promised(name):
    draw, expectation = DISTRIBUTIONS[name]
    delta, random = 0.2, generator(12, f"two sides {name}")
    missed = dict.fromkeys(LOWER_BOUNDS, 0)
    for _ in range(WORLDS):
        values = draw(random, 50)
        for kind in LOWER_BOUNDS:
            low, high = interval(values, delta, kind)
            missed[kind] += not low <= expectation <= high
    allowed = delta + 3 * math.sqrt(delta * (1 - delta) / WORLDS)
    assert max(missed.values()) / WORLDS <= allowed


def test_bounds_are_useful():
    """Widths in worlds of Beta(9, 1), whose figures were measured once; half of the room is for chance."""
    random = generator(5, "widths")
    worlds = [random.beta(9, 1, 100) for _ in range(200)]
    mean = {kind: float(np.mean([0.9 - lower(x, 0.05) for x in worlds])) for kind, lower in LOWER_BOUNDS.items()}
    assert mean["betting"] < 0.035
    assert 0.1 < mean["bernstein"] < 0.12
    assert mean["hoeffding"] == pytest.approx(math.sqrt(math.log(20) / 200), abs=0.003)
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


@pytest.mark.parametrize("clients", [33, 60, 84, 100])
@pytest.mark.parametrize("p", [0.5, 0.9])
def test_sorted_clients_do_not_mislead_the_gambler(clients, p):
    """With one fixed order for all data, clients that come sorted made the bound fail in up to half of the worlds."""
    random, delta, worlds = generator(6, f"sorted/{clients}/{p}"), 0.05, 500
    failed = 0
    for world in range(worlds):
        values = np.sort((random.random(clients) < p).astype(float))[::-1]
        failed += betting_lower(shuffled(values, f"world {world}"), delta) > p
    assert failed / worlds <= delta + 3 * math.sqrt(delta * (1 - delta) / worlds)


def test_the_order_of_bets_does_not_depend_on_the_order_of_clients():
    values = generator(7, "order").random(50)
    found = shuffled(values, "here")
    assert sorted(found) == sorted(values)
    assert (shuffled(values[::-1], "here") == found).all()
    assert (shuffled(values, "there") != found).any()
