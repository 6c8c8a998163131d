"""What one client sees: its own samples, each as often as it should, and nothing of others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pefll.data import client as client_module
from pefll.data.assembly import assemble
from pefll.data.client import Client
from pefll.data.samples import TEST, TRAIN, VALIDATION, Normalise, Samples
from tests.federations import ragged


def numbered(sizes=(1, 3, 5, 40), classes: int = 4):
    """A federation whose samples are their own row numbers, dealt out in no order."""
    rng = np.random.default_rng(3)
    owner = np.concatenate([[i] * (n + n // 2 + 2) for i, n in enumerate(sizes)])
    split = np.concatenate([[TRAIN] * n + [VALIDATION] * (n // 2) + [TEST] * 2 for n in sizes])
    order = rng.permutation(len(owner))
    x = np.arange(len(owner), dtype=np.float32)[:, None]
    samples = Samples(x=x, y=rng.integers(0, classes, len(owner)), classes=classes)
    return assemble(samples, owner[order], split[order].astype(np.int8), len(sizes), "numbered")


def make(federation, id_: int, round_: int = 0, extra: int = 0, seed: int = 0) -> Client:
    count = federation.count[:, id_]
    capacity = tuple(n + extra for n in count.tolist())
    return Client(
        federation,
        seed,
        torch.tensor(id_),
        torch.tensor(round_),
        federation.offset[:, id_],
        count,
        capacity,
        torch.float64,
    )


def numbers(batch) -> list[int]:
    """The rows in a batch that count."""
    return batch.x[batch.weight > 0].flatten().long().tolist()


@pytest.mark.parametrize("extra", [0, 13])
def test_batches_hold_only_the_clients_own_training_rows_each_at_most_once(extra):
    federation = numbered()
    for id_ in range(4):
        own = set(federation.indices(id_, TRAIN).tolist())
        met = set()
        for batch in make(federation, id_, extra=extra).batches("adapt", 4, 60):
            chosen = numbers(batch)
            assert len(chosen) == min(4, len(own))
            assert len(set(chosen)) == len(chosen)
            assert set(chosen) <= own
            assert torch.equal(batch.y, federation.y[batch.x.flatten().long()])
            met |= set(chosen)
        assert met == own  # in 60 batches everybody's turn comes


def test_a_client_smaller_than_a_batch_gives_everything_once():
    federation = numbered()
    for extra in (0, 50):
        (batch,) = make(federation, 1, extra=extra).batches("adapt", 32, 1)
        assert sorted(numbers(batch)) == sorted(federation.indices(1, TRAIN).tolist())
        assert float(batch.weight.sum()) == 3
        assert float(batch.mean(batch.x).squeeze()) == pytest.approx(federation.indices(1).double().mean().item())


def test_padding_changes_neither_means_nor_sums_nor_which_samples_are_drawn():
    federation = numbered()
    for id_ in range(4):
        for size in (4, 32, None):
            pairs = zip(
                make(federation, id_, round_=5).batches("p", size, 6),
                make(federation, id_, round_=5, extra=29).batches("p", size, 6),
                strict=True,
            )
            for alone, padded in pairs:
                assert numbers(alone) == numbers(padded)
                assert torch.equal(alone.sum(alone.x), padded.sum(padded.x))
                assert torch.equal(alone.mean(alone.x), padded.mean(padded.x))


def test_batches_differ_by_round_client_purpose_seed_and_step():
    federation = numbered(sizes=(40, 40))

    def first(id_=0, round_=0, purpose="adapt", seed=0):
        return [numbers(batch) for batch in make(federation, id_, round_, seed=seed).batches(purpose, 8, 2)]

    start = first()
    assert first() == start
    assert start[0] != start[1]
    for other in (first(round_=1), first(purpose="descriptor"), first(seed=1)):
        assert other[0] != start[0]
    places = federation.indices(0).tolist(), federation.indices(1).tolist()
    assert [places[0].index(n) for n in start[0]] != [places[1].index(n) for n in first(id_=1)[0]]


def test_without_a_size_the_whole_training_split_comes_in_every_batch():
    federation = numbered()
    for batch in make(federation, 3).batches("adapt", None, 3):
        assert numbers(batch) == federation.indices(3, TRAIN).tolist()
        assert bool((batch.weight == 1).all())


@pytest.mark.parametrize("block", [1, 3, 4, 512])
@pytest.mark.parametrize("extra", [0, 7])
def test_everything_covers_each_sample_exactly_once(monkeypatch, block, extra):
    monkeypatch.setattr(client_module, "BLOCK", block)
    federation = numbered()
    for id_ in range(4):
        for split in (TRAIN, VALIDATION, TEST):
            batches = list(make(federation, id_, extra=extra).everything(split))
            assert all(len(batch.weight) <= block for batch in batches)
            met = [number for batch in batches for number in numbers(batch)]
            assert met == federation.indices(id_, split).tolist()


def test_an_empty_split_at_the_end_of_the_arrays_is_nothing():
    samples = Samples(x=np.ones((3, 2)), y=np.zeros(3, dtype=np.int64), classes=2)
    federation = assemble(samples, np.array([0, 0, 1]), np.zeros(3, dtype=np.int8), 2, "no test data")
    assert list(make(federation, 1).everything(TEST)) == []
    (padded,) = make(federation, 1, extra=4).everything(TEST)
    assert float(padded.weight.sum()) == 0


@pytest.mark.parametrize("extra", [0, 11])
def test_has_class_tells_the_training_labels(extra):
    federation = numbered(classes=6)
    for id_ in range(4):
        wanted = set(federation.y[federation.indices(id_, TRAIN)].tolist())
        assert set(make(federation, id_, extra=extra).has_class().nonzero().flatten().tolist()) == wanted
    assert federation.histograms()[0].sum() == 1


def test_pixels_are_scaled_and_normalised_by_channel():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (6, 3, 4, 4), dtype=np.uint8)
    mean, std = (0.1, 0.5, 0.7), (0.2, 0.3, 0.4)
    samples = Samples(x=x, y=np.zeros(6, dtype=np.int64), classes=2, normalise=Normalise(mean, std))
    zeros = np.zeros(6, dtype=np.int64)
    federation = assemble(samples, zeros, zeros.astype(np.int8), 1, "one")
    assert federation.x.dtype == torch.uint8
    (batch,) = make(federation, 0).everything()
    wanted = (x / 255 - np.array(mean).reshape(3, 1, 1)) / np.array(std).reshape(3, 1, 1)
    np.testing.assert_allclose(batch.x.numpy(), wanted, rtol=0, atol=1e-12)
    low = federation.prepare(federation.x, torch.float32)
    assert low.dtype == torch.float32
    np.testing.assert_allclose(low.numpy(), wanted, rtol=0, atol=1e-5)


def test_features_and_tokens_are_left_alone():
    plain = ragged()
    assert torch.equal(plain.prepare(plain.x, torch.float64), plain.x.double())
    x = np.array([[1, 250], [3, 4]], dtype=np.uint8)
    samples = Samples(x=x, y=np.zeros(2, dtype=np.int64), classes=300, tokens=True)
    text = assemble(samples, np.array([0, 1]), np.zeros(2, dtype=np.int8), 2, "text")
    assert text.prepare(text.x, torch.float32).dtype == torch.int64
    assert text.prepare(text.x, torch.float32).tolist() == x.tolist()
