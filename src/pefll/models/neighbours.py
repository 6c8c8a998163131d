"""A model whose predictions are mixed with a vote of the nearest neighbours among its client's samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pefll.models.head import Head
from pefll.models.network import Network


def neighbour_shares(
    features: Tensor, bank: Tensor, labels: Tensor, allowed: Tensor, counts: tuple[int, ...], classes: int, scale: float
) -> list[Tensor]:
    """Return the share of each class among the nearest neighbours of each sample, weighted by distance.

    A neighbour at distance d has the weight exp(-d² / scale).

    Args:
        features: [b, F], features of the samples.
        bank: [m, F], features of the possible neighbours.
        labels: int64 [m], labels of the possible neighbours.
        allowed: bool [m] or [b, m], which rows of the bank may be neighbours.
        counts: numbers of neighbours, ascending.
        classes: C, number of classes.
        scale: divides squared distances.

    Returns:
        shares [b, C] for each number in `counts`; zeros for a sample without neighbours.
    """
    centre = bank.mean(dim=0)  # becomes the origin, because distances of points far from the origin lose precision
    features, bank = features - centre, bank - centre
    squares = features.square().sum(1)[:, None] + bank.square().sum(1) - 2 * features @ bank.T
    closeness = (-squares.clamp(min=0) / scale).masked_fill(~allowed, -torch.inf)
    nearest, place = closeness.topk(min(counts[-1], len(bank)), dim=1)
    of_class = labels[place][..., None] == torch.arange(classes, device=labels.device)
    # Scale weights so that the nearest neighbour has weight 1. Otherwise all weights of a distant sample would be 0.
    weights = (nearest - nearest[:, :1].clamp(min=-1e30)).exp()
    shares = []
    for count in counts:
        votes = torch.einsum("bk,bkc->bc", weights[:, :count], of_class[:, :count].to(features.dtype))
        shares.append(votes / votes.sum(dim=1, keepdim=True).clamp(min=1e-30))
    return shares


def mixed(probabilities: Tensor, shares: Tensor, weight: Tensor | float) -> Tensor:
    """Return the log of a mixture [b, C]: neighbours' shares have `weight`, the model's probabilities 1 - `weight`."""
    return (weight * shares + (1 - weight) * probabilities).clamp(min=1e-30).log()


class NeighbourModel(nn.Module):
    """A module that maps samples to log-probabilities, from a network and one client's samples.

    Attributes:
        network: the network with its weights.
        bank: [m, F], features of the client's samples.
        labels: int64 [m], labels of these samples.
        settings: count (number of neighbours), weight (of their vote), scale (of squared distances), classes.
    """

    def __init__(self, network: nn.Module, bank: Tensor, labels: Tensor, settings: dict[str, Any]) -> None:
        super().__init__()
        self.network, self.settings = network, settings
        self.register_buffer("bank", bank)
        self.register_buffer("labels", labels)
        self.bank: Tensor
        self.labels: Tensor
        self._flat = Network(network, may_be_empty=True)
        self._head = Head(self._flat)

    def forward(self, x: Tensor) -> Tensor:
        """Map samples [b, ...] to log-probabilities [b, classes]."""
        s = self.settings
        named = dict(self.network.named_parameters())
        parts = [named[name].reshape(-1) for name in self._flat.names]
        theta = torch.cat(parts) if parts else x.new_empty(0)
        allowed = torch.ones(len(self.bank), dtype=torch.bool, device=self.bank.device)
        features = self._head.features(theta, x)
        (shares,) = neighbour_shares(features, self.bank, self.labels, allowed, (s["count"],), s["classes"], s["scale"])
        return mixed(self.network(x).softmax(dim=1), shares, s["weight"])
