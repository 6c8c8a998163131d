"""What PAC-Bayes bounds are computed from: which clients, which weights, and which random numbers."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pefll
from pefll.data.samples import TEST, TRAIN
from pefll.engines.round_plan import PriorPhase
from pefll.engines.serial import SerialEngine
from pefll.guarantees import pac_bayes
from pefll.methods import build_method
from pefll.methods.pefll import Eta
from pefll.training import meta_bounds, posterior_losses
from pefll.training.posterior_losses import BoundedLosses, PosteriorLosses
from pefll.training.sampled_networks import Part, Posterior, descriptor_layer, every_part, with_hypernetwork
from tests.federations import problem_of, ragged

NONE = Part(frozenset(), frozenset())
CLIENTS = np.arange(20)  # two cohorts of the serial engine
SEEN, UNTESTED = 24, 20  # clients of the run, and the first one that has no test samples


@pytest.fixture(scope="module")
def federation():
    return ragged(clients=22, sizes=(5, 12))


@pytest.fixture(scope="module")
def bench(federation):
    settings = {"hypernetwork": "S", "embedding": "mlp", "descriptor_size": 3}
    method = build_method("pefll", problem_of(federation), settings)
    engine = SerialEngine(federation, method, 0, 1, dtype=torch.float64)
    server = engine.start()._replace(shift=torch.tensor(0.25).double(), scale=torch.tensor(0.5).double())
    yield PosteriorLosses(engine, method, server, 0, lambda done: None)
    engine.close()


def samples(federation, client, split=TRAIN):
    rows = federation.indices(client, split)
    return federation.take(rows, torch.float64), federation.y[rows]


def descriptor(method, eta_v, federation, client):
    """A client's descriptor before it is standardised: the mean of the embedding network over its samples, [l]."""
    x, y = samples(federation, client)
    return method.phi(eta_v, x, method.problem.embedded(y)).mean(dim=0)


def standardised(server, v):
    return (v - server.shift) / server.scale


def models_by_hand(method, server, eta, federation, clients):
    """Models [n, D] of the networks η."""
    v = torch.stack([descriptor(method, eta.embedder.double(), federation, int(client)) for client in clients])
    return method.h(eta.hypernetwork.double(), standardised(server, v))


def test_losses_of_fixed_networks_by_hand(bench, federation):
    """Errors, cross-entropies cut off at 2 log(classes), and distances; all on the training samples."""
    method = bench.method
    eta = method.serving(bench.server)
    eta = Eta(3 * eta.hypernetwork, eta.embedder)  # so that some cross-entropies exceed the limit
    centre = torch.full((method.problem.model.size,), 0.01, dtype=torch.float64)
    found = bench.on_training_samples(Posterior(eta, 0.0, 0.0, NONE), 0.0, centre, CLIENTS, 2, "test")
    models, limit, cut = models_by_hand(method, bench.server, eta, federation, CLIENTS), 2 * math.log(3), 0
    for client, theta in zip(CLIENTS, models, strict=True):
        own = method.problem.model.unflatten(theta)
        x, y = samples(federation, client)
        hidden = torch.relu(x @ own["layers.0.weight"].T + own["layers.0.bias"])
        scores = hidden @ own["layers.1.weight"].T + own["layers.1.bias"]
        entropy = -torch.log_softmax(scores, dim=1)[torch.arange(len(y)), y]
        cut += int((entropy > limit).sum())
        wanted = float((scores.argmax(dim=1) != y).double().mean()), float(entropy.clamp(max=limit).mean()) / limit
        for draw in (0, 1):
            assert (found.zero_one[client, draw], found.cross_entropy[client, draw]) == pytest.approx(wanted)
            assert found.distance[client, draw] == pytest.approx(float((theta - centre).square().sum()))
    assert 0 < cut < 170  # of 170 samples, some entropies are cut off, and some are not


def test_predictions_that_overflow_are_wrong(bench):
    eta = bench.method.serving(bench.server)
    centre = torch.zeros(bench.method.problem.model.size, dtype=torch.float64)
    found = bench.on_training_samples(Posterior(eta, 0.0, 0.0, NONE), 1e320, centre, CLIENTS, 1, "test")
    assert (found.zero_one == 1).all()
    assert (found.cross_entropy == 1).all()


