"""ODPFL-HN: Late to the Party? On-Demand Unlabeled Personalized Federated Learning (Amosy et al., WACV 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pefll.core.derivatives import network_vjp, pull_back
from pefll.data.client import Client
from pefll.methods import optim
from pefll.methods.contract import Cohort, each, everyone, undrawn_network
from pefll.methods.descriptor_size import DescriptorSize
from pefll.methods.local_sgd import LocalSGD
from pefll.models.embedding import build_encoder
from pefll.models.hypernetwork import Hypernetwork
from pefll.models.network import Network


class Server(NamedTuple):
    """The server's state.

    Attributes:
        hypernetwork: parameters of the hypernetwork, [H].
        encoder: parameters of the encoder, [E].
        step: int64 [], number of finished rounds.
        hypernetwork_moments: Adam's moments of the hypernetwork.
        encoder_moments: Adam's moments of the encoder.
    """

    hypernetwork: Tensor
    encoder: Tensor
    step: Tensor
    hypernetwork_moments: optim.Moments
    encoder_moments: optim.Moments


@dataclass(frozen=True)
class ODPFLHN(DescriptorSize, LocalSGD):
    """A hypernetwork makes each client's model from a descriptor of its unlabelled samples.

    Attributes:
        encoder: convnet-unlabeled, mlp-unlabeled, lstm-unlabeled, or auto.
        hypernetwork: size of the hypernetwork: S, M or L for 1, 3 or 5 hidden layers.
        descriptor_size: l, size of a descriptor; 0 for int(1 + n / 4). New runs of n > 1,000 clients set it to 64.
        descriptor_batch: samples per descriptor in training; 0 for all samples.
        local_steps: number of SGD steps of a client in a round.
        server_lr: learning rate of Adam, which trains hypernetwork and encoder.
        server_clip: maximum norm of the mean gradient of both; 0 for no clipping.
    """

    encoder: str = "auto"
    hypernetwork: str = "M"
    descriptor_size: int = 0
    descriptor_batch: int = 32
    local_steps: int = 50
    client_lr: float = 2e-3
    server_lr: float = 2e-4
    server_clip: float = 50.0

    uses_labels: ClassVar[bool] = False
    server_rates: ClassVar[tuple[str, ...]] = ("server_lr",)
    client_tasks: ClassVar = ("encode", "encode_backward", "adapt", "encode_all", "predict")
    describing_tasks: ClassVar = ("encode", "encode_all")

    def check(self) -> None:
        """Build the networks, so that a wrong name is an error before the run starts."""
        _ = self.phi, self.h

    @cached_property
    def phi(self) -> Network:
        """The encoder."""
        p = self.problem
        return undrawn_network(build_encoder, self.encoder, p.input_shape, p.classes, self.descriptor, p.tokens)

    @cached_property
    def h(self) -> Network:
        """The hypernetwork."""
        return undrawn_network(Hypernetwork, self.descriptor, self.problem.model.size, self.hypernetwork)

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw hypernetwork and encoder."""
        del cohort
        h, phi = self.h.init(seed, "hypernetwork"), self.phi.init(seed, "encoder")
        return Server(h, phi, torch.zeros((), dtype=torch.int64), optim.no_moments(h), optim.no_moments(phi))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Get descriptors, send models, receive their changes, and pull the changes back to both networks."""
        v = cohort.run(self.encode, everyone(server.encoder))  # encoder down, v_i up
        theta, pullback = network_vjp(self.h, self.h, server.hypernetwork, v)
        delta = cohort.run(self.adapt, each(theta))  # θ_i down, Δθ_i up
        d_h, d_v = pullback(delta / cohort.size)
        # Both networks follow the mean over clients. A client's Δv_i is not divided yet. Δv_i down, Δφ up.
        d_phi = cohort.run(self.encode_backward, everyone(server.encoder), each(cohort.size * d_v)).mean(dim=0)
        step, adam = server.step + 1, optim.Adam(cohort.server_rate(self.server_lr))
        factor = optim.clip_factor(self.server_clip, d_h, d_phi)
        h, moments_h = optim.adam(server.hypernetwork, d_h, server.hypernetwork_moments, step, adam, factor)
        phi, moments_phi = optim.adam(server.encoder, d_phi, server.encoder_moments, step, adam, factor)
        return Server(h, phi, step, moments_h, moments_phi)

    def encode(self, client: Client, encoder: Tensor) -> Tensor:
        """Return v, the mean of the encoder's outputs on a random batch, [l]."""
        (batch,) = client.batches("descriptor", self.descriptor_batch or None, steps=1)
        return batch.mean(self.phi(encoder, batch.x, batch.y))

    def adapt(self, client: Client, theta: Tensor) -> Tensor:
        """Return θ_before - θ_after [D] of local SGD. The server uses this difference as the gradient."""
        batches = client.batches("adapt", self.batch_size, self.local_steps)
        return theta - optim.sgd_on_loss(self.problem.loss, theta, batches, self.sgd(client.rate(self.client_lr)))

    def encode_backward(self, client: Client, encoder: Tensor, d_v: Tensor) -> Tensor:
        """Return the gradient Δv [l] pulled back through `encode`, which draws the same batch again, [E]."""
        return pull_back(lambda phi: self.encode(client, phi), encoder, d_v)

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return personal models [c, D]. A client sends one descriptor of its samples and gets one model."""
        return self.h(server.hypernetwork, self.descriptors(server, cohort))

    def descriptors(self, server: Server, cohort: Cohort) -> Tensor:
        """Return the descriptors of a cohort's clients, [c, l]."""
        return cohort.run(self.encode_all, everyone(server.encoder))  # type: ignore[no-any-return]

    def encode_all(self, client: Client, encoder: Tensor) -> Tensor:
        """Return v, the mean of the encoder's outputs on all training samples, [l]."""
        return client.mean(lambda batch: self.phi(encoder, batch.x, batch.y))
