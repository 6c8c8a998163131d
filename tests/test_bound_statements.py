"""PAC-Bayes statements from known losses and distances, against the formulas of docs/theory-bounds.md by hand.

A `Bench` stands in for the clients: it answers with losses that a test chose, and remembers what it was asked.
"""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import rel_entr

from pefll.core.errors import PefllError
from pefll.guarantees.intervals import betting_lower
from pefll.guarantees.statement import Statement
from pefll.methods import build_method
from pefll.methods.pefll import Eta
from pefll.training.posterior_losses import TrainLosses
from pefll.training.query_bounds import FAMILIES, QueryProblem, query_statements, without_influence
from pefll.training.theorem_bounds import Centres, Evaluated, Variances, evaluated, models_bound, theorem_statement
from tests.federations import problem_of, ragged

DELTA = 0.1


def upper(p: float, c: float) -> float:
    """The largest q with kl(p||q) <= c, by scipy's root finder."""
    return brentq(lambda q: rel_entr(p, q) + rel_entr(1 - p, 1 - q) - c, p, 1 - 1e-15, xtol=1e-15)


class Bench:
    """Answers with the losses that functions return; both get the posterior and the number of the call."""

    def __init__(self, method, train=None, test=None):
        self.method, self.train, self.test = method, train, test
        self.asked: list[SimpleNamespace] = []

    def _ask(self, posterior, clients, draws, purpose, **more):
        self.asked.append(SimpleNamespace(posterior=posterior, clients=clients, draws=draws, purpose=purpose, **more))
        return len(self.asked), (len(clients), draws)

    def on_training_samples(self, posterior, alpha_theta, centre, clients, draws, purpose):
        number, shape = self._ask(posterior, clients, draws, purpose, alpha_theta=alpha_theta, centre=centre)
        return TrainLosses(*(np.full(shape, value) for value in self.train(posterior, alpha_theta, number)))

    def on_test_samples(self, posterior, clients, draws, purpose):
        number, shape = self._ask(posterior, clients, draws, purpose)
        return np.broadcast_to(self.test(posterior, number), shape).copy()

    def shared_distances(self, posterior, centre, clients, purpose):
        return 0.5 * len(clients)


@pytest.fixture(scope="module")
def federation():
    return ragged(clients=32, sizes=(4, 12))


@pytest.fixture(scope="module")
def method(federation):
    return build_method("pefll", problem_of(federation), {"hypernetwork": "S", "embedding": "mlp"})


def weights(method, seed, scale=1.0):
    rng = torch.Generator().manual_seed(seed)
    sizes = method.h.size, method.phi.size
    return Eta(*(scale * torch.randn(size, generator=rng, dtype=torch.float64) for size in sizes))


def plus(one, other):
    return Eta(*(a + b for a, b in zip(one, other, strict=True)))


