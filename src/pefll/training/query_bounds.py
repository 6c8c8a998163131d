"""Bounds on the error of future clients whose unit is a client, and not a sample.

A client's model is made from its training samples, and its error is that on its test samples. The clients of the bound
had no influence on the prior, which is the state after the prior's rounds. For fixed networks their errors are
independent values between 0 and 1, whose expectation is the error of a future client. So there is one complexity term,
KL(Q||P) over the number of clients, and no term for the samples of each client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pefll.guarantees import pac_bayes
from pefll.guarantees.intervals import betting_lower
from pefll.guarantees.statement import Statement, rounded_up
from pefll.methods.pefll import Eta, PeFLL
from pefll.training.posterior_losses import Ids, PosteriorLosses, number_of_draws
from pefll.training.sampled_networks import (
    Part,
    Posterior,
    descriptor_layer,
    every_part,
    first_layer,
    moved,
    squared_distances,
)

# Variances of random weights. The prior depends on them, so their choice costs a union bound.
ALPHAS = (1e-8, 1e-6, 1e-4)
# Shares of the way from the prior's weights to the final ones. The prior does not depend on them: their choice is free.
RHOS = (0.0, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
PILOT = 16  # clients with which variance and way are chosen
MOST_KL = 0.5  # per client; with a larger KL, the bound is above 0.39 even for models without errors
BUDGET = 2e10  # numbers to touch for each family; see `number_of_draws`
OF_PRIOR, OF_CHANCE = 0.5, 0.05  # shares of δ: of the prior itself, and of the Monte Carlo estimates of the others


class Family(NamedTuple):
    """Posteriors of one kind: the rest of a statement's name, words for the random weights, and these weights."""

    name: str
    words: str
    part: Callable[[PeFLL], Part]


FAMILIES = (
    Family("all", "all weights", every_part),
    Family("embedding", "the embedding's last layer", descriptor_layer),
    Family("hypernetwork", "the hypernetwork's first layer", first_layer),
)


class Tried(NamedTuple):
    """A posterior that was evaluated on few clients."""

    total: float
    posterior: Posterior
    kl: float
    rho: float


@dataclass(frozen=True, eq=False)
class QueryProblem:
    """What all statements of this file are about.

    Attributes:
        bench: evaluates clients.
        prior: weights after the prior's rounds.
        final: weights at the best round.
        clients: the clients that had no influence on the prior, in ascending order, with test samples.
        sizes: mean numbers of training and of test samples of a client.
        delta: δ of all statements together.
    """

    bench: PosteriorLosses
    prior: Eta
    final: Eta
    clients: Ids
    sizes: tuple[float, float]
    delta: float


def query_statements(problem: QueryProblem) -> list[Statement]:
    """Return the best statement first, called "query", then that of each family; all hold together."""
    found = [prior_statement(problem)]
    for family in FAMILIES:
        part = family.part(problem.bench.method)
        if part.hypernetwork or part.embedder:
            found.append(family_statement(problem, family, part))
    best = min(found, key=lambda one: one.bound)
    terms = dict(best.terms) | {f"bound_{one.name.removeprefix('query-')}": one.bound for one in found}
    title = "Error of new clients, the best of the bounds below"
    return [best._replace(name="query", title=title, terms=terms), *found]


def prior_statement(problem: QueryProblem) -> Statement:
    """Return the statement about the prior itself: KL = 0, so that any bound on a mean of independent values holds.

    Clients' errors vary little, which betting uses.
    """
    mine, n = OF_PRIOR * problem.delta, len(problem.clients)
    fixed = Posterior(problem.prior, 0.0, 0.0, Part(frozenset(), frozenset()))
    errors = problem.bench.on_test_samples(fixed, problem.clients, 1, "query/prior")[:, 0]
    measured = float(errors.mean())
    by_kl = pac_bayes.monte_carlo_bound(measured, n, mine)
    bound = 1 - betting_lower(1 - errors, mine) if n > 1 else by_kl
    who = "The networks after the prior's rounds"
    terms = {"clients": n, "kl": 0.0, "delta": mine, "bound_by_kl": by_kl}
    return _statement(problem, "query-prior", "Error of new clients, the prior's networks", measured, bound, who, terms)


