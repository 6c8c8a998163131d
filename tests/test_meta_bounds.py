"""PAC-Bayes bounds of trained runs: what they are computed from, and who is refused."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.func import vmap

import pefll
from pefll.backend import client_axis
from pefll.core.errors import PefllError
from pefll.engines.cohort import sample_cohort
from pefll.engines.round_plan import PriorPhase
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.guarantees import pac_bayes
from pefll.guarantees.intervals import betting_lower
from pefll.methods import build_method
from pefll.methods.contract import each
from pefll.methods.pefll import Eta
from pefll.training import query_bounds
from pefll.training.meta_bounds import first_client, meta_bounds
from pefll.training.posterior_losses import PosteriorLosses, number_of_draws
from pefll.training.sampled_networks import (
    Part,
    Posterior,
    SampledHypernetwork,
    descriptor_layer,
    every_part,
    first_layer,
    generator,
    moved,
    sampled_vectors,
    squared_distances,
)
from pefll.training.theorem_bounds import models_bound
from tests.federations import problem_of, ragged

SMALL = {"clients_per_round": 2, "local_steps": 3, "hypernetwork": "S", "processes": 1, "device": "cpu"}
CPU = torch.device("cpu")


def train(federation, name="pefll", rounds=6, **settings):
    return pefll.fit(federation, name, rounds=rounds, model="mlp", **(SMALL | settings))


@pytest.fixture(scope="module")
def equal():
    return ragged(clients=16, sizes=(12,))


@pytest.fixture(scope="module")
def run(equal):
    return train(equal, prior_clients=0.5, prior_rounds=3)


@pytest.fixture(scope="module")
def statements(run):
    notes: list[str] = []
    found = {one.name: one for one in meta_bounds(run, 0.1, notes=notes)}
    assert notes == []
    return found


def other_weights(method, seed):
    rng = generator(seed, "other", CPU)
    return Eta(torch.randn(method.h.size, generator=rng), torch.randn(method.phi.size, generator=rng))


@pytest.mark.parametrize("name", ["S", "low-rank"])
def test_drawing_outputs_is_drawing_weights(name):
    """Two ways to draw: outputs layer by layer, and all weights as one vector that the network then uses."""
    method = build_method("pefll", problem_of(ragged()), {"hypernetwork": name, "descriptor_size": 3})
    eta_h, alpha, draws = method.h.init(0, "test"), 0.03, 3000
    v = torch.tensor([[0.5, -1.0, 2.0]])
    names = every_part(method).hypernetwork
    ours = SampledHypernetwork(method.h, alpha, names, generator(0, "a", CPU))(eta_h, v.expand(draws, -1))
    weights = eta_h + math.sqrt(alpha) * torch.randn((draws, method.h.size), generator=generator(0, "b", CPU))
    theirs = vmap(lambda one: method.h(one, v)[0])(weights)
    scale = theirs.std(dim=0)
    assert float((ours.mean(0) - theirs.mean(0)).div(scale).abs().max()) < 5 * math.sqrt(2 / draws)
    assert float((ours.var(0) / theirs.var(0)).log().abs().mean()) < 0.06
    # Two outputs depend on each other through the layers before the last, in both ways alike.
    a, b = (torch.corrcoef(each.square().T[:6]) for each in (ours, theirs))
    assert float((a - b).abs().max()) < 0.15


def test_a_random_layer_has_the_variance_of_its_input():
    method = build_method("pefll", problem_of(ragged()), {"hypernetwork": "S", "descriptor_size": 3})
    layer = method.h.module
    names = frozenset({"last.weight", "last.bias"})
    eta_h, v, alpha = method.h.init(0, "test"), torch.tensor([[0.5, -1.0, 2.0]]), 0.2
    drawn = SampledHypernetwork(method.h, alpha, names, generator(0, "a", CPU))(eta_h, v.expand(4000, -1))
    own = method.h.unflatten(eta_h)
    z = torch.relu(v @ own["first.weight"].T + own["first.bias"]) @ own["hidden.0.weight"].T + own["hidden.0.bias"]
    wanted = alpha * (float(z.square().sum()) + 1)
    assert float(drawn.var(0).mean()) == pytest.approx(wanted, rel=0.02)
    assert layer.last.out_features == drawn.shape[1]


def test_a_part_moves_and_draws_only_its_own_weights():
    method = build_method("pefll", problem_of(ragged()), {"hypernetwork": "S", "embedding": "mlp"})
    start, end = other_weights(method, 1), other_weights(method, 2)
    for part in (every_part(method), descriptor_layer(method), first_layer(method)):
        assert part.hypernetwork or part.embedder
        ways = [squared_distances(method, part, moved(method, part, start, end, rho), start) for rho in (0, 0.5, 1)]
        assert ways[0] == (0, 0)
        full = [0.0, 0.0]
        for place, (network, names) in enumerate(((method.h, part.hypernetwork), (method.phi, part.embedder))):
            one, other = network.unflatten(start[place]), network.unflatten(end[place])
            full[place] = sum(float((one[name] - other[name]).double().square().sum()) for name in names)
        assert ways[2] == pytest.approx(full, rel=1e-6)
        assert ways[1] == pytest.approx([each / 4 for each in full], rel=1e-5)
    last = descriptor_layer(method)
    drawn = sampled_vectors(method.phi, start.embedder, 0.5, last.embedder, 3, generator(0, "c", CPU))
    changed = (drawn != start.embedder).all(dim=0)
    assert int(changed.sum()) == 101 * method.descriptor == sum(1 for each in changed[-int(changed.sum()) :] if each)
    assert last.embedder == set(method.phi.names[-2:])


def test_the_terms_of_the_theorem_by_hand(equal, run, statements):
    found = statements["theorem-3.2"].terms
    n, m, cells = found["clients"], found["samples"], found["grid"]
    assert (n, m, cells) == (13, 12, 27)  # one of 14 seen clients standardises the descriptors of the others
    kl_h = float(run.server.hypernetwork.double().square().sum()) / (2 * found["alpha_h"])
    kl_v = float(run.server.embedder.double().square().sum()) / (2 * found["alpha_v"])
    assert (found["kl_hypernetwork"], found["kl_embedder"]) == pytest.approx((kl_h, kl_v))
    delta = 0.9 * 0.1 / 27
    first = math.sqrt((kl_h + kl_v + math.log(4 * math.sqrt(n) / delta)) / (2 * n))
    assert found["environment_term"] == pytest.approx(first)
    kl = n * found["kl_models"]  # from other draws than the theorem's term, but of the same size
    third = math.sqrt((kl + math.log(8 * m * n / delta) + 1) / (2 * m * n))
    assert found["models_term_of_theorem"] == pytest.approx(third, rel=0.2)
    assert third > 2
    assert found["models_term"] == found["models_term_cut_at_1"] == 1  # the difference of two losses is at most 1
    one = statements["theorem-3.2"]
    assert one.bound == pytest.approx(found["loss_bound"] + first + found["models_term"])
    assert found["loss_bound"] == pac_bayes.monte_carlo_bound(one.measured, int(found["draws"]), 0.05 * 0.1)
    assert one.vacuous
    assert "says nothing: the distance of the hypernetwork's weights" in one.promise
    wanted = sample_cohort(equal, 0, torch.tensor(0), 2)[0]
    plain = train(equal, rounds=1)
    assert first_client(plain.config, plain.method, equal) == int(wanted)


def test_the_bound_of_the_prior_is_about_clients_that_it_never_saw(equal, run, statements):
    members = PriorPhase(0.5, 3).clients(0, 14)
    others = np.setdiff1d(np.arange(14), members)
    scores = dataclasses.replace(run, server=run.prior).evaluate_clients("test")
    errors = np.array([1 - scores[client].accuracy for client in others])
    prior = statements["query-prior"]
    assert prior.measured == pytest.approx(errors.mean())
    assert prior.terms["bound_by_kl"] == pytest.approx(pac_bayes.monte_carlo_bound(errors.mean(), 7, 0.05))
    assert prior.bound == pytest.approx(1 - betting_lower(1 - errors, 0.05))
    families = [one for name, one in statements.items() if name.startswith("query-")]
    assert {one.name for one in families} == {"query-prior", "query-all", "query-embedding", "query-hypernetwork"}
    assert statements["query"].bound == min(one.bound for one in families)
    for one in families[1:]:
        terms = one.terms
        assert terms["clients"] == 7
        wanted = pac_bayes.client_bound(terms["loss_bound"], terms["kl"], 7, 0.45 * 0.1 / 9)
        assert one.bound == pytest.approx(wanted)
        assert terms["kl"] > 0 or terms["rho"] == 0
    assert all(math.isfinite(one.bound) and one.bound > one.measured for one in statements.values())
    assert statements["prior-half"].bound <= 1  # the tight form is never above 1
    for name in ("prior-half", "query", "query-all"):  # a search with these clients would have had an influence
        assert "nor on hyper-parameters, as in a search that scores seen clients" in statements[name].assumes
        assert "what scales or encodes inputs counts as fixed" in statements[name].assumes


def test_the_same_run_has_the_same_bounds(run, statements):
    again = meta_bounds(run, 0.1)
    assert [one.row() for one in again] == [one.row() for one in statements.values()]


@pytest.mark.parametrize("name", ["pefll-prior", "pefll-plus"])
def test_methods_like_pefll_on_clients_of_different_sizes(name):
    federation = ragged(clients=12, sizes=(3, 5, 9))
    run, notes = train(federation, name, prior_clients=0.5, refine_steps=2), []
    found = {one.name: one for one in meta_bounds(run, notes=notes)}
    assert len(notes) == 2
    assert "says nothing about the 2 refining steps" in notes[0]
    assert "equal numbers of training samples, but these have 3 to 9" in notes[1]
    assert "theorem-3.2" not in found
    assert found["theorem-3.2-unequal"].terms["samples"] == pytest.approx(
        pac_bayes.harmonic_mean(
            [
                int(federation.count[0, one])
                for one in range(10)
                if one != first_client(run.config, run.method, federation)
            ]
        )
    )
    assert "refined its model" in found["query"].promise


def test_both_engines_evaluate_the_same_models(equal):
    method = build_method("pefll", problem_of(equal), {"hypernetwork": "S", "embedding": "mlp"})
    clients, found = np.arange(14), []
    for make in (SerialEngine, VectorEngine):
        engine = make(equal, method, 0, 1, dtype=torch.float64)
        server = engine.start()
        fixed = Posterior(method.serving(server), 0.0, 0.0, Part(frozenset(), frozenset()))
        bench = PosteriorLosses(engine, method, server, 0, lambda done: None)
        mean = bench.mean_model(fixed, clients)
        losses = bench.on_training_samples(fixed, 0.0, mean, clients, 1, "test")
        everything = Posterior(fixed.mean, 1e-12, 1e-12, every_part(method))
        shared = bench.shared_distances(everything, mean, clients, "test")
        found.append([*losses, bench.on_test_samples(fixed, clients, 2, "test"), mean.numpy(), shared])
        assert shared == pytest.approx(losses.distance.sum(), rel=1e-3)
        engine.close()
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-12)
    assert 0 < found[0][0].mean() < 1


def test_a_models_bound_holds_for_heavy_tails():
    rng = np.random.default_rng(0)
    kl = rng.pareto(1.5, (60, 40))  # a few draws are far above the others
    bound = models_bound(kl, 20.0, 60, 100, 0.05, 0.001)
    replaced = float((kl > 20).mean())
    least = pac_bayes.sample_term(60 * float(np.where(kl <= 20, kl, 0).mean()), 60, 100, 0.05) + 2 * replaced
    assert least < bound < least + 0.1
    alike = np.full((60, 40), 3.0)
    assert models_bound(alike, 3.0, 60, 100, 0.05, 0.001) == pytest.approx(
        pac_bayes.sample_term(60 * 3.0, 60, 100, 0.05) + 2 * pac_bayes.monte_carlo_bound(0, 2400, 0.001)
    )


def test_a_query_bound_that_says_nothing_says_so(run, monkeypatch):
    monkeypatch.setattr(query_bounds, "betting_lower", lambda values, delta: 2e-4)
    found = {one.name: one for one in meta_bounds(run, 0.1)}["query-prior"]
    assert found.vacuous
    assert found.row()["vacuous"]
    assert found.promise.endswith("on a new client is at most 1. This says nothing.")


def test_more_draws_for_less_work(run):
    method = run.method
    assert number_of_draws(method, (10, 10), 5, 1e12) == 64
    assert number_of_draws(method, (10, 10), 10**6, 2e10) == 1
    assert 1 < number_of_draws(method, (10, 10), 1000, 2e11) < 64


def test_who_is_refused(equal):
    plain, notes = train(equal, rounds=1), []
    assert {one.name for one in meta_bounds(plain, notes=notes)} == {"theorem-3.2", "theorem-3.2-cross-entropy"}
    assert len(notes) == 1
    assert "--prior-clients 0.5" in notes[0]
    for wrong, code in (
        (lambda: meta_bounds(plain, 1.5), "PEFLL-G203"),
        (lambda: meta_bounds(plain, federation=ragged(clients=16, sizes=(12,), seed=1)), "PEFLL-G214"),
        (lambda: meta_bounds(pefll.fit(equal, "fedavg", rounds=1, model="mlp", device="cpu")), "PEFLL-G212"),
    ):
        with pytest.raises(PefllError) as error:
            wrong()
        assert error.value.code == code


@pytest.mark.parametrize("kernels", [False, True])
def test_each_client_has_its_own_convolutional_embedding(monkeypatch, kernels):
    """A GPU's kernels, interpreted here, compute the same as one client after another."""
    if kernels:
        pytest.importorskip("triton")
    if kernels and not torch.cuda.is_available():
        monkeypatch.setattr(client_axis, "interpreted", True)
    federation = ragged(clients=5, shape=(1, 8, 8), sizes=(4, 6), classes=3)
    method = build_method("pefll", problem_of(federation), {"embedding": "convnet", "hypernetwork": "S"})
    weights = sampled_vectors(
        method.phi, method.phi.init(0, "embedder"), 0.01, every_part(method).embedder, 3, generator(0, "d", CPU)
    )
    found = []
    for make in (SerialEngine, VectorEngine):
        engine = make(federation, method, 0, 1)
        v = torch.zeros(3, method.descriptor)
        for ids, cohort in engine.cohorts(np.arange(3)):
            v[ids] = cohort.run(method.describe_all, each(weights[ids].to(engine.device))).cpu()
        found.append(v)
        engine.close()
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert float(found[0].std(dim=0).min()) > 1e-3  # clients differ
