"""A hypernetwork that makes the weights of a large client model in chunks, with one layer that all chunks share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pefll.models.hypernetwork import WIDTH, Hypernetwork


class ChunkedHypernetwork(nn.Module):
    """θ_k = s_k · head(ReLU(trunk(v) + e_k)) for each chunk k of the client model's weights.

    The trunk maps a descriptor to 100 numbers, e_k are 100 learned numbers of chunk k, and the head is one linear layer
    for all chunks. A chunk lies in one tensor of the client model. For D weights, chunks of about √D weights need the
    fewest parameters: 200 √D instead of the 100 D of one last layer. s_k is learned too. It starts at 1/√(fan-in) of
    the chunk's tensor, so that the first models are about as large as freshly drawn ones.
    """

    def __init__(self, descriptor: int, shapes: Sequence[torch.Size]) -> None:
        """Plan the chunks of tensors with these shapes.

        Args:
            descriptor: l, size of a descriptor.
            shapes: shapes of the client model's parameters, in the order of its flat vector.
        """
        super().__init__()
        sizes = [shape.numel() for shape in shapes]
        self.chunk = math.ceil(math.sqrt(sum(sizes)))
        self.sizes = sizes
        self.chunks = [math.ceil(size / self.chunk) for size in sizes]
        self.fans = _fans_in(shapes)
        self.trunk = Hypernetwork(descriptor, WIDTH)
        self.embeddings = nn.Parameter(torch.empty(sum(self.chunks), WIDTH))
        self.scales = nn.Parameter(torch.empty(sum(self.chunks), 1))
        self.head = nn.Linear(WIDTH, self.chunk)

    def reset_parameters(self) -> None:
        """Draw the chunks' embeddings, and set their scales."""
        nn.init.normal_(self.embeddings)
        fans = [fan for fan, count in zip(self.fans, self.chunks, strict=True) for _ in range(count)]
        with torch.no_grad():
            self.scales.copy_(torch.tensor(fans).pow(-0.5)[:, None])

    def forward(self, v: Tensor) -> Tensor:
        """Map descriptors [c, l] to parameters [c, D]."""
        features = F.relu(self.trunk(v)[:, None, :] + self.embeddings)
        made = (self.head(features) * self.scales).flatten(1)
        # Each tensor has whole chunks. The end of its last chunk is left out.
        parts = torch.split(made, [self.chunk * count for count in self.chunks], dim=1)
        return torch.cat([part[:, :size] for part, size in zip(parts, self.sizes, strict=True)], dim=1)


def _fans_in(shapes: Sequence[torch.Size]) -> list[float]:
    """Return the fan-in of each tensor; a bias takes that of the tensor before it."""
    fans, last = [], 1.0
    for shape in shapes:
        last = float(shape[1:].numel()) if len(shape) > 1 else last
        fans.append(max(1.0, last))
    return fans
