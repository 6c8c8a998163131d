"""Ditto and APFL: rounds by hand, and their limits: FedAvg, and local training of the personal model."""

from __future__ import annotations

import pytest
import torch

from pefll.core.errors import PefllError
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method
from tests.federations import problem_of
from tests.methods.by_hand import PLAIN, both_engines, clients_of, grad, models_of, opened, two_layers, weighted

CLOSE = {"rtol": 0, "atol": 1e-12}
WHOLE = PLAIN | {"batch_size": 64, "client_lr": 0.1, "new_epochs": 3}
DITTO = WHOLE | {"lambda_": 0.8, "global_steps": 2, "personal_steps": 3, "personal_lr": 0.05}
APFL = WHOLE | {"alpha": 0.3, "alpha_lr": 0.2, "mixed_steps": 3}


def descended(engine, client: int, theta, steps: int, lr: float, w=None, pull: float = 0.0):
    for _ in range(steps):
        theta = theta - lr * (grad(engine, client, theta) + (pull * (theta - w) if pull else 0))
    return theta


@both_engines
def test_ditto_by_hand(make):
    engine = opened(make, "ditto", DITTO)
    server = engine.start()
    w, personal = server.theta, [server.theta] * 3
    for t in range(2):
        personal = [descended(engine, i, personal[i], 3, 0.05, w, 0.8) for i in range(3)]  # towards the w of the start
        w = weighted([descended(engine, i, w, 2, 0.1) for i in range(3)])
        server = engine.advance(server, t, 1)
        torch.testing.assert_close(server.theta, w, **CLOSE)
        torch.testing.assert_close(server.personal[:3], torch.stack(personal), **CLOSE)
    models = models_of(engine, server)
    assert all(torch.equal(models[i], server.personal[i]) for i in range(3))
    torch.testing.assert_close(models[3], descended(engine, 3, w, 3, 0.05, w, 0.8), **CLOSE)
    assert engine.method.local_steps == 2 + 3
    engine.close()


@both_engines
def test_ditto_without_a_pull_is_local_training_beside_fedavg(make):
    engine = opened(make, "ditto", DITTO | {"lambda_": 0.0})
    fedavg = opened(make, "fedavg", PLAIN | {"batch_size": 64, "client_lr": 0.1, "local_steps": 2})
    start = engine.start()
    after = engine.advance(start, 0, 3)
    torch.testing.assert_close(after.theta, fedavg.advance(fedavg.start(), 0, 3).theta, **CLOSE)
    for i in range(3):
        torch.testing.assert_close(after.personal[i], descended(engine, i, start.theta, 9, 0.05), **CLOSE)
    engine.close()
    fedavg.close()


@both_engines
def test_apfl_by_hand(make):
    engine = opened(make, "apfl", APFL)
    server = engine.start()
    w, own, alpha = server.theta, [server.theta] * 3, [torch.tensor([0.3], dtype=torch.float64)] * 3
    torch.testing.assert_close(server.alpha, torch.full((4, 1), 0.3).double(), rtol=0, atol=1e-7)
    server = server._replace(alpha=torch.full((4, 1), 0.3, dtype=torch.float64))
    for t in range(3):
        copies = []
        for i in range(3):
            a, v, copy = alpha[i], own[i], w
            slope = ((v - copy) * grad(engine, i, a * v + (1 - a) * copy)).sum()
            a = (a - 0.2 * slope).clamp(0, 1)
            for _ in range(3):
                mixed = a * v + (1 - a) * copy
                copy, v = copy - 0.1 * grad(engine, i, copy), v - 0.1 * a * grad(engine, i, mixed)
            alpha[i], own[i] = a, v
            copies.append(copy)
        w = weighted(copies)
        server = engine.advance(server, t, 1)
        torch.testing.assert_close(server.theta, w, **CLOSE)
        torch.testing.assert_close(server.own[:3], torch.stack(own), **CLOSE)
        torch.testing.assert_close(server.alpha[:3], torch.stack(alpha), **CLOSE)
    assert len(set(server.alpha[:3].flatten().tolist())) == 3  # each client has learned its own
    models = models_of(engine, server)
    for i in range(3):  # seen clients: the newest w
        torch.testing.assert_close(models[i], alpha[i] * own[i] + (1 - alpha[i]) * w, **CLOSE)
    v = w
    for _ in range(3):
        v = v - 0.1 * 0.3 * grad(engine, 3, 0.3 * v + 0.7 * w)
    torch.testing.assert_close(models[3], 0.3 * v + 0.7 * w, **CLOSE)
    assert engine.method.local_steps == 2 * 3 + 1
    engine.close()


@both_engines
def test_apfl_with_alpha_0_is_fedavg_and_with_alpha_1_local_training(make):
    fedavg = opened(make, "fedavg", PLAIN | {"batch_size": 64, "client_lr": 0.1, "local_steps": 3})
    shared = fedavg.advance(fedavg.start(), 0, 2).theta
    for alpha in (0.0, 1.0):
        engine = opened(make, "apfl", APFL | {"alpha": alpha, "alpha_lr": 0.0})
        start = engine.start()
        after = engine.advance(start, 0, 2)
        torch.testing.assert_close(after.theta, shared, **CLOSE)
        for i, model in models_of(engine, after).items():
            trained = descended(engine, i, *((start.theta, 6) if i < 3 else (shared, 3)), 0.1)
            torch.testing.assert_close(model, trained if alpha else shared, **CLOSE)
        engine.close()
    fedavg.close()


def test_what_clients_keep_is_not_sent():
    for name, settings in (("ditto", DITTO), ("apfl", APFL)):
        engine = opened(VectorEngine, name, settings)
        server = engine.start()
        engine.advance(server, 0, 2)
        model = 8 * len(server.theta)
        assert (engine.ledger.down, engine.ledger.up) == (2 * 3 * model, 2 * 3 * (model + 8))  # and number of samples
        engine.close()


@pytest.mark.parametrize(
    ("name", "settings", "code"), [("ditto", {"batch_size": 0}, "S008"), ("apfl", {"alpha": 1.5}, "S571")]
)
def test_settings_out_of_range(name, settings, code):
    with pytest.raises(PefllError, match=f"PEFLL-{code}"):
        build_method(name, problem_of(clients_of(), two_layers()), settings)
