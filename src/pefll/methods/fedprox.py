"""FedProx: Federated Optimization in Heterogeneous Networks (Li et al., MLSys 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pefll.data.client import Batch, Client
from pefll.methods.averaging import Averaging, Update, update
from pefll.methods.optim import SGD, sgd_along


@dataclass(frozen=True)
class FedProx(Averaging):
    """FedAvg whose clients stay near the global model: their loss has the penalty μ/2 ‖θ - w‖².

    Attributes:
        mu: μ of the penalty μ/2 ‖θ - w‖²; 0 for FedAvg.
        local_steps: number of SGD steps of a client in a round.
        batch_size: samples per local step; 0 for all samples.
        client_lr: learning rate of local SGD.
        client_momentum: momentum of local SGD.
        client_clip: maximum norm of the gradient of loss and penalty; 0 for no clipping.
        weight_decay: weight decay of local SGD.
    """

    mu: float = 0.1
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
        """Minimise f(θ) + μ/2 ‖θ - w‖² on one client's samples, from the global model w = `theta`."""
        w = theta

        def direction(at: Tensor, batch: Batch) -> Tensor:
            return self.problem.gradient(at, batch) + self.mu * (at - w)

        sgd = SGD(client.rate(self.client_lr), self.client_momentum, self.weight_decay, self.client_clip or None)
        batches = client.batches("train", self.batch_size or None, self.local_steps)
        return update(client, sgd_along(direction, w, batches, sgd))
