"""All certificates of a trained world, each with the truth that it is about."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.certificate_validity.trained import Judged, Trained, Truth, mean_of, reached_by
from pefll.core.tree import map_tree
from pefll.data.samples import TEST
from pefll.engines.hardware import open_engine, pick_hardware
from pefll.guarantees.held_out import accuracy_statement
from pefll.guarantees.statement import Statement
from pefll.methods.contract import each
from pefll.methods.pefll import Eta, PeFLL
from pefll.training.meta_bounds import meta_bounds
from pefll.training.posterior_losses import PosteriorLosses, bounded_losses
from pefll.training.query_bounds import FAMILIES
from pefll.training.sampled_networks import Part, Posterior, every_part, gaussian, moved

Certifier = Callable[[Trained], list[Judged]]
OWN_SAMPLES, OWN_TESTS = 30, 20_000  # labelled samples of the single new client, and samples for the truth
GIBBS_CLIENTS = 4_000  # new clients for the truth about random networks


def held_out(trained: Trained) -> list[Judged]:
    """Return the certificates from unseen clients: means by three intervals, and two quantiles."""
    found = trained.run.certify(trained.delta, 0.9, bounds=False)
    truths = {"share-measured": lambda: reached_by(trained.measured, 0.9), "share-true": lambda: reached_by(trained.true, 0.9)}
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
    """Return the PAC-Bayes certificates. Their truth is the error of random models of many new clients."""
    run = trained.run
    statements = meta_bounds(run, trained.delta)
    method, config = run.method, run.config
    assert isinstance(method, PeFLL)
    fresh = trained.world.new_clients(GIBBS_CLIENTS, draw=3)
    hardware = pick_hardware(method.problem, config.device, config.engine, config.precision, config.processes)
    judged = []
    with torch.no_grad(), open_engine(hardware, fresh, method, config.seed, 0) as engine:
        server = map_tree(lambda leaf: leaf.to(engine.device), run.server)
        bench = PosteriorLosses(engine, method, server, config.seed, lambda _: None)
        known: dict[Any, Truth] = {}
        for one in statements:
            predictor = predictor_of(one, run, method)
            if predictor not in known:
                known[predictor] = _error(bench, *predictor, f"truth/{one.name}")
            judged.append(Judged(one, known[predictor]))
    return judged


def predictor_of(statement: Statement, run: Any, method: PeFLL) -> tuple[Posterior, float, str]:
    """Return the posterior that a statement is about, the variance of its models, and the loss."""
    terms, name = statement.terms, statement.name
    loss = "cross_entropy" if name.endswith("cross-entropy") else "zero_one"
    final = method.serving(run.server)
    if "alpha_theta" in terms:
        return Posterior(final, terms["alpha_h"], terms["alpha_v"], every_part(method)), terms["alpha_theta"], loss
    start = method.serving(run.prior)
    if name == "query":  # the best of the others, which it repeats
        name = min(
            (key for key in terms if key.startswith("bound_query-")), key=lambda key: terms[key], default="query-prior"
        )
    return Posterior(start, 0.0, 0.0, Part(frozenset(), frozenset())), 0.0, loss


def _error(bench: PosteriorLosses, posterior: Posterior, alpha_theta: float, loss: str, purpose: str) -> Truth:
    raise NotImplementedError


CERTIFIERS: Mapping[str, Certifier] = {"held-out": held_out, "one-client": one_client, "pac-bayes": pac_bayes}
