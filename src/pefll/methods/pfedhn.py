"""pFedHN: Personalized Federated Learning using Hypernetworks (Shamsian et al., ICML 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from pefll.core import randomness
from pefll.data.client import Client
from pefll.methods.contract import BaseMethod, Cohort, check_kept, each, require, undrawn_network
from pefll.methods.optim import SGD, sgd_on_loss, sgd_step
from pefll.models.hypernetwork_choice import build_hypernetwork, check_hypernetwork
from pefll.models.network import Network
from pefll.models.own import Choice


class Server(NamedTuple):
    """The server's state; clients keep nothing.

    Attributes:
        hypernetwork: φ, [H].
        embeddings: v_i, one embedding for each client, [n, l].
        newcomer: the initial embedding of a new client, [l]; it never changes.
        hypernetwork_velocity: velocity of φ in SGD, [H].
        embeddings_velocity: velocities of the embeddings in SGD, [n, l].
    """

    hypernetwork: Tensor
    embeddings: Tensor
    newcomer: Tensor
    hypernetwork_velocity: Tensor
    embeddings_velocity: Tensor


@dataclass(frozen=True)
class PFedHN(BaseMethod):
    """A hypernetwork makes each client's model from the client's embedding; the server learns both.

    Attributes:
        hypernetwork: S, M or L for 1, 3 or 5 hidden layers; chunked or low-rank for large models; or your own.
        embedding_size: l, size of an embedding; 0 for int(1 + n / 4) with n clients.
        local_steps: number of SGD steps of a client in a round.
        batch_size: samples per local step; 0 for all samples.
        client_lr: learning rate of local SGD.
        client_momentum: momentum of local SGD.
        client_clip: maximum norm of a local gradient; 0 for no clipping.
        weight_decay: weight decay of local SGD.
        server_lr: learning rate of the hypernetwork's SGD; 0 keeps the hypernetwork fixed.
        embedding_lr: learning rate of the embeddings' SGD.
        server_momentum: momentum of the SGD of hypernetwork and embeddings.
        server_decay: weight decay of the SGD of hypernetwork and embeddings.
        server_clip: maximum norm of the gradient of the hypernetwork, and of that of the embeddings; 0 for no clipping.
        new_rounds: number of exchanges with a new client, which train only its embedding.
        new_lr: learning rate of a new client's embedding; 0 for embedding_lr.
    """

    hypernetwork: Choice = "M"
    embedding_size: int = 0
    local_steps: int = 50
    batch_size: int = 32
    client_lr: float = 5e-3
    client_momentum: float = 0.9
    client_clip: float = 50.0
    weight_decay: float = 5e-5
    server_lr: float = 1e-2
    embedding_lr: float = 1e-2
    server_momentum: float = 0.9
    server_decay: float = 1e-3
    server_clip: float = 50.0
    new_rounds: int = 20
    new_lr: float = 0.0

    trains_new_clients: ClassVar[bool] = True
    client_rates: ClassVar[tuple[str, ...]] = ("client_lr",)
    server_rates: ClassVar[tuple[str, ...]] = ("server_lr", "embedding_lr")
    client_tasks: ClassVar[tuple[str, ...]] = ("adapt", "predict")
    network_settings: ClassVar[tuple[str, ...]] = ("hypernetwork",)

    def __post_init__(self) -> None:
        require(self.local_steps >= 1, f"local_steps is {self.local_steps}; it must be at least 1", code="PEFLL-S009")

    def check(self) -> None:
        """Build the hypernetwork, so that a wrong one is an error before the run starts."""
        check_kept(self.problem.num_clients, self.size, "set embedding_size, or take fewer clients")
        check_hypernetwork(self.h, self.problem.model)

    @cached_property
    def size(self) -> int:
        """l, the size of an embedding."""
        return self.embedding_size or int(1 + self.problem.num_clients / 4)

    @cached_property
    def h(self) -> Network:
        """The hypernetwork, with parameters φ."""
        return undrawn_network(build_hypernetwork, self.hypernetwork, self.size, self.problem.model)

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw the hypernetwork, and every client's embedding from a normal distribution."""
        del cohort
        hypernetwork = self.h.init(seed, "hypernetwork")
        with randomness.initial_weights(seed, "embeddings"):
            newcomer, embeddings = torch.randn(self.size), torch.randn(self.problem.num_clients, self.size)
        still = torch.zeros_like
        return Server(hypernetwork, embeddings, newcomer, still(hypernetwork), still(embeddings))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Send models, receive their changes, and pull the changes back to φ and the embeddings."""
        v = server.embeddings.index_select(0, cohort.ids)
        theta, pullback = vjp(self.h, server.hypernetwork, v)  # type: ignore[misc]
        delta = cohort.run(self.adapt, each(theta), exchange=0)  # θ_i down, Δθ_i up
        d_hypernetwork, d_v = pullback(delta)
        # φ follows the mean over clients. An embedding belongs to one client and follows only that client.
        d_embeddings = torch.zeros_like(server.embeddings).index_copy(0, cohort.ids, d_v)
        lr, lr_of_embeddings = cohort.server_rate(self.server_lr), cohort.server_rate(self.embedding_lr)
        hypernetwork, velocity = self.step(
            server.hypernetwork, server.hypernetwork_velocity, d_hypernetwork / cohort.size, lr
        )
        embeddings, of_embeddings = self.step(
            server.embeddings, server.embeddings_velocity, d_embeddings, lr_of_embeddings
        )
        return Server(hypernetwork, embeddings, server.newcomer, velocity, of_embeddings)

    def step(self, parameters: Tensor, velocity: Tensor, gradient: Tensor, lr: float | Tensor) -> tuple[Tensor, Tensor]:
        """Return parameters and velocity after one step of the server's SGD, with unchanged shapes."""
        sgd = SGD(lr, self.server_momentum, self.server_decay, self.server_clip or None)
        after = sgd_step(parameters.flatten(), velocity.flatten(), gradient.flatten(), sgd)
        return after[0].view_as(parameters), after[1].view_as(velocity)

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return a model for each embedding, [c, D]; new clients learn their embeddings first."""
        v = self.embed(server, cohort) if cohort.is_new else server.embeddings.index_select(0, cohort.ids)
        return self.h(server.hypernetwork, v)

    def embed(self, server: Server, cohort: Cohort) -> Tensor:
        """Return embeddings [c, l] of new clients, learned in `new_rounds` exchanges; φ stays fixed."""
        v = server.newcomer.repeat(cohort.size, 1)
        velocity = torch.zeros_like(v)
        lr = self.new_lr or self.embedding_lr
        sgd = SGD(lr, self.server_momentum, self.server_decay, self.server_clip or None)
        for exchange in range(self.new_rounds):
            theta, pullback = vjp(lambda at: self.h(server.hypernetwork, at), v)  # type: ignore[misc]
            (d_v,) = pullback(cohort.run(self.adapt, each(theta), exchange=exchange))
            # Each client's gradient is clipped separately, so that its embedding does not depend on other clients.
            v, velocity = torch.vmap(lambda at, speed, along: sgd_step(at, speed, along, sgd))(v, velocity, d_v)
        return v

    def adapt(self, client: Client, theta: Tensor, exchange: int) -> Tensor:
        """Return θ_before - θ_after [D] of local SGD. The server uses this difference as the gradient."""
        sgd = SGD(client.rate(self.client_lr), self.client_momentum, self.weight_decay, self.client_clip or None)
        batches = client.batches(f"adapt/{exchange}", self.batch_size or None, self.local_steps)
        return theta - sgd_on_loss(self.problem.loss, theta, batches, sgd)
