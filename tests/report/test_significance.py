from __future__ import annotations

import numpy as np
import pytest

from pefll.core.errors import PefllError
from pefll.report.significance import Pair, paired_bootstrap


def pair(samples, ours, theirs) -> Pair:
    return Pair(*(np.array(part, dtype=np.int64) for part in (samples, ours, theirs)))


def test_equal_methods_do_not_differ():
    same = paired_bootstrap([pair([10, 20, 30], [5, 6, 7], [5, 6, 7])])
    assert same == (0.0, 0.0, 0.0, 1.0, 3, 1)


def test_the_difference_is_that_of_accuracies_per_sample_and_its_mean_over_seeds():
    found = paired_bootstrap([pair([10, 30], [5, 10], [4, 8]), pair([10], [9], [5])])
    assert found.points == pytest.approx((100 * 3 / 40 + 100 * 4 / 10) / 2)
    assert (found.clients, found.seeds) == (3, 2)
    assert found.low <= found.points <= found.high


def test_the_interval_is_the_one_of_the_normal_distribution_for_many_clients():
    rng = np.random.default_rng(1)
    samples = np.full(2000, 100)
    theirs = rng.binomial(100, 0.5, 2000)
    ours = rng.binomial(100, 0.51, 2000)
    found = paired_bootstrap([Pair(samples, ours, theirs)])
    error = (ours - theirs).std() / np.sqrt(2000)
    assert found.low == pytest.approx(found.points - 1.96 * error, abs=0.02)
    assert found.high == pytest.approx(found.points + 1.96 * error, abs=0.02)
    assert found.p < 0.001


def test_a_lead_of_one_client_among_few_may_be_luck():
    found = paired_bootstrap([pair([10] * 6, [9, 5, 5, 5, 5, 4], [5, 5, 5, 5, 5, 5])])
    assert found.points == pytest.approx(5.0)
    assert found.p > 0.2
    behind = paired_bootstrap([pair([10] * 6, [5, 5, 5, 5, 5, 5], [9, 5, 5, 5, 5, 4])])
    assert (behind.points, behind.low, behind.high) == pytest.approx((-5.0, -found.high, -found.low))


def test_it_is_the_same_every_time():
    one = [pair(range(1, 9), [1, 1, 2, 3, 4, 4, 6, 8], [1, 0, 1, 1, 3, 2, 6, 7])]
    assert paired_bootstrap(one) == paired_bootstrap(one)


@pytest.mark.parametrize("bad", [[], [pair([1, 2], [1, 2], [1])], [pair([0, 0], [0, 0], [0, 0])], [pair([], [], [])]])
def test_clients_that_cannot_be_paired(bad):
    with pytest.raises(PefllError, match="PEFLL-X010"):
        paired_bootstrap(bad)