def test_each_draw_of_a_model_has_its_own_noise(bench, monkeypatch):
    """θ ~ N(h(v), α_θ Id): two of its weights, over all clients and draws. The KL is that of the mean h(v)."""

    def two_weights(method, limit):
        return lambda client, theta: BoundedLosses(theta.new_ones(()), theta[3], theta[-1])

    monkeypatch.setattr(posterior_losses, "bounded_losses", two_weights)
    method, draws, alpha = bench.method, 20, 0.09
    fixed = Posterior(method.serving(bench.server), 0.0, 0.0, NONE)
    means = torch.cat([theta for _, _, theta, _ in bench.models(fixed, CLIENTS, "any")])
    found = bench.on_training_samples(fixed, alpha, torch.zeros(means.shape[1]), CLIENTS, draws, "noise")
    noise = np.stack([found.zero_one - means[:, [3]].numpy(), found.cross_entropy - means[:, [-1]].numpy()])
    noise /= math.sqrt(alpha)
    values = 2 * len(CLIENTS) * draws
    assert len(np.unique(noise.round(12))) == values  # no draw is used twice
    assert noise.mean() == pytest.approx(0, abs=5 / math.sqrt(values))
    assert noise.var() == pytest.approx(1, abs=5 * math.sqrt(2 / values))
    assert float((noise[0] * noise[1]).mean()) == pytest.approx(0, abs=5 / math.sqrt(values / 2))
    np.testing.assert_allclose(found.distance, np.tile(means.square().sum(dim=1).numpy()[:, None], draws))


def test_each_client_draws_its_own_embedding_network(bench, federation):
    """A last layer with weights N(W, α) has as output, in the mean over a client's samples, N(v, α(‖z‖² + 1))."""
    method, alpha, draws = bench.method, 0.04, 60
    drawing = with_hypernetwork(method, lambda eta_h, v: v)
    ours = dataclasses.replace(bench, method=drawing)
    eta = method.serving(bench.server)
    posterior = Posterior(eta, 5.0, alpha, descriptor_layer(method))
    drawn = torch.stack(
        [torch.cat([v for _, _, v, _ in ours.models(posterior, CLIENTS, f"test/{draw}")]) for draw in range(draws)]
    )
    noise = torch.zeros_like(drawn)
    for client in CLIENTS:
        x, y = samples(federation, client)
        own = method.phi.unflatten(eta.embedder)
        weight, bias = own["net.layers.0.weight"], own["net.layers.0.bias"]
        z = torch.relu(torch.cat([x, F.one_hot(y, 3)], dim=1) @ weight.T + bias).mean(dim=0)
        mean = standardised(bench.server, descriptor(method, eta.embedder, federation, client))
        scale = math.sqrt(alpha * (float(z.square().sum()) + 1)) / float(bench.server.scale)
        noise[:, client] = (drawn[:, client] - mean) / scale
    check_is_standard_noise(noise)


def test_each_client_draws_its_own_hypernetwork(bench, federation):
    """A last layer with weights N(W, α) has outputs N(θ, α(‖z‖² + 1))."""
    method, alpha, draws = bench.method, 0.04, 20
    eta = method.serving(bench.server)
    posterior = Posterior(eta, alpha, 5.0, Part(frozenset({"last.weight", "last.bias"}), frozenset()))
    drawn = torch.stack(
        [torch.cat([v for _, _, v, _ in bench.models(posterior, CLIENTS, f"test/{draw}")]) for draw in range(draws)]
    )
    own = method.h.unflatten(eta.hypernetwork)
    v = torch.stack([descriptor(method, eta.embedder, federation, client) for client in CLIENTS])
    z = torch.relu(standardised(bench.server, v) @ own["first.weight"].T + own["first.bias"])
    z = z @ own["hidden.0.weight"].T + own["hidden.0.bias"]
    mean = z @ own["last.weight"].T + own["last.bias"]
    check_is_standard_noise((drawn - mean) / (alpha * (z.square().sum(dim=1, keepdim=True) + 1)).sqrt())


def test_the_term_as_in_the_theorem_has_networks_that_all_clients_share(bench, federation, monkeypatch):
    drawn, plain = [], posterior_losses.sampled_vectors

    def remembered(*arguments):
        drawn.append(plain(*arguments))
        return drawn[-1]

    monkeypatch.setattr(posterior_losses, "sampled_vectors", remembered)
    method = bench.method
    eta = method.serving(bench.server)
    centre = torch.full((method.problem.model.size,), 0.5, dtype=torch.float64)
    found = bench.shared_distances(Posterior(eta, 1e-2, 1e-4, every_part(method)), centre, CLIENTS, "test")
    eta_v, eta_h = (one[0] for one in drawn)
    assert float((eta_h - eta.hypernetwork).var()) == pytest.approx(1e-2, rel=0.05)
    assert float((eta_v - eta.embedder).var()) == pytest.approx(1e-4, rel=0.2)
    models = models_by_hand(method, bench.server, Eta(eta_h, eta_v), federation, CLIENTS)
    assert found == pytest.approx(float((models - centre).square().sum()))


