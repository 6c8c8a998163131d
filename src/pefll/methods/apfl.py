"""APFL: Adaptive Personalized Federated Learning (Deng, Kamani and Mahdavi, 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pefll.data.client import Client
from pefll.data.samples import TRAIN
from pefll.methods.averaging import mean
from pefll.methods.contract import ClientState, Cohort, client_state, everyone, require
from pefll.methods.local_sgd import LocalSGD
from pefll.methods.optim import sgd_on_loss, sgd_step


class Server(NamedTuple):
    """The server's state, and what clients keep.

    Attributes:
        theta: w, the global model, [D].
        own: v_i, the clients' own models, [n, D].
        alpha: α_i, the weight of v_i in a client's personal model, [n, 1].
    """

    theta: Tensor
    own: Tensor
    alpha: Tensor


class Update(NamedTuple):
    """A client's reply: its copy of w [D] and its number of training samples []. It keeps v_i [D] and α_i [1]."""

    theta: Tensor
    samples: Tensor
    own: ClientState
    alpha: ClientState


def mixture(own: Tensor, theta: Tensor, alpha: Tensor | float) -> Tensor:
    """Return the personal model α v + (1 - α) w, [D]."""
    return alpha * own + (1 - alpha) * theta


@dataclass(frozen=True)
class APFL(LocalSGD):
    """A personal model is α v + (1 - α) w: a mixture of the client's own model v and the global model w.

    Attributes:
        alpha: α of a client that has not trained yet, between 0 and 1.
        alpha_lr: learning rate of α, which takes one step at the beginning of a round; 0 for a fixed α.
        mixed_steps: number of SGD steps in a round, of the copy of w and of v at once.
        new_epochs: passes over a new client's samples that train its own model.
    """

    alpha: float = 0.5
    alpha_lr: float = 1e-2
    mixed_steps: int = 50
    new_epochs: int = 20

    trains_new_clients: ClassVar[bool] = True
    client_rates: ClassVar[tuple[str, ...]] = ("client_lr", "alpha_lr")
    client_tasks: ClassVar = ("train", "join_in", "mix", "predict")
    kept_arguments: ClassVar = {"train": ("own", "alpha"), "mix": ("own", "alpha"), "predict": ("theta",)}

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha <= 1, f"alpha is {self.alpha}; it must be at most 1", code="PEFLL-S571")

    @property
    def local_steps(self) -> int:
        """Number of batch gradients that a client computes in a round."""
        return 2 * self.mixed_steps + (self.alpha_lr > 0)

    @property
    def kept_size(self) -> int:
        """Number of numbers that a client keeps between rounds: its own model and α."""
        return self.problem.model.size + 1

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw the first global model; all clients' own models start as copies of it."""
        del cohort
        theta, clients = self.problem.model.init(seed, "model"), self.problem.num_clients
        return Server(theta, theta.repeat(clients, 1), torch.full((clients, 1), self.alpha))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Clients train α, then w and v in the same steps; the server takes the mean of the copies of w."""
        update = cohort.run(self.train, everyone(server.theta), client_state(server.own), client_state(server.alpha))
        own, alpha = cohort.keep(server.own, update.own), cohort.keep(server.alpha, update.alpha)
        return Server(mean(update.theta, update.samples), own, alpha)

    def train(self, client: Client, theta: Tensor, own: Tensor, alpha: Tensor) -> Update:
        """Take steps of w = `theta` along ∇f(w), and of v = `own` along the gradient of f(α v + (1 - α) w) by v."""
        gradient, sgd, w, v = self.problem.gradient, self.sgd(client.rate(self.client_lr)), theta, own
        if self.alpha_lr:
            slope = torch.dot(v - w, gradient(mixture(v, w, alpha), *client.batches("alpha", self.batch_size, 1)))
            alpha = (alpha - client.rate(self.alpha_lr) * slope).clamp(0, 1)
        speed_w, speed_v = torch.zeros_like(w), torch.zeros_like(v)
        for batch in client.batches("train", self.batch_size, self.mixed_steps):
            v, speed_v = sgd_step(v, speed_v, alpha * gradient(mixture(v, w, alpha), batch), sgd)
            w, speed_w = sgd_step(w, speed_w, gradient(w, batch), sgd)
        return Update(w, client.count[TRAIN].to(w.dtype), ClientState(v), ClientState(alpha))

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return α v + (1 - α) w for each client, [c, D]; new clients train v first."""
        w, kept = everyone(server.theta), (client_state(server.own), client_state(server.alpha))
        reply = cohort.run(self.join_in, w) if cohort.is_new else cohort.run(self.mix, w, *kept)
        return reply.value  # type: ignore[no-any-return]

    def mix(self, client: Client, theta: Tensor, own: Tensor, alpha: Tensor) -> ClientState:
        """Return the mixture [D] of the newest global model and the own model that the client kept."""
        del client
        return ClientState(mixture(own, theta, alpha))

    def join_in(self, client: Client, theta: Tensor) -> ClientState:
        """Train a new client's v from w, with the first α and a fixed w; the client keeps the mixture [D]."""
        loss, sgd = self.problem.loss, self.sgd(self.client_lr)
        batches, steps = client.epochs("new", self.batch_size, self.new_epochs)
        v = sgd_on_loss(lambda v, batch: loss(mixture(v, theta, self.alpha), batch), theta, batches, sgd, steps)
        return ClientState(mixture(v, theta, self.alpha))
