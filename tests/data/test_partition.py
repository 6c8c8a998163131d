import tracemalloc
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from pefll.core.errors import PefllError
from pefll.data import (
    TEST,
    TRAIN,
    VALIDATION,
    Samples,
    arrays,
    by_class,
    digits,
    dirichlet,
    make_federation,
    natural,
    samples_from_arrays,
    summarise,
    with_channel_stats,
)
from pefll.data.assembly import assemble
from pefll.data.class_partition import _draw_classes
from tests.federations import ragged

from . import layouts


def rows_of(federation, split):
    return [federation.indices(client, split).tolist() for client in range(federation.num_clients)]


@pytest.mark.parametrize(("classes", "each"), [(10, 2), (100, 10)])
@pytest.mark.parametrize(("clients", "sizes"), [(100, (400, 100, 100)), (500, (80, 20, 20)), (1000, (40, 10, 10))])
def test_by_class_gives_the_shares_of_the_paper(classes, each, clients, sizes):
    samples = layouts.cifar_sized(classes)
    federation = by_class(samples, clients, each, seed=3)
    assert federation.num_unseen == clients // 10
    for split, size in enumerate(sizes):
        assert (federation.count[split] == size).all()
        table = federation.histograms(split)
        assert ((table > 0).sum(axis=1) == each).all()
        assert set(np.unique(table)) == {0, size // each}
    assert ((federation.histograms(TRAIN) > 0) == (federation.histograms(TEST) > 0)).all()
    # Everything is dealt once, and the makers' test samples are the test samples.
    assert sorted(federation.rows.tolist()) == list(range(60000))
    assert min(min(rows) for rows in rows_of(federation, TEST)) == 50000
    assert federation.partition == f"by-class {each}"


def test_by_class_depends_on_the_seed_and_only_on_it():
    samples = layouts.cifar_sized(10)
    first, again, other = (by_class(samples, 100, 2, seed=seed) for seed in (1, 1, 2))
    assert first.fingerprint() == again.fingerprint()
    assert first.fingerprint() != other.fingerprint()


@pytest.mark.parametrize(("clients", "each", "classes"), [(100, 2, 10), (7, 3, 5), (50, 4, 4), (33, 7, 10)])
def test_classes_are_drawn_among_those_with_most_slots_left(clients, each, classes):
    table = _draw_classes(clients, each, classes, np.random.default_rng(0))
    assert (table.sum(axis=1) == each).all()
    totals = table.sum(axis=0)
    assert totals.max() - totals.min() <= 1
    left = totals.copy()
    for row in table:
        # No class that was not drawn had more slots left than one that was.
        assert left[row].min() >= left[~row].max(initial=0)
        left -= row
    assert (left == 0).all()


def test_drawn_classes_are_uniform():
    """The first client's pair of classes is any of the 10 pairs of 5 classes equally often."""
    draws = [_draw_classes(10, 2, 5, np.random.default_rng(seed))[0] for seed in range(2000)]
    counts = np.unique([np.flatnonzero(row).tolist() for row in draws], axis=0, return_counts=True)[1]
    assert len(counts) == 10
    assert (abs(counts - 200) < 5 * np.sqrt(200)).all()


def test_by_class_cuts_every_class_alike_where_nobody_split():
    federation = by_class(digits.load("."), 50, 3, seed=0)
    summary = summarise(federation)
    for label, (train, validation, test) in enumerate(summary.class_table):
        total = (digits.load(".").y == label).sum()
        assert train + validation + test == total
        assert abs(test - 0.2 * total) <= 0.5
        assert abs(validation - 0.2 * (total - test)) <= 0.5
    for split in (TRAIN, VALIDATION, TEST):
        table = federation.histograms(split)
        for label in range(10):
            # Shares that do not divide differ by one.
            shares = table[:, label][federation.histograms(TRAIN)[:, label] > 0]
            assert shares.max() - shares.min() <= 1


@pytest.mark.parametrize(
    "deal", [lambda samples: by_class(samples, 20, 3, 0), lambda samples: dirichlet(samples, 20, 1, 0)]
)
def test_pixels_of_digits_are_scaled_by_seen_training_samples_or_not_used_at_all(deal):
    dealt = deal(digits.load("."))
    without = replace(dealt, normalise=None)
    with pytest.raises(PefllError, match="PEFLL-D146"):
        without.prepare(without.x, torch.float32)
    federation = with_channel_stats(without)
    assert federation.normalise == dealt.normalise
    mine = torch.cat([federation.indices(client) for client in range(federation.num_seen)])
    pixels = federation.x[mine].double() / 255
    assert federation.normalise.mean[0] == pytest.approx(pixels.mean().item(), abs=1e-12)
    assert federation.normalise.std[0] == pytest.approx(pixels.std(correction=0).item(), abs=1e-12)
    ready = federation.prepare(federation.x[mine], torch.float64)
    assert ready.mean().item() == pytest.approx(0, abs=1e-9)
    words = make_federation(digits.load("."), partition=dealt.partition, clients=20, seed=0)
    assert words.normalise == federation.normalise


def _fingerprint(x, **changes):
    y = np.arange(len(x)) % 2
    return assemble(Samples(x, y, 2, **changes), y, np.zeros(len(x), np.int8), 2, "two").fingerprint()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
@pytest.mark.parametrize("hashed", [1, 100, 1 << 24])
def test_fingerprint_is_over_every_value_of_x(dtype, hashed, monkeypatch):
    x = np.random.default_rng(0).integers(0, 200, (10_000, 3)).astype(dtype)
    plain = _fingerprint(x)
    monkeypatch.setattr("pefll.data.federation._HASHED", hashed)
    assert _fingerprint(x) == plain
    for row, place in ((0, 0), (4_999, 1), (9_999, 2)):
        changed = x.copy()
        changed[row, place] += 1
        assert _fingerprint(changed) != plain


def test_fingerprint_is_over_types_and_meaning():
    bits = np.arange(64, dtype=np.int32).reshape(8, 8)
    prints = {_fingerprint(bits), _fingerprint(bits.view(np.float32)), _fingerprint(bits, tokens=True)}
    prints |= {_fingerprint(bits.reshape(8, 4, 2))}
    assert len(prints) == 4


def test_fingerprint_makes_no_big_copy():
    federation = assemble(
        Samples(np.zeros((64, 1 << 20), np.uint8), np.zeros(64, np.int64), 1),
        np.zeros(64, np.int64),
        np.zeros(64, np.int8),
        1,
        "big",
    )
    tracemalloc.start()
    federation.fingerprint()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_histograms_and_rows_of_clients_agree():
    federation = natural(_natural_samples(True), seed=0)
    for split in (TRAIN, VALIDATION, TEST):
        rows = np.concatenate([federation.indices(client, split).numpy() for client in range(300, 700)])
        np.testing.assert_array_equal(federation.rows_of_clients(split, 300, 700), rows)
        for client in range(0, 2000, 97):
            labels = federation.y[federation.indices(client, split)].numpy()
            np.testing.assert_array_equal(federation.histograms(split)[client], np.bincount(labels, minlength=5))


def test_reprs_are_one_short_line():
    samples = digits.load(".")
    assert repr(samples) == "<Samples 'digits': 1,797 of shape (1, 8, 8) (uint8), 10 classes>"
    assert repr(by_class(samples, 50, 3, seed=0)) == (
        "<Federation 'digits', by-class 3: 50 clients (45 seen, 5 unseen), "
        "1,797 samples of shape (1, 8, 8), 10 classes>"
    )


def test_by_class_keeps_a_validation_split_that_is_there():
    split = np.tile(np.repeat(np.array([0, 1, 2], dtype=np.int8), [5, 3, 2]), 10)
    samples = Samples(np.zeros((100, 1), np.float32), np.arange(100) % 2, 2, split=split)
    assert by_class(samples, 2, 1, seed=0, unseen=0).count.sum(dim=1).tolist() == [50, 30, 20]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"clients": 2000}, r"class 0 .* samples.*\b600 clients.*PEFLL-D186"),
        ({"classes_per_client": 11}, r"\b1\.\.10\b.*PEFLL-D185"),
        ({"classes_per_client": 0}, r"\b1\.\.10\b.*PEFLL-D185"),
        ({"clients": 0}, r"\bclients\b.*\b0\b.*PEFLL-A002"),
        ({"unseen": 1.0}, r"\bunseen\b.* 1\.0\b.*PEFLL-A007"),
        ({"unseen": -0.1}, r"\bunseen\b.* -0\.1\b.*PEFLL-A007"),
        ({"unseen": float("nan")}, r"\bunseen\b.*\bnan\b.*PEFLL-A005"),
        ({"unseen": 0.99, "clients": 10}, "PEFLL-D197"),
        ({"validation": 1.5}, r"\bvalidation\b.*1\.5.*PEFLL-A007"),
        ({"test": 1.5}, r"\btest\b.*1\.5.*PEFLL-A007"),
    ],
)
def test_by_class_refuses(arguments, sentence):
    defaults = {"clients": 20, "classes_per_client": 3, "seed": 0}
    with pytest.raises(PefllError, match=sentence):
        by_class(digits.load("."), **(defaults | arguments))


