"""The base class of methods in which clients share one part of a model and keep the other part to themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from pefll.data.client import Client
from pefll.data.samples import TRAIN
from pefll.methods.averaging import mean
from pefll.methods.contract import ClientState, Cohort, client_state, everyone
from pefll.methods.local_sgd import LocalSGD
from pefll.methods.optim import sgd_on_loss
from pefll.models.head import Parts


class Server(NamedTuple):
    """The server's state, and the clients' own parts.

    Attributes:
        shared: the part that all clients share, [S].
        own: the own part with which every client starts, [P]; it never changes.
        owns: the own parts that clients keep, [n, P].
    """

    shared: Tensor
    own: Tensor
    owns: Tensor


class Update(NamedTuple):
    """A client's reply: its shared part [S] and its number of training samples []. It keeps its own part [P]."""

    shared: Tensor
    samples: Tensor
    own: ClientState


@dataclass(frozen=True)
class PartlyShared(LocalSGD):
    """Clients train both parts of a model at once; the server takes the mean of the shared parts.

    The papers leave open what a new client does. Here it trains its own part, and the shared part stays fixed. A
    subclass defines `parts`.

    Attributes:
        local_steps: number of SGD steps of a client in a round.
        new_epochs: passes over a new client's samples that train its own part; the shared part stays fixed.
    """

    local_steps: int = 50
    new_epochs: int = 20

    trains_new_clients: ClassVar[bool] = True
    client_tasks: ClassVar = ("train", "join_in", "assemble", "predict")
    kept_arguments: ClassVar = {"train": ("own",), "assemble": ("own",), "predict": ("theta",)}

    @property
    def parts(self) -> Parts:
        """The object that splits a model into the shared part and the own part."""
        raise NotImplementedError

    @property
    def kept_size(self) -> int:
        """Number of numbers that a client keeps between rounds: its own part."""
        return self.parts.size

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw the first model; every client starts with its own part."""
        del cohort
        shared, own = self.parts.split(self.problem.model.init(seed, "model"))
        return Server(shared, own, own.repeat(self.problem.num_clients, 1))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Clients train whole models; the server takes the mean of the shared parts."""
        update = cohort.run(self.train, everyone(server.shared), client_state(server.owns))
        return Server(mean(update.shared, update.samples), server.own, cohort.keep(server.owns, update.own))

    def train(self, client: Client, shared: Tensor, own: Tensor) -> Update:
        """Train the model of a shared part and a client's own part; both parts move in every step."""
        batches = client.batches("train", self.batch_size, self.local_steps)
        theta = sgd_on_loss(
            self.problem.loss, self.parts.join(shared, own), batches, self.sgd(client.rate(self.client_lr))
        )
        shared, own = self.parts.split(theta)
        return Update(shared, client.count[TRAIN].to(theta.dtype), ClientState(own))

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return models [c, D] of the shared part and clients' own parts; new clients train their own part first."""
        shared = everyone(server.shared)
        if cohort.is_new:
            return cohort.run(self.join_in, shared, everyone(server.own)).value  # type: ignore[no-any-return]
        return cohort.run(self.assemble, shared, client_state(server.owns)).value  # type: ignore[no-any-return]

    def join_in(self, client: Client, shared: Tensor, own: Tensor) -> ClientState:
        """Train a new client's own part, with a fixed shared part; the client keeps its model [D]."""
        if self.parts.size and self.new_epochs:
            batches, steps = client.epochs("new", self.batch_size, self.new_epochs)
            values, loss, sgd = self.parts.values, self.problem.loss, self.sgd(self.client_lr)
            own = sgd_on_loss(lambda at, batch: loss(values(shared, at), batch), own, batches, sgd, steps)
        return ClientState(self.parts.join(shared, own))

    def assemble(self, client: Client, shared: Tensor, own: Tensor) -> ClientState:
        """Return the model [D] of the newest shared part and the own part that the client kept."""
        del client
        return ClientState(self.parts.join(shared, own))
