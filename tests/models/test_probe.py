"""A run refuses a model that computes something else with the same weights."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import pefll
from pefll.core.errors import PefllError
from pefll.models import Network, build_model
from pefll.models.check import probe
from pefll.models.spec import ModelSpec, check_same_model
from tests.federations import ragged

QUICK = {"rounds": 2, "local_steps": 1, "clients_per_round": 2, "processes": 1, "engine": "serial"}


def made(nonlinearity: nn.Module, seed: int = 0, frozen: bool = False) -> nn.Module:
    """A network; with `frozen` its first layer is drawn once and not trained."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(6, 5), nonlinearity, nn.Linear(5, 3))
    if frozen:
        module[0].requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("name", "shape", "tokens"),
    [("lenet", (3, 32, 32), False), ("resnet20", (3, 32, 32), False), ("mlp", (6,), False), ("lstm", (80,), True)],
)
def test_the_same_network_gives_the_same_scores_whatever_weights_it_has(name, shape, tokens):
    scores = [probe(Network(build_model(name, shape, 7)), shape, tokens) for _ in range(2)]
    assert scores[0] == scores[1]
    for row in scores[0]:
        assert len(row) == 7
        assert len(set(row)) > 1
        assert None not in row


def test_networks_that_large_weights_are_too_much_for_are_looked_at_with_small_ones():
    class Careful(nn.Linear):
        def forward(self, x):
            if (y := super().forward(x)).abs().max() > 10:
                raise ValueError("too large")
            return y

    class Steep(nn.Linear):
        def forward(self, x):
            return super().forward(x).pow(2).exp().exp()

    for layer in (Careful, Steep):
        small, large = probe(Network(layer(6, 3)), (6,), False)
        assert len(small) == 3
        assert None not in small
        assert large in ([], [None] * 3)
        spec = replace(scoring(), weights=21, probe=[small, large])
        text = json.dumps(spec.to_json(), allow_nan=False)  # other programs read it too
        check_same_model(ModelSpec.from_json(json.loads(text)), spec, "it")


def scoring(*scores: float | None, weights: int = 9) -> ModelSpec:
    plain = {"model": "", "input_shape": [6], "classes": 3, "normalise": None, "tokens": False, "class_names": []}
    return replace(ModelSpec.from_json(plain | {"num_clients": 2}), weights=weights, probe=[[1.0], list(scores)])


def test_rounding_is_no_other_model():
    check_same_model(scoring(100.0, 0.0, -50.0), scoring(100.05, 0.04, -50.05), "it")
    check_same_model(replace(scoring(), weights=None, probe=None), scoring(1.0), "it")  # of an earlier version
    check_same_model(scoring(None, None, 2.0), scoring(None, None, 2.0), "it")  # not finite
    for other in ([100.0, 0.2, -50.0], [100.0, 0.0]):
        with pytest.raises(PefllError, match="PEFLL-N027"):
            check_same_model(scoring(100.0, 0.0, -50.0), scoring(*other), "it")
    with pytest.raises(PefllError, match="PEFLL-N027"):
        check_same_model(scoring(None, 2.0, 3.0), scoring(None, 2.0, 500.0), "it")
    with pytest.raises(PefllError, match="PEFLL-N027"):
        check_same_model(scoring(None, 2.0, 3.0), scoring(1.0, 2.0, 3.0), "it")
    with pytest.raises(PefllError, match=r"\b9\b.*\b1,000\b.*PEFLL-N026"):
        check_same_model(scoring(1.0), scoring(1.0, weights=1000), "it")


def test_frozen_words_are_looked_at_too():
    def reader(seed: int) -> Network:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            words = nn.Embedding(5, 4, padding_idx=0).requires_grad_(False)
        return Network(nn.Sequential(words, nn.Flatten(), nn.Linear(12, 2)))

    assert probe(reader(0), (3,), True) == probe(reader(0), (3,), True) != probe(reader(1), (3,), True)


@pytest.mark.parametrize(
    ("trained", "other"),
    [
        (made(nn.Tanh()), made(nn.ReLU())),
        (made(nn.ReLU()), made(nn.ReLU6())),
        (made(nn.ReLU(), frozen=True), made(nn.ReLU(), seed=1, frozen=True)),
    ],
)
def test_another_model_of_the_same_size_is_refused(tmp_path, trained, other):
    federation = ragged(clients=5, sizes=(9,))
    pefll.fit(federation, "fedavg", model=trained, out=tmp_path / "run", **QUICK)
    pefll.load(tmp_path / "run", model=trained)
    with pytest.raises(PefllError, match="PEFLL-N027"):
        pefll.load(tmp_path / "run", model=other)
    with pytest.raises(PefllError, match="PEFLL-M050"):
        pefll.load(tmp_path / "run", model=nn.Sequential)
    with pytest.raises(PefllError, match="PEFLL-N027"):  # it is finished
        pefll.fit(federation, "fedavg", model=other, out=tmp_path / "run", **QUICK)
    with pytest.raises(PefllError, match="PEFLL-N027"):
        pefll.fit(federation, "fedavg", model=other, out=tmp_path / "run", **QUICK | {"rounds": 4})
    assert pefll.load(tmp_path / "run", model=trained).config.rounds == 2  # nothing was changed
    assert pefll.fit(federation, "fedavg", model=trained, out=tmp_path / "run", **QUICK | {"rounds": 4}).server


def test_a_run_without_a_probe_is_read_as_before(tmp_path, monkeypatch):
    federation = ragged(clients=5, sizes=(9,))
    with monkeypatch.context() as patch:
        patch.setattr("pefll.runs.problem.probe", lambda *_: None)  # as earlier versions
        pefll.fit(federation, "fedavg", model=made(nn.Tanh()), out=tmp_path / "run", **QUICK)
    pefll.load(tmp_path / "run", model=made(nn.ReLU()))
    pefll.fit(federation, "fedavg", model=made(nn.Tanh()), out=tmp_path / "run", **QUICK | {"rounds": 4})
