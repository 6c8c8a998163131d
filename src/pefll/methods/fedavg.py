"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data (McMahan et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pefll.data.client import Client
from pefll.methods.averaging import Averaging, Update, update
from pefll.methods.optim import SGD, sgd_on_loss


@dataclass(frozen=True)
class FedAvg(Averaging):
    """One model for all clients: the mean of locally trained copies, weighted by numbers of samples.

    Attributes:
        local_steps: number of SGD steps of a client in a round.
        batch_size: samples per local step; 0 for all samples.
        client_lr: learning rate of local SGD.
        client_momentum: momentum of local SGD.
        client_clip: maximum norm of a local gradient; 0 for no clipping.
        weight_decay: weight decay of local SGD.
    """

    local_steps: int = 50
    batch_size: int = 32
    client_lr: float = 1e-2
    client_momentum: float = 0.9
    client_clip: float = 50.0
    weight_decay: float = 5e-5

    uses_labels: ClassVar[bool] = False  # every client gets the global model
    client_rates: ClassVar[tuple[str, ...]] = ("client_lr",)
    client_tasks: ClassVar[tuple[str, ...]] = ("train", "predict")

    def train(self, client: Client, theta: Tensor) -> Update:
        """Train the global model on one client's samples."""
        sgd = SGD(client.rate(self.client_lr), self.client_momentum, self.weight_decay, self.client_clip or None)
        batches = client.batches("train", self.batch_size or None, self.local_steps)
        return update(client, sgd_on_loss(self.problem.loss, theta, batches, sgd))
