"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data (McMahan et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pefll.data.client import Client
from pefll.data.federation import TRAIN
from pefll.methods.contract import Cohort, Problem, Score, everyone, score
from pefll.methods.optim import SGD, sgd_on_loss


class Server(NamedTuple):
    """The global model θ, [D]."""

    theta: Tensor


class Update(NamedTuple):
    """A client's reply: its model [D] and how many samples made it []."""

    theta: Tensor
    samples: Tensor


@dataclass(frozen=True)
class FedAvg:
    """One model for everybody: the mean of locally trained copies, weighted by samples.

    Attributes:
        problem: what there is to learn.
        local_steps: of SGD in a round.
        batch_size: of a local step; 0 for all samples.
        client_lr: learning rate.
        client_momentum: of local SGD.
        client_clip: a local gradient's norm is cut to this; 0 for no cut.
        weight_decay: of local SGD.
    """

    problem: Problem
    local_steps: int = 50
    batch_size: int = 32
    client_lr: float = 1e-2
    client_momentum: float = 0.9
    client_clip: float = 50.0
    weight_decay: float = 5e-5

    trains_in_rounds: ClassVar[bool] = True
    uses_labels: ClassVar[bool] = False  # to personalise, which is to hand out the global model
    trains_new_clients: ClassVar[bool] = False
    local_epochs: ClassVar[int] = 0
    client_tasks: ClassVar[tuple[str, ...]] = ("train", "predict")

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw the first global model."""
        del cohort
        return Server(self.problem.model.init(seed, "model"))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Everyone trains the global model, the server takes the mean."""
        update = cohort.run(self.train, everyone(server.theta))
        share = update.samples / update.samples.sum()
        return Server(torch.einsum("c,cd->d", share, update.theta))

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return the global model for each, [c, D]: FedAvg does not personalise."""
        return server.theta.expand(cohort.size, -1)

    def descriptors(self, server: Server, cohort: Cohort) -> None:
        """Return nothing: clients are not described."""

    def train(self, client: Client, theta: Tensor) -> Update:
        """Train the global model on one client's samples."""
        sgd = SGD(self.client_lr, self.client_momentum, self.weight_decay, self.client_clip or None)
        batches = client.batches("train", self.batch_size or None, self.local_steps)
        return Update(sgd_on_loss(self.problem.loss, theta, batches, sgd), client.count[TRAIN].to(theta.dtype))

    def predict(self, client: Client, theta: Tensor, split: int) -> Score:
        """Score the global model."""
        return score(self.problem, client, theta, split)
