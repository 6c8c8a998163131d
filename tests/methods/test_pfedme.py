"""pFedMe: a round by hand, and FedAvg as its limit."""

from __future__ import annotations

import pytest
import torch

from tests.methods.by_hand import PLAIN, both_engines, clients_of, grad, models_of, opened

ENVELOPE = PLAIN | {
    "batch_size": 64,
    "lambda_": 3.0,
    "local_rounds": 2,
    "inner_steps": 2,
    "beta": 0.7,
    "personal_lr": 0.05,
    "client_lr": 0.1,
    "new_epochs": 4,
}


def nearer(engine, client: int, theta, w, steps: int, lr: float = 0.05):
    for _ in range(steps):
        theta = theta - lr * (grad(engine, client, theta) + 3.0 * (theta - w))
    return theta


@pytest.mark.parametrize("new_lr", [0.0, 0.02])
@both_engines
def test_pfedme_by_hand(make, new_lr):
    engine = opened(make, "pfedme", ENVELOPE | {"new_lr": new_lr})
    server = engine.start()
    after = engine.advance(server, 0, 1)
    copies = []
    for i in range(3):
        w, theta = server.theta, server.theta
        for _ in range(2):
            theta = nearer(engine, i, theta, w, 2)
            w = w - 0.1 * 3.0 * (w - theta)
        torch.testing.assert_close(after.personal[i], theta, rtol=0, atol=1e-10)
        copies.append(w)
    wanted = 0.3 * server.theta + 0.7 * torch.stack(copies).mean(0)
    torch.testing.assert_close(after.theta, wanted, rtol=0, atol=1e-10)
    models = models_of(engine, after)
    assert all(torch.equal(models[i], after.personal[i]) for i in range(3))
    wanted = nearer(engine, 3, after.theta, after.theta, 4, new_lr or 0.05)
    torch.testing.assert_close(models[3], wanted, rtol=0, atol=1e-10)
    engine.close()


@both_engines
def test_pfedme_with_a_strong_pull_is_fedavg(make):
    federation = clients_of(sizes=(9,))
    common = PLAIN | {"client_lr": 0.1, "batch_size": 4}
    strong = {"lambda_": 1e6, "personal_lr": 1e-6, "local_rounds": 5, "inner_steps": 3}
    models = []
    for name, settings in (("pfedme", strong), ("fedavg", {"local_steps": 5})):
        engine = opened(make, name, common | settings, federation)
        models.append(engine.advance(engine.start(), 0, 3))
        engine.close()
    torch.testing.assert_close(models[0].theta, models[1].theta, rtol=0, atol=1e-5)
