"""FedProx and SCAFFOLD: rounds by hand, and FedAvg as their limit."""

from __future__ import annotations

import pytest
import torch

from pefll.core.errors import PefllError
from pefll.engines.cohort import sample_cohort
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method
from tests.federations import problem_of
from tests.methods.by_hand import PLAIN, both_engines, clients_of, grad, models_of, opened, two_layers, weighted

CLOSE = {"rtol": 0, "atol": 1e-12}
WHOLE = {"client_clip": 0.0, "weight_decay": 0.0, "client_lr": 0.1, "batch_size": 0, "local_steps": 3}


@both_engines
def test_fedprox_by_hand(make):
    engine = opened(make, "fedprox", PLAIN | WHOLE | {"mu": 0.7})
    server = engine.start()
    models = []
    for i in range(3):
        theta = server.theta
        for _ in range(3):
            theta = theta - 0.1 * (grad(engine, i, theta) + 0.7 * (theta - server.theta))
        models.append(theta)
    after = engine.advance(server, 0, 1)
    torch.testing.assert_close(after.theta, weighted(models), **CLOSE)
    assert all(torch.equal(model, after.theta) for model in models_of(engine, after).values())
    engine.close()


@both_engines
def test_fedprox_without_a_penalty_is_fedavg(make):
    states = []
    for name, settings in (("fedprox", {"mu": 0.0}), ("fedavg", {})):
        engine = opened(make, name, settings | {"local_steps": 4, "batch_size": 4, "client_lr": 0.1})
        states.append(engine.advance(engine.start(), 0, 3).theta)
        engine.close()
    torch.testing.assert_close(*states, **CLOSE)


@both_engines
def test_scaffold_by_hand(make):
    """Two clients of three take part in a round; the fourth is unseen, and no part of the mean c."""
    engine = opened(make, "scaffold", WHOLE | {"server_lr": 0.6}, c=2)
    server = engine.start()
    x, c, variates = server.theta, torch.zeros_like(server.theta), {i: torch.zeros_like(server.theta) for i in range(3)}
    for t in range(4):
        chosen = sorted(sample_cohort(engine.federation, 0, torch.tensor(t), 2).tolist())
        assert len(set(chosen)) == 2
        models, changes = [], []
        for i in chosen:
            y, total = x, torch.zeros_like(x)
            for _ in range(3):
                g = grad(engine, i, y)
                total = total + g
                y = y - 0.1 * (g - variates[i] + c)
            models.append(y)
            changes.append(total / 3 - variates[i])  # c_i⁺ is the mean of the client's gradients in its steps
        x = x + 0.6 * sum(y - x for y in models) / 2
        c = c + 2 / 3 * sum(changes) / 2
        for i, change in zip(chosen, changes, strict=True):
            variates[i] = variates[i] + change
        server = engine.advance(server, t, 1)
        torch.testing.assert_close(server.theta, x, **CLOSE)
        torch.testing.assert_close(server.variate, c, **CLOSE)
        torch.testing.assert_close(server.variates[:3], torch.stack([*variates.values()]), **CLOSE)
        torch.testing.assert_close(server.variate, server.variates[:3].mean(dim=0), **CLOSE)
    assert torch.equal(server.variates[3], torch.zeros_like(x))
    assert all(torch.equal(model, server.theta) for model in models_of(engine, server).values())
    engine.close()


@both_engines
def test_the_first_round_of_scaffold_is_fedavg(make):
    """All control variates are 0. Clients have the same number of samples, because SCAFFOLD does not weight them."""
    federation, states = clients_of(sizes=(9,)), []
    common = {"client_lr": 0.1, "batch_size": 4, "local_steps": 5, "weight_decay": 0.01}
    for name, settings in (("scaffold", {}), ("fedavg", {"client_momentum": 0.0})):
        engine = opened(make, name, common | settings, federation)
        first = engine.advance(engine.start(), 0, 1)
        states.append((first.theta, engine.advance(first, 1, 1).theta))
        engine.close()
    (scaffold, later), (fedavg, other) = states
    torch.testing.assert_close(scaffold, fedavg, **CLOSE)
    assert (later - other).abs().max() > 1e-4


def test_control_variates_stay_with_their_clients():
    engine = opened(VectorEngine, "scaffold", WHOLE)
    server = engine.start()
    engine.advance(server, 0, 2)
    model = 8 * len(server.theta)
    assert (engine.ledger.down, engine.ledger.up) == (2 * 3 * 2 * model, 2 * 3 * 2 * model)  # x and c, y_i and Δc_i
    engine.close()


@pytest.mark.parametrize("settings", [{"local_steps": 0}, {"client_lr": 0.0}])
def test_control_variates_need_steps(settings):
    with pytest.raises(PefllError, match="PEFLL-S570"):
        build_method("scaffold", problem_of(clients_of(), two_layers()), settings)
