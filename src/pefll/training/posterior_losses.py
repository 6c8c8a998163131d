"""Losses of clients whose models come from random networks, by Monte Carlo.

Each client and each draw has its own random networks. So n clients with M draws give n·M independent values, and their
mean is close to the expected loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pefll.data.client import Client
from pefll.data.samples import TEST, TRAIN
from pefll.engines.cohort import Engine
from pefll.methods.contract import each
from pefll.methods.pefll import PeFLL, Server
from pefll.tasks.classification import cross_entropy
from pefll.training.sampled_networks import (
    Posterior,
    SampledHypernetwork,
    gaussian,
    generator,
    sampled_vectors,
    with_hypernetwork,
)

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
# A pass over clients costs about this many numbers per client, beside the weights and samples that are counted.
OVERHEAD = 6e6


class TrainLosses(NamedTuple):
    """Results of sampled models on the clients' training samples, one row per client and one column per draw.

    Attributes:
        zero_one: [n, M], share of wrong predictions.
        cross_entropy: [n, M], mean of min(cross-entropy, B) / B with B = 2 log(classes).
        distance: [n, M], ‖h(v; η̄) - c‖² for the prior's centre c.
    """

    zero_one: Floats
    cross_entropy: Floats
    distance: Floats


class BoundedLosses(NamedTuple):
    """Sums over a client's samples: their number, wrong predictions, clipped cross-entropies between 0 and 1."""

    samples: Tensor
    zero_one: Tensor
    cross_entropy: Tensor


def bounded_losses(method: PeFLL, limit: float) -> Callable[..., BoundedLosses]:
    """Return a function for one client that sums the two losses of a model [D] on its training samples."""

    def train_losses(client: Client, theta: Tensor) -> BoundedLosses:
        totals = theta.new_zeros(3)
        for batch in client.everything(TRAIN):
            scores = method.problem.model(theta, batch.x)
            # Random weights may be so large that scores overflow. Such predictions count as wrong.
            finite = scores.isfinite().all(dim=1)
            wrong = ~(finite & (scores.argmax(dim=1) == batch.y))
            clipped = cross_entropy(torch.nan_to_num(scores), batch.y).clamp(0, limit) / limit
            clipped = torch.where(finite, clipped, torch.ones_like(clipped))
            sums = batch.weight.sum(), batch.sum(wrong.to(theta.dtype)), batch.sum(clipped)
            totals = totals + torch.stack(sums)
        return BoundedLosses(*totals)

    return train_losses


