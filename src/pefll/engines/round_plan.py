"""What a run decides on the host for each round: the clients that take part, and factors of the learning rates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pefll.core import randomness
from pefll.core.arguments import shown
from pefll.core.errors import PefllError, first_line, unknown
from pefll.core.plugins import fault, import_name
from pefll.core.schedules import Schedule, sha256_of

Ids: TypeAlias = npt.NDArray[np.int64]
# Called with the round, the number of training samples of each seen client [n], the number of clients to choose, and a
# random generator for this round. Returns the chosen clients' numbers, all different.
Sampling: TypeAlias = Callable[[int, Ids, int, np.random.Generator], Any]


class Rates(NamedTuple):
    """Factors of the learning rates in one round; None for 1.

    Attributes:
        clients: factor of the clients' rates.
        server: factor of the server's rates.
    """

    clients: float | Tensor | None = None
    server: float | Tensor | None = None


CONSTANT = Rates()
_PROBED = 8  # rounds in a fingerprint of a sampling


class PriorPhase(NamedTuple):
    """The first rounds of a run, in which only some of the seen clients take part.

    The state after them does not depend on the other clients. So it can be the prior of a bound on future clients.

    Attributes:
        share: share of the seen clients that take part.
        rounds: number of these rounds.
    """

    share: float
    rounds: int

    def clients(self, seed: int, num_seen: int) -> Ids:
        """Return the numbers of these clients, int64 [m], in ascending order."""
        return np.sort(randomness.generator(seed, "prior clients").permutation(num_seen)[: self.size(num_seen)])

    def size(self, num_seen: int) -> int:
        """Return the number of these clients, m."""
        return round(self.share * num_seen)


@dataclass(frozen=True, eq=False)
class RoundPlan:
    """The schedules and the sampling of a run.

    Attributes:
        client_schedule: factors of the clients' learning rates; None for constant rates.
        server_schedule: factors of the server's learning rates; None for constant rates.
        sampling: chooses the clients of a round; None for uniform.
        prior: the first rounds, with some of the clients only; it needs a `sampling`. None for all clients.
    """

    client_schedule: Schedule | None = None
    server_schedule: Schedule | None = None
    sampling: Sampling | None = None
    prior: PriorPhase | None = None

    def rates(self, t: int) -> Rates:
        """Return the factors of round t."""
        return Rates(*(None if one is None else one(t) for one in (self.client_schedule, self.server_schedule)))

    def clients(self, seed: int, t: int, samples: Ids, size: int) -> Ids | None:
        """Return the clients of round t, int64 [size]; None for uniform sampling.

        Args:
            seed: the run's seed.
            t: number of the round.
            samples: int64 [n], numbers of training samples of the seen clients.
            size: number of clients to choose.
        """
        if self.sampling is None:
            return None
        members = np.arange(len(samples), dtype=np.int64)
        if self.prior is not None and t < self.prior.rounds:
            members = self.prior.clients(seed, len(samples))
        samples = samples[members]
        try:
            chosen = self.sampling(t, samples, size, randomness.generator(seed, f"sampling/{t}"))
            ids = np.asarray(chosen)
        except Exception as error:  # a user's function may raise anything
            why = fault(error) or f"{type(error).__name__}: {first_line(error)}"
            raise PefllError(
                f"the function sampling failed for round {t}: {why}; correct it", code="PEFLL-E550"
            ) from error
        whole = ids.ndim == 1 and (ids.dtype.kind in "iu")
        if not whole or len(ids) != size or len(np.unique(ids)) != size or ids.min() < 0 or ids.max() >= len(samples):
            raise PefllError(
                f"the function sampling returned {shown(chosen)} for round {t}; it must return {size} different "
                f"numbers of seen clients, from 0 to {len(samples) - 1}",
                code="PEFLL-E551",
            )
        found: Ids = members[ids]
        return found

    def fingerprints(self, rounds: int, clients: int, size: int) -> dict[str, Any]:
        """Return the fingerprints of its schedules and its sampling, by the names of their settings.

        Args:
            rounds: number of rounds of the run.
            clients: number of seen clients.
            size: number of clients in a round.
        """
        schedules = {"lr_schedule": self.client_schedule, "server_lr_schedule": self.server_schedule}
        found: dict[str, Any] = {name: sha256_of(one, rounds) for name, one in schedules.items() if one is not None}
        with suppress(PefllError):  # a user's function may reject artificial numbers of samples
            if self.sampling is not None and size <= clients:
                chosen = [self.clients(0, t, np.arange(1, clients + 1), size) for t in range(min(_PROBED, rounds))]
                found["sampling"] = [int(ids[-1]) for ids in chosen if ids is not None]
        return found


UNIFORM = RoundPlan()


def by_samples(round_: int, samples: Ids, size: int, rng: np.random.Generator) -> Ids:
    """Choose clients with probabilities proportional to their numbers of training samples [n], without repetition."""
    del round_
    weight = np.maximum(samples, 1)  # real clients may not say how many samples they have
    return rng.choice(len(samples), size, replace=False, p=weight / weight.sum())


def uniformly(round_: int, samples: Ids, size: int, rng: np.random.Generator) -> Ids:
    """Choose clients with equal probabilities, without repetition."""
    del round_
    return rng.choice(len(samples), size, replace=False)


SAMPLINGS: dict[str, Sampling | None] = {"uniform": None, "samples": by_samples}


def parse_sampling(name: str) -> Sampling | None:
    """Return the sampling with a name: a key of SAMPLINGS, or a function package.module:function."""
    if ":" in name:
        return checked_sampling(import_name(name, "sampling"))
    if name not in SAMPLINGS:
        raise unknown("sampling", name, [*SAMPLINGS, "your.module:function"])
    return SAMPLINGS[name]


def checked_sampling(function: Any) -> Sampling:
    """Return a user's function; PefllError if it cannot be called."""
    if not callable(function):
        raise PefllError(
            f"sampling is {shown(function)}; it must be a function, or one of {', '.join(SAMPLINGS)}",
            code="PEFLL-E552",
        )
    return function  # type: ignore[no-any-return]
