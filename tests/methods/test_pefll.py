"""PeFLL's round against the mathematics it stands for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pefll.core.errors import PefllError
from pefll.data.samples import TRAIN
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import PeFLL, build_method
from pefll.runs.config import Config
from pefll.training.resolve import resolve
from tests.federations import flat, problem_of, ragged

EXACT = {
    "local_steps": 1,
    "batch_size": 0,
    "descriptor_batch": 0,
    "client_momentum": 0.0,
    "client_clip": 0.0,
    "server_clip": 0.0,
    "server_optimizer": "sgd",
    "client_lr": 0.05,
    "lambda_h": 0.013,
    "lambda_v": 0.007,
    "lambda_theta": 0.011,
}


def objective(method: PeFLL, server, eta_h, eta_v, federation, clients):
    """The paper's objective, written as one differentiable function over a cohort, without any of our client code."""
    total = 0.0
    for client in clients:
        rows = federation.indices(client, TRAIN)
        x, y = federation.prepare(federation.x[rows], torch.float64), federation.y[rows]
        v = method.phi(eta_v, x, y).mean(0)
        theta = method.h(eta_h, ((v - server.shift) / server.scale)[None])[0]
        loss = F.cross_entropy(method.problem.model(theta, x), y)
        total = total + loss + method.lambda_theta * theta.square().sum()
    regulariser = method.lambda_h * eta_h.square().sum() + method.lambda_v * eta_v.square().sum()
    return total / len(clients) + regulariser


@pytest.mark.parametrize("make_engine", [SerialEngine, VectorEngine])
@pytest.mark.parametrize("embedding", ["mlp", "mlp-unlabeled", "linear"])
def test_three_exchanges_are_one_gradient_step_on_the_objective(make_engine, embedding):
    federation = ragged(clients=7, seen=5)
    method = build_method("pefll", problem_of(federation), EXACT | {"embedding": embedding})
    engine = make_engine(federation, method, seed=3, clients_per_round=5, dtype=torch.float64)
    server = engine.start()
    after = engine.advance(server, 0, 1)
    eta_h = server.hypernetwork.clone().requires_grad_()
    eta_v = server.embedder.clone().requires_grad_()
    objective(method, server, eta_h, eta_v, federation, range(5)).backward()
    beta = method.client_lr
    torch.testing.assert_close(after.hypernetwork, eta_h.detach() - beta * eta_h.grad, rtol=0, atol=1e-10)
    torch.testing.assert_close(after.embedder, eta_v.detach() - beta * eta_v.grad, rtol=0, atol=1e-10)
    assert (after.embedder - server.embedder).abs().max() > 1e-6  # the step is not nothing
    engine.close()


