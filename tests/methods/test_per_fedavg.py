"""Per-FedAvg: a round by hand, in both of its variants, and FedAvg as its limit."""

from __future__ import annotations

import torch

from pefll.methods import build_method
from tests.federations import problem_of
from tests.methods.by_hand import (
    PLAIN,
    both_engines,
    clients_of,
    grad,
    loss_of,
    models_of,
    opened,
    two_layers,
    weighted,
)

META = PLAIN | {"batch_size": 64, "inner_lr": 0.3, "client_lr": 0.1}


@both_engines
def test_per_fedavg_first_order_by_hand(make):
    engine = opened(make, "per-fedavg", META | {"personal_steps": 2})
    server = engine.start()
    theta = server.theta
    models = [theta - 0.1 * grad(engine, i, theta - 0.3 * grad(engine, i, theta)) for i in range(3)]
    after = engine.advance(server, 0, 1)
    torch.testing.assert_close(after.theta, weighted(models), rtol=0, atol=1e-10)
    for client, model in models_of(engine, after).items():  # seen and new alike take two steps
        wanted = after.theta
        for _ in range(2):
            wanted = wanted - 0.3 * grad(engine, client, wanted)
        torch.testing.assert_close(model, wanted, rtol=0, atol=1e-10)
    engine.close()


@both_engines
def test_per_fedavg_without_the_hessian_is_the_gradient_through_the_inner_step(make):
    engine = opened(make, "per-fedavg", META | {"variant": "hf"})
    server = engine.start()
    models = []
    for client in range(3):
        w = server.theta.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss_of(engine, client, w), w, create_graph=True)
        (d,) = torch.autograd.grad(loss_of(engine, client, w - 0.3 * g), w)
        models.append(server.theta - 0.1 * d)
    after = engine.advance(server, 0, 1).theta
    first_order = opened(make, "per-fedavg", META)
    far = first_order.advance(first_order.start(), 0, 1).theta
    torch.testing.assert_close(after, weighted(models), rtol=0, atol=1e-7)
    assert (far - after).abs().max() > 1e-4
    engine.close()
    first_order.close()


@both_engines
def test_per_fedavg_with_inner_rate_0_is_fedavg(make):
    federation = clients_of(sizes=(9,))
    common = {"client_lr": 0.1, "batch_size": 4}
    states = []
    for name, settings in (("per-fedavg", {"inner_lr": 0.0}), ("fedavg", {"local_steps": 3})):  # 9 are 3 batches of 4
        engine = opened(make, name, common | settings, federation)
        states.append(engine.advance(engine.start(), 0, 4).theta)
        engine.close()
    torch.testing.assert_close(*states, rtol=0, atol=1e-12)


def test_gradients_of_per_fedavg_are_all_counted():
    problem = problem_of(clients_of(), two_layers())
    counts = [build_method("per-fedavg", problem, {"variant": v, "epochs": 3}).local_epochs for v in ("fo", "hf")]
    assert counts == [6, 12]
