"""pFedMe: Personalized Federated Learning with Moreau Envelopes (Dinh, Tran and Nguyen, NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from pefll.data.client import Batch, Client
from pefll.data.samples import TRAIN
from pefll.methods.contract import BaseMethod, ClientState, Cohort, check_kept, client_state, everyone, require
from pefll.methods.optim import SGD, sgd_on_loss


class Server(NamedTuple):
    """The server's state, and the clients' personal models.

    Attributes:
        theta: w, the global model, [D].
        personal: θ_i, the personal model that each client kept from its last round, [n, D].
    """

    theta: Tensor
    personal: Tensor


class Update(NamedTuple):
    """A client's reply: its copy of the global model [D]. The client keeps its personal model [D]."""

    theta: Tensor
    personal: ClientState


@dataclass(frozen=True)
class PFedMe(BaseMethod):
    """Personal models stay near a global model, which is trained so that good personal models are near it.

    Attributes:
        lambda_: λ of the penalty λ/2 ‖θ - w‖².
        local_rounds: R, number of steps of the global model on a client in a round, each with a new batch.
        inner_steps: K, number of steps of the personal model on each of these batches.
        beta: β, weight of the mean of the clients' copies in the new global model.
        batch_size: samples per local round; 0 for all samples.
        personal_lr: learning rate of the personal model's steps.
        client_lr: η, learning rate of the global model's steps along λ(w - θ).
        client_momentum: momentum of the personal model's steps on one batch.
        client_clip: maximum norm of the personal model's gradient; 0 for no clipping.
        weight_decay: weight decay of the personal model's steps.
        new_epochs: passes over a new client's samples that train its personal model.
        new_lr: learning rate of a new client's steps; 0 for personal_lr.
    """

    lambda_: float = 15.0
    local_rounds: int = 20
    inner_steps: int = 3
    beta: float = 1.0
    batch_size: int = 32
    personal_lr: float = 2e-2
    client_lr: float = 5e-3
    client_momentum: float = 0.0
    client_clip: float = 50.0
    weight_decay: float = 0.0
    new_epochs: int = 20
    new_lr: float = 0.0

    trains_new_clients: ClassVar[bool] = True
    client_rates: ClassVar[tuple[str, ...]] = ("personal_lr", "client_lr")
    client_tasks: ClassVar[tuple[str, ...]] = ("train", "join_in", "recall", "predict")
    kept_arguments: ClassVar[dict[str, tuple[str, ...]]] = {"recall": ("personal",), "predict": ("theta",)}

    def __post_init__(self) -> None:
        fits = self.local_rounds >= 1 and self.inner_steps >= 1
        require(fits, "local_rounds and inner_steps must be at least 1", code="PEFLL-S016")

    def check(self) -> None:
        """Raise PefllError if the clients' models do not fit into memory."""
        advice = "take fewer clients, a smaller model, or a method whose clients keep no model"
        check_kept(self.problem.num_clients, self.problem.model.size, advice)

    @property
    def local_steps(self) -> int:
        """Number of batch gradients that a client computes in a round."""
        return self.local_rounds * self.inner_steps

    def sgd(self, lr: float | Tensor) -> SGD:
        """Return the optimiser of a personal model, with the learning rate `lr`."""
        return SGD(lr, self.client_momentum, self.weight_decay, self.client_clip or None)

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw the first global model; all personal models start as copies of it."""
        del cohort
        theta = self.problem.model.init(seed, "model")
        return Server(theta, theta.repeat(self.problem.num_clients, 1))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Clients move their copies of the global model; the server mixes in the mean of the copies with weight β."""
        update = cohort.run(self.train, everyone(server.theta))
        theta = (1 - self.beta) * server.theta + self.beta * update.theta.mean(dim=0)
        return Server(theta, cohort.keep(server.personal, update.personal))

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return the personal models that clients kept, [c, D]; new clients train one near the global model."""
        if cohort.is_new:
            theta: Tensor = cohort.run(self.join_in, everyone(server.theta)).value
        else:
            theta = cohort.run(self.recall, client_state(server.personal)).value
        return theta

    def train(self, client: Client, theta: Tensor) -> Update:
        """Repeat R times: K steps of the personal model on one batch, then one step of the global model."""
        w, personal = theta, theta
        sgd, lr = self.sgd(client.rate(self.personal_lr)), client.rate(self.client_lr)
        for batch in client.batches("train", self.batch_size or None, self.local_rounds):
            personal = self.approach(personal, w, batch, sgd)
            w = w - lr * self.lambda_ * (w - personal)
        return Update(w, ClientState(personal))

    def approach(self, personal: Tensor, w: Tensor, batch: Batch, sgd: SGD) -> Tensor:
        """Return the personal model [D] after K steps on f(θ) + λ/2 ‖θ - w‖²."""
        return sgd_on_loss(lambda at, batch: self.envelope(at, w, batch), personal, [batch] * self.inner_steps, sgd)

    def envelope(self, personal: Tensor, w: Tensor, batch: Batch) -> Tensor:
        """Return f(θ) + λ/2 ‖θ - w‖² on a batch, []."""
        return self.problem.loss(personal, batch) + 0.5 * self.lambda_ * (personal - w).square().sum()

    def join_in(self, client: Client, theta: Tensor) -> ClientState:
        """Minimise f(θ) + λ/2 ‖θ - w‖² on all samples of a new client; the client keeps its model [D]."""
        batches, steps = client.epochs("new", self.batch_size or client.capacity[TRAIN], self.new_epochs)
        # In a round, w follows θ every K steps. That damps steps that are too large (personal_lr·λ above 1). Here w is
        # fixed, so the same learning rate can diverge. Therefore new clients have their own rate, new_lr.
        sgd = self.sgd(self.new_lr or self.personal_lr)
        return ClientState(sgd_on_loss(lambda at, batch: self.envelope(at, theta, batch), theta, batches, sgd, steps))

    def recall(self, client: Client, personal: Tensor) -> ClientState:
        """Return the model [D] that a client kept."""
        del client
        return ClientState(personal)
