"""All certificates of a trained world, each with the truth that it is about."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.certificate_validity.trained import Judged, Trained, Truth, mean_of, reached_by
from pefll.core.tree import map_tree
from pefll.data.client import Client
from pefll.data.samples import TEST
from pefll.engines.hardware import open_engine, pick_hardware
from pefll.guarantees.held_out import accuracy_statement
from pefll.guarantees.statement import Statement
from pefll.methods.contract import each
from pefll.methods.pefll import Eta, PeFLL
from pefll.training.meta_bounds import meta_bounds
from pefll.training.posterior_losses import PosteriorLosses
from pefll.training.query_bounds import FAMILIES
from pefll.training.sampled_networks import Part, Posterior, every_part, gaussian, moved

Certifier = Callable[[Trained], list[Judged]]
SHARE = 0.9  # of new clients, in statements about quantiles
OWN_SAMPLES, OWN_TESTS = 30, 20_000  # labelled samples of the single new client, and samples for the truth
RANDOM_CLIENTS = 2_000  # new clients for the truth about random networks


def held_out(trained: Trained) -> list[Judged]:
    """Return the certificates from unseen clients: means by three intervals, and two quantiles."""
    found = trained.run.certify(trained.delta, SHARE, bounds=False)
    truths = {
        "share-measured": lambda: reached_by(trained.measured, 0.9),
        "share-true": lambda: reached_by(trained.true, 0.9),
    }
    mean = mean_of(trained.measured)
    return [Judged(one, truths[one.name]() if one.name in truths else mean) for one in found.statements]


def one_client(trained: Trained) -> list[Judged]:
    """Return the Clopper-Pearson certificate of one new client, from labelled samples that did not make its model."""
    client = trained.world.new_clients(1, OWN_SAMPLES + OWN_TESTS, draw=2)
    found = trained.run.predictions(federation=client)
    right = found.label == found.predicted
    statement = accuracy_statement(int(right[:OWN_SAMPLES].sum()), OWN_SAMPLES, trained.delta)
    return [Judged(statement, mean_of(right[OWN_SAMPLES:].astype(float)))]


def pac_bayes(trained: Trained) -> list[Judged]:
    """Return the PAC-Bayes certificates. Their truth is the error of new clients' random models."""
    run = trained.run
    method, config = run.method, run.config
    assert isinstance(method, PeFLL)
    statements = meta_bounds(run, trained.delta)
    fresh = trained.world.new_clients(RANDOM_CLIENTS, draw=3)
    hardware = pick_hardware(method.problem, config.device, config.engine, config.precision, config.processes)
    truths: dict[str, Truth] = {}
    with torch.no_grad(), open_engine(hardware, fresh, method, config.seed, 0) as engine:
        server, prior = (map_tree(lambda leaf: leaf.to(engine.device), state) for state in (run.server, run.prior))
        bench = PosteriorLosses(engine, method, server, config.seed, lambda _: None)
        for one in statements:
            if one.name != "query":
                predictor = predictor_of(one, method, method.serving(server), method.serving(prior))
                truths[one.name] = mean_of(random_losses(bench, predictor, f"truth/{one.name}"))
    for one in statements:
        if one.name == "query":  # the best of the others, which it repeats
            truths["query"] = truths[f"query-{best_of(one)}"]
    return [Judged(one, truths[one.name]) for one in statements]


class Predictor(NamedTuple):
    """Random models: the distribution of both networks, the variance of a model's weights, and the loss."""

    posterior: Posterior
    alpha_theta: float
    loss: str


def predictor_of(statement: Statement, method: PeFLL, final: Eta, prior: Eta) -> Predictor:
    """Return the random models that a PAC-Bayes statement is about, from its name and its terms alone.

    Args:
        statement: the statement.
        method: PeFLL.
        final: weights of both networks at the best round.
        prior: weights after the prior's rounds.
    """
    terms, name = statement.terms, statement.name
    if "alpha_theta" in terms:
        loss = "cross_entropy" if name.endswith("cross-entropy") else "zero_one"
        posterior = Posterior(final, terms["alpha_h"], terms["alpha_v"], every_part(method))
        return Predictor(posterior, terms["alpha_theta"], loss)
    if name == "query-prior":
        return Predictor(Posterior(prior, 0.0, 0.0, Part(frozenset(), frozenset())), 0.0, "zero_one")
    part = {family.name: family for family in FAMILIES}[name.removeprefix("query-")].part(method)
    mean = moved(method, part, prior, final, terms["rho"])
    return Predictor(Posterior(mean, terms["alpha"], terms["alpha"], part), 0.0, "zero_one")


def best_of(query: Statement) -> str:
    """Return which statement "query" repeats, such as "prior" or "embedding"."""
    bounds = {key.removeprefix("bound_"): value for key, value in query.terms.items() if key.startswith("bound_")}
    return min(bounds, key=lambda key: bounds[key])


class TestLosses(NamedTuple):
    """Sums over a client's test samples."""

    samples: Tensor
    zero_one: Tensor
    cross_entropy: Tensor


def random_losses(bench: PosteriorLosses, predictor: Predictor, purpose: str) -> npt.NDArray[np.float64]:
    """Return the mean loss on test samples of one random model for each client of the engine, [n]."""
    method = bench.method
    limit = 2 * math.log(method.problem.classes)

    def test_losses(client: Client, theta: Tensor) -> TestLosses:
        totals = theta.new_zeros(3)
        for batch in client.everything(TEST):
            scores = method.problem.model(theta, batch.x)
            wrong = (scores.argmax(dim=1) != batch.y).to(theta.dtype)
            cut = cross_entropy(scores, batch.y, reduction="none").clamp(max=limit) / limit
            totals = totals + torch.stack([batch.weight.sum(), batch.sum(wrong), batch.sum(cut)])
        return TestLosses(*totals)

    clients = np.arange(bench.engine.federation.num_clients, dtype=np.int64)
    found = np.zeros(len(clients))
    for place, cohort, mean, rng in bench.models(predictor.posterior, clients, purpose):
        theta = mean + math.sqrt(predictor.alpha_theta) * gaussian(tuple(mean.shape), mean, rng)
        sums = cohort.run(test_losses, each(theta))
        found[place] = (getattr(sums, predictor.loss) / sums.samples).double().numpy()
    return found


CERTIFIERS: Mapping[str, Certifier] = {"held-out": held_out, "one-client": one_client, "pac-bayes": pac_bayes}
