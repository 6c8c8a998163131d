"""The terms of Theorem 3.1, against a computation by hand, and against the inequalities of its proof."""

import math
from fractions import Fraction

import pytest

from pefll import PefllError
from pefll.guarantees.convergence import (
    Constants,
    Terms,
    learning_rate,
    least_rounds,
    least_rounds_of_the_paper,
    printed_terms,
    sharper_terms,
    squared_bias,
    terms,
)

EASY = Constants(
    3.0, b1=2.0, b2=0.5, smooth1=1.0, smooth2=0.25, smooth3=0.25, sigma1=2.0, sigma2=4.0, sigma3=8.0, gamma=3.0
)


def test_smoothness_is_that_of_the_first_lemma():
    assert EASY.smoothness == 1.0  # 2 · 0.25 + 0.25 · 1 + 0.25


def test_the_terms_by_hand():
    # c = 4, T = 2500, k = 2, b = 16: √(cT) = 100.
    found = terms(EASY, 2500, 4, 2, 16)
    assert found.start == 3 / 100
    assert found.noise == pytest.approx(8 * (0.25 * 4 + 2 * 9) / (2 * 100), rel=1e-14)
    assert found.drift == pytest.approx(10 * 4 * 0.25 * (4 + 4) / 2500, rel=1e-14)
    assert found.jacobian == 7.5 * 4 * 16 / 16
    assert found.model == 7.5 * 0.25 * 64 / 16
    assert found.total == sum(found)


def test_the_printed_terms_by_hand():
    found = printed_terms(EASY, 2500, 4, 2, 16)
    assert found == Terms(
        3 / 100, (6 * 4 + 4 * 2 * 9) / 200, 224 * 4 * 4 * 0.25 / 2500, 8 * 4 * 16 / 16, 14 * 0.25 * 64 / 16
    )


def test_all_samples_leave_no_floor():
    assert terms(EASY, 2500, 4, 2)[3:] == (0, 0)


def test_the_terms_follow_from_the_inequality_of_one_round():
    """One round gives E F⁺ - F ≤ -βk/2 ‖∇F‖² + rest; the bound is 2 gap / (βkT) + 2 rest / (βk), in exact fractions."""
    rounds, clients, steps, batch = 2500, 4, 2, 16
    gap, b1, b2, l1, _, _, s1, s2, s3, gamma = (Fraction(value) for value in EASY[:10])
    smooth = Fraction(EASY.smoothness)
    beta = Fraction(2 * 2, steps * 50)
    assert float(beta) == learning_rate(rounds, clients, steps)
    drift = sum((step - 1) ** 2 for step in range(1, steps + 1))  # Σ (l - 1)², at most k³/3
    of_batch = 3 * (b1**2 * s2**2 + l1**2 * b2**2 * s3**2) / batch
    errors = steps * of_batch + 3 * l1**2 * b2**2 * beta**2 * drift * (b1**2 + s1**2)  # Σ_l E‖error of step l‖²
    square = 4 * beta**2 * (steps * b2**2 * s1**2 / clients + steps**2 * gamma**2 / clients + steps * errors)
    rest = beta * errors + smooth / 2 * square
    assert 2 * smooth * beta**2 * steps**2 <= beta * steps / 4  # so that -3/4 βk ‖∇F‖² becomes -1/2 βk ‖∇F‖²
    exact = 2 * gap / (beta * steps * rounds) + 2 * rest / (beta * steps)
    bound = terms(EASY, rounds, clients, steps, batch)
    assert float(exact) <= bound.total
    assert float(exact) > 0.8 * bound.total  # the rest is Σ (l - 1)² ≤ k³/3 and Lβk ≤ 1/8


def test_the_printed_noise_term_is_smaller_than_its_own_proof_gives():
    """The proof ends with 6Lβσ_1²/c + 4Lβkγ²/c. With β = 2√c/(k√T), this is twice what is printed."""
    rounds, clients, steps = 2500, 4, 2
    beta = learning_rate(rounds, clients, steps)
    proof = (6 * EASY.smoothness * beta * EASY.sigma1**2 + 4 * EASY.smoothness * beta * steps * EASY.gamma**2) / clients
    assert proof == pytest.approx(2 * printed_terms(EASY, rounds, clients, steps).noise, rel=1e-14)


