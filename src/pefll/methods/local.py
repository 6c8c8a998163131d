"""Local: every client trains alone, on nothing but its own samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from pefll.core.errors import PefllError
from pefll.data.client import Client
from pefll.methods.contract import BaseMethod, Cohort, Own, everyone
from pefll.methods.optim import SGD, sgd_on_loss


class Server(NamedTuple):
    """The initial model that everybody starts from, [D]; it never changes."""

    theta: Tensor


@dataclass(frozen=True)
class Local(BaseMethod):
    """No federation: what a client would get without one. All training happens when a client is personalised.

    Attributes:
        epochs: of as many steps as make one pass over a client's samples; each step draws its batch afresh.
        batch_size: of a step.
        client_lr: learning rate.
        client_momentum: of SGD.
        client_clip: a gradient's norm is cut to this; 0 for no cut.
        weight_decay: of SGD.
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
        if self.batch_size < 1:
            raise PefllError("batch_size must be at least 1", code="PEFLL-S008")

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw the model that everybody starts from."""
        del cohort
        return Server(self.problem.model.init(seed, "model"))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Nothing is learned together."""
        del cohort
        return server

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Let every client train on its own, [c, D]."""
        theta: Tensor = cohort.run(self.train, everyone(server.theta)).value
        return theta

    def train(self, client: Client, theta: Tensor) -> Own:
        """Train for `epochs` passes; clients mapped together stop each after its own number of steps."""
        sgd = SGD(self.client_lr, self.client_momentum, self.weight_decay, self.client_clip or None)
        batches, steps = client.epochs("train", self.batch_size, self.epochs)
        return Own(sgd_on_loss(self.problem.loss, theta, batches, sgd, steps))
