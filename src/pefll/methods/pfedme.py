"""pFedMe: Personalized Federated Learning with Moreau Envelopes (Dinh, Tran and Nguyen, NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from pefll.core.errors import PefllError
from pefll.data.client import Batch, Client
from pefll.data.federation import TRAIN
from pefll.methods.contract import BaseMethod, Cohort, Own, check_kept, everyone, own
from pefll.methods.optim import SGD, sgd_on_loss


class Server(NamedTuple):
    """What the server keeps, and, last, what clients keep.

    Attributes:
        theta: w, the global model, [D].
        personal: θ_i, every client's own model as of its last round, [n, D].
    """

    theta: Tensor
    personal: Tensor


class Update(NamedTuple):
    """A client's reply: its copy of the global model [D]; its own model [D] stays with it."""

    theta: Tensor
    personal: Own


@dataclass(frozen=True)
class PFedMe(BaseMethod):
    """A personal model near the global one, which is trained to have good models near it.

    Attributes:
        lambda_: λ: the pull of the global model on personal ones, λ/2 ‖θ - w‖².
        local_rounds: R: steps of the global model on a client, each with a batch of its own.
        inner_steps: K: steps of the personal model on each of these batches.
        beta: β: how far the server goes to the mean of the clients' copies.
        batch_size: of a local round; 0 for all samples.
        personal_lr: of the personal model's steps.
        client_lr: η, of the global model's steps along λ(w - θ).
        client_momentum: of the personal model's steps on one batch.
        client_clip: the norm of the personal model's gradient is cut to this; 0 for no cut.
        weight_decay: of the personal model's steps.
        new_epochs: passes over a new client's samples for its personal model.
        new_lr: of a new client's own steps; 0 for personal_lr.
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
    client_tasks: ClassVar[tuple[str, ...]] = ("train", "join_in", "recall", "predict")
    kept_arguments: ClassVar[dict[str, tuple[str, ...]]] = {"recall": ("personal",), "predict": ("theta",)}

    def __post_init__(self) -> None:
        if self.local_rounds < 1 or self.inner_steps < 1:
            raise PefllError("local_rounds and inner_steps must be at least 1", code="PEFLL-S016")

    def check(self) -> None:
        """Raise PefllError where the models that clients keep do not fit into memory."""
        advice = "take fewer clients, a smaller model, or a method whose clients keep no model"
        check_kept(self.problem.num_clients, self.problem.model.size, advice)

    @property
    def local_steps(self) -> int:
        """How many gradients of a batch a client computes in a round."""
        return self.local_rounds * self.inner_steps

    @property
    def sgd(self) -> SGD:
        """The optimiser of the personal model of a client that takes part."""
        return SGD(self.personal_lr, self.client_momentum, self.weight_decay, self.client_clip or None)

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw the first global model; everybody's own is the same at first."""
        del cohort
        theta = self.problem.model.init(seed, "model")
        return Server(theta, theta.repeat(self.problem.num_clients, 1))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Everyone moves the global model towards its own, the server goes β of the way to the mean."""
        update = cohort.run(self.train, everyone(server.theta))
        theta = (1 - self.beta) * server.theta + self.beta * update.theta.mean(dim=0)
        return Server(theta, cohort.keep(server.personal, update.personal))

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return the models that clients kept, [c, D]; new clients make one, near the global model."""
        if cohort.is_new:
            theta: Tensor = cohort.run(self.join_in, everyone(server.theta)).value
        else:
            theta = cohort.run(self.recall, own(server.personal)).value
        return theta

    def train(self, client: Client, theta: Tensor) -> Update:
        """R times: K steps for the personal model on one batch, then one step for the global one."""
        w, personal = theta, theta
        for batch in client.batches("train", self.batch_size or None, self.local_rounds):
            personal = self.approach(personal, w, batch)
            w = w - self.client_lr * self.lambda_ * (w - personal)
        return Update(w, Own(personal))

    def approach(self, personal: Tensor, w: Tensor, batch: Batch) -> Tensor:
        """Return the personal model [D], K steps nearer to the least f(θ) + λ/2 ‖θ - w‖²."""
        return sgd_on_loss(
            lambda at, batch: self.envelope(at, w, batch), personal, [batch] * self.inner_steps, self.sgd
        )

    def envelope(self, personal: Tensor, w: Tensor, batch: Batch) -> Tensor:
        """Return f(θ) + λ/2 ‖θ - w‖² on a batch, []."""
        return self.problem.loss(personal, batch) + 0.5 * self.lambda_ * (personal - w).square().sum()

    def join_in(self, client: Client, theta: Tensor) -> Own:
        """Minimise the same sum on all samples of a new client; its model [D] stays with it."""
        batches, steps = client.epochs("new", self.batch_size or client.capacity[TRAIN], self.new_epochs)
        # In a round w comes after θ every K steps, which damps steps that go too far (personal_lr·λ above 1); here it
        # stays where it is, and the same rate can lead away from a good model.
        sgd = self.sgd._replace(lr=self.new_lr or self.personal_lr)
        return Own(sgd_on_loss(lambda at, batch: self.envelope(at, theta, batch), theta, batches, sgd, steps))

    def recall(self, client: Client, personal: Tensor) -> Own:
        """Return the model [D] that a client kept."""
        del client
        return Own(personal)
