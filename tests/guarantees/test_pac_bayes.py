"""PAC-Bayes formulas against other ways to compute them: by hand, by simulation, and step by step as in the proof."""

from __future__ import annotations

import math

import numpy as np
import pytest
from mpmath import findroot, log, mp, mpf, sqrt
from scipy import optimize, stats

from pefll.core.errors import PefllError
from pefll.guarantees import pac_bayes as bounds


def test_the_kl_of_gaussians_is_the_expected_logarithm_of_their_ratio():
    rng = np.random.default_rng(0)
    mean, alpha = np.array([0.3, -0.2, 0.5]), 0.4
    drawn = rng.normal(mean, math.sqrt(alpha), (400_000, 3))
    ratio = stats.norm.logpdf(drawn, mean, math.sqrt(alpha)) - stats.norm.logpdf(drawn, 0, math.sqrt(alpha))
    assert bounds.gaussian_kl(float((mean**2).sum()), alpha) == pytest.approx(ratio.sum(1).mean(), rel=0.01)


def test_terms_in_high_precision():
    mp.dps = 40
    kl, n, m, delta = 7.25, 90, 400, mpf("0.05")
    first = sqrt((kl + log(4 * sqrt(n) / delta)) / (2 * n))
    second = sqrt((kl + log(8 * m * n / delta) + 1) / (2 * m * n))
    assert bounds.environment_term(kl, n, 0.05) == pytest.approx(float(first), rel=1e-14)
    assert bounds.sample_term(kl, n, m, 0.05) == pytest.approx(float(second), rel=1e-14)
    right = (mpf("2.5") + log(2 * sqrt(450) / delta)) / 450
    found = findroot(lambda q: 0.2 * log(0.2 / q) + 0.8 * log(0.8 / (1 - q)) - right, 0.35)
    assert bounds.client_bound(0.2, 2.5, 450, 0.05) == pytest.approx(float(found), rel=1e-9)


@pytest.mark.parametrize("kl", [0.0, 0.5, 30.0, 2000.0])
@pytest.mark.parametrize(("clients", "samples"), [(1, 1), (3, 2.5), (50, 40), (900, 17.3)])
def test_the_sample_term_follows_from_the_best_lambda(kl, clients, samples):
    """Γ(λ) = K/(λ-1) + λ/8mn at λ = √(8mnK) + 1 is at most the claim, unless the claim is 1 or more."""
    total, delta = samples * clients, 0.1
    claim = bounds.sample_term(kl, clients, samples, delta)
    if claim >= 1:
        return
    k = kl + math.log(8 * total / delta)
    best = math.sqrt(8 * total * k) + 1
    assert 1 < best <= 4 * total  # the union bound is over 1, ..., 4mn
    gamma = k / (best - 1) + best / (8 * total)
    assert gamma <= claim
    # No other λ is much better, so that the claim loses little.
    found = optimize.minimize_scalar(
        lambda x: k / (x - 1) + x / (8 * total), bounds=(1.001, 4 * total), method="bounded"
    )
    assert found.fun == pytest.approx(gamma, rel=1e-6)


def test_unequal_numbers_of_samples_have_the_exponential_moment_of_their_harmonic_mean():
    samples, chance, strength = [1, 4, 7, 40], 0.3, 9.0
    n, m = len(samples), bounds.harmonic_mean(samples)
    assert m == pytest.approx(stats.hmean(samples))
    assert bounds.harmonic_mean([5, 5]) == 5
    exact = 1.0  # E exp(λ · mean over clients of (p - mean of the client's coins))
    for each in samples:
        counts = np.arange(each + 1)
        exact *= (stats.binom.pmf(counts, each, chance) * np.exp(strength / n * (chance - counts / each))).sum()
    assert 1 < exact <= math.exp(strength**2 / (8 * n * m))
    assert exact > math.exp(strength**2 / (8 * n * np.mean(samples)))  # the arithmetic mean would be wrong


def test_monte_carlo_bounds_fail_as_often_as_they_may():
    rng = np.random.default_rng(1)
    chances = rng.uniform(0, 0.4, 60)  # draws need not have the same expectation
    drawn = (rng.random((4000, 60)) < chances).mean(axis=1)
    found = {value: bounds.monte_carlo_bound(value, 60, 0.2) for value in set(drawn.tolist())}
    failed = np.mean([found[value] < chances.mean() for value in drawn.tolist()])
    assert 0.01 < failed <= 0.2


def test_the_bound_on_clients_fails_rarely():
    rng = np.random.default_rng(2)
    losses = rng.beta(0.5, 2.0, (2000, 50))  # of 50 clients, with mean 0.2
    failed = np.mean([bounds.client_bound(float(each.mean()), 0.0, 50, 0.1) < 0.2 for each in losses])
    assert failed <= 0.1


def test_a_loss_above_1_has_the_bound_1():
    """A sum of bounds may exceed 1, which no loss does."""
    assert bounds.client_bound(1.3, 0.5, 50, 0.1) == 1.0


def test_the_constant_of_maurer_holds_from_one_client_on():
    """E exp(n kl(mean||p)) of n coins is largest at any p at the sum below, which is at most 2√n."""
    for n in (1, 2, 3, 5, 8, 50, 900):
        k = np.arange(n + 1)
        exact = float(stats.binom.pmf(k, n, k / n).sum())
        assert exact <= 2 * math.sqrt(n)
        assert exact == pytest.approx(math.sqrt(math.pi * n / 2) + 2 / 3, rel=0.06)


def test_wrong_numbers_are_one_sentence():
    for delta in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(PefllError) as wrong:
            bounds.environment_term(1.0, 10, delta)
        assert wrong.value.code == "PEFLL-G203"
    for call, code in (
        (lambda: bounds.client_bound(0.1, 0.0, 0, 0.1), "PEFLL-G204"),
        (lambda: bounds.gaussian_kl(1.0, 0.0), "PEFLL-G201"),
        (lambda: bounds.harmonic_mean([3, 0]), "PEFLL-G202"),
    ):
        with pytest.raises(PefllError) as wrong:
            call()
        assert wrong.value.code == code