def family_statement(problem: QueryProblem, family: Family, part: Part) -> Statement:
    """Return the best bound of a family of posteriors, in which a part of the weights is random."""
    bench, n = problem.bench, len(problem.clients)
    mine = (1 - OF_PRIOR - OF_CHANCE) * problem.delta / (len(FAMILIES) * len(ALPHAS))
    chance = OF_CHANCE * problem.delta / len(FAMILIES)
    tried = _chosen(problem, family, part, mine)
    draws = number_of_draws(bench.method, problem.sizes, n, BUDGET)
    errors = bench.on_test_samples(tried.posterior, problem.clients, draws, f"query/{family.name}")
    measured = float(errors.mean())
    upper = pac_bayes.monte_carlo_bound(measured, errors.size, chance)
    bound = pac_bayes.client_bound(upper, tried.kl, n, mine)
    where = f", moved by {tried.rho:g} of the way to the final ones" if tried.rho else ""
    who = f"The prior's networks, with random noise in {family.words}{where},"
    terms = {
        "clients": n,
        "draws": errors.size,
        "loss_bound": upper,
        "kl": tried.kl,
        "alpha": tried.posterior.alpha_h,
        "rho": tried.rho,
        "delta": mine,
        "grid": len(FAMILIES) * len(ALPHAS),
    }
    title = f"Error of new clients, noise in {family.words}"
    return _statement(problem, f"query-{family.name}", title, measured, bound, who, terms)


def _chosen(problem: QueryProblem, family: Family, part: Part, delta: float) -> Tried:
    """Return the posterior whose bound seems lowest on a few clients; their draws are not used again."""
    bench, n = problem.bench, len(problem.clients)
    distances = squared_distances(bench.method, part, problem.final, problem.prior)
    few = problem.clients[np.linspace(0, n - 1, min(n, PILOT)).astype(np.int64)]
    found: list[Tried] = []
    for alpha in ALPHAS:
        allowed = [rho for rho in RHOS if pac_bayes.gaussian_kl(rho**2 * sum(distances), alpha) <= MOST_KL * n]
        for rho in allowed[-2:]:  # a shorter way has less KL, but also less of what the last rounds learned
            kl = pac_bayes.gaussian_kl(rho**2 * sum(distances), alpha)
            mean = moved(bench.method, part, problem.prior, problem.final, rho)
            posterior = Posterior(mean, alpha, alpha, part)
            errors = bench.on_test_samples(posterior, few, 1, f"query/{family.name}/pilot")
            total = pac_bayes.client_bound(float(errors.mean()), kl, n, delta)
            found.append(Tried(total, posterior, kl, rho))
    return min(found, key=lambda one: one.total)


def _statement(
    problem: QueryProblem, name: str, title: str, measured: float, bound: float, who: str, terms: dict[str, float]
) -> Statement:
    refined = " after each client has refined its model" if problem.bench.method.refine_steps else ""
    found = Statement(
        name=name,
        title=title,
        measured=measured,
        bound=bound,
        lower=False,
        confidence=1 - problem.delta,
        promise=f"{who} make models whose expected error on a new client is at most {rounded_up(bound)}{refined}.",
        assumes="Clients are independent draws from one environment, and noise is drawn anew for each. The clients of "
        f"the bound had no influence on the prior, {pac_bayes.NO_SEARCH}, {pac_bayes.FIXED}. Their test samples had "
        "none on anything. All bounds called query hold together.",
        terms=terms,
    )
    return found._replace(promise=f"{found.promise} This says nothing.") if found.vacuous else found


def without_influence(prior: Ids, num_seen: int) -> Ids:
    """Return the seen clients that are not among those of the prior, in ascending order."""
    return np.setdiff1d(np.arange(num_seen, dtype=np.int64), prior)
