"""FedAvg and Local against the same thing written with torch's optimisers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method
from tests.federations import problem_of, ragged

SGD = {"client_lr": 0.1, "client_momentum": 0.9, "weight_decay": 0.03, "client_clip": 0.5}


def trained_alone(federation, model, theta, client: int, steps: int) -> torch.Tensor:
    wanted = theta.clone().requires_grad_()
    sgd = torch.optim.SGD([wanted], lr=0.1, momentum=0.9, weight_decay=0.03)
    rows = federation.indices(client)
    for _ in range(steps):
        sgd.zero_grad()
        F.cross_entropy(model(wanted, federation.x[rows].double()), federation.y[rows]).backward()
        torch.nn.utils.clip_grad_norm_([wanted], 0.5)
        sgd.step()
    return wanted.detach()


@pytest.mark.parametrize("make", [SerialEngine, VectorEngine])
def test_fedavg_is_the_mean_weighted_by_samples(make):
    federation = ragged(clients=4, sizes=(2, 7, 30), seen=3)
    method = build_method("fedavg", problem_of(federation), SGD | {"local_steps": 5, "batch_size": 0})
    engine = make(federation, method, seed=0, clients_per_round=3, dtype=torch.float64)
    theta = engine.start().theta
    for _ in range(2):
        models = [trained_alone(federation, method.problem.model, theta, client, 5) for client in range(3)]
        theta = (2 * models[0] + 7 * models[1] + 30 * models[2]) / 39
    after = engine.advance(engine.start(), 0, 2).theta
    engine.close()
    torch.testing.assert_close(after, theta, rtol=0, atol=1e-9)
    assert (after - torch.stack(models).mean(0)).abs().max() > 1e-3  # equal weights would be something else


@pytest.mark.parametrize("make", [SerialEngine, VectorEngine])
def test_local_takes_as_many_steps_as_epochs_over_its_own_samples(make):
    federation = ragged(clients=4, sizes=(2, 7, 30), seen=3)
    # One batch holds everything, so an epoch is one step, whoever is trained at the same time.
    method = build_method("local", problem_of(federation), SGD | {"epochs": 4, "batch_size": 64})
    engine = make(federation, method, seed=0, clients_per_round=3, dtype=torch.float64)
    server = engine.start()
    for ids, cohort in engine.cohorts(np.arange(4)):
        models = method.personalize(server, cohort)
        for client, model in zip(ids.tolist(), models, strict=True):
            wanted = trained_alone(federation, method.problem.model, server.theta, client, 4)
            torch.testing.assert_close(model, wanted, rtol=0, atol=1e-9)
    engine.close()


def test_the_number_of_local_steps_follows_the_number_of_samples():
    federation = ragged(clients=3, sizes=(3, 8, 9), seen=3)
    method = build_method("local", problem_of(federation), {"epochs": 5, "batch_size": 4})
    engine = SerialEngine(federation, method, seed=0, clients_per_round=1)
    steps = []
    for client in range(3):
        batches = engine._client(client, 0).batches
        counted = []

        def count(*arguments, batches=batches, counted=counted):
            for batch in batches(*arguments):
                counted.append(len(batch.y))
                yield batch

        one = engine._client(client, 0)
        object.__setattr__(one, "batches", count)
        method.train(one, engine.start().theta)
        steps.append(len(counted))
    engine.close()
    assert steps == [5 * 1, 5 * 2, 5 * 3]
