"""PeFLL: Personalized Federated Learning by Learning to Learn (Scott, Zakerinia, Lampert, ICLR 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pefll.core.derivatives import network_vjp, pull_back
from pefll.core.errors import unknown
from pefll.core.tree import map_tree
from pefll.data.client import Client
from pefll.methods import optim
from pefll.methods.contract import Cohort, each, everyone, require
from pefll.methods.two_networks import Standardised, TwoNetworks
from pefll.models.network import Parameters
from pefll.models.own import Choice


class Eta(NamedTuple):
    """η, the parameters of the server's two networks.

    Attributes:
        hypernetwork: η_h, [H].
        embedder: η_v, [E].
    """

    hypernetwork: Tensor
    embedder: Tensor


class Server(NamedTuple):
    """The server's state.

    Attributes:
        hypernetwork: η_h, [H].
        embedder: η_v, [E].
        shift: [], subtracted from every number of a descriptor; fixed before the first round.
        scale: [], divides every number of a descriptor; fixed before the first round.
        step: int64 [], number of finished rounds.
        hypernetwork_moments: Adam's moments of η_h; plain SGD does not use them.
        embedder_moments: Adam's moments of η_v; plain SGD does not use them.
        average: running mean of η over rounds, which makes personal models; NoMean if `server_average` is 0.
    """

    hypernetwork: Tensor
    embedder: Tensor
    shift: Tensor
    scale: Tensor
    step: Tensor
    hypernetwork_moments: optim.Moments
    embedder_moments: optim.Moments
    average: Eta | optim.NoMean = optim.NoMean()


@dataclass(frozen=True)
class PeFLL(TwoNetworks):
    """Algorithms 1 and 2 of the paper; the defaults are the settings behind its results.

    Attributes:
        embedding: convnet, mlp or lstm, also with -unlabeled; linear, two or auto; or your own, see docs/models.md.
        hypernetwork: S, M or L for 1, 3 or 5 hidden layers; chunked or low-rank for large models; or your own.
        descriptor_size: l, size of a descriptor; 0 for int(1 + n / 4). New runs of n > 1,000 clients set it to 64.
        descriptor_batch: samples per descriptor in training; 0 for all samples.
        local_steps: k, number of SGD steps of a client in a round.
        batch_size: samples per local step; 0 for all samples.
        client_lr: β, learning rate of local SGD.
        client_momentum: momentum of local SGD.
        client_clip: maximum norm of a local gradient; 0 for no clipping.
        server_optimizer: adam, or sgd for the plain averaged steps of Algorithm 2.
        server_lr: learning rate of adam; sgd, as in Algorithm 2, has none.
        server_clip: maximum norm of the mean gradient for adam; 0 for no clipping.
        server_average: decay of the running mean of η, such as 0.99; 0 for no running mean, as in the paper.
        lambda_h: λ_h of the objective, the weight of ‖η_h‖².
        lambda_v: λ_v of the objective, the weight of ‖η_v‖².
        lambda_theta: λ_θ of the objective, the weight of ‖θ‖²; the default is half the published code's weight decay.
        refine_steps: number of SGD steps with which a client refines its generated model; 0 for none, as in the paper.
        refine_lr: learning rate of these steps.
    """

    embedding: Choice = "auto"
    hypernetwork: Choice = "M"
    descriptor_size: int = 0
    descriptor_batch: int = 32
    local_steps: int = 50
    batch_size: int = 32
    client_lr: float = 2e-3
    client_momentum: float = 0.9
    client_clip: float = 50.0
    server_optimizer: str = "adam"
    server_lr: float = 2e-4
    server_clip: float = 50.0
    server_average: float = 0.0
    lambda_h: float = 0.0
    lambda_v: float = 0.0
    lambda_theta: float = 2.5e-5
    refine_steps: int = 0
    refine_lr: float = 5e-4

    base_tasks: ClassVar[tuple[str, ...]] = ("describe", "describe_backward", "adapt", "describe_all", "predict")
    client_rates: ClassVar[tuple[str, ...]] = ("client_lr",)
    server_rates: ClassVar[tuple[str, ...]] = ("server_lr",)
    describing_tasks: ClassVar[tuple[str, ...]] = ("describe", "describe_all")

    def __post_init__(self) -> None:
        if self.server_optimizer not in ("adam", "sgd"):
            raise unknown("server optimizer", self.server_optimizer, ("adam", "sgd"))
        require(self.local_steps >= 1, f"local_steps is {self.local_steps}; it must be at least 1", code="PEFLL-S009")
        require(self.server_average < 1, "server_average must be less than 1, or the mean never changes", "PEFLL-S010")

    # Algorithm 2: training.

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw η. Mean and deviation of the first client's descriptor standardise all descriptors."""
        eta_v = self.phi.init(seed, "embedder")
        v = cohort.run(self.describe, everyone(eta_v))[0, : self.descriptor]
        eta = Eta(self.h.init(seed, "hypernetwork").to(v), eta_v.to(v))
        scale = v.std() if v.numel() > 1 else v.abs().mean()
        moments = optim.no_moments(eta.hypernetwork), optim.no_moments(eta.embedder)
        average = map_tree(torch.clone, eta) if self.server_average else optim.NoMean()
        return Server(*eta, v.mean(), scale.clamp(min=1e-6), v.new_zeros((), dtype=torch.int64), *moments, average)

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Lines 3 to 17: three exchanges with the clients, then the server's step."""
        v = cohort.run(self.describe, everyone(server.embedder))  # η_v down, v_i up
        theta, pullback = network_vjp(self.h, partial(self.generate, server), server.hypernetwork, v)
        delta = cohort.run(self.adapt, each(theta))  # θ_i down, Δθ_i up
        # η_h needs the mean over clients. It is cheaper to divide Δθ by c than Δη_h. For Δv_i, the division is undone.
        d_hypernetwork, d_v = pullback(delta / cohort.size)
        d_v = cohort.size * d_v
        d_embedder = cohort.run(self.describe_backward, everyone(server.embedder), each(d_v))  # Δv_i down, Δη_v up
        return self.step(server, d_hypernetwork, d_embedder.mean(dim=0), cohort)

    def describe(self, client: Client, eta_v: Tensor) -> Tensor:
        """Return v, the mean of φ over a random batch, [l]."""
        (batch,) = client.batches("descriptor", self.descriptor_batch or None, steps=1)
        return batch.mean(self.phi(eta_v, batch.x, self.problem.embedded(batch.y)))

    def generate(self, server: Server | Standardised, eta_h: Parameters, v: Tensor) -> Tensor:
        """Return personal models θ = h(v; η_h), [c, D], for descriptors v [c, l]."""
        return self.h(eta_h, (v - server.shift) / server.scale)

    def adapt(self, client: Client, theta: Tensor) -> Tensor:
        """Return θ_before - θ_after [D] of k steps of local SGD. The server uses this difference as the gradient."""
        batches = client.batches("adapt", self.batch_size or None, self.local_steps)
        return theta - optim.sgd_on_loss(self.problem.loss, theta, batches, self.sgd(client.rate(self.client_lr)))

    def describe_backward(self, client: Client, eta_v: Tensor, d_v: Tensor) -> Tensor:
        """Return Δη_v [E]: the gradient Δv [l] pulled back through `describe`, which draws the same batch again."""
        return pull_back(lambda eta: self.describe(client, eta), eta_v, d_v)

    def step(
        self, server: Server, d_hypernetwork: Parameters, d_embedder: Tensor, cohort: Cohort | None = None
    ) -> Server:
        """Lines 16 and 17: move η against the mean gradient plus the gradient of λ_h‖η_h‖² + λ_v‖η_v‖².

        The cohort knows the schedules of learning rates; without it, the rates are constant.
        """
        step, moments_h, moments_v = server.step + 1, server.hypernetwork_moments, server.embedder_moments
        if self.server_optimizer == "sgd":
            lr = cohort.client_rate(self.client_lr) if cohort else self.client_lr
            eta_h = (1 - 2 * lr * self.lambda_h) * server.hypernetwork - optim.as_vector(d_hypernetwork)
            eta_v = (1 - 2 * lr * self.lambda_v) * server.embedder - d_embedder
        else:
            # Both gradients are clipped as one vector.
            factor = optim.clip_factor(self.server_clip, d_hypernetwork, d_embedder)
            lr = cohort.server_rate(self.server_lr) if cohort else self.server_lr
            of_h, of_v = (optim.Adam(lr, 2 * decay) for decay in (self.lambda_h, self.lambda_v))
            eta_h, moments_h = optim.adam(server.hypernetwork, d_hypernetwork, moments_h, step, of_h, factor)
            eta_v, moments_v = optim.adam(server.embedder, d_embedder, moments_v, step, of_v, factor)
        average = optim.move_mean(server.average, Eta(eta_h, eta_v), step, self.server_average)
        return Server(eta_h, eta_v, server.shift, server.scale, step, moments_h, moments_v, average)

    # Algorithm 1: a personal model.

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return personal models [c, D]. A client sends one descriptor, gets one model, and may refine it."""
        theta = self.generate(server, self.serving(server).hypernetwork, self.descriptors(server, cohort))
        return self.refined(cohort, theta)

    def serving(self, server: Server) -> Eta:
        """Return the η that makes personal models: the running mean if there is one, else η itself."""
        return Eta(server.hypernetwork, server.embedder) if isinstance(server.average, optim.NoMean) else server.average

    def descriptors(self, server: Server, cohort: Cohort) -> Tensor:
        """Return the descriptors of a cohort's clients, [c, l]."""
        return cohort.run(self.describe_all, everyone(self.serving(server).embedder))  # type: ignore[no-any-return]

    def describe_all(self, client: Client, eta_v: Tensor) -> Tensor:
        """Return v, the mean of φ over all training samples, [l]."""
        total, samples = eta_v.new_zeros(self.descriptor), eta_v.new_zeros(())
        for batch in client.everything():
            total = total + batch.sum(self.phi(eta_v, batch.x, self.problem.embedded(batch.y)))
            samples = samples + batch.weight.sum()
        return total / samples