def check_is_standard_noise(noise):
    """Check that noise [draws, clients, numbers] is independent in all three ways, with mean 0 and variance 1."""
    assert len(np.unique(noise.numpy().round(12))) == noise.numel()
    assert float(noise.mean()) == pytest.approx(0, abs=5 / math.sqrt(noise.numel()))
    assert float(noise.var()) == pytest.approx(1, abs=5 * math.sqrt(2 / noise.numel()))
    for way in range(3):  # neighbours have no correlation
        size = noise.shape[way] - 1
        together = noise.narrow(way, 0, size) * noise.narrow(way, 1, size)
        assert float(together.mean()) == pytest.approx(0, abs=5 / math.sqrt(together.numel()))


@pytest.fixture(scope="module")
def certified():
    """A run with a prior, its statements, and what was asked for them.

    The running mean of η makes models, so that it is the centre of posteriors; models are refined; the last four
    clients have no test samples.
    """
    data = ragged(clients=SEEN + 2, sizes=(12, 5))
    count = data.count.clone()
    count[TEST, UNTESTED:] = 0
    data = dataclasses.replace(data, count=count)
    run = pefll.fit(
        data,
        pefll.PeFLL(local_steps=3, hypernetwork="S", server_average=0.6, refine_steps=3, refine_lr=0.1),
        rounds=6,
        model="mlp",
        clients_per_round=3,
        seed=5,
        prior_clients=0.5,
        prior_rounds=3,
        processes=1,
        device="cpu",
    )
    parts, calls = {}, []
    with pytest.MonkeyPatch.context() as patch:
        plain, generator = meta_bounds.evaluated, posterior_losses.generator

        def evaluated(bench, federation, eta, centres, clients, delta, name):
            found = plain(bench, federation, eta, centres, clients, delta, name)
            parts[name] = SimpleNamespace(eta=eta, centres=centres, clients=clients, delta=delta, found=found)
            return found

        def remembered(seed, purpose, device):
            rng = generator(seed, purpose, device)
            calls[-1].seeds.append(rng.initial_seed())
            return rng

        def watched(name):
            method = getattr(PosteriorLosses, name)

            def run_it(self, posterior, *arguments):
                # mean_model and shared_distances have no number of draws, which is the last but one elsewhere.
                draws = arguments[-2] if name.startswith("on_") else 0
                calls.append(SimpleNamespace(name=name, arguments=arguments, draws=draws, seeds=[]))
                return method(self, posterior, *arguments)

            patch.setattr(PosteriorLosses, name, run_it)

        patch.setattr(meta_bounds, "evaluated", evaluated)
        patch.setattr(posterior_losses, "generator", remembered)
        for name in ("on_training_samples", "on_test_samples", "mean_model", "shared_distances"):
            watched(name)
        statements = {one.name: one for one in meta_bounds.meta_bounds(run, 0.1, federation=data)}
    return SimpleNamespace(run=run, data=data, parts=parts, calls=calls, statements=statements)


def clients_of(certified):
    """The clients of the prior, and the other seen ones."""
    members = PriorPhase(0.5, 3).clients(5, SEEN)
    return members, np.setdiff1d(np.arange(SEEN), members)


def squared_distance(one, other):
    return float((one.double() - other.double()).square().sum())


def test_the_prior_half_starts_at_the_prior(certified):
    run, part = certified.run, certified.parts["prior-half"]
    start, final = run.method.serving(run.prior), run.method.serving(run.server)
    assert squared_distance(final.hypernetwork, run.server.hypernetwork) > 0  # the running mean differs
    of_h, of_v = (squared_distance(a, b) for a, b in zip(final, start, strict=True))
    terms = certified.statements["prior-half"].terms
    assert terms["kl_hypernetwork"] == pytest.approx(of_h / (2 * terms["alpha_h"]))
    assert terms["kl_embedder"] == pytest.approx(of_v / (2 * terms["alpha_v"]))
    for ours, theirs in zip(part.eta, final, strict=True):
        assert torch.equal(ours, theirs)


