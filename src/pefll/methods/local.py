"""Local: every client trains its own model, only on its own samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from pefll.data.client import Client
from pefll.methods.contract import BaseMethod, ClientState, Cohort, everyone, require
from pefll.methods.optim import SGD, sgd_on_loss


class Server(NamedTuple):
    """The initial model of all clients, [D]; it never changes."""

    theta: Tensor


@dataclass(frozen=True)
class Local(BaseMethod):
    """The baseline without a federation: a client trains when it needs its personal model, not in rounds.

    Attributes:
        epochs: passes over a client's samples; each step draws a new random batch.
        batch_size: samples per step.
        client_lr: learning rate of local SGD.
        client_momentum: momentum of local SGD.
        client_clip: maximum norm of a local gradient; 0 for no clipping.
        weight_decay: weight decay of local SGD.
    """

    epochs: int = 200
    batch_size: int = 32
    client_lr: float = 5e-3
    client_momentum: float = 0.9
    client_clip: float = 50.0
    weight_decay: float = 5e-5

    trains_in_rounds: ClassVar[bool] = False
    trains_new_clients: ClassVar[bool] = True
    client_tasks: ClassVar[tuple[str, ...]] = ("train", "predict")
    kept_arguments: ClassVar[dict[str, tuple[str, ...]]] = {"predict": ("theta",)}

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size is {self.batch_size}; it must be at least 1", code="PEFLL-S008")

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw the initial model."""
        del cohort
        return Server(self.problem.model.init(seed, "model"))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Return the state unchanged, because clients do not learn from each other."""
        del cohort
        return server

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return the models [c, D] that clients train on their own samples."""
        theta: Tensor = cohort.run(self.train, everyone(server.theta)).value
        return theta

    def train(self, client: Client, theta: Tensor) -> ClientState:
        """Train for `epochs` passes; the client keeps its model [D]."""
        sgd = SGD(self.client_lr, self.client_momentum, self.weight_decay, self.client_clip or None)
        batches, steps = client.epochs("train", self.batch_size, self.epochs)
        return ClientState(sgd_on_loss(self.problem.loss, theta, batches, sgd, steps))
