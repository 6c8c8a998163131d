"""Bounds from counts against scipy, by hand, and against simulated clients."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pefll.core.errors import PefllError
from pefll.core.randomness import generator
from pefll.guarantees.binomial import (
    beta_cdf,
    beta_quantile,
    clopper_pearson_lower,
    clopper_pearson_upper,
    least_clients_for_share,
    least_samples,
    tolerance_rank,
)
from pefll.guarantees.held_out import (
    accuracy_statement,
    at_least,
    mean_statements,
    measured_share,
    percent,
    true_share,
)

WORLDS = 2_000
FEWER = WORLDS // 4  # where a world takes milliseconds


def scipy_limits(correct, samples, delta):
    """Return the one-sided limits below and above as scipy computes them."""
    k, n = np.asarray(correct, float), np.asarray(samples, float)
    lower = np.where(k > 0, stats.beta.ppf(delta, np.maximum(k, 1), n - k + 1), 0)
    upper = np.where(k < n, stats.beta.ppf(1 - delta, k + 1, np.maximum(n - k, 1)), 1)
    return lower, upper


@pytest.mark.parametrize("samples", [1, 2, 7, 100, 5_000, pytest.param(200_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("delta", [0.5, 0.05, 1e-6])
def test_clopper_pearson_is_that_of_scipy(samples, delta):
    correct = np.unique(np.linspace(0, samples, 40).astype(int))
    lower, upper = scipy_limits(correct, samples, delta)
    np.testing.assert_allclose(clopper_pearson_lower(correct, samples, delta), lower, atol=1e-9)
    np.testing.assert_allclose(clopper_pearson_upper(correct, samples, delta), upper, atol=1e-9)


def test_clopper_pearson_by_hand():
    assert clopper_pearson_lower(3, 3, 0.05) == pytest.approx(0.05 ** (1 / 3), abs=1e-12)  # p**3 = 0.05
    assert clopper_pearson_upper(0, 4, 0.05) == pytest.approx(1 - 0.05**0.25, abs=1e-12)
    assert clopper_pearson_lower(1, 2, 0.19) == pytest.approx(0.1, abs=1e-12)  # 1 - 0.9**2 = 0.19
    low = float(clopper_pearson_lower(47, 60, 0.03))
    assert stats.binom.sf(46, 60, low) == pytest.approx(0.03, abs=1e-12)


def test_the_incomplete_beta_function_is_that_of_scipy():
    random = generator(1, "beta")
    a, b, x = random.uniform(0.5, 400, 500), random.uniform(0.5, 400, 500), random.random(500)
    np.testing.assert_allclose(beta_cdf(x, a, b), stats.beta.cdf(x, a, b), atol=1e-12)
    assert beta_cdf([0.0, 1.0], 2, 3).tolist() == [0, 1]
    np.testing.assert_allclose(beta_quantile(0.3, a + 1, b + 1), stats.beta.ppf(0.3, a + 1, b + 1), atol=1e-12)


def scipy_rank(clients, share, delta):
    return max((r for r in range(1, clients + 1) if stats.binom.cdf(r - 1, clients, 1 - share) <= delta), default=0)


@pytest.mark.parametrize(("share", "delta"), [(0.9, 0.05), (0.5, 0.01), (0.925, 0.1)])
def test_ranks_of_tolerance_bounds_are_those_of_scipy(share, delta):
    for clients in (1, 10, 28, 29, 46, 100, 733):
        assert tolerance_rank(clients, share, delta) == scipy_rank(clients, share, delta)
    needed = least_clients_for_share(share, delta)
    assert tolerance_rank(needed, share, delta) == 1
    assert tolerance_rank(needed - 1, share, delta) == 0


def widest(samples, delta):
    lower, upper = scipy_limits(np.arange(samples + 1), samples, delta / 2)
    return float((upper - lower).max())


@pytest.mark.parametrize("width", [0.9, 0.5, 0.3, 0.15])
@pytest.mark.parametrize("delta", [0.05, 0.3])
def test_the_least_number_of_samples_by_trying_all(width, delta):
    found = least_samples(width, delta)
    assert widest(found, delta) <= width
    assert all(widest(fewer, delta) > width for fewer in range(1, found))


def test_the_least_number_of_samples_for_an_expected_accuracy():
    worst, known = least_samples(0.1, 0.05), least_samples(0.1, 0.05, accuracy=0.9)
    assert worst == 402
    assert known < worst
    lower, upper = scipy_limits(0.9 * known, known, 0.025)
    assert upper - lower <= 0.1
    lower, upper = scipy_limits(0.9 * (known - 1), known - 1, 0.025)
    assert upper - lower > 0.1
    assert least_samples(0.001, 0.05) == pytest.approx(1.96**2 * 1e6, rel=2e-3)  # fast, too
    with pytest.raises(PefllError, match="PEFLL-G107"):
        least_samples(0.0001, 0.05)
    for width in (0, 1, -0.1, math.nan):
        with pytest.raises(PefllError, match=r"PEFLL-(G104|A005)"):
            least_samples(width, 0.05)


def test_one_clients_bound_fails_as_often_as_promised():
    random, delta = generator(2, "one client"), 0.1
    counts = random.binomial(40, 0.8, WORLDS)
    failed = (clopper_pearson_lower(counts, 40, delta) > 0.8).mean()
    assert failed <= delta + 3 * math.sqrt(delta * (1 - delta) / WORLDS)
    # The exact rate is the tail from the smallest count whose limit is above 0.8.
    first = int((clopper_pearson_lower(np.arange(41), 40, delta) > 0.8).argmax())
    assert stats.binom.sf(first - 1, 40, 0.8) <= delta < stats.binom.sf(first - 2, 40, 0.8)


def test_shares_of_clients_fail_at_most_as_often_as_promised():
    """Clients have accuracies of Beta(6, 2) and 20 samples, so both shares are known."""
    random, delta, share, m = generator(3, "shares"), 0.1, 0.8, 20
    chances = stats.betabinom.pmf(np.arange(m + 1), m, 6, 2)
    failed = {"measured": 0, "true": 0}
    for _ in range(FEWER):
        correct = random.binomial(m, random.beta(6, 2, 60))
        measured = measured_share(correct / m, delta, share).bound
        failed["measured"] += chances[np.arange(m + 1) >= round(measured * m)].sum() < share
        failed["true"] += stats.beta.sf(true_share(np.full(60, m), correct, delta, share).bound, 6, 2) < share
    assert max(failed.values()) / FEWER <= delta + 3 * math.sqrt(delta * (1 - delta) / FEWER)


def test_true_shares_are_valid_where_they_are_tightest():
    """All clients below the quantile have an accuracy just below it, and the others always answer rightly."""
    random, delta, share, m, low = generator(4, "worst case"), 0.2, 0.8, 15, 0.6
    failed = 0
    for _ in range(FEWER):
        below = random.random(80) < 1 - share + 1e-9
        correct = np.where(below, random.binomial(m, low, 80), m)
        failed += true_share(np.full(80, m), correct, delta, share).bound > low
    assert 0 < failed / FEWER <= delta + 3 * math.sqrt(delta * (1 - delta) / FEWER)


def test_shares_of_clients_by_hand():
    values = np.linspace(0.51, 1, 50)
    found = measured_share(values, 0.05, 0.9)
    # P(Binomial(50, 0.1) <= 1) = 0.034 and P(<= 2) = 0.112, so the second smallest value is the bound.
    assert found.terms["rank"] == 2
    assert found.bound == pytest.approx(0.52)
    assert found.measured == pytest.approx(0.56)  # 45 of the 50 values are at least this
    assert found.promise.startswith("At least 90% of new clients have a measured accuracy of at least 52.0%")
    true = true_share(np.full(50, 100), np.arange(51, 101), 0.05, 0.9)
    # With level 1/2, P(Binomial(50, 0.05) <= 0) = 0.077 is too much. With 1/4, P(Binomial(50, 0.075) <= 0) = 0.02.
    assert (true.terms["level_per_client"], true.terms["rank"]) == (0.25, 1)
    assert true.bound == pytest.approx(scipy_limits(51, 100, 0.25)[0], abs=1e-9)
    many = true_share(np.full(100, 100), np.arange(1, 101), 0.05, 0.9)
    # With level 1/2, P(Binomial(100, 0.05) <= 1) = 0.037 and P(<= 2) = 0.118.
    assert (many.terms["level_per_client"], many.terms["rank"]) == (0.5, 2)
    assert many.bound == pytest.approx(scipy_limits(2, 100, 0.5)[0], abs=1e-9)
    with pytest.raises(PefllError, match=r"29 unseen clients, but there are 28.*PEFLL-G110"):
        measured_share(values[:28], 0.05, 0.9)
    with pytest.raises(PefllError, match=r"32 unseen clients, but there are 31.*PEFLL-G110"):
        true_share([10] * 31, [9] * 31, 0.05, 0.9)


def test_statements_say_what_was_computed():
    first, second, third = mean_statements([0.5, 0.75, 1.0, 0.75], 0.05, "micro F1")
    assert [one.name for one in (first, second, third)] == ["mean-betting", "mean-bernstein", "mean-hoeffding"]
    assert first.measured == 0.75
    assert first.confidence == 0.95
    assert "expected micro F1" in first.promise
    assert second.vacuous
    assert not first.vacuous
    one = accuracy_statement(45, 50, 0.05)
    assert one.bound == pytest.approx(scipy_limits(45, 50, 0.05)[0], abs=1e-9)
    lower, upper = scipy_limits(45, 50, 0.025)
    assert one.terms["two_sided_lower"] == pytest.approx(lower, abs=1e-9)
    assert one.terms["two_sided_upper"] == pytest.approx(upper, abs=1e-9)
    with pytest.raises(PefllError, match="PEFLL-G108"):
        accuracy_statement(0, 0, 0.05)


def test_texts_round_to_the_safe_side():
    assert at_least(0.87099) == "87.0%"
    assert at_least(0.871) == "87.1%"
    assert at_least(0.0) == "0.0%"
    assert percent(0.9) == "90%"
    assert percent(0.925) == "92.5%"
    assert percent(1 - 0.001) == "99.9%"


@pytest.mark.parametrize(
    ("samples", "correct"),
    [
        ([10, 10], [5, 11]),
        ([10, 0], [5, 0]),
        ([10, 10], [5, math.nan]),
        ([10.5, 3], [2, 2]),
        ([10], [-1]),
        ([3], [1, 2]),
    ],
)
def test_impossible_counts_are_refused(samples, correct):
    with pytest.raises(PefllError, match="PEFLL-G109"):
        true_share(samples, correct, 0.05, 0.9)
