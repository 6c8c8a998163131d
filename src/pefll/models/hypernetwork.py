"""The hypernetwork h maps a descriptor to all parameters of a client's model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pefll.core.errors import unknown

HIDDEN_LAYERS = {"S": 1, "M": 3, "L": 5}
WIDTH = 100


class Hypernetwork(nn.Module):
    """Linear(l, 100), then [ReLU, Linear(100, 100)] for each hidden layer, then Linear(100, outputs).

    There is no ReLU before the last layer. One last layer generates all parameters. A separate last layer per parameter
    would compute the same: all would have the same input, and weights with the same initial distribution. The sizes S,
    M and L have 1, 3 and 5 hidden layers.
    """

    def __init__(self, descriptor: int, outputs: int, size: str = "M") -> None:
        super().__init__()
        if size not in HIDDEN_LAYERS:
            raise unknown("hypernetwork size", size, HIDDEN_LAYERS)
        self.first = nn.Linear(descriptor, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(HIDDEN_LAYERS[size]))
        self.last = nn.Linear(WIDTH, outputs)

    def forward(self, v: Tensor) -> Tensor:
        """Map descriptors [c, l] to parameters [c, outputs]."""
        z = self.first(v)
        for layer in self.hidden:
            z = layer(F.relu(z))
        output: Tensor = self.last(z)
        return output
