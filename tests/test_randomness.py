"""The random numbers: a pure function of their coordinates, and uniform."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pefll.core import randomness
from pefll.core.randomness import choose, key, spread


def test_a_key_depends_on_every_coordinate_and_on_their_order():
    start = (3, "cohort", 5, 9)
    others = [(4, "cohort", 5, 9), (3, "cohor", 5, 9), (3, "cohort", 6, 9), (3, "cohort", 5, 8), (3, "cohort", 9, 5)]
    others += [(3, "cohort", 5), (3, "cohort"), (3, "cohort", 5, 9, 0)]
    keys = [int(key(*coordinates)) for coordinates in (start, *others)]
    assert len(set(keys)) == len(keys)
    assert int(key(*start)) == keys[0]


def first_weight(seed: int, purpose: str) -> float:
    with randomness.initial_weights(seed, purpose):
        return float(torch.rand(()))


def test_seed_and_purpose_do_not_run_into_each_other():
    assert int(key(1, "1/x")) != int(key(11, "/x"))
    assert first_weight(1, "a") == first_weight(1, "a")
    assert len({first_weight(1, "a"), first_weight(2, "a"), first_weight(1, "b")}) == 3
    assert randomness.generator(1, "a").random() != randomness.generator(1, "b").random()
    assert randomness.generator(1, "a").random() == randomness.generator(1, "a").random()


def test_keys_of_neighbours_are_all_different():
    rounds, clients = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
    keys = key(0, "batches", rounds.reshape(-1), clients.reshape(-1))
    assert len(keys.unique()) == 40_000
    # Every bit of the keys is set about as often as not.
    bits = (keys[:, None] >> torch.arange(64)) & 1
    assert (bits.double().mean(0) - 0.5).abs().max() < 6 * 0.5 / 200


def test_tensors_integers_batches_and_vmap_give_the_same():
    ids = torch.tensor([0, 1, 7, 100_000])
    alone = torch.stack([key(2, "p", 4, int(i)) for i in ids])
    assert torch.equal(key(2, "p", 4, ids), alone)
    assert torch.equal(key(2, "p", torch.tensor(4), ids), alone)
    assert torch.equal(torch.vmap(lambda i: key(2, "p", 4, i))(ids), alone)
    assert torch.equal(spread(alone, 3), torch.stack([spread(k, 3) for k in alone]))
    totals = torch.tensor([5, 9, 1, 1000])
    drawn = choose(alone, totals, 4)
    assert torch.equal(drawn, torch.stack([choose(k, int(t), 4) for k, t in zip(alone, totals, strict=True)]))
    assert torch.equal(drawn, torch.vmap(lambda k, t: choose(k, t, 4))(alone, totals))
    steps = spread(alone, 6)  # [clients, steps]
    assert torch.equal(choose(steps, totals[:, None], 4)[2, 3], choose(steps[2, 3], totals[2], 4))
    assert torch.equal(
        choose(steps.reshape(2, 2, 6), totals.reshape(2, 2, 1), 4).reshape(4, 6, 4)[3, 1], choose(steps[3, 1], 1000, 4)
    )


@pytest.mark.parametrize("total", [2, 3, 7, 32, 1000, 10**12])
def test_chosen_numbers_are_different_and_below_the_total(total):
    drawn = choose(key(0, "t", torch.arange(300)), total, min(total, 32))
    assert drawn.shape == (300, min(total, 32))
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < total
    ordered = drawn.sort(dim=1).values
    assert bool((ordered.diff(dim=1) > 0).all())


@pytest.mark.parametrize("total", [1, 2, 5, 31])
def test_asking_for_more_than_there_are_gives_a_permutation_and_repeats_it(total):
    drawn = choose(key(0, "t", torch.arange(50)), total, 2 * total + 3)
    assert torch.equal(drawn[:, :total].sort(dim=1).values, torch.arange(total).expand(50, -1))
    assert torch.equal(drawn[:, total : 2 * total], drawn[:, :total])
    assert torch.equal(drawn[:, 2 * total :], drawn[:, torch.arange(3) % total])


def test_a_shorter_draw_is_the_beginning_of_a_longer_one():
    state = key(0, "t", torch.arange(20))
    assert torch.equal(choose(state, 50, 7), choose(state, 50, 40)[:, :7])


def chi_square(counts: torch.Tensor, expected: float) -> float:
    return float(((counts.double() - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(("total", "count"), [(2, 1), (3, 2), (5, 2), (7, 3), (16, 4), (45, 5)])
def test_every_number_and_every_pair_is_chosen_equally_often(total, count):
    draws = 40_000
    drawn = choose(key(1, "uniform", torch.arange(draws)), total, count)
    # Each position on its own is uniform: the statistic has mean total - 1 and variance 2 (total - 1).
    for position in range(count):
        value = chi_square(drawn[:, position].bincount(minlength=total), draws / total)
        assert abs(value - (total - 1)) < 6 * (2 * (total - 1)) ** 0.5
    chosen = torch.zeros(draws, total).scatter_(1, drawn, 1.0)
    together = (chosen.T @ chosen).double()
    share = count * (count - 1) / (total * (total - 1))
    pairs = together[torch.triu(torch.ones(total, total), diagonal=1) > 0]
    if count > 1:
        deviation = (pairs - draws * share).abs() / (draws * share * (1 - share)) ** 0.5 if share < 1 else pairs - draws
        assert float(deviation.max()) < 5
    single = together.diagonal()
    rate = count / total
    assert float((single - draws * rate).abs().max()) < 5 * (draws * rate * (1 - rate)) ** 0.5


def test_the_order_within_a_draw_is_random_too():
    drawn = choose(key(3, "order", torch.arange(60_000)), 3, 3)
    codes = (drawn * torch.tensor([9, 3, 1])).sum(1)
    counts = codes.bincount(minlength=27)
    counts = counts[counts > 0]
    assert len(counts) == 6
    assert chi_square(counts, 10_000) < 5 + 6 * 10**0.5


def test_draws_of_neighbouring_rounds_are_independent():
    first = choose(key(0, "cohort", torch.arange(40_000)), 10, 1).squeeze(1)
    table = (first[:-1] * 10 + first[1:]).bincount(minlength=100)
    assert abs(chi_square(table, 39_999 / 100) - 99) < 6 * 198**0.5


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_known_answers():
    """Any change to the stream would change every published number: it must be noticed here."""
    assert key(0, "cohort", 0).item() == 5529267798262646533
    assert key(2024, "adapt", 17, torch.tensor([0, 3])).tolist() == [-8567271622904491956, -4574717311699134055]
    assert spread(key(0, "x"), 3).tolist() == [3397994112981273093, 5928378721696653197, -5132667691242191891]
    assert choose(key(0, "cohort", torch.arange(3)), 90, 5).tolist() == [
        [11, 54, 45, 15, 61],
        [65, 28, 54, 2, 21],
        [44, 17, 15, 54, 0],
    ]
    assert choose(key(7, "descriptor", 1, 2), 6, 8).tolist() == [4, 3, 0, 1, 2, 5, 4, 3]
    assert first_weight(0, "init/model") == pytest.approx(float(torch.rand((), generator=seeded(675631718784972006))))
    assert randomness.generator(0, "partition/natural").integers(0, 1000, 4).tolist() == [605, 314, 966, 626]


def test_numpy_and_torch_agree_on_unsigned_arithmetic():
    """SplitMix64's finaliser, written again with NumPy's unsigned integers."""
    with np.errstate(over="ignore"):
        x = np.array([0, 1, 2**63, 2**64 - 1, 0xDEADBEEF12345678], dtype=np.uint64)
        wanted = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        wanted = (wanted ^ (wanted >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        wanted = wanted ^ (wanted >> np.uint64(31))
    ours = randomness._scramble(torch.from_numpy(x.view(np.int64).copy()))
    assert ours.numpy().view(np.uint64).tolist() == wanted.tolist()