def test_the_centre_of_models_comes_from_the_clients_of_the_prior(certified):
    run, (members, others) = certified.run, clients_of(certified)
    part = certified.parts["prior-half"]
    start = run.method.serving(run.prior)
    wanted, of_others = (
        models_by_hand(run.method, run.prior, start, certified.data, clients).mean(dim=0)
        for clients in (members, others)
    )
    torch.testing.assert_close(part.centres.theta.double(), wanted, rtol=1e-4, atol=1e-6)
    assert float((wanted - of_others).abs().max()) > 1e-3
    np.testing.assert_array_equal(part.clients, others)
    terms = certified.statements["prior-half"].terms
    assert terms["clients"] == 12
    assert terms["samples"] == pytest.approx(12 / sum(1 / int(certified.data.count[TRAIN, one]) for one in others))
    # The KL of the clients' models is measured from this centre, for the variance of the statement.
    mean = part.found.losses.distance.mean() / (2 * terms["alpha_theta"])
    assert terms["kl_models"] == pytest.approx(mean)


def test_the_paper_has_its_centres_at_zero(certified):
    run, part = certified.run, certified.parts["theorem-3.2-unequal"]
    # The descriptor of one client standardises all. It is not among the clients of the bound.
    eta_v = run.method.phi.init(5, "embedder").double()
    means = [float(descriptor(run.method, eta_v, certified.data, client).mean()) for client in range(SEEN)]
    away = np.abs(np.array(means) - float(run.server.shift))
    first = int(away.argmin())
    assert np.sort(away)[0] < 1e-6 < 1e-3 < np.sort(away)[1]
    assert first in clients_of(certified)[0]  # so the prior's numbers do not depend on the other clients
    np.testing.assert_array_equal(part.clients, np.delete(np.arange(SEEN), first))
    assert part.centres.eta is None
    assert not part.centres.theta.any()
    assert part.centres.theta.shape == (run.method.problem.model.size,)
    final, terms = run.method.serving(run.server), certified.statements["theorem-3.2-unequal"].terms
    lengths = (squared_distance(each, torch.zeros_like(each)) for each in final)
    assert next(lengths) / (2 * terms["alpha_h"]) == pytest.approx(terms["kl_hypernetwork"])
    assert next(lengths) / (2 * terms["alpha_v"]) == pytest.approx(terms["kl_embedder"])


def test_final_draws_have_their_own_random_numbers(certified):
    """A choice made with a pilot is measured with other draws. No client or draw has another one's."""
    final = [one for one in certified.calls if one.draws > 1]
    assert [one.name for one in final] == ["on_training_samples"] * 2 + ["on_test_samples"] * 3
    for one in final:
        assert one.draws <= len(one.seeds) == len(set(one.seeds))
        others = {seed for other in certified.calls if other is not one for seed in other.seeds}
        assert others
        assert not others & set(one.seeds)


def test_query_bounds_are_about_tested_clients_and_refined_models(certified):
    run, (_, others) = certified.run, clients_of(certified)
    tested = others[others < UNTESTED]
    assert 0 < len(tested) < len(others)
    for one in certified.calls:
        if one.name == "on_test_samples":  # also those of the pilots, because there are few
            np.testing.assert_array_equal(one.arguments[0], tested)
    scores = dataclasses.replace(run, server=run.prior).evaluate_clients("test", certified.data)
    errors = np.array([1 - scores[client].accuracy for client in tested])
    one = certified.statements["query-prior"]
    assert one.terms["clients"] == len(tested)
    assert one.measured == pytest.approx(errors.mean())
    plain = dataclasses.replace(run.with_settings(refine_steps=0), server=run.prior)
    scores = plain.evaluate_clients("test", certified.data)
    assert np.mean([1 - scores[client].accuracy for client in tested]) != pytest.approx(errors.mean())


def test_all_statements_hold_with_the_confidence_that_was_asked_for(certified):
    """Each has its share of δ = 0.1; test_bound_statements.py has the formulas."""
    assert {one.confidence for one in certified.statements.values()} == {0.9}
    for name in ("theorem-3.2-unequal", "theorem-3.2-unequal-cross-entropy", "prior-half"):
        one, terms = certified.statements[name], certified.statements[name].terms
        kl, n = terms["kl_hypernetwork"] + terms["kl_embedder"], terms["clients"]
        first = (kl + math.log(4 * math.sqrt(n) * 27 / 0.09)) / (2 * n)
        assert terms["environment_term"] == pytest.approx(math.sqrt(first))
        by_hand = pac_bayes.monte_carlo_bound(one.measured, int(terms["draws"]), 0.005)
        assert terms["loss_bound"] == pytest.approx(by_hand)
    for family in ("all", "embedding", "hypernetwork"):
        assert certified.statements[f"query-{family}"].terms["delta"] == pytest.approx(0.045 / 9)
