"""Where a model ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pefll.core.errors import PefllError
from pefll.models import Network, build_model
from pefll.models.head import Head, last_linear
from pefll.models.neighbours import neighbour_shares


class Backwards(nn.Module):
    """Layers that were made in another order than they are called in, and something after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(6, 4)

    def forward(self, x):
        return self.last(self.first(x).relu())


class Stubborn(Backwards):
    def forward(self, x):
        return super().forward(x) if float(x.sum()) > 0 else super().forward(-x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x))


@pytest.mark.parametrize(
    ("model", "shape"),
    [("lenet", (3, 32, 32)), ("cnn", (1, 8, 8)), ("resnet20", (3, 32, 32)), ("mlp", (6,)), ("lstm", (5,))],
)
def test_features_and_head_make_the_model(model, shape):
    network = Network(build_model(model, shape, 7))
    head = Head(network)
    theta = network.init(0, "x")
    x = torch.randint(0, 7, (4, *shape)) if model == "lstm" else torch.randn(4, *shape)
    body, own = head.split(theta)
    assert len(own) == head.size
    assert torch.equal(head.join(body, own), theta)
    features = head.features(theta, x)
    weight, bias = own[:-7].reshape(7, -1), own[-7:]
    torch.testing.assert_close(features @ weight.T + bias, network(theta, x), rtol=1e-4, atol=1e-5)
    start, stop = head.bias_place()
    assert torch.equal(theta[start:stop], bias)


def test_the_last_layer_is_the_one_called_last():
    network = Network(Backwards())
    head = Head(network)
    assert head.layer == "last"
    theta = torch.arange(float(network.size))
    body, own = head.split(theta)
    assert len(own) == 15
    assert torch.equal(head.join(body, own), theta)
    x, theta = torch.randn(5, 6), network.init(0, "x")
    values = network.unflatten(theta)
    assert torch.allclose(head.features(theta, x), (x @ values["first.weight"].T + values["first.bias"]).relu())
    assert theta[slice(*head.bias_place())].equal(values["last.bias"])


def test_a_module_that_cannot_be_recorded_calls_its_layers_in_order():
    assert last_linear(Stubborn()) == "first"


def test_clear_sentences():
    with pytest.raises(PefllError, match="PEFLL-N023"):
        Head(Network(nn.Conv1d(1, 1, 1)))
    with pytest.raises(PefllError, match="PEFLL-N021"):
        Head(Network(Tied()))
    with pytest.raises(PefllError, match="PEFLL-N022"):
        Head(Network(nn.Linear(2, 2, bias=False))).bias_place()


def test_neighbours_by_hand():
    bank = torch.tensor([[0.0], [1.0], [3.0], [100.0]]).double()
    labels = torch.tensor([0, 1, 1, 2])
    allowed = torch.tensor([True, True, True, False])
    near = torch.tensor([[0.4], [3.0], [-1e4]]).double()
    one, two = neighbour_shares(near, bank, labels, allowed, (1, 2), 3, scale=2.0)
    assert one.tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]
    votes = torch.tensor([-0.16 / 2, -0.36 / 2, -torch.inf]).double().exp()
    torch.testing.assert_close(two[0], votes / votes.sum())
    assert two[1].tolist() == [0, 1, 0]
    assert two[2].tolist() == [1, 0, 0]  # far away, where exp(-d²) is 0, the nearest still counts
    (none,) = neighbour_shares(near, bank, labels, allowed & False, (2,), 3, scale=2.0)
    assert none.tolist() == [[0, 0, 0]] * 3


class Listed(nn.Module):
    """Layers that are called from a list, and something after the last that would not fit features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.steps = [self.first, torch.relu, self.last]

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return (x * self.scale).log_softmax(dim=1)


def test_features_are_what_the_last_layer_is_given_whatever_comes_after_it():
    module = Listed()
    network = Network(module)
    theta = network.flatten([value.detach() for value in module.parameters()])
    x = torch.randn(5, 6)
    torch.testing.assert_close(Head(network).features(theta, x), module.first(x).relu())