def squared_length(network, names, vector):
    parts = network.unflatten(vector)
    return sum(float(parts[name].square().sum()) for name in names)


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("loss", ["zero_one", "cross_entropy"])
def test_each_part_of_the_theorem_gets_its_share_of_delta(loss, tight):
    """δ is split in 90% for the theorem, over 27 cells, 5% for the loss, and 5% for two bounds of the last term."""
    rng = np.random.default_rng(3)
    n, draws, m, cut = 40, 6, 25.0, 1.0
    losses = TrainLosses(rng.beta(1, 9, (n, draws)), rng.beta(1, 7, (n, draws)), rng.uniform(0, 4e-6, (n, draws)))
    losses.distance[:3, 0] = 1e-3  # three draws of 240 are cut off
    found = Evaluated(Variances(1e-2, 1e-4, 1e-5), 2.5, 1.25, losses, m, (0.7, 400.0), cut)
    one = theorem_statement(found, n, DELTA, loss, ("name", "title"), "words", tight)

    cell, chance, calls = 0.9 * DELTA / 27, 0.05 * DELTA, n * draws
    measured = getattr(losses, loss).mean()
    loss_bound = upper(measured, math.log(1 / chance) / calls)
    first = math.sqrt((3.75 + math.log(4 * math.sqrt(n) / cell)) / (2 * n))
    kl = losses.distance / 2e-5
    kept, replaced = kl[kl <= cut].sum() / calls, 3 / calls
    half = math.log(2 / chance) / calls

    def last(total: float) -> float:
        return math.sqrt((total + math.log(8 * m * n / cell) + 1) / (2 * m * n))

    second = last(n * cut * upper(kept / cut, half)) + 2 * upper(replaced, half)
    total = loss_bound + first + second
    if tight:
        tighter = upper(loss_bound + second, (3.75 + math.log(2 * math.sqrt(n) / (cell / 2))) / n)
        assert tighter < total
        total = tighter
    assert one.measured == pytest.approx(measured)
    assert one.bound == pytest.approx(total, rel=1e-9)
    assert one.confidence == 1 - DELTA
    assert not one.lower
    literal = last(0.7), last(400.0)
    assert literal[0] < second < 1
    wanted = {
        "clients": n,
        "samples": m,
        "draws": calls,
        "loss_bound": loss_bound,
        "environment_term": first,
        "models_term": second,
        "models_term_of_theorem": sum(literal) / 2,
        "models_term_cut_at_1": sum(min(1.0, each) for each in literal) / 2,
        "kl_hypernetwork": 2.5,
        "kl_embedder": 1.25,
        "kl_models": kl.mean(),
        "alpha_h": 1e-2,
        "alpha_v": 1e-4,
        "alpha_theta": 1e-5,
        "grid": 27,
    }
    assert dict(one.terms) == pytest.approx(wanted, rel=1e-9)


def test_the_last_term_of_the_theorem_is_at_most_1():
    assert models_bound(np.full((5, 3), 80.0), 100.0, 5, 2, 0.05, 0.01) == 1.0


def test_a_kl_that_is_no_number_counts_as_too_large():
    kl = np.random.default_rng(0).uniform(0, 0.02, (60, 40))
    broken, large = kl.copy(), kl.copy()
    broken[:5, 0], large[:5, 0] = math.nan, 1e9
    found = models_bound(broken, 0.05, 60, 100, 0.05, 0.001)
    assert found == models_bound(large, 0.05, 60, 100, 0.05, 0.001)
    assert models_bound(kl, 0.05, 60, 100, 0.05, 0.001) < found < 1
    broken[:] = math.nan
    assert models_bound(broken, 0.05, 60, 100, 0.05, 0.001) == 1.0
    assert models_bound(np.array([[math.inf, 0.1]]), math.inf, 60, 100, 0.05, 0.001) == 1.0  # nothing was cut off


@pytest.mark.parametrize("cut", [0.0, math.nan])
def test_without_a_cut_the_last_term_is_refused(cut):
    with pytest.raises(PefllError, match="inverse of the KL divergence needs") as wrong:
        models_bound(np.zeros((3, 2)), cut, 3, 10, 0.05, 0.001)
    assert wrong.value.code == "PEFLL-G102"


def test_json_has_no_number_for_what_is_none():
    terms = {"nan": math.nan, "infinite": math.inf, "half": 0.5, "clients": 7}
    row = Statement("name", "title", math.nan, math.inf, False, 0.95, "promise", "assumes", terms).row()
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert (row["measured"], row["bound"], row["vacuous"]) == (None, None, True)
    assert row["terms"] == {"nan": None, "infinite": None, "half": 0.5, "clients": 7}
    again = Statement.from_row(row)
    assert again.bound == math.inf
    assert math.isnan(again.terms["nan"])
    assert again.row() == row


