"""PeFLL: Personalized Federated Learning by Learning to Learn (Scott, Zakerinia, Lampert, ICLR 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pefll.core import randomness
from pefll.core.derivatives import network_vjp, pull_back
from pefll.core.errors import PefllError, unknown
from pefll.data.client import Client
from pefll.methods.contract import BaseMethod, Cohort, each, everyone
from pefll.methods.optim import SGD, Adam, Moments, adam, as_vector, no_moments, norm, sgd_on_loss, shrinkage
from pefll.models.embedding import build_embedding
from pefll.models.hypernetwork import Hypernetwork
from pefll.models.network import Network, Parameters


class Average(NamedTuple):
    """A running mean of η over the rounds: models are made with it, and training goes on with η itself.

    Attributes:
        hypernetwork: of η_h, [H].
        embedder: of η_v, [E].
    """

    hypernetwork: Tensor
    embedder: Tensor


class NoAverage(NamedTuple):
    """Nothing is averaged: models are made with η as it is."""


class Server(NamedTuple):
    """What the server keeps.

    Attributes:
        hypernetwork: η_h, [H].
        embedder: η_v, [E].
        shift: [] subtracted from every descriptor coordinate; frozen before the first round.
        scale: [] every descriptor coordinate is divided by it; frozen before the first round.
        step: int64 [], rounds done.
        hypernetwork_moments: Adam's, unused by plain SGD.
        embedder_moments: Adam's, unused by plain SGD.
        average: of η over the rounds, where there is one.
    """

    hypernetwork: Tensor
    embedder: Tensor
    shift: Tensor
    scale: Tensor
    step: Tensor
    hypernetwork_moments: Moments
    embedder_moments: Moments
    average: Average | NoAverage = NoAverage()


@dataclass(frozen=True)
class PeFLL(BaseMethod):
    """Algorithms 1 and 2 of the paper; the defaults are the recipe behind its numbers.

    Attributes:
        embedding: convnet, convnet-unlabeled, mlp, mlp-unlabeled, linear, or auto.
        hypernetwork: S, M or L: 1, 3 or 5 hidden layers.
        descriptor_size: l; 0 for int(1 + n / 4).
        descriptor_batch: samples behind a descriptor in training; 0 for all of them.
        local_steps: k.
        batch_size: of a local step; 0 for all samples.
        client_lr: β of local SGD.
        client_momentum: of local SGD.
        client_clip: a local gradient's norm is cut to this; 0 for no cut.
        server_optimizer: adam, or sgd for Algorithm 2's averaged steps to the letter.
        server_lr: of adam; Algorithm 2 has none.
        server_clip: of adam: the mean gradient's norm is cut to this; 0 for no cut.
        server_average: share of the running mean of η that a round leaves in it, such as 0.99; 0 for no mean, as in the
            paper.
        lambda_h: λ_h of the objective.
        lambda_v: λ_v of the objective.
        lambda_theta: λ_θ of the objective; 2.5e-5 is the published code's weight decay of 5e-5.
    """

    embedding: str = "auto"
    hypernetwork: str = "M"
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

    client_tasks: ClassVar[tuple[str, ...]] = ("describe", "describe_backward", "adapt", "describe_all", "predict")
    describing_tasks: ClassVar[tuple[str, ...]] = ("describe", "describe_all")

    def __post_init__(self) -> None:
        if self.server_optimizer not in ("adam", "sgd"):
            raise unknown("server optimizer", self.server_optimizer, ("adam", "sgd"))
        if self.local_steps < 1:
            raise PefllError("local_steps must be at least 1", code="PEFLL-S009")
        if self.server_average >= 1:
            raise PefllError("server_average must be less than 1, or the mean would never change", code="PEFLL-S010")

    def check(self) -> None:
        """Build the networks now, so that names that are wrong are told before a run starts."""
        _ = self.phi, self.h

    # The networks.

    @cached_property
    def descriptor(self) -> int:
        """l, the size of a descriptor."""
        return self.descriptor_size or int(1 + self.problem.num_clients / 4)

    @cached_property
    def phi(self) -> Network:
        """The embedding network, with parameters η_v."""
        p = self.problem
        with randomness.initial_weights(0, "architecture"):  # not used: `init` draws anew
            return Network(build_embedding(self.embedding, p.input_shape, p.classes, self.descriptor, p.tokens))

    @cached_property
    def h(self) -> Network:
        """The hypernetwork, with parameters η_h."""
        with randomness.initial_weights(0, "architecture"):  # not used: `init` draws anew
            return Network(Hypernetwork(self.descriptor, self.problem.model.size, self.hypernetwork))

    @property
    def uses_labels(self) -> bool:
        """Whether a client needs labels to describe itself."""
        return bool(self.phi.module.uses_labels)

    # The server.

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw η, and ask the first sampled client for the descriptor that all later ones are standardised by."""
        embedder = self.phi.init(seed, "embedder")
        v = cohort.run(self.describe, everyone(embedder))[0, : self.descriptor]
        embedder = embedder.to(v)
        hypernetwork = self.h.init(seed, "hypernetwork").to(v)
        scale = v.std() if v.numel() > 1 else v.abs().mean()
        return Server(
            hypernetwork=hypernetwork,
            embedder=embedder,
            shift=v.mean(),
            scale=scale.clamp(min=1e-6),
            step=torch.zeros((), dtype=torch.int64, device=v.device),
            hypernetwork_moments=no_moments(hypernetwork),
            embedder_moments=no_moments(embedder),
            average=Average(hypernetwork.clone(), embedder.clone()) if self.server_average else NoAverage(),
        )

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Algorithm 2, lines 3 to 17: three exchanges, then the server's step."""
        v = cohort.run(self.describe, everyone(server.embedder))  # η_v down, v_i up
        theta, pullback = network_vjp(self.h, partial(self.generate, server), server.hypernetwork, v)
        delta = cohort.run(self.adapt, each(theta))  # θ_i down, Δθ_i up
        # Of the mean over clients, so c models are divided by c, and not the much longer η_h; Δv_i is one client's own.
        d_hypernetwork, d_v = pullback(delta / cohort.size)
        d_v = cohort.size * d_v
        d_embedder = cohort.run(self.describe_backward, everyone(server.embedder), each(d_v))  # Δv_i down, Δη_v up
        return self.averaged(self.step(server, d_hypernetwork, d_embedder.mean(dim=0)))

    def generate(self, server: Server, eta_h: Parameters, v: Tensor) -> Tensor:
        """θ = h(v; η_h): personal models [c, D] from descriptors [c, l]; η_h is a vector [H]."""
        return self.h(eta_h, (v - server.shift) / server.scale)

    def step(self, server: Server, d_hypernetwork: Parameters, d_embedder: Tensor) -> Server:
        """Lines 16 and 17: move η along the mean gradient, with the server's objective λ_h‖η_h‖² + λ_v‖η_v‖² added."""
        step = server.step + 1
        if self.server_optimizer == "sgd":
            return server._replace(
                hypernetwork=(1 - 2 * self.client_lr * self.lambda_h) * server.hypernetwork - as_vector(d_hypernetwork),
                embedder=(1 - 2 * self.client_lr * self.lambda_v) * server.embedder - d_embedder,
                step=step,
            )
        # The norm is that of both parts of the gradient, seen as one vector.
        factor = shrinkage(norm(d_hypernetwork, d_embedder), self.server_clip) if self.server_clip else None
        of_h, of_v = (Adam(self.server_lr, 2 * decay) for decay in (self.lambda_h, self.lambda_v))
        hypernetwork, moments_h = adam(
            server.hypernetwork, d_hypernetwork, server.hypernetwork_moments, step, of_h, factor
        )
        embedder, moments_v = adam(server.embedder, d_embedder, server.embedder_moments, step, of_v, factor)
        return server._replace(
            hypernetwork=hypernetwork,
            embedder=embedder,
            step=step,
            hypernetwork_moments=moments_h,
            embedder_moments=moments_v,
        )

    def averaged(self, server: Server) -> Server:
        """Move the mean of η, where there is one, towards η; in early rounds faster, so that it forgets the start."""
        if isinstance(server.average, NoAverage):
            return server
        rounds = server.step.to(server.shift.dtype)
        change = 1 - (rounds / (rounds + 9)).clamp(max=self.server_average)
        return server._replace(
            average=Average(
                torch.lerp(server.average.hypernetwork, server.hypernetwork, change),
                torch.lerp(server.average.embedder, server.embedder, change),
            )
        )

    def serving(self, server: Server) -> Average:
        """Return the η that models are made with: its mean, or η itself."""
        if isinstance(server.average, NoAverage):
            return Average(server.hypernetwork, server.embedder)
        return server.average

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Algorithm 1: one descriptor up, one model [c, D] down."""
        return self.generate(server, self.serving(server).hypernetwork, self.descriptors(server, cohort))

    def descriptors(self, server: Server, cohort: Cohort) -> Tensor:
        """Return what the clients of a cohort look like to the server, [c, l]."""
        v: Tensor = cohort.run(self.describe_all, everyone(self.serving(server).embedder))
        return v

    # One client.

    def describe(self, client: Client, eta_v: Tensor) -> Tensor:
        """Return v, the mean of φ over a fresh random batch, [l]."""
        (batch,) = client.batches("descriptor", self.descriptor_batch or None, steps=1)
        return batch.mean(self.phi(eta_v, batch.x, batch.y))

    def describe_backward(self, client: Client, eta_v: Tensor, d_v: Tensor) -> Tensor:
        """Pull Δv back to Δη_v [E]; the batch is drawn again, so nothing was remembered since `describe`."""
        return pull_back(lambda eta: self.describe(client, eta), eta_v, d_v)

    def adapt(self, client: Client, theta: Tensor) -> Tensor:
        """Run k steps of local SGD on f_i; the way back, θ_before - θ_after [D], stands for the gradient."""
        sgd = SGD(self.client_lr, self.client_momentum, 2 * self.lambda_theta, self.client_clip or None)
        batches = client.batches("adapt", self.batch_size or None, self.local_steps)
        return theta - sgd_on_loss(self.problem.loss, theta, batches, sgd)

    def describe_all(self, client: Client, eta_v: Tensor) -> Tensor:
        """Return v, the mean of φ over all training samples, [l]."""
        total = torch.zeros(self.descriptor, dtype=eta_v.dtype, device=eta_v.device)
        samples = torch.zeros((), dtype=eta_v.dtype, device=eta_v.device)
        for batch in client.everything():
            total = total + batch.sum(self.phi(eta_v, batch.x, batch.y))
            samples = samples + batch.weight.sum()
        return total / samples
