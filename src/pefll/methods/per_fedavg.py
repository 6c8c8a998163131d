"""Per-FedAvg: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach.

Fallah, Mokhtari and Ozdaglar, NeurIPS 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pefll.core.errors import unknown
from pefll.data.client import Batch, Batches, Client
from pefll.methods.averaging import Averaging, Server, Update, update
from pefll.methods.contract import ClientState, Cohort, everyone, require
from pefll.methods.optim import SGD, sgd_along, sgd_on_loss

VARIANTS = ("fo", "hf")


@dataclass(frozen=True)
class PerFedAvg(Averaging):
    """One initial model, trained to be good after a step on a client's own samples.

    Attributes:
        variant: fo ignores the second derivative; hf approximates it by a difference of gradients.
        epochs: passes over a client's samples in a round, with one step for each batch.
        meta_steps: τ, number of steps in a round, instead of the passes; 0 for the passes.
        batch_size: samples in each of the independent batches of a step.
        inner_lr: α, learning rate of the step on a client's own samples.
        client_lr: β, learning rate of the steps of the global model.
        client_momentum: momentum of the steps of the global model.
        client_clip: maximum norm of a local gradient; 0 for no clipping.
        weight_decay: weight decay of the steps of the global model.
        difference: δ, step of the finite difference of gradients in hf; float32 has enough digits for it, TF32 has not.
        personal_steps: number of steps with rate α that make a personal model from the global model.
    """

    variant: str = "fo"
    epochs: int = 1
    meta_steps: int = 0
    batch_size: int = 32
    inner_lr: float = 1e-2
    client_lr: float = 1e-2
    client_momentum: float = 0.9
    client_clip: float = 50.0
    weight_decay: float = 5e-5
    difference: float = 1e-3
    personal_steps: int = 5

    trains_new_clients: ClassVar[bool] = True
    client_rates: ClassVar[tuple[str, ...]] = ("client_lr",)
    client_tasks: ClassVar[tuple[str, ...]] = ("train", "adapt", "predict")
    kept_arguments: ClassVar[dict[str, tuple[str, ...]]] = {"predict": ("theta",)}

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise unknown("variant of per-fedavg", self.variant, VARIANTS)
        require(self.batch_size >= 1 and self.epochs >= 1, "batch_size and epochs must be at least 1", "PEFLL-S013")
        require(self.variant != "hf" or self.difference != 0, "difference must be more than 0", code="PEFLL-S014")

    @property
    def local_epochs(self) -> int:
        """Gradients of each sample that a client computes in a round; 0 if the number of steps is fixed."""
        return 0 if self.meta_steps else self.epochs * self.step_gradients

    @property
    def local_steps(self) -> int:
        """Gradients of a batch that a client computes in a round; 0 if the number of passes is fixed."""
        return self.meta_steps * self.step_gradients

    @property
    def step_gradients(self) -> int:
        """Gradients that a step computes."""
        return 2 if self.variant == "fo" else 4

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return for each client the global model after `personal_steps` steps on its samples, [c, D]."""
        theta: Tensor = cohort.run(self.adapt, everyone(server.theta)).value
        return theta

    def train(self, client: Client, theta: Tensor) -> Update:
        """Train the global model along the meta-gradient. Each step draws batches D, D' and, for hf, D''."""
        sgd = SGD(client.rate(self.client_lr), self.client_momentum, self.weight_decay, self.client_clip or None)
        outer, steps = self.batches(client, "train")
        inner, _ = self.batches(client, "inner")
        if self.variant == "fo":
            theta = sgd_along(self.meta_gradient, theta, zip(inner, outer, strict=True), sgd, steps)
        else:
            curved, _ = self.batches(client, "curvature")
            theta = sgd_along(self.meta_gradient, theta, zip(inner, outer, curved, strict=True), sgd, steps)
        return update(client, theta)

    def batches(self, client: Client, purpose: str) -> tuple[Batches, Tensor | None]:
        """Return a batch for each step, and how many of the steps are this client's; None for all."""
        if self.meta_steps:
            return client.batches(purpose, self.batch_size, self.meta_steps), None
        return client.epochs(purpose, self.batch_size, self.epochs)

    def meta_gradient(self, theta: Tensor, batches: tuple[Batch, ...]) -> Tensor:
        """Return the gradient [D] of f(w - α∇f(w)) with respect to w, first-order (fo) or Hessian-free (hf)."""
        gradient, (inner, outer, *curved) = self.problem.gradient, batches
        v = gradient(theta - self.inner_lr * gradient(theta, inner), outer)
        if not curved:
            return v
        ahead, behind = (gradient(theta + sign * self.difference * v, curved[0]) for sign in (1, -1))
        return v - self.inner_lr * (ahead - behind) / (2 * self.difference)

    def adapt(self, client: Client, theta: Tensor) -> ClientState:
        """Take plain SGD steps with rate α on a client's own samples; the client keeps its model [D]."""
        batches = client.batches("personal", self.batch_size, self.personal_steps)
        return ClientState(
            sgd_on_loss(self.problem.loss, theta, batches, SGD(self.inner_lr, 0.0, 0.0, self.client_clip or None))
        )
