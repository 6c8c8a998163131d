"""FedBABU: Toward Enhanced Representation for Federated Image Classification (Oh, Kim and Yun, ICLR 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from torch import Tensor

from pefll.data.client import Client
from pefll.data.samples import TRAIN
from pefll.methods.averaging import mean
from pefll.methods.contract import ClientState, Cohort, everyone
from pefll.methods.local_sgd import LocalSGD
from pefll.methods.optim import sgd_on_loss
from pefll.models.head import Head, NoHead, head_of


class Server(NamedTuple):
    """The server's state.

    Attributes:
        body: the body that clients train, [B].
        head: the head as it was drawn, [h]; it never changes.
    """

    body: Tensor
    head: Tensor


class Update(NamedTuple):
    """A client's reply: its body [B] and its number of training samples []."""

    body: Tensor
    samples: Tensor


@dataclass(frozen=True)
class FedBABU(LocalSGD):
    """Clients train one body under a fixed random head; every client then fine-tunes the whole model.

    Attributes:
        head: auto for the model's last linear layer, none for no head (FedAvg with fine-tuning), or a layer's name.
        local_steps: number of SGD steps of a client in a round.
        tune_epochs: passes over a client's samples that fine-tune its model, of seen and new clients; 0 for none.
        tune_lr: learning rate of fine-tuning.
    """

    head: str = "auto"
    local_steps: int = 50
    tune_epochs: int = 5
    tune_lr: float = 1e-2

    trains_new_clients: ClassVar[bool] = True
    client_tasks: ClassVar = ("train", "tune", "predict")
    kept_arguments: ClassVar = {"predict": ("theta",)}

    def check(self) -> None:
        """Find the head, so that a wrong name of a layer is an error before the run starts."""
        _ = self.parts

    @cached_property
    def parts(self) -> Head | NoHead:
        """The object that splits a model into body and head."""
        return head_of(self.problem.model, self.head)

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw the first body, and the head of all clients."""
        del cohort
        return Server(*self.parts.split(self.problem.model.init(seed, "model")))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Clients train the body, the server takes the mean."""
        update = cohort.run(self.train, everyone(server.body), everyone(server.head))
        return Server(mean(update.body, update.samples), server.head)

    def train(self, client: Client, body: Tensor, head: Tensor) -> Update:
        """Train the body on one client's samples; the head stays as it was drawn."""
        batches = client.batches("train", self.batch_size, self.local_steps)
        values, loss, sgd = self.parts.values, self.problem.loss, self.sgd(client.rate(self.client_lr))
        body = sgd_on_loss(lambda at, batch: loss(values(at, head), batch), body, batches, sgd)
        return Update(body, client.count[TRAIN].to(body.dtype))

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return for each client the model of body and head after fine-tuning on its samples, [c, D]."""
        theta: Tensor = cohort.run(self.tune, everyone(self.parts.join(server.body, server.head))).value
        return theta

    def tune(self, client: Client, theta: Tensor) -> ClientState:
        """Train the whole model for `tune_epochs`; the client keeps it, [D]."""
        batches, steps = client.epochs("tune", self.batch_size, self.tune_epochs)
        return ClientState(sgd_on_loss(self.problem.loss, theta, batches, self.sgd(self.tune_lr), steps))