@dataclass(frozen=True, eq=False)
class PosteriorLosses:
    """Evaluates clients with models from random networks.

    Attributes:
        engine: reaches the clients.
        method: PeFLL, or a method like it.
        server: a state, for the numbers that standardise descriptors.
        seed: of the draws.
        advance: called with the number of clients done since the last call, for a progress bar.
    """

    engine: Engine
    method: PeFLL
    server: Server
    seed: int
    advance: Callable[[int], None]

    def models(self, posterior: Posterior, clients: Ids, purpose: str) -> Iterator[tuple[Ids, Any, Tensor, Any]]:
        """Yield (places in `clients`, cohort, means of models [c, D], random generator), with own draws per client."""
        method, mean, part = self.method, posterior.mean, posterior.part
        for ids, cohort in self.engine.cohorts(clients):
            rng = generator(self.seed, f"bound/{purpose}/{ids[0]}", self.engine.device)
            eta_v = sampled_vectors(method.phi, mean.embedder, posterior.alpha_v, part.embedder, len(ids), rng)
            v = cohort.run(method.describe_all, each(eta_v))
            drawing = SampledHypernetwork(method.h, posterior.alpha_h, part.hypernetwork, rng)
            theta = with_hypernetwork(method, drawing).generate(self.server, mean.hypernetwork, v)
            yield np.searchsorted(clients, ids), cohort, theta, rng

    @torch.no_grad()
    def on_training_samples(
        self, posterior: Posterior, alpha_theta: float, centre: Tensor, clients: Ids, draws: int, purpose: str
    ) -> TrainLosses:
        """Return the losses of models θ ~ N(h(v; η̄), α_θ Id) on the samples that also made the descriptors v.

        Args:
            posterior: distribution of η̄.
            alpha_theta: α_θ.
            centre: c, the centre of the models' prior, [D].
            clients: the clients' numbers, in ascending order.
            draws: M, number of draws for each client.
            purpose: of the random numbers; another evaluation needs another purpose.
        """
        task = bounded_losses(self.method, 2 * math.log(max(2, self.method.problem.classes)))
        found = TrainLosses(*(np.zeros((len(clients), draws)) for _ in range(3)))
        for draw in range(draws):
            for place, cohort, mean, rng in self.models(posterior, clients, f"{purpose}/{draw}"):
                found.distance[place, draw] = (mean - centre).double().square().sum(dim=1).numpy(force=True)
                theta = mean + math.sqrt(alpha_theta) * gaussian(tuple(mean.shape), mean, rng)
                sums = cohort.run(task, each(theta))
                count = sums.samples.double().clamp(min=1)
                found.zero_one[place, draw] = (sums.zero_one.double() / count).numpy(force=True)
                found.cross_entropy[place, draw] = (sums.cross_entropy.double() / count).numpy(force=True)
                self.advance(len(place))
        return found

    @torch.no_grad()
    def on_test_samples(self, posterior: Posterior, clients: Ids, draws: int, purpose: str) -> Floats:
        """Return the share of wrong predictions [n, M] on test samples, of models made from training samples.

        The clients need test samples. The models are refined as the method says.
        """
        found = np.zeros((len(clients), draws))
        for draw in range(draws):
            for place, cohort, theta, _ in self.models(posterior, clients, f"{purpose}/{draw}"):
                score = cohort.run(self.method.predict, each(self.method.refined(cohort, theta)), split=TEST)
                share = 1 - score.correct.double() / score.samples.double()
                found[place, draw] = share.numpy(force=True)
                self.advance(len(place))
        return found

    @torch.no_grad()
    def mean_model(self, posterior: Posterior, clients: Ids) -> Tensor:
        """Return the mean of the clients' generated models, [D]."""
        total: Any = 0
        for place, _, theta, _ in self.models(posterior, clients, "mean"):
            total = total + theta.double().sum(dim=0)
            self.advance(len(place))
        return (total / len(clients)).to(posterior.mean.hypernetwork.dtype)  # type: ignore[no-any-return]

    @torch.no_grad()
    def shared_distances(self, posterior: Posterior, centre: Tensor, clients: Ids, purpose: str) -> float:
        """Return Σ ‖h(v_i; η̄) - c‖² over all clients for one draw of η̄, as in the last term of Theorem 3.2."""
        method, rng = self.method, generator(self.seed, f"bound/{purpose}", self.engine.device)
        mean, part = posterior.mean, posterior.part
        (eta_v,) = sampled_vectors(method.phi, mean.embedder, posterior.alpha_v, part.embedder, 1, rng)
        (eta_h,) = sampled_vectors(method.h, mean.hypernetwork, posterior.alpha_h, part.hypernetwork, 1, rng)
        total = 0.0
        for ids, cohort in self.engine.cohorts(clients):
            v = cohort.run(method.describe_all, each(eta_v.expand(len(ids), -1)))
            theta = method.generate(self.server, eta_h, v)
            total += float((theta - centre).double().square().sum())
            self.advance(len(ids))
        return total


def number_of_draws(method: PeFLL, samples: Sequence[float], clients: int, budget: float, most: int = 64) -> int:
    """Return the number of draws per client that a budget of touched numbers allows, from 1 to `most`.

    It depends on sizes alone, so that every machine has the same draws.

    Args:
        method: has the networks' sizes.
        samples: numbers of samples per client that the embedding network and the model read.
        clients: number of clients.
        budget: about 2.5e9 numbers take a second on two CPU cores.
        most: the largest number.
    """
    described, predicted = samples
    each_client = OVERHEAD + described * method.phi.size + predicted * method.problem.model.size + method.h.size
    return int(max(1, min(most, budget // (each_client * clients))))
