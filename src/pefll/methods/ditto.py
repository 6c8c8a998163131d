"""Ditto: Fair and Robust Federated Learning Through Personalization (Li, Hu, Beirami and Smith, ICML 2021)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from pefll.data.client import Batch, Client
from pefll.data.samples import TRAIN
from pefll.methods.averaging import mean
from pefll.methods.contract import ClientState, Cohort, client_state, everyone
from pefll.methods.local_sgd import LocalSGD
from pefll.methods.optim import sgd_along, sgd_on_loss


class Server(NamedTuple):
    """The server's state, and the clients' personal models.

    Attributes:
        theta: w, the global model, [D].
        personal: v_k, the personal models that clients keep, [n, D].
    """

    theta: Tensor
    personal: Tensor


class Update(NamedTuple):
    """A client's reply: its copy of w [D] and its number of training samples []. The client keeps v_k [D]."""

    theta: Tensor
    samples: Tensor
    personal: ClientState


@dataclass(frozen=True)
class Ditto(LocalSGD):
    """FedAvg's global model, and a personal model for each client that is pulled towards it.

    Attributes:
        lambda_: λ of the penalty λ/2 ‖v - w‖².
        global_steps: number of SGD steps of a client's copy of the global model in a round.
        personal_steps: s, number of SGD steps of the personal model in a round.
        personal_lr: η, learning rate of the personal model's steps.
        new_epochs: passes over a new client's samples that train its personal model.
    """

    lambda_: float = 1.0
    global_steps: int = 50
    personal_steps: int = 50
    personal_lr: float = 1e-2
    new_epochs: int = 20

    trains_new_clients: ClassVar[bool] = True
    client_rates: ClassVar[tuple[str, ...]] = ("client_lr", "personal_lr")
    client_tasks: ClassVar = ("train", "join_in", "recall", "predict")
    kept_arguments: ClassVar = {"train": ("personal",), "recall": ("personal",), "predict": ("theta",)}

    @property
    def local_steps(self) -> int:
        """Number of batch gradients that a client computes in a round."""
        return self.global_steps + self.personal_steps

    @property
    def kept_size(self) -> int:
        """Number of numbers that a client keeps between rounds: its personal model."""
        return self.problem.model.size

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw the first global model; all personal models start as copies of it."""
        del cohort
        theta = self.problem.model.init(seed, "model")
        return Server(theta, theta.repeat(self.problem.num_clients, 1))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Clients train their copies of w, then their personal models; the server takes the mean of the copies."""
        update = cohort.run(self.train, everyone(server.theta), client_state(server.personal))
        return Server(mean(update.theta, update.samples), cohort.keep(server.personal, update.personal))

    def train(self, client: Client, theta: Tensor, personal: Tensor) -> Update:
        """Train a copy of w = `theta` on f; train the personal model v on f(v) + λ/2 ‖v - w‖²."""
        batches = client.batches("train", self.batch_size, self.global_steps)
        copy = sgd_on_loss(self.problem.loss, theta, batches, self.sgd(client.rate(self.client_lr)))
        batches = client.batches("personal", self.batch_size, self.personal_steps)
        personal = sgd_along(self.pulled_to(theta), personal, batches, self.sgd(client.rate(self.personal_lr)))
        return Update(copy, client.count[TRAIN].to(theta.dtype), ClientState(personal))

    def pulled_to(self, w: Tensor) -> Callable[[Tensor, Batch], Tensor]:
        """Return the function that maps v [D] and a batch to ∇f(v) + λ(v - w)."""
        return lambda v, batch: self.problem.gradient(v, batch) + self.lambda_ * (v - w)

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return the personal models that clients kept, [c, D]; new clients train one, from the global model."""
        if cohort.is_new:
            return cohort.run(self.join_in, everyone(server.theta)).value  # type: ignore[no-any-return]
        return cohort.run(self.recall, client_state(server.personal)).value  # type: ignore[no-any-return]

    def join_in(self, client: Client, theta: Tensor) -> ClientState:
        """Minimise f(v) + λ/2 ‖v - w‖² from v = w on a new client's samples; the client keeps v [D]."""
        batches, steps = client.epochs("new", self.batch_size, self.new_epochs)
        return ClientState(sgd_along(self.pulled_to(theta), theta, batches, self.sgd(self.personal_lr), steps))

    def recall(self, client: Client, personal: Tensor) -> ClientState:
        """Return the model [D] that a client kept."""
        del client
        return ClientState(personal)
