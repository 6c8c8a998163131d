"""Theorem 3.2 for a trained run, with the prior of the paper or with one that half of the clients made."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.data.federation import Federation
from pefll.data.samples import TRAIN
from pefll.guarantees import pac_bayes
from pefll.guarantees.statement import Statement, rounded_up
from pefll.methods.pefll import Eta, PeFLL
from pefll.training.posterior_losses import Floats, Ids, PosteriorLosses, TrainLosses, number_of_draws
from pefll.training.sampled_networks import Posterior, every_part, squared_distances

# Variances of each kind of weights, largest first; their choice costs a union bound.
ALPHAS = (1e-2, 1e-4, 1e-6)
PILOT = 16  # clients with which the variances are chosen
BUDGET = 2e10  # numbers to touch; see `number_of_draws`
LEFT_TO_CHANCE = 0.05  # the share of δ for each of two Monte Carlo estimates
WIDTH = 2.0  # distances above WIDTH times the largest one of a pilot draw are cut off


class Variances(NamedTuple):
    """A cell of the grid of variances: of η_h, of η_v, and of a model's weights."""

    h: float
    v: float
    theta: float


@dataclass(frozen=True, eq=False)
class Centres:
    """Centres of the priors, which do not depend on the clients of the bound.

    Attributes:
        eta: of the two networks' weights; None for zero.
        theta: of a model's weights, [D].
    """

    eta: Eta | None
    theta: Tensor


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A posterior with its parts of the bound.

    Attributes:
        variances: the chosen cell.
        kl_h: KL of the hypernetwork's weights.
        kl_v: KL of the embedding network's weights.
        losses: of all clients and draws.
        samples: m, the harmonic mean of the numbers of training samples.
        shared: for each draw that all clients share, the sum over clients of the models' KL, as in the theorem.
        cut: KL of a model at which it is cut off.
    """

    variances: Variances
    kl_h: float
    kl_v: float
    losses: TrainLosses
    samples: float
    shared: Sequence[float]
    cut: float


def equal_samples(federation: Federation, clients: Ids) -> bool:
    """Return whether all these clients have the same number of training samples."""
    count = federation.count[TRAIN, clients]
    return bool((count == count[0]).all())


def evaluated(
    bench: PosteriorLosses, federation: Federation, eta: Eta, centres: Centres, clients: Ids, delta: float, name: str
) -> Evaluated:
    """Return the parts of the bound at the variances that a few clients suggest.

    Args:
        bench: evaluates clients.
        federation: has the clients' samples, in the host's memory.
        eta: the trained weights, the centre of the posterior.
        centres: of the priors.
        clients: the clients of the bound, in ascending order.
        delta: δ of one cell of the grid.
        name: for the random numbers.
    """
    method = bench.method
    samples = pac_bayes.harmonic_mean(federation.count[TRAIN, clients].tolist())
    part, n = every_part(method), len(clients)
    distances = squared_distances(method, part, eta, centres.eta)

    def posterior(one: Variances) -> Posterior:
        return Posterior(eta, one.h, one.v, part)

    def kls(one: Variances) -> tuple[float, float]:
        return pac_bayes.gaussian_kl(distances[0], one.h), pac_bayes.gaussian_kl(distances[1], one.v)

    few = clients[np.linspace(0, n - 1, min(n, PILOT)).astype(np.int64)]
    best: tuple[float, Variances, float] | None = None
    for cell in itertools.starmap(Variances, itertools.product(ALPHAS, repeat=3)):
        first = pac_bayes.environment_term(sum(kls(cell)), n, delta)
        if best is not None and first >= best[0]:
            continue
        tried = bench.on_training_samples(posterior(cell), cell.theta, centres.theta, few, 1, f"{name}/pilot")
        # Weights that overflow make a KL of NaN, which must not look small.
        kl = np.nan_to_num(tried.distance / (2 * cell.theta), nan=math.inf, posinf=math.inf)
        second = pac_bayes.sample_term(n * float(kl.mean()), n, samples, delta)
        total = first + second + float(tried.zero_one.mean())
        if best is None or total < best[0]:
            best = total, cell, float(kl.max())
    assert best is not None
    _, cell, largest = best
    sizes = [float(federation.count[TRAIN, clients].double().mean())] * 2
    draws = number_of_draws(method, sizes, n, BUDGET)
    shared = [
        bench.shared_distances(posterior(cell), centres.theta, clients, f"{name}/shared/{draw}") / (2 * cell.theta)
        for draw in range(number_of_draws(method, (sizes[0], 0), n, BUDGET / 4, most=8))
    ]
    losses = bench.on_training_samples(posterior(cell), cell.theta, centres.theta, clients, draws, name)
    return Evaluated(cell, *kls(cell), losses, samples, shared, WIDTH * largest)


def models_bound(kl: Floats, cut: float, clients: int, samples: float, delta: float, chance: float) -> float:
    """Return an upper bound of the last term of Theorem 3.2, from independent draws of each client's model.

    A draw whose KL exceeds `cut` is replaced by the prior, whose KL is 0. The other draws have KL between 0 and `cut`,
    so that their mean has a Monte Carlo bound, and by Jensen's inequality the square root of the mean is enough. A
    replaced draw changes the difference of losses by at most 2.

    Args:
        kl: [n, M], KL of each client's model in each draw.
        cut: does not depend on these draws.
        clients: n.
        samples: m.
        delta: δ of the term.
        chance: δ of each of the two Monte Carlo bounds.
    """
    small = np.isfinite(kl) & (kl <= cut)  # NaN is replaced, too
    # Without a positive cut there is no share of it. The inverse of the KL divergence refuses NaN in one sentence.
    share = float((np.where(small, kl, 0.0) / cut).mean()) if cut > 0 else math.nan
    mean = cut * pac_bayes.monte_carlo_bound(share, kl.size, chance)
    replaced = pac_bayes.monte_carlo_bound(float((~small).mean()), kl.size, chance)
    return min(1.0, pac_bayes.sample_term(clients * mean, clients, samples, delta) + 2 * replaced)


def theorem_statement(
    found: Evaluated, clients: int, delta: float, loss: str, names: tuple[str, str], words: str, tight: bool = False
) -> Statement:
    """Return Theorem 3.2 with the measured parts.

    Args:
        found: the parts.
        clients: n.
        delta: δ, of which each cell of the grid gets the same share.
        loss: zero_one or cross_entropy.
        names: name and title of the statement.
        words: what it assumes beside independent clients.
        tight: whether the step from seen to future clients takes the inverse of the binary KL, and not its lower bound.
    """
    cells = len(ALPHAS) ** 3
    mine, chance = (1 - 2 * LEFT_TO_CHANCE) * delta / cells, LEFT_TO_CHANCE * delta
    values, kl = getattr(found.losses, loss), found.losses.distance / (2 * found.variances.theta)
    measured = float(values.mean())
    loss_bound = pac_bayes.monte_carlo_bound(measured, values.size, chance)
    first = pac_bayes.environment_term(found.kl_h + found.kl_v, clients, mine)
    second = models_bound(kl, found.cut, clients, found.samples, mine, chance / 2)
    literal = [pac_bayes.sample_term(one, clients, found.samples, mine) for one in found.shared]
    parts = {
        "the distance of the hypernetwork's weights from their prior": math.sqrt(found.kl_h / (2 * clients)),
        "the distance of the embedding network's weights from their prior": math.sqrt(found.kl_v / (2 * clients)),
        "the distance of the clients' models from their prior": second,
        "the loss of the randomised models": loss_bound,
    }
    bound = loss_bound + first + second
    if tight:
        kls = found.kl_h + found.kl_v
        bound = min(bound, pac_bayes.client_bound(min(1.0, loss_bound + second), kls, clients, mine / 2))
    name, title = names
    kind = "error" if loss == "zero_one" else "cross-entropy, scaled to be at most 1,"
    promise = f"Models from randomised networks have an expected {kind} of at most {rounded_up(bound)} on a new client."
    statement = Statement(
        name=name,
        title=title,
        measured=measured,
        bound=bound,
        lower=False,
        confidence=1 - delta,
        promise=promise,
        assumes="Seen and new clients are independent draws from one environment. For each client, both networks' "
        f"weights and then the model's are drawn from Gaussians around the trained ones; {words}.",
        terms={
            "clients": clients,
            "samples": found.samples,
            "draws": values.size,
            "loss_bound": loss_bound,
            "environment_term": first,
            "models_term": second,
            "models_term_of_theorem": float(np.mean(literal)),
            "models_term_cut_at_1": float(np.mean(np.minimum(1.0, literal))),
            "kl_hypernetwork": found.kl_h,
            "kl_embedder": found.kl_v,
            "kl_models": float(np.mean(kl)),
            "alpha_h": found.variances.h,
            "alpha_v": found.variances.v,
            "alpha_theta": found.variances.theta,
            "grid": cells,
        },
    )
    if statement.vacuous:
        cause = max(parts, key=lambda part: parts[part])
        statement = statement._replace(promise=f"{promise} This says nothing: {cause} costs {parts[cause]:.3g}.")
    return statement


def check_equal(federation: Federation, clients: Ids) -> None:
    """Raise PefllError unless the clients have equal numbers of training samples, as Theorem 3.2 needs."""
    if not equal_samples(federation, clients):
        count = federation.count[TRAIN, clients]
        raise PefllError(
            f"Theorem 3.2 needs clients with equal numbers of training samples, but these have {int(count.min()):,} to "
            f"{int(count.max()):,}; take the version for unequal numbers",
            code="PEFLL-G211",
        )


def zero_model(method: PeFLL, like: Tensor) -> Tensor:
    """Return the paper's centre of the models' prior, zero [D]."""
    return like.new_zeros(method.problem.model.size)