def test_adam_is_torchs_adam_on_the_mean_gradient():
    federation = ragged(clients=7, seen=5)
    settings = EXACT | {"server_optimizer": "adam", "server_lr": 1e-2, "client_lr": 1.0, "server_clip": 0.7}
    method = build_method("pefll", problem_of(federation), settings)
    engine = VectorEngine(federation, method, seed=3, clients_per_round=5, dtype=torch.float64)
    server = engine.start()
    eta_h = server.hypernetwork.clone().requires_grad_()
    eta_v = server.embedder.clone().requires_grad_()
    adam = torch.optim.Adam([eta_h, eta_v], lr=1e-2)
    for t in range(4):
        adam.zero_grad()
        # The clients' part of the gradient is clipped, the server's own objective is not.
        bare = build_method("pefll", method.problem, settings | {"lambda_h": 0.0, "lambda_v": 0.0})
        objective(bare, server, eta_h, eta_v, federation, range(5)).backward()
        torch.nn.utils.clip_grad_norm_([eta_h, eta_v], 0.7)
        eta_h.grad += 2 * method.lambda_h * eta_h.detach()
        eta_v.grad += 2 * method.lambda_v * eta_v.detach()
        adam.step()
        server = engine.advance(server, t, 1)
    torch.testing.assert_close(server.hypernetwork, eta_h.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(server.embedder, eta_v.detach(), rtol=0, atol=1e-9)


def test_algorithm_2_does_not_clip():
    federation = ragged(clients=7, seen=5)
    states = []
    for clip in (0.0, 1e-3):
        method = build_method("pefll", problem_of(federation), EXACT | {"server_clip": clip})
        engine = VectorEngine(federation, method, seed=3, clients_per_round=5, dtype=torch.float64)
        states.append(flat(engine.advance(engine.start(), 0, 2)))
    assert torch.equal(*states)


def test_local_steps_are_torchs_sgd():
    federation = ragged(clients=3, seen=3, sizes=(20,))
    settings = {"local_steps": 4, "batch_size": 0, "client_lr": 0.3, "client_clip": 0.2, "lambda_theta": 0.02}
    method = build_method("pefll", problem_of(federation), settings)
    engine = SerialEngine(federation, method, seed=0, clients_per_round=1, dtype=torch.float64)
    theta = method.problem.model.init(0, "x").double()
    change = method.adapt(engine._client(1, 0), theta)
    wanted = theta.clone().requires_grad_()
    sgd = torch.optim.SGD([wanted], lr=0.3, momentum=0.9, weight_decay=0.04)
    rows = federation.indices(1)
    for _ in range(4):
        sgd.zero_grad()
        F.cross_entropy(method.problem.model(wanted, federation.x[rows].double()), federation.y[rows]).backward()
        assert wanted.grad.norm() > 0.2  # so that the cut matters
        torch.nn.utils.clip_grad_norm_([wanted], 0.2)
        sgd.step()
    torch.testing.assert_close(theta - change, wanted.detach(), rtol=0, atol=1e-9)


def test_descriptor_ignores_order_and_uses_labels_only_when_told_to():
    federation = ragged(clients=4, seen=4, sizes=(12,))
    rows = federation.rows.clone()
    start, count = int(federation.offset[TRAIN, 1]), int(federation.count[TRAIN, 1])
    rows[start : start + count] = rows[start : start + count].flip(0)
    turned = type(federation)(
        **{**{f: getattr(federation, f) for f in ("x", "y", "offset", "count", "num_seen", "classes")}, "rows": rows}
    )
    other_labels = type(federation)(
        **{
            **{f: getattr(federation, f) for f in ("x", "rows", "offset", "count", "num_seen", "classes")},
            "y": (federation.y + 1) % federation.classes,
        }
    )

    def describe(data, embedding):
        method = build_method("pefll", problem_of(data), {"embedding": embedding})
        engine = SerialEngine(data, method, seed=0, clients_per_round=1, dtype=torch.float64)
        return method.describe_all(engine._client(1, 0), method.phi.init(0, "e").double())

    for embedding in ("mlp", "linear", "mlp-unlabeled"):
        torch.testing.assert_close(describe(federation, embedding), describe(turned, embedding), rtol=0, atol=1e-12)
    assert not torch.allclose(describe(federation, "mlp"), describe(other_labels, "mlp"))
    assert not torch.allclose(describe(federation, "linear"), describe(other_labels, "linear"))
    assert torch.equal(describe(federation, "mlp-unlabeled"), describe(other_labels, "mlp-unlabeled"))


def test_descriptors_are_standardised_by_the_first_sampled_clients_first_descriptor():
    federation = ragged(clients=8)
    method = build_method("pefll", problem_of(federation), {"descriptor_size": 5})
    engine = SerialEngine(federation, method, seed=11, clients_per_round=3, dtype=torch.float64)
    server = engine.start()
    first = int(engine._sample(0)[0])
    v = method.describe(engine._client(first, 0), server.embedder)
    assert float(server.shift) == pytest.approx(float(v.mean()), abs=1e-12)
    assert float(server.scale) == pytest.approx(float(v.std()), abs=1e-12)
    later = engine.advance(server, 0, 3)
    assert torch.equal(later.shift, server.shift)
    assert torch.equal(later.scale, server.scale)


def test_a_round_costs_what_the_paper_says():
    federation = ragged(clients=8)
    method = build_method("pefll", problem_of(federation), {"local_steps": 1})
    engine = VectorEngine(federation, method, seed=0, clients_per_round=3)
    server = engine.start()
    before = engine.ledger.copy()
    engine.advance(server, 0, 2)
    cost = engine.ledger.since(before)
    per_way = 3 * 4 * (method.problem.model.size + method.phi.size + method.descriptor)
    assert (cost.down, cost.up) == (2 * per_way, 2 * per_way)
    assert cost.exchanges == 6


def test_descriptor_size_follows_the_number_of_clients():
    for clients, size in ((100, 26), (500, 126), (1000, 251)):
        federation = ragged(clients=clients, sizes=(2,))
        assert build_method("pefll", problem_of(federation), {}).descriptor == size


def test_a_new_run_of_many_clients_stores_a_size_of_its_own(tmp_path):
    federation = ragged(clients=1001, sizes=(2,))
    few = ragged(clients=1000, sizes=(2,))
    config = Config(method="pefll-prior", model="tiny", rounds=1, device="cpu")

    def size(config, federation, out=None):
        spec = resolve(config, federation, out)
        return spec.method.descriptor, spec.config.settings

    assert size(config, federation) == (64, {"descriptor_size": 64})
    assert size(config, few) == (251, {})
    for chosen, used in ((0, 251), (5, 5)):  # what a user says holds, also 0 for the paper's rule
        asked = replace(config, settings={"descriptor_size": chosen})
        assert size(asked, federation) == (used, asked.settings)
    # A run of an earlier version has stored nothing. It goes on as it was started.
    (tmp_path / "config.toml").write_text(replace(config, data_sha256=federation.fingerprint()).toml())
    (tmp_path / "history.jsonl").touch()  # a run that has not begun is started anew
    assert size(config, federation, tmp_path) == (251, {})


def test_settings_are_checked():
    problem = problem_of(ragged())
    with pytest.raises(PefllError, match=r"did you mean 'client_lr'.*PEFLL-A101"):
        build_method("pefll", problem, {"clientlr": 1})
    with pytest.raises(PefllError, match="PEFLL-A014"):
        build_method("pefll", problem, {"client_lr": "fast"})
    with pytest.raises(PefllError, match="PEFLL-A014"):
        build_method("pefll", problem, {"client_lr": -1})
    with pytest.raises(PefllError, match="PEFLL-S010"):
        build_method("pefll", problem, {"server_average": 1.0})
    with pytest.raises(PefllError, match=r"server optimizer.*PEFLL-A101"):
        build_method("pefll", problem, {"server_optimizer": "lion"})
    with pytest.raises(PefllError, match=r"embedding network.*PEFLL-A101"):
        build_method("pefll", problem, {"embedding": "cnvnet"}).phi  # noqa: B018
    with pytest.raises(PefllError, match=r"hypernetwork.*PEFLL-A101"):
        build_method("pefll", problem, {"hypernetwork": "XL"}).h  # noqa: B018


@pytest.mark.parametrize("make_engine", [SerialEngine, VectorEngine])
def test_models_are_made_with_the_mean_of_the_networks_over_rounds(make_engine):
    federation = ragged(clients=7, seen=5)
    settings = {"embedding": "mlp", "local_steps": 2, "server_lr": 1e-2}
    plain, averaging = (
        build_method("pefll", problem_of(federation), settings | more) for more in ({}, {"server_average": 0.3})
    )
    states, servings = [], []
    for method in (plain, averaging):
        engine = make_engine(federation, method, seed=3, clients_per_round=3, dtype=torch.float64)
        servers = [engine.start()]
        for t in range(4):
            servers.append(engine.advance(servers[-1], t, 1))
        ((_, cohort),) = engine.cohorts(np.array([6]))
        states.append(servers)
        servings.append(method.personalize(servers[-1], cohort))
        engine.close()
    for one, other in zip(*states, strict=True):  # training takes no notice
        assert torch.equal(one.hypernetwork, other.hypernetwork)
        assert torch.equal(one.embedder, other.embedder)
    kept = [1 / 10, 2 / 11, 3 / 12, 0.3]  # t / (t + 9), at most 0.3
    for part in ("hypernetwork", "embedder"):
        mean = getattr(states[0][0], part)
        for share, server in zip(kept, states[0][1:], strict=True):
            mean = share * mean + (1 - share) * getattr(server, part)
        torch.testing.assert_close(getattr(states[1][-1].average, part), mean)
    # As if η were its mean.
    mean = plain.serving(states[1][-1])
    assert mean is states[1][-1].average
    engine = make_engine(federation, plain, seed=3, clients_per_round=3, dtype=torch.float64)
    ((_, cohort),) = engine.cohorts(np.array([6]))
    replaced = states[0][-1]._replace(hypernetwork=mean.hypernetwork, embedder=mean.embedder)
    torch.testing.assert_close(plain.personalize(replaced, cohort), servings[1])
    assert (servings[0] - servings[1]).abs().max() > 1e-4
    engine.close()


def test_training_helps():
    federation = ragged(clients=12, sizes=(40,), seen=10)
    method = build_method("pefll", problem_of(federation), {"server_lr": 2e-3, "client_lr": 0.02, "local_steps": 10})
    engine = VectorEngine(federation, method, seed=0, clients_per_round=5)
    from pefll.training.evaluation import evaluate

    server = engine.start()
    before = evaluate(engine, method, server, 2)
    after = evaluate(engine, method, engine.advance(server, 0, 60), 2)
    assert after.seen.per_sample > max(0.75, before.seen.per_sample + 0.2)
    assert after.unseen.per_sample > 0.6
    assert np.isfinite(after.unseen.loss)
    assert flat(server).isfinite().all()
