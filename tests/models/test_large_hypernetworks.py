"""Hypernetworks for large client models: in chunks, and of low rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import pefll
from benchmarks import large_model
from pefll.core.errors import PefllError
from pefll.core.tree import leaves
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method
from pefll.models import Network
from pefll.models.hypernetwork_choice import build_hypernetwork
from pefll.models.low_rank import RANK
from tests.federations import problem_of, ragged

CLIENT = nn.Sequential(nn.Conv2d(3, 20, 5), nn.GroupNorm(2, 20), nn.Flatten(), nn.Linear(80, 30), nn.Linear(30, 4))
LARGE = ["chunked", "low-rank"]


def made(name: str) -> tuple[Network, Network, torch.Tensor]:
    """A client model, its hypernetwork, and the hypernetwork's first weights."""
    client = Network(CLIENT)
    network = Network(build_hypernetwork(name, 5, client))
    return client, network, network.init(3, "hypernetwork")


@pytest.mark.parametrize("name", LARGE)
def test_a_model_for_each_descriptor(name):
    client, network, eta = made(name)
    v = torch.randn(6, 5)
    theta = network(eta, v)
    assert theta.shape == (6, client.size)
    assert len(theta.unique(dim=0)) == 6  # descriptors matter
    torch.testing.assert_close(theta[2:3], network(eta, v[2:3]))  # and each for its own model
    for part in client.unflatten(theta[0]).values():
        assert part.std() > 0 or part.numel() == 1  # no tensor is forgotten


@pytest.mark.parametrize("name", LARGE)
def test_first_weights_follow_the_seed_and_have_the_usual_scale(name):
    client, network, eta = made(name)
    assert torch.equal(eta, network.init(3, "hypernetwork"))
    assert not torch.equal(eta, network.init(4, "hypernetwork"))
    weight = client.unflatten(network(eta, torch.randn(1, 5))[0])["3.weight"]
    drawn = 1 / math.sqrt(3 * 80)  # of nn.Linear(80, 30)
    assert drawn / 3 < weight.std() < 3 * drawn


def test_chunks_are_the_rows_of_one_layer_scaled():
    client, network, eta = made("chunked")
    module = network.module
    parts, v = network.unflatten(eta), torch.randn(1, 5)
    assert module.chunk == math.ceil(math.sqrt(client.size))
    trunk = network.with_parameters(eta).trunk(v)[0]
    wanted = []
    place = 0
    for shape in client.shapes:
        numbers: list[float] = []
        while len(numbers) < shape.numel():
            z = torch.relu(trunk + parts["embeddings"][place])
            numbers += (parts["scales"][place] * (parts["head.weight"] @ z + parts["head.bias"])).tolist()
            place += 1
        wanted += numbers[: shape.numel()]
    assert place == len(parts["embeddings"])
    torch.testing.assert_close(network(eta, v)[0], torch.tensor(wanted), rtol=1e-4, atol=1e-6)


def test_changes_of_matrices_have_low_rank_around_a_shared_model():
    client, network, eta = made("low-rank")
    base = client.unflatten(network.unflatten(eta)["base"])
    assert torch.equal(network.unflatten(eta)["base"][:10], network.init(3, "hypernetwork")[:10])
    models = [client.unflatten(theta) for theta in network(eta, torch.randn(2, 5))]
    for name in ("0.weight", "3.weight"):
        change = (models[0][name] - base[name]).flatten(1).double()
        assert torch.linalg.matrix_rank(change, rtol=1e-4) == RANK, name
        assert change.abs().max() < base[name].abs().max()
    assert torch.equal(base["1.weight"], torch.ones(20))  # as a GroupNorm starts
    assert not torch.equal(models[0]["1.weight"], models[1]["1.weight"])


@pytest.mark.parametrize("name", LARGE)
def test_engines_agree_on_gradients(name):
    federation = ragged(clients=5, sizes=(4, 9))
    settings = {"hypernetwork": name, "local_steps": 2, "batch_size": 4, "server_optimizer": "sgd"}
    after = []
    for make in (SerialEngine, VectorEngine):
        method = build_method("pefll", problem_of(federation), settings)
        engine = make(federation, method, seed=0, clients_per_round=3, dtype=torch.float64)
        after.append(engine.advance(engine.start(), 0, 1))
    for mine, other in zip(leaves(after[0]), leaves(after[1]), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", LARGE)
def test_the_benchmark_of_a_large_model_trains(name):
    row = large_model.measure(name, 8, large_model.federation(pixels=12), large_model.client_model(12, (20, 10)))
    assert row["weights"] == 12 * 20 + 20 + 20 * 10 + 10 + 10 * 10 + 10
    assert row["peak_gb"] > 0
    assert row["last_loss"] < row["first_loss"]


@pytest.mark.parametrize("method", ["pefll", "pfedhn"])
def test_an_unknown_name_is_one_sentence(method):
    with pytest.raises(PefllError, match="low-rank"):
        pefll.fit(ragged(clients=4), method, hypernetwork="XL", rounds=1)