def test_the_theorem_is_about_its_own_clients_draws_and_centres(federation, method):
    """The cut and the variances come from the pilot. The final draws are others, of all clients of the bound."""
    start, way = weights(method, 1), weights(method, 2, scale=1e-3)
    end, clients, delta = plus(start, way), np.arange(3, 30), DELTA

    def losses(posterior, alpha_theta, number):
        error = 0.3 if (posterior.alpha_h, posterior.alpha_v, alpha_theta) == (1e-2, 1e-4, 1e-6) else 0.9
        return error, error, number * 1e-9  # each call has larger distances than the one before

    bench = Bench(method, train=losses)
    centre = torch.zeros(method.problem.model.size)
    found = evaluated(bench, federation, end, Centres(start, centre), clients, delta, "name")
    *pilots, final = bench.asked
    assert found.variances == (1e-2, 1e-4, 1e-6)  # all differ, so that none stands in for another
    assert final.alpha_theta == 1e-6
    assert (final.posterior.alpha_h, final.posterior.alpha_v) == (found.variances.h, found.variances.v)
    assert final.posterior.mean is end
    assert (final.posterior.part.hypernetwork, final.posterior.part.embedder) == (
        set(method.h.names),
        set(method.phi.names),
    )
    np.testing.assert_array_equal(final.clients, clients)
    assert final.draws == 64
    assert found.losses.zero_one.shape == (27, 64)
    # A pilot that had the final draws would make the choice, and the cut, depend on them.
    assert final.purpose not in {one.purpose for one in pilots}
    chosen = [
        place
        for place, one in enumerate(pilots, 1)
        if Variances(one.posterior.alpha_h, one.posterior.alpha_v, one.alpha_theta) == found.variances
    ]
    assert found.cut == pytest.approx(2 * chosen[0] * 1e-9 / 2e-6)
    assert all(one.centre is centre and len(one.clients) == 16 for one in pilots)
    assert all(one.centre is centre for one in bench.asked)
    of_h, of_v = (float(each.square().sum()) for each in way)
    assert found.kl_h == pytest.approx(of_h / (2 * found.variances.h))
    assert found.kl_v == pytest.approx(of_v / (2 * found.variances.v))
    assert found.samples == pytest.approx(27 / (13 / 4 + 14 / 12))  # clients have 4 and 12 samples, by turns
    assert found.shared == [0.5 * 27 / 2e-6] * 8


def test_a_pilot_whose_weights_overflow_is_not_chosen(federation, method):
    def losses(posterior, alpha_theta, number):
        return 0.5, 0.5, math.nan if posterior.alpha_h == 1e-2 else 1e-3

    bench, centre = Bench(method, train=losses), torch.zeros(method.problem.model.size)
    small = weights(method, 1, scale=1e-4)
    found = evaluated(bench, federation, small, Centres(None, centre), np.arange(30), DELTA, "name")
    assert found.variances.h < 1e-2
    assert math.isfinite(found.cut)
    bench = Bench(method, train=lambda *_: (0.5, 0.5, math.nan))
    found = evaluated(bench, federation, small, Centres(None, centre), np.arange(30), DELTA, "name")
    one = theorem_statement(found, 30, DELTA, "zero_one", ("name", "title"), "words")
    assert one.terms["models_term"] == 1.0  # says nothing, and is no error
    json.dumps(one.row(), allow_nan=False)


@pytest.fixture(scope="module")
def queried(method):
    """The statements of a problem in which models are best at three tenths of the way to the final weights."""
    start, clients = weights(method, 1), np.arange(100, 400)
    end = plus(start, weights(method, 2, scale=3e-4))
    rng = np.random.default_rng(0)
    fixed = rng.beta(2, 5, (300, 1))

    def errors(posterior, number):
        if not posterior.alpha_h:
            return fixed
        pairs = zip(start, end, posterior.mean, strict=True)
        rho = max(float(((mean - a) / (b - a)).max()) for a, b, mean in pairs)
        return 0.05 + 0.2 * abs(rho - 0.3) + number * 1e-6  # no two calls have equal errors

    bench = Bench(method, test=errors)
    problem = QueryProblem(bench, start, end, clients, (10.0, 6.0), DELTA)
    return problem, {one.name: one for one in query_statements(problem)}, fixed


