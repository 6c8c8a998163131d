"""The base class of methods that average models: clients train the global model, the server takes the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pefll.data.client import Client
from pefll.data.samples import TRAIN
from pefll.methods.contract import BaseMethod, Cohort, everyone


class Server(NamedTuple):
    """The global model θ, [D]."""

    theta: Tensor


class Update(NamedTuple):
    """A client's reply: its model [D] and its number of training samples []."""

    theta: Tensor
    samples: Tensor


def update(client: Client, theta: Tensor) -> Update:
    """Return a client's reply: the model [D] that it trained, and its number of training samples."""
    return Update(theta, client.count[TRAIN].to(theta.dtype))


def mean(models: Tensor, samples: Tensor) -> Tensor:
    """Return the mean [D] of models [c, D], weighted by samples [c]."""
    return torch.einsum("c,cd->d", samples / samples.sum(), models)


@dataclass(frozen=True)
class Averaging(BaseMethod):
    """One global model: the mean of the copies that clients train. A subclass must define `train`."""

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw the first global model."""
        del cohort
        return Server(self.problem.model.init(seed, "model"))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Clients train the global model, the server takes the mean."""
        updates = cohort.run(self.train, everyone(server.theta))
        return Server(mean(updates.theta, updates.samples))

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return the global model for each client, [c, D]."""
        return server.theta.expand(cohort.size, -1)

    def train(self, client: Client, theta: Tensor) -> Update:
        """Train the global model [D] on one client's samples."""
        raise NotImplementedError