def test_dirichlet_moments():
    """Counts are Dirichlet-multinomial: their mean and variance are known."""
    classes, clients = 10, 4000
    y = np.arange(240_000) % classes
    samples = Samples(np.zeros((len(y), 1), np.uint8), y, classes)
    for alpha in (0.1, 1.0, 10.0):
        federation = dirichlet(samples, clients, alpha, seed=5, unseen=0)
        for split in (TRAIN, TEST):
            size = int(federation.count[split, 0])
            assert (federation.count[split] == size).all()
            shares = federation.histograms(split) / size
            mean = 1 / classes
            spread = mean * (1 - mean) / (classes * alpha + 1)
            # Var(count/m) = E[p(1-p)]/m + Var(p).
            variance = (mean - mean**2 - spread) / size + spread
            assert shares.mean() == pytest.approx(mean)
            np.testing.assert_allclose(shares.mean(axis=0), mean, atol=5 * np.sqrt(variance / clients))
            assert shares.var() == pytest.approx(variance, rel=0.06)


def test_dirichlet_uses_the_same_proportions_in_all_splits_and_never_mixes_splits():
    samples = layouts.cifar_sized(10)
    federation = dirichlet(samples, 50, 0.1, seed=0)
    assert federation.count[:, 0].tolist() == [800, 200, 200]
    train, test = (federation.histograms(split) / federation.count[split, 0].item() for split in (TRAIN, TEST))
    assert abs(train - test).max() < 0.15
    assert np.corrcoef(train.ravel(), test.ravel())[0, 1] > 0.98
    owned = [set(chain.from_iterable(rows_of(federation, split))) for split in (TRAIN, VALIDATION, TEST)]
    assert not owned[0] & owned[1]
    assert not owned[0] & owned[2]
    assert not owned[1] & owned[2]
    assert min(owned[2]) >= 50000
    for client in range(50):
        labels = samples.y[federation.indices(client, TRAIN)]
        np.testing.assert_array_equal(np.bincount(labels, minlength=10), federation.histograms(TRAIN)[client])


