"""Models of a user, for `--model tests.models.zoo:function`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """One weight used twice, a constant that is saved and one that is not, and a bare parameter."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, features)
        self.again = nn.Linear(features, features)
        self.again.weight = self.first.weight
        self.last = nn.Linear(features, classes)
        self.scale = nn.Parameter(1 + torch.rand(features))
        self.register_buffer("kept", torch.full((features,), 0.5))
        self.register_buffer("derived", torch.full((features,), 0.25), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x.flatten(1) * self.scale) + self.kept)
        output: Tensor = self.last(torch.tanh(self.again(z) * self.derived))
        return output


def tied(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return Tied(int(torch.Size(input_shape).numel()), classes)


def normalised(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    features = int(torch.Size(input_shape).numel())
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 8), nn.LayerNorm(8), nn.Linear(8, classes))


def too_wide(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(torch.Size(input_shape).numel()), classes + 2))


def a_pair(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x.flatten(1)), x

    return Pair(int(torch.Size(input_shape).numel()), classes)


def no_module(input_shape: tuple[int, ...], classes: int) -> str:
    return f"{input_shape} {classes}"


class Keeping(nn.Module):
    """Attention, which is kept for whoever wants to look at it; a branch keeps it from being recorded."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(features, 1, batch_first=True)
        self.last = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, None] if x.shape[0] > 0 else x
        z, self.weights = self.attention(x, x, x)
        output: Tensor = self.last(z[:, 0])
        return output


def keeping(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return Keeping(int(torch.Size(input_shape).numel()), classes)


def frozen(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Make a network that is learnt but for its first layer and a count that is no number to learn."""
    network = normalised(input_shape, classes)
    network[1].requires_grad_(False)  # type: ignore[index]
    network.steps = nn.Parameter(torch.tensor([3]), requires_grad=False)  # type: ignore[assignment]
    return network


def flat(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Make a network without parameters but for its last layer, and with something after it."""
    features = int(torch.Size(input_shape).numel())
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes), nn.LogSoftmax(dim=1))


def fails(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    raise KeyError(f"{input_shape} {classes}")


made = nn.Linear(6, 3)
