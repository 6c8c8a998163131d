"""A run that is hardly better than a guess says so at its end."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import pefll as package
from pefll.data import federation_from_arrays
from pefll.training.most_frequent import hardly_better, most_frequent_class
from tests.cli.conftest import pefll  # noqa: F401 - a fixture

FITTING = {"clients_per_round": 2, "processes": 1, "device": "cpu"}


def data(learnable=True):
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(10), 60)
    x = rng.normal(size=(600, 6)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(int) if learnable else rng.integers(0, 2, 600), client


def test_the_guess_by_hand():
    client, split = np.repeat([0, 1], 6), np.tile([0, 0, 0, 1, 1, 2], 2)
    y = np.array([0, 0, 1, 0, 1, 0, 1, 1, 1, 1, 0, 0])
    federation = federation_from_arrays(np.zeros((12, 2), np.float32), y, client, split=split, unseen=0.0)
    assert most_frequent_class(federation) == 0.5  # each client is right once in two
    y[10] = 1
    federation = federation_from_arrays(np.zeros((12, 2), np.float32), y, client, split=split, unseen=0.0)
    assert most_frequent_class(federation) == 0.75
    numbers = federation_from_arrays(np.zeros((12, 2), np.float32), y + 0.5, client, split=split)
    assert most_frequent_class(numbers) is None


@pytest.mark.parametrize(("best", "said"), [(0.76, "hardly"), (0.75, "no"), (0.4, "no"), (0.77, ""), (1.0, "")])
def test_what_counts_as_hardly_better(monkeypatch, best, said):
    monkeypatch.setattr("pefll.training.most_frequent.most_frequent_class", lambda federation: 0.75)
    history = [{"seen": {"per_sample": 0.1}}, {"seen": {"per_sample": best}}, {"seen": None}]
    sentence = hardly_better(None, history)
    assert sentence.startswith(f"the run is {said} better than a guess: it is right on") if said else not sentence
    assert hardly_better(None, []) == ""
    monkeypatch.setattr("pefll.training.most_frequent.most_frequent_class", lambda federation: 1.0)
    assert bool(hardly_better(None, history)) is (best < 1), "clients with one class each: nothing is better than 100%"


def test_fit_warns_of_a_run_that_learned_nothing():
    with pytest.warns(UserWarning, match=r"better than a guess.*clients_per_round"):
        package.fit(federation_from_arrays(*data(learnable=False)), rounds=2, local_steps=1, **FITTING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        package.fit(federation_from_arrays(*data()), "fedavg", rounds=30, local_steps=10, client_lr=0.1, **FITTING)


def test_train_says_it(pefll, tmp_path):  # noqa: F811
    x, y, client = data(learnable=False)
    np.savez(tmp_path / "data.npz", x=x, y=y, client=client)
    words = ("--rounds", 2, "--clients-per-round", 2, "--processes", 1, "--data-dir", tmp_path)
    said = pefll("train", "--data", tmp_path / "data.npz", *words, "--out", tmp_path / "run")
    assert said.code == 0
    assert said.err.count("better than a guess") == 1
    assert "--clients-per-round" in said.err
