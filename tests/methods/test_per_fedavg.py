"""Per-FedAvg: a round by hand, in both of its variants, which samples its steps take, and FedAvg as its limit."""

from __future__ import annotations

import pytest
import torch

from pefll.engines.serial import SerialEngine
from pefll.methods import build_method
from tests.federations import problem_of
from tests.methods.by_hand import (
    PLAIN,
    batches_asked_for,
    both_engines,
    clients_of,
    grad,
    grad_on,
    loss_of,
    models_of,
    opened,
    samples_in,
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
def test_a_round_may_have_a_number_of_meta_steps_whatever_samples_a_client_has(make):
    engine = opened(make, "per-fedavg", META | {"meta_steps": 2})
    server = engine.start()
    models = []
    for client in range(3):
        theta = server.theta
        for _ in range(2):
            theta = theta - 0.1 * grad(engine, client, theta - 0.3 * grad(engine, client, theta))
        models.append(theta)
    torch.testing.assert_close(engine.advance(server, 0, 1).theta, weighted(models), rtol=0, atol=1e-10)
    assert (engine.method.local_steps, engine.method.local_epochs) == (4, 0)
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


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_each_part_of_a_step_has_samples_of_its_own(monkeypatch, variant):
    """The batches D, D' and D'' of the paper are independent, so here, 4 of 30 samples each, no two are the same."""
    engine = opened(SerialEngine, "per-fedavg", META | {"batch_size": 4, "variant": variant})
    theta = engine.start().theta
    asked = batches_asked_for(monkeypatch)
    after = engine.method.train(engine._client(2, 0), theta).theta
    a_step = {"fo": 2, "hf": 4}[variant]
    assert len(asked) == 8 * a_step  # 30 samples are 8 batches of 4
    drawn = []
    for first in range(0, len(asked), a_step):
        inner, outer, *curved = asked[first : first + a_step]
        samples = [samples_in(engine.federation, batch) for batch in (inner, outer, *curved)]
        assert all(len(each) == 4 for each in samples)
        assert samples[2:3] == samples[3:]  # both ends of the difference are measured on the same samples
        drawn += samples[:3]
        v = grad_on(engine, outer, theta - 0.3 * grad_on(engine, inner, theta))
        for end in curved[:1]:
            ahead, behind = (grad_on(engine, end, theta + sign * 1e-3 * v) for sign in (1, -1))
            v = v - 0.3 * (ahead - behind) / 2e-3
        theta = theta - 0.1 * v
    assert len(set(drawn)) == len(drawn)
    torch.testing.assert_close(after, theta, rtol=0, atol=1e-9)
    engine.close()


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