def test_dirichlet_deals_a_deck_to_its_end_before_it_repeats():
    samples = layouts.cifar_sized(10)
    federation = dirichlet(samples, 100, 0.1, seed=0, unseen=0)
    times = np.bincount(federation.rows.numpy(), minlength=60000)
    for label in range(10):
        test = (samples.y == label) & (samples.split == 2)
        assert times[test].max() - times[test].min() <= 1


def test_dirichlet_has_its_own_concentration_for_unseen_clients():
    federation = dirichlet(layouts.cifar_sized(10), 200, 0.05, seed=0, alpha_unseen=100, unseen=0.5)
    different = (federation.histograms(TRAIN) >= 5).sum(axis=1)
    assert different[:100].mean() < 4
    assert (different[100:] == 10).all()
    assert federation.partition == "dirichlet 0.05/100"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"alpha": 0.0}, "PEFLL-D187"),
        ({"alpha": float("inf")}, "PEFLL-A005"),
        ({"alpha_unseen": -1.0}, "PEFLL-D187"),
        ({"clients": 1000}, r"1,000 clients.*PEFLL-D188"),
        ({"clients": 0}, r"\bclients\b.*\b0\b.*PEFLL-A002"),
    ],
)
def test_dirichlet_refuses(arguments, sentence):
    with pytest.raises(PefllError, match=sentence):
        dirichlet(digits.load("."), **({"clients": 10, "alpha": 1.0, "seed": 0} | arguments))


