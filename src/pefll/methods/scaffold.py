"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning (Karimireddy et al., ICML 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pefll.data.client import Batch, Client
from pefll.methods.contract import BaseMethod, ClientState, Cohort, check_kept, client_state, everyone, require
from pefll.methods.optim import SGD, sgd_along


class Server(NamedTuple):
    """The server's state, and the clients' control variates.

    Attributes:
        theta: x, the global model, [D].
        variate: c, the server's control variate: the mean of all c_i, [D].
        variates: c_i, the control variates that clients keep, [n, D].
    """

    theta: Tensor
    variate: Tensor
    variates: Tensor


class Update(NamedTuple):
    """A client's reply: its model y_i [D] and c_i⁺ - c_i [D]. The client keeps c_i⁺ [D]."""

    theta: Tensor
    change: Tensor
    variate: ClientState


@dataclass(frozen=True)
class Scaffold(BaseMethod):
    """One model for all clients, whose local steps are corrected by how a client's gradient differs from the mean.

    Algorithm 1 with option II: a client's new control variate is the mean of its gradients of the round.

    Attributes:
        local_steps: K, number of SGD steps of a client in a round.
        batch_size: samples per local step; 0 for all samples.
        client_lr: η_l, learning rate of local SGD, which has no momentum.
        server_lr: η_g, learning rate of the server's step along the mean change of the clients' models.
        client_clip: maximum norm of a corrected gradient; 0 for no clipping.
        weight_decay: weight decay of local SGD.
    """

    local_steps: int = 50
    batch_size: int = 32
    client_lr: float = 1e-2
    server_lr: float = 1.0
    client_clip: float = 50.0
    weight_decay: float = 5e-5

    uses_labels: ClassVar[bool] = False  # every client gets the global model
    client_rates: ClassVar[tuple[str, ...]] = ("client_lr",)
    server_rates: ClassVar[tuple[str, ...]] = ("server_lr",)
    client_tasks: ClassVar[tuple[str, ...]] = ("train", "predict")
    kept_arguments: ClassVar[dict[str, tuple[str, ...]]] = {"train": ("variate_i",)}

    def __post_init__(self) -> None:
        fits = self.local_steps >= 1 and self.client_lr > 0
        require(fits, "local_steps must be at least 1, and client_lr more than 0", code="PEFLL-S570")

    def check(self) -> None:
        """Raise PefllError if the clients' control variates do not fit into memory."""
        advice = "take fewer clients, a smaller model, or a method whose clients keep no model"
        check_kept(self.problem.num_clients, self.problem.model.size, advice)

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw the first global model; all control variates are 0."""
        del cohort
        theta = self.problem.model.init(seed, "model")
        zero = torch.zeros_like(theta)
        return Server(theta, zero, zero.repeat(self.problem.num_clients, 1))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Clients take corrected steps; the server moves x and c by the mean changes. N is the number of clients."""
        x, c = server.theta, server.variate
        update = cohort.run(self.train, everyone(x), everyone(c), client_state(server.variates))
        x = x + cohort.server_rate(self.server_lr) * (update.theta.mean(dim=0) - x)
        c = c + cohort.size / self.problem.num_seen * update.change.mean(dim=0)
        return Server(x, c, cohort.keep(server.variates, update.variate))

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return the global model for each client, [c, D]."""
        return server.theta.expand(cohort.size, -1)

    def train(self, client: Client, theta: Tensor, variate: Tensor, variate_i: Tensor) -> Update:
        """Take K steps along g_i(y) - c_i + c from x = `theta`; then c_i⁺ = c_i - c + (x - y) / (K η_l)."""
        correction = variate - variate_i

        def direction(y: Tensor, batch: Batch) -> Tensor:
            return self.problem.gradient(y, batch) + correction

        lr = client.rate(self.client_lr)
        sgd = SGD(lr, 0.0, self.weight_decay, self.client_clip or None)
        batches = client.batches("train", self.batch_size or None, self.local_steps)
        y = sgd_along(direction, theta, batches, sgd)
        change = (theta - y) / (self.local_steps * lr) - variate
        if isinstance(lr, Tensor):
            change = torch.where(lr > 0, change, 0.0)
        elif lr == 0:  # a schedule may stop the clients
            change = torch.zeros_like(change)
        return Update(y, change, ClientState(variate_i + change))
