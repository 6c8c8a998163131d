"""FedRep: Exploiting Shared Representations for Personalized Federated Learning (Collins et al., ICML 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from torch import Tensor

from pefll.data.client import Client
from pefll.data.samples import TRAIN
from pefll.methods.averaging import mean
from pefll.methods.contract import BaseMethod, ClientState, Cohort, check_kept, client_state, everyone, require
from pefll.methods.optim import SGD, sgd_on_loss
from pefll.models.head import Head, NoHead, head_of


class Server(NamedTuple):
    """The server's state, and the clients' heads.

    Attributes:
        body: φ, the shared representation, [B].
        head: the initial head of every client, [h]; it never changes.
        heads: h_i, the heads that clients keep, [n, h].
    """

    body: Tensor
    head: Tensor
    heads: Tensor


class Update(NamedTuple):
    """A client's reply: its body [B] and its number of training samples []. The client keeps its head [h]."""

    body: Tensor
    samples: Tensor
    head: ClientState


@dataclass(frozen=True)
class FedRep(BaseMethod):
    """All clients learn one body, a shared representation; each client learns a personal head.

    Attributes:
        head: auto for the model's last linear layer, none for no head (FedAvg), or the name of a layer.
        head_epochs: passes over a client's samples that train its head, per round.
        body_epochs: passes over a client's samples that train the body after the head, per round.
        new_epochs: passes over a new client's samples that train its head, with a fixed body; 0 for the initial head.
        batch_size: samples per step.
        client_lr: learning rate of local SGD.
        client_momentum: momentum of local SGD.
        client_clip: maximum norm of a local gradient; 0 for no clipping.
        weight_decay: weight decay of local SGD.
    """

    head: str = "auto"
    head_epochs: int = 5
    body_epochs: int = 1
    new_epochs: int = 20
    batch_size: int = 32
    client_lr: float = 1e-2
    client_momentum: float = 0.9
    client_clip: float = 50.0
    weight_decay: float = 5e-5

    trains_new_clients: ClassVar[bool] = True
    client_rates: ClassVar[tuple[str, ...]] = ("client_lr",)
    client_tasks: ClassVar[tuple[str, ...]] = ("train", "join_in", "assemble", "predict")
    kept_arguments: ClassVar[dict[str, tuple[str, ...]]] = {
        "train": ("head",),
        "assemble": ("head",),
        "predict": ("theta",),
    }

    def __post_init__(self) -> None:
        fits = self.batch_size >= 1 and self.body_epochs >= 1
        require(fits, "batch_size and body_epochs must be at least 1", code="PEFLL-S005")

    def check(self) -> None:
        """Find the head, so that a wrong name of a layer is an error before the run starts."""
        check_kept(self.problem.num_clients, self.parts.size, "take fewer clients, or a smaller layer as the head")

    @cached_property
    def parts(self) -> Head | NoHead:
        """The object that splits a model into body and head."""
        return head_of(self.problem.model, self.head)

    @property
    def local_epochs(self) -> int:
        """Number of gradients per sample that a client computes in a round."""
        return self.head_epochs + self.body_epochs if self.parts.size else self.body_epochs

    def sgd(self, client: Client) -> SGD:
        """Return a client's optimiser."""
        return SGD(client.rate(self.client_lr), self.client_momentum, self.weight_decay, self.client_clip or None)

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw the first model; its head is the initial head of every client."""
        del cohort
        body, head = self.parts.split(self.problem.model.init(seed, "model"))
        return Server(body, head, head.repeat(self.problem.num_clients, 1))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Clients train their heads, then their bodies. The server takes the mean of the bodies."""
        update = cohort.run(self.train, everyone(server.body), client_state(server.heads))
        body = mean(update.body, update.samples)
        return Server(body, server.head, cohort.keep(server.heads, update.head))

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return models [c, D] of the shared body and each client's head; new clients train a head first."""
        if cohort.is_new:
            theta: Tensor = cohort.run(self.join_in, everyone(server.body), everyone(server.head)).value
        else:
            theta = cohort.run(self.assemble, everyone(server.body), client_state(server.heads)).value
        return theta

    def train(self, client: Client, body: Tensor, head: Tensor) -> Update:
        """Train a client's head for `head_epochs`, then its body for `body_epochs`."""
        head = self.fit_head(client, body, head, self.head_epochs)
        batches, steps = client.epochs("train", self.batch_size, self.body_epochs)
        body = sgd_on_loss(
            lambda b, batch: self.problem.loss(self.parts.values(b, head), batch),
            body,
            batches,
            self.sgd(client),
            steps,
        )
        return Update(body, client.count[TRAIN].to(body.dtype), ClientState(head))

    def fit_head(self, client: Client, body: Tensor, head: Tensor, epochs: int) -> Tensor:
        """Return the head [h] after `epochs` passes over a client's samples; the body stays fixed."""
        if not self.parts.size or not epochs:
            return head
        batches, steps = client.epochs("head", self.batch_size, epochs)
        return sgd_on_loss(
            lambda h, batch: self.problem.loss(self.parts.values(body, h), batch),
            head,
            batches,
            self.sgd(client),
            steps,
        )

    def join_in(self, client: Client, body: Tensor, head: Tensor) -> ClientState:
        """Train a new client's head; the client keeps its model [D]."""
        return ClientState(self.parts.join(body, self.fit_head(client, body, head, self.new_epochs)))

    def assemble(self, client: Client, body: Tensor, head: Tensor) -> ClientState:
        """Return the model [D] of the newest body and the head that the client kept."""
        del client
        return ClientState(self.parts.join(body, head))
