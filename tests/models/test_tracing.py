"""A record of a network says all that it does, or there is none, and the network runs as it was written."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pefll.backend.fused import fused
from pefll.models import Network
from tests.models.same import Do, assert_same


class LooksAtNumbers(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return z if z.sum() > 0 else -z


class MakesATensor(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.ones(2)


class Counts(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    module[0].register_forward_hook(lambda module, inputs, output: output + 1)
    return module


@pytest.mark.parametrize(
    "module",
    [
        LooksAtNumbers(3, 2),
        MakesATensor(3, 2),
        hooked(),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        nn.LSTM(3, 2),
        nn.LayerNorm(3),
    ],
    ids=["looks at numbers", "makes a tensor", "hooks", "parametrized", "lstm", "nothing to fuse"],
)
def test_modules_that_cannot_be_recorded_come_back_unchanged(module):
    assert fused(module) is module


def test_recording_leaves_the_module_alone():
    module = Counts(3, 2)
    fused(module)
    assert module.calls == 0
    assert "forward" not in vars(module)


def test_what_reads_memory_as_it_lies_is_left_alone():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), Do(lambda x: x.as_strided((2, 8), (8, 1))))
    assert fused(module) is module


def test_what_has_no_gradient_gets_none():
    def without(first: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return F.relu(first(x))

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(without(self.first, x))

    module = Partly()
    assert fused(module) is module
    with torch.no_grad():  # where somebody evaluates, other networks are recorded all the same
        other = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
        assert fused(other) is not other


@pytest.mark.parametrize(
    "use",
    [
        lambda y, z: (y.mul_(2.0), z)[1],
        lambda y, z: (z.relu_(), y.flatten(1))[1],
        lambda y, z: (F.relu(z, inplace=True), y.flatten(1))[1],
        lambda y, z: (operator.iadd(z, 1.0), y.flatten(1) * 2)[1],
        lambda y, z: (operator.imul(y, 3.0), z)[1],
        lambda y, z: (operator.isub(y[:, 0], 3.0), z)[1],
        lambda y, z: (z.chunk(2, 1)[0].mul_(2), y.flatten(1))[1],
    ],
)
def test_all_names_of_what_is_written_to_see_the_change(use):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), Do(lambda y: use(y, y.view(y.size(0), -1))), nn.Linear(64, 3))
    network = Network(module)
    x = torch.randn(2, 3, 6, 6)
    theta = network.flatten([value.detach() for value in module.parameters()])
    with torch.no_grad():
        torch.testing.assert_close(network(theta, x), module(x))


def test_sums_in_place_are_recorded_where_nobody_else_looks():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            x = F.relu(self.first(x))
            before = x
            x = self.second(x)
            x += before
            x = F.relu(x, inplace=True)
            return x.view(x.size(0), -1)

    other = assert_same(Residual(), torch.randn(2, 3, 5, 5))
    assert "forward" in vars(other)