def test_dirichlet_refuses_a_class_without_samples():
    samples = samples_from_arrays(np.zeros((100, 2)), np.zeros(100, dtype=int), classes=2)
    with pytest.raises(PefllError, match=r"class 1\b.*PEFLL-D189"):
        dirichlet(samples, 5, 10.0, seed=0)


def _natural_samples(with_split, seed=0):
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 12, 2000)
    client = random.permutation(np.repeat(np.arange(2000), sizes))
    split = None
    if with_split:
        split = np.where(random.random(len(client)) < 0.3, 2, 0).astype(np.int8)
        first = np.unique(client, return_index=True)[1]
        split[first] = 0
    x = np.arange(len(client), dtype=np.float32)[:, None]
    return Samples(x, random.integers(0, 5, len(client)), 5, split=split, client=client)


@pytest.mark.parametrize("with_split", [False, True])
def test_natural_agrees_with_a_slow_reference(with_split):
    samples = _natural_samples(with_split)
    federation = natural(samples, seed=4)
    assert federation.num_clients == 2000
    assert federation.num_unseen == 200
    assert sorted(federation.rows.tolist()) == list(range(len(samples.y)))
    found = set()
    for new in range(2000):
        mine = {split: federation.indices(new, split).tolist() for split in (TRAIN, VALIDATION, TEST)}
        (old,) = {samples.client[row] for rows in mine.values() for row in rows}
        found.add(old)
        all_of_it = np.flatnonzero(samples.client == old)
        if with_split:
            assert sorted(mine[TEST]) == [row for row in all_of_it if samples.split[row] == 2]
            left = len(all_of_it) - len(mine[TEST])
        else:
            assert len(mine[TEST]) == min(int(0.2 * len(all_of_it) + 0.5), len(all_of_it) - 1)
            left = len(all_of_it) - len(mine[TEST])
        assert len(mine[VALIDATION]) == min(int(0.1 * left + 0.5), left - 1)
        assert len(mine[TRAIN]) == left - len(mine[VALIDATION]) >= 1
        assert sorted(chain.from_iterable(mine.values())) == all_of_it.tolist()
    assert len(found) == 2000


def test_natural_chooses_unseen_clients_and_held_out_samples_at_random():
    samples = _natural_samples(False)
    by_seed = [natural(samples, seed=seed) for seed in (0, 0, 1)]
    assert by_seed[0].fingerprint() == by_seed[1].fingerprint()
    unseen = [{int(samples.client[f.indices(c)[0]]) for c in range(f.num_seen, 2000)} for f in by_seed]
    assert unseen[0] == unseen[1]
    # 200 of 2,000 twice have about 20 in common.
    assert len(unseen[0] & unseen[2]) < 50
    # Place among the client's own samples: a test sample is as often an early as a late one.
    test = np.concatenate([by_seed[0].indices(client, TEST).numpy() for client in range(2000)])
    assert np.mean(test) / len(samples.y) == pytest.approx(0.5, abs=0.03)


def test_natural_gaps_between_keys_are_no_clients():
    samples = Samples(np.zeros((6, 1), np.float32), np.zeros(6, np.int64), 1, client=np.array([0, 0, 5, 5, 9, 9]))
    assert natural(samples, seed=0, unseen=0).num_clients == 3


