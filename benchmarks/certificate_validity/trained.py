"""One synthetic world with a trained run, and what is true of new clients in it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import nn

import pefll
from pefll.data.synthetic import SyntheticWorld, synthetic_world
from pefll.guarantees.statement import Statement

CLIENTS, UNSEEN = 160, 60 / 160
# Worlds differ in how much clients differ, and in one world of three, clients have unequal numbers of samples.
KINDS = tuple(itertools.product((0.2, 0.5, 1.0), (0.0, 0.5, 1.0), (0.0, 0.0, 0.5)))  # α, β, spread
SETTINGS: dict[str, Any] = {
    "rounds": 40,
    "clients_per_round": 20,
    "eval_every": 20,
    "local_steps": 5,
    "client_lr": 0.1,
    "server_lr": 3e-3,
    "embedding": "mlp",
    "hypernetwork": "S",
    "descriptor_size": 8,
    "engine": "vector",
    "device": "cpu",
    "prior_clients": 0.5,
    "prior_rounds": 20,
}
# New clients that the truth is estimated with. `MANY` have as many test samples as the unseen clients, `WELL_TESTED`
# have enough for the true accuracy of each.
MANY, WELL_TESTED, TESTS = 6_000, 1_500, 200
CONSTANT_SEEDS = 100  # seeds of runs are 0..99


class Truth(NamedTuple):
    """What is true, estimated from many new clients.

    Attributes:
        value: the quantity that a bound is about.
        error: standard error of the estimate.
    """

    value: float
    error: float


class Judged(NamedTuple):
    """A statement and the truth about it."""

    statement: Statement
    truth: Truth


@dataclass(frozen=True, eq=False)
class Trained:
    """A world, its federation and a run on it.

    Attributes:
        world: the world.
        run: the trained run.
        delta: δ of all certificates.
    """

    world: SyntheticWorld
    run: pefll.Run
    delta: float

    @cached_property
    def measured(self) -> npt.NDArray[np.float64]:
        """The accuracy of many new clients, each on as many test samples as the unseen clients have, [MANY]."""
        return self._accuracies(MANY, 0, 0)

    @cached_property
    def true(self) -> npt.NDArray[np.float64]:
        """The accuracy of many new clients on many test samples each, [WELL_TESTED]."""
        return self._accuracies(WELL_TESTED, TESTS, 1)

    def _accuracies(self, clients: int, test: int, draw: int) -> npt.NDArray[np.float64]:
        scores: list[Any] = list(self.run.evaluate_clients("test", self.world.new_clients(clients, test, draw)))
        return np.array([one.accuracy for one in scores])


def train_world(seed: int, index: int, delta: float = 0.05) -> Trained:
    """Return world `index` with a run of PeFLL on it."""
    alpha, beta, spread = KINDS[index % len(KINDS)]
    world = synthetic_world(seed, index, alpha=alpha, beta=beta, spread=spread)
    model = nn.Linear(world.features, world.classes)
    federation = world.federation(CLIENTS, UNSEEN)
    run = pefll.fit(federation, "pefll", model=model, seed=index % CONSTANT_SEEDS, **SETTINGS)
    return Trained(world, run, delta)


def mean_of(values: npt.NDArray[np.float64]) -> Truth:
    """Return the mean of new clients' values."""
    return Truth(float(values.mean()), float(values.std(ddof=1)) / len(values) ** 0.5)


def reached_by(values: npt.NDArray[np.float64], share: float) -> Truth:
    """Return the value that a share of new clients reaches; its error is half the distance of two order statistics."""
    ordered = np.sort(values)
    rank = len(values) - int(np.ceil(share * len(values) - 1e-9))
    apart = max(1, round((len(values) * share * (1 - share)) ** 0.5))
    low, high = ordered[max(0, rank - apart)], ordered[min(len(values) - 1, rank + apart)]
    return Truth(float(ordered[rank]), float(high - low) / 2)
