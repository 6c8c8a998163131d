"""A hypernetwork that changes a shared client model by matrices of low rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pefll.models.hypernetwork import WIDTH, Hypernetwork

RANK = 8


class Draw:
    """A function without arguments that copies of a module share, because its value may be large."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self.function = function

    def __deepcopy__(self, memo: dict[int, object]) -> Draw:
        return self


class LowRankHypernetwork(nn.Module):
    """θ = base + U(v) V(v)ᵀ / √(fan-in) for each weight matrix, and θ = base + u(v) for each smaller tensor.

    The base is one learned model for all clients, and starts as a freshly drawn one. The factors U [o, r] and V [i, r]
    of a matrix [o, i] come from one linear layer on the trunk's 100 numbers. For a client model of D weights, this
    needs D parameters and 100 r (o + i) for each matrix, instead of 100 D. A convolution's kernel counts as a matrix
    with a row for each output channel.
    """

    def __init__(
        self, descriptor: int, shapes: Sequence[torch.Size], draw: Callable[[], Tensor], rank: int = RANK
    ) -> None:
        """Plan the factors of tensors with these shapes.

        Args:
            descriptor: l, size of a descriptor.
            shapes: shapes of the client model's parameters, in the order of its flat vector.
            draw: returns fresh weights of the client model, [D], from torch's random state.
            rank: r, rank of the change of a matrix.
        """
        super().__init__()
        self.rank = rank
        self.matrices = [(shape[0], shape[1:].numel()) if len(shape) > 1 else (shape.numel(), 0) for shape in shapes]
        self.numbers = [_numbers(rows, columns, rank) for rows, columns in self.matrices]
        self._draw = Draw(draw)
        self.trunk = Hypernetwork(descriptor, WIDTH)
        self.base = nn.Parameter(torch.empty(sum(shape.numel() for shape in shapes)))
        self.head = nn.Linear(WIDTH, sum(self.numbers))

    def reset_parameters(self) -> None:
        """Draw the base."""
        with torch.no_grad():
            self.base.copy_(self._draw.function())

    def forward(self, v: Tensor) -> Tensor:
        """Map descriptors [c, l] to parameters [c, D]."""
        parts = torch.split(self.head(self.trunk(v)), self.numbers, dim=1)
        changes = [self._change(part, *matrix) for part, matrix in zip(parts, self.matrices, strict=True)]
        return self.base + torch.cat(changes, dim=1)

    def _change(self, numbers: Tensor, rows: int, columns: int) -> Tensor:
        """Return the change of one tensor, [c, rows * columns], from the numbers made for it, [c, n]."""
        fan_in = max(1, columns)
        if numbers.shape[1] == rows * fan_in:  # made in full, because factors would be no smaller
            return numbers / math.sqrt(fan_in)
        left, right = torch.split(numbers, [rows * self.rank, columns * self.rank], dim=1)
        product = left.view(-1, rows, self.rank) @ right.view(-1, self.rank, columns)
        return product.flatten(1) / math.sqrt(fan_in)


def _numbers(rows: int, columns: int, rank: int) -> int:
    """Return how many numbers are made for a matrix: its factors, or all its entries if these are fewer."""
    return min(rank * (rows + columns), rows * max(1, columns))


def fresh_weights(module: nn.Module, names: Sequence[str]) -> Tensor:
    """Return new weights of a copy of a module, drawn from torch's random state, float32 [D] on the CPU.

    Args:
        module: the module; layers without `reset_parameters` keep its weights.
        names: names of the parameters, in the order of the vector.
    """
    drawn = copy.deepcopy(module)
    with torch.no_grad():
        for layer in drawn.modules():
            reset = getattr(layer, "reset_parameters", None)
            if callable(reset):
                reset()
    values = dict(drawn.named_parameters())
    return torch.cat([values[name].detach().float().cpu().reshape(-1) for name in names])
