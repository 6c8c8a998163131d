"""kNN-Per: Personalized Federated Learning through Local Memorization (Marfoq et al., ICML 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from pefll.data.client import Client
from pefll.methods.averaging import Averaging, Update, update
from pefll.methods.contract import ClientState, Cohort, everyone, require, sum_scores
from pefll.methods.optim import SGD, sgd_on_loss
from pefll.models.head import Head
from pefll.models.neighbours import NeighbourModel, mixed, neighbour_shares


class Memory(NamedTuple):
    """A client's memory of its training samples. It is computed when it is needed.

    Attributes:
        bank: features of the samples, [m, F].
        labels: labels of the samples, int64 [m].
        filled: bool [m], False for padding.
        many: bool [], whether to use the larger number of neighbours.
        weight: λ [], the weight of the neighbours; the global model has the weight 1 - λ.
    """

    bank: Tensor
    labels: Tensor
    filled: Tensor
    many: Tensor
    weight: Tensor


@dataclass(frozen=True)
class KNNPer(Averaging):
    """FedAvg's global model, mixed with a vote of a client's nearest samples. A new client trains nothing.

    Attributes:
        local_steps: number of SGD steps of a client in a round.
        batch_size: samples per local step; 0 for all samples.
        client_lr: learning rate of local SGD.
        client_momentum: momentum of local SGD.
        client_clip: maximum norm of a local gradient; 0 for no clipping.
        weight_decay: weight decay of local SGD.
        scale: a neighbour at distance d has weight exp(-d² / scale).
        few_neighbours: the smaller choice of k, the number of neighbours.
        many_neighbours: the larger choice of k, the number of neighbours.
        max_weight: largest λ that a client may choose among 0, 0.1, 0.2, ...; 0 for the global model only.
    """

    local_steps: int = 50
    batch_size: int = 32
    client_lr: float = 1e-2
    client_momentum: float = 0.9
    client_clip: float = 50.0
    weight_decay: float = 5e-5
    scale: float = 100.0
    few_neighbours: int = 5
    many_neighbours: int = 10
    max_weight: float = 1.0

    client_rates: ClassVar[tuple[str, ...]] = ("client_lr",)
    client_tasks: ClassVar[tuple[str, ...]] = ("train", "keep_memory", "predict")

    def __post_init__(self) -> None:
        ordered = 1 <= self.few_neighbours <= self.many_neighbours
        require(ordered, "few_neighbours must be at least 1 and at most many_neighbours", code="PEFLL-S006")
        fits = self.scale > 0 and self.max_weight <= 1
        require(fits, "scale must be more than 0, and max_weight at most 1", code="PEFLL-S007")

    def check(self) -> None:
        """Raise PefllError unless labels are classes. Find the head, so that a model without one is an error now."""
        require(
            self.problem.classes > 0,
            "kNN-Per lets neighbours vote for classes, but these labels are not classes; take another method",
            code="PEFLL-S521",
        )
        _ = self.head

    @cached_property
    def head(self) -> Head:
        """The model's last linear layer; its input is the features."""
        return Head(self.problem.model)

    def train(self, client: Client, theta: Tensor) -> Update:
        """Train the global model on one client's samples."""
        sgd = SGD(client.rate(self.client_lr), self.client_momentum, self.weight_decay, self.client_clip or None)
        batches = client.batches("train", self.batch_size or None, self.local_steps)
        return update(client, sgd_on_loss(self.problem.loss, theta, batches, sgd))

    def predict(self, client: Client, theta: Tensor, split: int) -> Any:
        """Score the mixture of the global model and the client's memory."""
        memory = self.remember(client, theta)

        def scores_of(x: Tensor) -> Tensor:
            few, many = self.shares(memory, self.head.features(theta, x), memory.filled)
            shares = torch.where(memory.many, many, few)
            return mixed(self.problem.model(theta, x).softmax(dim=1), shares, memory.weight)

        return sum_scores(self.problem, client, scores_of, split)

    def remember(self, client: Client, theta: Tensor) -> Memory:
        """Return the features of all training samples, and the k and λ that are best if each sample is left out once.

        Of settings with equally many correct predictions, the one with the highest probability of true labels is best.
        """
        blocks = list(client.everything())
        bank = torch.cat([self.head.features(theta, block.x) for block in blocks])
        labels = torch.cat([block.y for block in blocks])
        filled = torch.cat([block.weight for block in blocks]) > 0
        memory = Memory(bank, labels, filled, filled.any(), bank.new_zeros(()))
        weights = 0.1 * torch.arange(round(10 * self.max_weight) + 1, dtype=bank.dtype, device=bank.device)
        right = bank.new_zeros(2, len(weights))
        sure = bank.new_zeros(2, len(weights))
        start, places = 0, torch.arange(len(bank), device=bank.device)
        for block in blocks:
            mine = slice(start, start + len(block.y))
            others = filled & (places[mine][:, None] != places)
            p = self.problem.model(theta, block.x).softmax(dim=1)
            for k, shares in enumerate(self.shares(memory, bank[mine], others)):
                mixture = weights[:, None, None] * shares + (1 - weights)[:, None, None] * p  # [λ, b, C]
                hits = (mixture.argmax(dim=2) == block.y).to(p.dtype)
                of_label = mixture.gather(2, block.y.expand(len(weights), -1)[..., None]).squeeze(2)
                choice = torch.arange(2, device=bank.device)[:, None] == k
                right = right + choice * (hits @ block.weight)
                sure = sure + choice * (of_label @ block.weight)
            start += len(block.y)
        best = (right + sure / filled.sum().clamp(min=1)).flatten().argmax()
        return memory._replace(many=best >= len(weights), weight=weights[torch.remainder(best, len(weights))])

    def shares(self, memory: Memory, features: Tensor, allowed: Tensor) -> list[Tensor]:
        """Return the shares of classes, [b, C], among few neighbours and among many neighbours."""
        counts = (self.few_neighbours, self.many_neighbours)
        return neighbour_shares(features, memory.bank, memory.labels, allowed, counts, self.problem.classes, self.scale)

    def keep_memory(self, client: Client, theta: Tensor) -> ClientState:
        """Compute the client's memory, which the client keeps."""
        return ClientState(self.remember(client, theta))

    def personal_module(self, cohort: Cohort, theta: Tensor) -> nn.Module:
        """Return the model and the memory of the cohort's only client as one module.

        Args:
            cohort: a cohort of one client.
            theta: the client's model, [1, D].
        """
        memory: Memory = cohort.run(self.keep_memory, everyone(theta[0])).value
        settings = {
            "count": self.many_neighbours if bool(memory.many) else self.few_neighbours,
            "weight": float(memory.weight),
            "scale": self.scale,
            "classes": self.problem.classes,
        }
        network = self.problem.model.with_parameters(theta[0])
        return NeighbourModel(network, memory.bank[0].cpu(), memory.labels[0].cpu(), settings)