def test_the_sharper_terms_follow_from_the_inequality_of_one_round():
    """As above, but the direction of a round has the square of the mean error, and not the mean of the square."""
    rounds, clients, steps, batch = 2500, 4, 2, 16
    gap, b1, b2, l1, _, _, s1, s2, s3, gamma = (Fraction(value) for value in EASY[:10])
    smooth, beta = Fraction(EASY.smoothness), Fraction(2 * 2, steps * 50)
    moved = l1**2 * b2**2 * beta**2 * sum((step - 1) ** 2 for step in range(1, steps + 1)) * (b1**2 + s1**2)
    of_batch = 3 * (b1**2 * s2**2 + l1**2 * b2**2 * s3**2) / batch
    mean_errors = 2 * steps * (l1 * s2 * s3 / batch) ** 2 + 2 * moved
    errors = steps * of_batch + 3 * moved
    square = 4 * beta**2 * (steps * b2**2 * s1**2 / clients + steps**2 * gamma**2 / clients + steps * errors)
    rest = beta * mean_errors + smooth / 2 * square
    exact = 2 * gap / (beta * steps * rounds) + 2 * rest / (beta * steps)
    bound = sharper_terms(EASY, rounds, clients, steps, batch)
    assert 0.8 * bound.total < float(exact) <= bound.total


def test_the_sharper_floor_falls_with_the_square_of_the_batch():
    one, two = (sharper_terms(EASY, 10**9, 4, 2, batch) for batch in (8, 16))
    assert one.bias == 4 * two.bias == 4 * (1 * 4 * 8 / 8) ** 2
    assert one.spread == 2 * two.spread
    more = sharper_terms(EASY, 4 * 10**9, 4, 2, 8)
    assert (more.bias, more.spread) == (one.bias, one.spread / 2)
    assert sharper_terms(EASY, 2500, 4, 2).total < terms(EASY, 2500, 4, 2).total


def test_a_round_of_all_clients_has_no_noise_from_the_draw():
    few = EASY._replace(clients=5, sigma1=0.0)
    assert terms(few, 10_000, 5, 1).noise == 0
    alone = terms(few, 10_000, 1, 1).noise
    assert alone == pytest.approx(8 * 9 / 100, rel=1e-14)
    half = terms(few, 10_000, 3, 1).noise * math.sqrt(3)
    assert half == pytest.approx(alone * (5 - 3) / (5 - 1), rel=1e-14)


def test_the_fewest_rounds():
    assert least_rounds(EASY, 4) == 1024
    terms(EASY, 1024, 4, 2)
    with pytest.raises(PefllError, match="at least 1,024 rounds") as error:
        terms(EASY, 1023, 4, 2)
    assert error.value.code == "PEFLL-G301"
    beta = learning_rate(1024, 4, 2)
    assert EASY.smoothness * beta * 2 == 1 / 8


def test_the_rounds_that_the_paper_needs():
    # Noise needs the most: βk ≤ L / (28 · 0.25 · 4 · 2) = 1/56, as does 56 L β k ≤ 1.
    assert least_rounds_of_the_paper(EASY, 4, 2) == 4 * 4 * 56**2
    assert least_rounds_of_the_paper(EASY, 4, 4) == 4 * 4 * 112**2
    assert least_rounds_of_the_paper(EASY._replace(sigma1=0.0), 4, 4) == 4 * 4 * 56**2


def test_the_bias_is_of_second_order():
    assert squared_bias(EASY, 16) == (1 * 4 * 8 / 16) ** 2


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ((0, 4, 2), "G302"),
        ((2500, 0, 2), "G302"),
        ((2500, 4, 0), "G302"),
        ((2500, 4, 2, 0), "G302"),
        ((10**6, 9, 2), "G303"),
    ],
)
def test_numbers_that_no_training_has(numbers, code):
    with pytest.raises(PefllError) as error:
        terms(EASY._replace(clients=8), *numbers)
    assert error.value.code == f"PEFLL-{code}"


def test_constants_that_no_problem_has():
    for bad in (-1.0, math.nan):
        with pytest.raises(PefllError, match="sigma2 is"):
            terms(EASY._replace(sigma2=bad), 2500, 4, 2)