def test_the_prior_alone_has_half_of_delta_and_no_noise(queried):
    problem, found, errors = queried
    one, (asked, *_) = found["query-prior"], problem.bench.asked
    assert (asked.posterior.alpha_h, asked.posterior.alpha_v, asked.draws) == (0, 0, 1)
    assert asked.posterior.mean is problem.prior
    np.testing.assert_array_equal(asked.clients, problem.clients)
    assert one.measured == pytest.approx(errors.mean())
    assert one.bound == 1 - betting_lower(1 - errors[:, 0], 0.5 * DELTA)
    assert one.bound > one.measured
    assert one.terms["bound_by_kl"] == pytest.approx(upper(errors.mean(), math.log(1 / (0.5 * DELTA)) / 300))
    assert one.terms["delta"] == 0.5 * DELTA


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_pays_for_its_way_its_noise_and_its_choice(queried, method, family):
    problem, found, _ = queried
    one = found[f"query-{family.name}"]
    part, terms = family.part(method), one.terms
    asked = [each for each in problem.bench.asked if each.posterior.alpha_h and each.posterior.part == part]
    *pilots, final = asked
    assert [each.draws for each in pilots] == [1] * len(pilots)
    assert final.draws > 1
    assert terms["draws"] == 300 * final.draws
    np.testing.assert_array_equal(final.clients, problem.clients)
    # What was chosen with the pilot's draws is measured with others.
    assert final.purpose not in {each.purpose for each in problem.bench.asked if each is not final}
    # The statement is about weights with noise, and about those that were evaluated.
    assert final.posterior.alpha_h == final.posterior.alpha_v == terms["alpha"] > 0
    assert final.posterior.part == part
    rho, networks = terms["rho"], (method.h, method.phi)
    assert rho == 0.3
    for network, names, *vectors in zip(
        networks, (part.hypernetwork, part.embedder), problem.prior, problem.final, final.posterior.mean, strict=True
    ):
        a, b, mean = (network.unflatten(vector) for vector in vectors)
        for name in network.names:
            wanted = a[name] + rho * (b[name] - a[name]) if name in names else a[name]
            torch.testing.assert_close(mean[name], wanted, rtol=0, atol=1e-12)
    difference = (b - a for a, b in zip(problem.prior, problem.final, strict=True))
    distance = sum(map(squared_length, networks, (part.hypernetwork, part.embedder), difference))
    kl = rho**2 * distance / (2 * terms["alpha"])
    assert terms["kl"] == pytest.approx(kl)
    # 5% of δ are for the Monte Carlo bounds of three families, 45% for three families with three variances each.
    loss_bound = upper(one.measured, math.log(1 / (0.05 * DELTA / 3)) / terms["draws"])
    assert terms["loss_bound"] == pytest.approx(loss_bound, rel=1e-9)
    mine = 0.45 * DELTA / 9
    assert one.bound == pytest.approx(upper(loss_bound, (kl + math.log(2 * math.sqrt(300) / mine)) / 300), rel=1e-9)
    assert (terms["delta"], terms["grid"], terms["clients"]) == (pytest.approx(mine), 9, 300)


def test_the_best_query_bound_is_one_of_four_that_hold_together(queried):
    _, found, _ = queried
    four = ["query-prior", *(f"query-{family.name}" for family in FAMILIES)]
    assert list(found) == ["query", *four]
    best = min((found[name] for name in four), key=lambda one: one.bound)
    assert best.name != "query-prior"
    assert (found["query"].bound, found["query"].measured) == (best.bound, best.measured)
    assert all(found[f"query-{end}"].bound == found["query"].terms[f"bound_{end}"] for end in ("prior", "all"))
    assert {(one.confidence, one.lower) for one in found.values()} == {(1 - DELTA, False)}


def test_clients_of_the_bound_are_those_without_influence():
    np.testing.assert_array_equal(without_influence(np.array([1, 4]), 6), [0, 2, 3, 5])
