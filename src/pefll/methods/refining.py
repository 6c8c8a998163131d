"""Refining: a client trains its generated model further, with a few steps of SGD on its own samples and device."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from pefll.data.client import Client
from pefll.methods.contract import BaseMethod, ClientState, Cohort, each
from pefll.methods.optim import SGD, sgd_on_loss


class Refining(BaseMethod):
    """The base class of methods whose clients may refine their models. A subclass has these attributes as fields.

    Attributes:
        refine_steps: number of SGD steps with which a client refines its generated model; 0 for none.
        refine_lr: learning rate of these steps.
        batch_size: samples per step; 0 for all samples.
        client_momentum: momentum of local SGD.
        client_clip: maximum norm of a local gradient; 0 for no clipping.
        lambda_theta: λ_θ of the penalty λ_θ‖θ‖².
        base_tasks: names of the functions that clients run, without `refine`.
    """

    refine_steps: int
    refine_lr: float
    batch_size: int
    client_momentum: float
    client_clip: float
    lambda_theta: float

    base_tasks: ClassVar[tuple[str, ...]]
    personal_settings: ClassVar[tuple[str, ...]] = ("refine_steps", "refine_lr")

    @property
    def trains_new_clients(self) -> bool:
        """Whether a new client takes steps of SGD."""
        return self.refine_steps > 0

    @property
    def client_tasks(self) -> tuple[str, ...]:
        """Names of the functions that real clients agree to run."""
        return (*self.base_tasks, "refine") if self.refine_steps else self.base_tasks

    @property
    def kept_arguments(self) -> dict[str, tuple[str, ...]]:
        """The arguments that may be `ClientState`: a refined model, which its client keeps."""
        return {"predict": ("theta",)} if self.refine_steps else {}

    def sgd(self, lr: float | Tensor) -> SGD:
        """Return a client's optimiser with the learning rate `lr`."""
        return SGD(lr, self.client_momentum, 2 * self.lambda_theta, self.client_clip or None)

    def refined(self, cohort: Cohort, theta: Tensor) -> Tensor:
        """Return the models [c, D] that clients use: the generated models `theta`, refined if `refine_steps` > 0."""
        if self.refine_steps:
            theta = cohort.run(self.refine, each(theta)).value
        return theta

    def refine(self, client: Client, theta: Tensor) -> ClientState:
        """Take `refine_steps` steps of local SGD from a model [D]; the client keeps the result [D]."""
        batches = client.batches("refine", self.batch_size or None, self.refine_steps)
        return ClientState(sgd_on_loss(self.problem.loss, theta, batches, self.sgd(self.refine_lr)))