def test_natural_small_clients():
    client = np.repeat(np.arange(4), [1, 2, 3, 10])
    samples = Samples(np.zeros((16, 1), np.float32), np.zeros(16, np.int64), 1, client=client)
    federation = natural(samples, seed=0, unseen=0, test=0.9, validation=0.9)
    assert (federation.count[TRAIN] >= 1).all()


def test_natural_some_clients():
    samples = _natural_samples(True)
    federation = natural(samples, seed=0, clients=50)
    assert federation.num_clients == 50
    assert federation.num_unseen == 5
    for client in range(50):
        assert len(np.unique(samples.client[federation.indices(client).numpy()])) == 1
    with pytest.raises(PefllError, match=r"2,000 natural clients.*2,001.*PEFLL-D193"):
        natural(samples, seed=0, clients=2001)
    with pytest.raises(PefllError, match=r"\bclients\b.*\b0\b.*PEFLL-A002"):
        natural(samples, seed=0, clients=0)


def test_natural_refuses():
    with pytest.raises(PefllError, match="PEFLL-D190"):
        natural(digits.load("."), seed=0)
    two = np.array([0, 1])
    samples = Samples(np.zeros((2, 1), np.float32), two, 2, client=two, split=np.array([0, 2], np.int8))
    with pytest.raises(PefllError, match=r"client 1\b.*PEFLL-D195"):
        natural(samples, seed=0)
    with pytest.raises(PefllError, match=r"client -1.*PEFLL-D191"):
        natural(Samples(np.zeros((2, 1), np.float32), two, 2, client=two - 1), seed=0)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["ann", "bob", "cem", "dan"], r"client bob.*PEFLL-D195"),
        ([10, 20, 30, 40], r"client 20\b.*PEFLL-D195"),
        ([-5, 10**12, 10**13, 10**14], r"client 1000000000000\b.*PEFLL-D195"),
    ],
)
def test_clients_without_training_samples_go_by_their_own_names(keys, sentence):
    x, y = np.zeros((8, 1)), np.arange(8) % 2
    split = [0, 2, 0, 0] * 2
    for seed in range(3):  # whatever order they are put into
        with pytest.raises(PefllError, match=sentence):
            natural(samples_from_arrays(x, y, keys * 2, split), seed=seed)


def test_many_clients_without_training_samples_are_counted():
    who = np.arange(20)
    samples = Samples(np.zeros((20, 1), np.float32), who % 2, 2, client=who, split=(who % 2 * 2).astype(np.int8))
    with pytest.raises(PefllError, match=r"\b10 clients.*\(1, 3, 5, 7, 9 and 5 more\).*PEFLL-D196"):
        natural(samples, seed=0)


def test_numbers_of_one_are_singular():
    one = Samples(np.zeros((1, 1), np.float32), np.zeros(1, np.int64), 1, client=np.zeros(1, np.int64))
    for call, sentence in (
        (lambda: natural(one, seed=0, clients=5), r"\b1 natural client\b.*\b5\b.*PEFLL-D193"),
        (lambda: natural(one, seed=0, unseen=0.9), r"\b1 client\b.*PEFLL-D197"),
        (lambda: by_class(one, 2, 1, seed=0), r"class 0 .*\b1 train sample\b.*\b2 clients.*PEFLL-D186"),
        (lambda: dirichlet(one, 2, 1.0, seed=0), r"\b1 train sample\b.*\b2 clients.*PEFLL-D188"),
        (
            lambda: Samples(np.zeros((1, 1), np.float32), np.zeros(2, np.int64), 1),
            r"\b1 sample\b.*\b2\b.*PEFLL-D135",
        ),
    ):
        with pytest.raises(PefllError, match=sentence):
            call()


def test_make_federation_reads_partitions_in_words():
    samples = layouts.cifar_sized(10)
    for words in ("by-class 2", "dirichlet 0.1", "dirichlet 0.1/10"):
        federation = make_federation(samples, partition=words, clients=20, seed=0, unseen=0.25)
        assert federation.partition == words
        assert (federation.num_clients, federation.num_unseen) == (20, 5)
    own = _natural_samples(False)
    assert make_federation(own, partition="natural", clients=None, seed=0).num_clients == 2000
    assert make_federation(own, partition="natural", clients=30, seed=0).num_clients == 30
    with pytest.raises(PefllError, match="PEFLL-D206"):
        make_federation(samples, partition="by-class 2", clients=None, seed=0)


