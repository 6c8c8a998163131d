"""Fully connected networks for feature vectors and small images."""

from __future__ import annotations

import itertools
import math

import torch.nn.functional as F
from torch import Tensor, nn


def linear_layers(*widths: int) -> nn.ModuleList:
    """Return one linear layer for each pair of consecutive widths."""
    return nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))


def fully_connected(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Return the output of `layers` for x, with ReLU between the layers."""
    for layer in layers[:-1]:
        x = F.relu(layer(x))
    output: Tensor = layers[-1](x)
    return output


class MLP(nn.Module):
    """Fully connected layers with ReLU between them; images are flattened."""

    def __init__(self, input_shape: tuple[int, ...], outputs: int, hidden: tuple[int, ...] = (64,)) -> None:
        super().__init__()
        self.layers = linear_layers(math.prod(input_shape), *hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map samples [b, ...] to [b, outputs]."""
        return fully_connected(self.layers, x.flatten(1))


def tiny_mlp(input_shape: tuple[int, ...], outputs: int) -> MLP:
    """Return a network with 4 hidden units: too small to fit the data of all clients at once."""
    return MLP(input_shape, outputs, hidden=(4,))
