"""Worlds of made-up clients whose distribution is known, in the manner of LEAF's synthetic data.

A world has groups of clients. Client i of group g has a taste w_i ~ N(m_g, α²), and its label of x is the largest of
the scores Q w_i (x, 1), with one matrix Q of the world for all. Its inputs are x ~ N(β u_i, Σ) with u_i ~ N(0, 1) and
Σ = diag(j^-1.2). A share of labels is random instead. Clients of one world are independent, so what held for some of
them can be checked on any number of others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pefll.core.arguments import number, share, whole_number
from pefll.core.errors import PefllError
from pefll.core.randomness import generator
from pefll.data.assembly import assemble
from pefll.data.federation import Federation
from pefll.data.samples import TEST, TRAIN, VALIDATION, Array, Samples


class SyntheticClients(NamedTuple):
    """What is true of some clients of a world.

    Attributes:
        weights: [n, classes, features + 1], a client's scores are its weights times (x, 1).
        centre: [n, features], mean of a client's inputs.
    """

    weights: Array
    centre: Array


@dataclass(frozen=True, eq=False)
class SyntheticWorld:
    """An environment that clients are drawn from. Make one with `synthetic_world`.

    Attributes:
        seed: seed of the world and of all its clients.
        index: number of the world; each number gives another one.
        mixing: Q, [classes, features + 1, tastes].
        groups: m, [groups, tastes].
        alpha: α, how far the clients of a group differ in their tastes.
        beta: β, how far clients differ in their inputs.
        noise: share of labels that are random.
        samples: numbers of training, validation and test samples of a client.
        spread: standard deviation of the logarithm of a client's training samples; 0 for equal numbers.
    """

    seed: int
    index: int
    mixing: Array
    groups: Array
    alpha: float
    beta: float
    noise: float
    samples: tuple[int, int, int]
    spread: float

    @property
    def features(self) -> int:
        """Number of features."""
        return int(self.mixing.shape[1]) - 1

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.mixing.shape[0])

    def federation(self, clients: int, unseen: float = 0.1) -> Federation:
        """Return a federation of `clients` clients; a fraction `unseen` of them never takes part in training."""
        clients, unseen = whole_number(clients, "clients", 1), share(unseen, "unseen")
        return self._federation(clients, clients - round(unseen * clients), "federation", self.samples)

    def new_clients(self, clients: int, test: int = 0, draw: int = 0) -> Federation:
        """Return a federation of other clients, all unseen.

        Args:
            clients: number of clients.
            test: test samples of each; 0 for as many as the world's clients have.
            draw: each number gives other clients.
        """
        clients, test, draw = (
            whole_number(value, name, least)
            for value, name, least in ((clients, "clients", 1), (test, "test", 0), (draw, "draw", 0))
        )
        train, validation, own = self.samples
        return self._federation(clients, 0, f"new/{draw}", (train, validation, test or own))

    def clients(self, count: int, random: np.random.Generator) -> SyntheticClients:
        """Return `count` independent clients."""
        group = random.integers(0, len(self.groups), count)
        tastes = self.groups[group] + self.alpha * random.standard_normal((count, self.groups.shape[1]))
        return SyntheticClients(
            np.einsum("cfs,ns->ncf", self.mixing, tastes),
            self.beta * random.standard_normal((count, self.features)),
        )

    def draw(self, clients: SyntheticClients, owner: Array, random: np.random.Generator) -> tuple[Array, Array]:
        """Return inputs [R, features] and labels int64 [R]: sample r is of client `owner[r]`. Owners must ascend."""
        scale = np.arange(1, self.features + 1) ** -0.6  # the square root of Σ
        x = clients.centre[owner] + scale * random.standard_normal((len(owner), self.features))
        starts = np.searchsorted(owner, np.arange(len(clients.centre) + 1))
        best = [
            (x[first:last] @ weights[:, :-1].T + weights[:, -1]).argmax(axis=1)
            for weights, first, last in zip(clients.weights, starts[:-1], starts[1:], strict=True)
        ]
        at_random = random.random(len(owner)) < self.noise
        y = np.where(at_random, random.integers(0, self.classes, len(owner)), np.concatenate(best))
        return x, y

    def _federation(self, count: int, num_seen: int, purpose: str, samples: tuple[int, int, int]) -> Federation:
        random = generator(self.seed, f"synthetic/{self.index}/{purpose}")
        clients = self.clients(count, random)
        train = np.full(count, samples[TRAIN])
        if self.spread:
            # The mean of the log-normal numbers is the number of samples that the world asks for.
            train = train * np.exp(self.spread * random.standard_normal(count) - self.spread**2 / 2)
            train = np.maximum(1, np.round(train)).astype(np.int64)
        counts = np.stack([train, *(np.full(count, samples[split]) for split in (VALIDATION, TEST))], axis=1)
        owner = np.repeat(np.arange(count), counts.sum(axis=1))
        split = np.repeat(np.tile([TRAIN, VALIDATION, TEST], count), counts.reshape(-1)).astype(np.int8)
        x, y = self.draw(clients, owner, random)
        made = Samples(x=x.astype(np.float32), y=y.astype(np.int64), classes=self.classes, name="synthetic")
        return assemble(made, owner, split, num_seen, "synthetic")


def synthetic_world(
    seed: int,
    index: int = 0,
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
    features: int = 10,
    classes: int = 3,
    tastes: int = 2,
    groups: int = 2,
    noise: float = 0.05,
    samples: tuple[int, int, int] = (30, 10, 30),
    spread: float = 0.0,
) -> SyntheticWorld:
    """Return a world of made-up clients, drawn at random from a seed.

    Args:
        seed: seed of all random draws.
        index: number of the world; each number gives another world with other clients.
        alpha: α, how far the clients of a group differ in their tastes.
        beta: β, how far clients differ in their inputs.
        features: number of features.
        classes: number of classes.
        tastes: number of numbers in a client's taste.
        groups: number of groups of clients.
        noise: share of labels that are random.
        samples: numbers of training, validation and test samples of a client.
        spread: standard deviation of the logarithm of a client's training samples; 0 for equal numbers.
    """
    seed, index = whole_number(seed, "seed", 0), whole_number(index, "index", 0)
    sizes = {"features": features, "classes": classes, "tastes": tastes, "groups": groups}
    features, classes, tastes, groups = (whole_number(value, name, 1) for name, value in sizes.items())
    if classes < 2:
        raise PefllError(f"classes is {classes}; a synthetic world needs at least 2", code="PEFLL-D651")
    amounts = {"alpha": number(alpha, "alpha"), "beta": number(beta, "beta"), "spread": number(spread, "spread")}
    for name, value in amounts.items():
        if value < 0:
            raise PefllError(f"{name} is {value:g}; it must be 0 or more", code="PEFLL-D652")
    if not isinstance(samples, tuple | list) or len(samples) != 3:
        raise PefllError(
            f"samples is {samples!r}; give numbers of training, validation and test samples, such as (30, 10, 30)",
            code="PEFLL-D653",
        )
    train, validation, test = (
        whole_number(value, "a number of samples", least) for value, least in zip(samples, (1, 0, 0), strict=True)
    )
    random = generator(seed, f"synthetic/{index}/world")
    return SyntheticWorld(
        seed=seed,
        index=index,
        mixing=random.standard_normal((classes, features + 1, tastes)),
        groups=random.standard_normal((groups, tastes)),
        alpha=amounts["alpha"],
        beta=amounts["beta"],
        noise=share(noise, "noise"),
        samples=(train, validation, test),
        spread=amounts["spread"],
    )