@pytest.mark.parametrize(
    "words", ["", "by-class", "by-class two", "by-class 1.5", "dirichlet", "dirichlet 1/2/3", "natural 3", "iid"]
)
def test_make_federation_lists_the_forms(words):
    with pytest.raises(PefllError, match=r"'by-class K', 'dirichlet A', 'dirichlet A/B'.*PEFLL-D207"):
        make_federation(digits.load("."), partition=words, clients=5, seed=0)


def test_summary():
    samples = _natural_samples(False)
    federation = natural(samples, seed=0)
    summary = summarise(federation)
    assert sum(summary.samples) == len(samples.y)
    assert summary.num_seen + summary.num_unseen == summary.num_clients == 2000
    for split in (TRAIN, VALIDATION, TEST):
        table = federation.histograms(split)
        assert [row[split] for row in summary.class_table] == table.sum(axis=0).tolist()
        sizes = table.sum(axis=1)
        spread = summary.samples_per_client[split]
        assert (spread.least, spread.median, spread.most) == (sizes.min(), np.median(sizes), sizes.max())
    different = (federation.histograms(TRAIN) > 0).sum(axis=1)
    assert summary.classes_per_client.least == different.min()
    assert summary.classes_per_client.most == different.max()
    assert summary.classes_per_client.median == np.median(different)


def test_summary_in_blocks(monkeypatch):
    federation = natural(_natural_samples(True), seed=0)
    whole = summarise(federation)
    monkeypatch.setattr("pefll.data.summary._CELLS", 700)
    assert summarise(federation) == whole


@pytest.mark.parametrize("keys", [["zoe", "ann", "bob"], [7, 5, 30], [0, 2, 1], [-3, 10**12, 4]])
def test_clients_keep_the_names_that_the_data_has_for_them(keys):
    total = 40
    client = np.array(keys)[np.arange(total) % 3]
    x = np.arange(total, dtype=np.float32)[:, None]
    samples = arrays.samples_from_arrays(x, [0, 1] * 20, client=client)
    for seed in range(3):
        federation = natural(samples, seed, unseen=0.4)
        for one in range(3):
            rows = federation.indices(one).numpy()
            assert {str(name) for name in client[rows]} == {federation.name_of(one)}
    made = by_class(samples, 2, 2, seed=0, unseen=0.0)
    assert [made.name_of(one) for one in range(2)] == ["0", "1"]
    chosen = natural(samples, 0, unseen=0.0, clients=2)
    assert {chosen.name_of(0), chosen.name_of(1)} < {str(key) for key in keys}


def test_seen_clients_can_be_held_out_as_if_unseen():
    whole = ragged(clients=9, seen=7)
    part = whole.holding_out(0.3)
    assert (part.num_clients, part.num_seen, part.num_unseen) == (7, 5, 2)
    for client in range(7):
        for split in (TRAIN, VALIDATION, TEST):
            assert torch.equal(part.indices(client, split), whole.indices(client, split))
    assert whole.holding_out(0.001).num_unseen == 1
    for share in (0.0, 1.0, -0.2, 0.99):
        with pytest.raises(PefllError, match="PEFLL-D145"):
            whole.holding_out(share)


def test_clients_that_are_held_out_keep_their_names():
    owner = np.repeat(np.arange(4), 12)
    x, y = np.zeros((48, 2), np.float32), np.arange(48) % 2
    samples = Samples(x, y, 2, client=owner, client_names=("d", "c", "b", "a"))
    whole = make_federation(samples, partition="natural", clients=4, seed=1, unseen=0.25)
    part = whole.holding_out(0.4)
    assert [part.name_of(client) for client in range(3)] == [whole.name_of(client) for client in range(3)]
