"""Fully connected networks for feature vectors and small images."""

from __future__ import annotations

import itertools
import math

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Fully connected layers with ReLU between them; images are flattened.

    Args:
        input_shape: of one sample.
        outputs: width of the last layer.
        hidden: widths of the layers before it.
    """

    def __init__(self, input_shape: tuple[int, ...], outputs: int, hidden: tuple[int, ...] = (64,)) -> None:
        super().__init__()
        widths = (math.prod(input_shape), *hidden, outputs)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Map samples [b, ...] to [b, outputs]."""
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        output: Tensor = self.layers[-1](x)
        return output


def tiny_mlp(input_shape: tuple[int, ...], outputs: int) -> MLP:
    """Return a network with 4 hidden units: too small to fit the data of all clients at once."""
    return MLP(input_shape, outputs, hidden=(4,))
