"""kNN-Per: neighbours and weights by hand, and the global model as its limit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pefll.data.samples import TEST, TRAIN
from pefll.training.evaluation import client_scores, evaluate
from tests.federations import ragged
from tests.methods.by_hand import both_engines, opened

NEIGHBOURS = {"local_steps": 2, "few_neighbours": 2, "many_neighbours": 4, "scale": 3.0, "client_lr": 0.05}


def by_hand(engine, theta, client: int):
    """k, λ and the test scores of a client, one sample after another in NumPy."""
    federation, network = engine.federation, engine.method.problem.model
    weight, bias = (part.numpy() for part in list(network.unflatten(theta).values())[:2])
    rows, held_out = federation.indices(client, TRAIN), federation.indices(client, TEST)
    x, y = federation.x.double().numpy(), federation.y.numpy()

    def p(i):
        return network(theta, torch.from_numpy(x[i : i + 1])).softmax(1)[0].numpy()

    def feature(i):
        return weight @ x[i] + bias

    def votes(i, others, k):
        distances = np.array([((feature(i) - feature(j)) ** 2).sum() for j in others])
        result = np.zeros(3)
        for j in np.argsort(distances)[:k]:
            result[y[others[j]]] += np.exp(-distances[j] / 3.0)
        return result / result.sum() if len(others) else result

    best = (-1.0, 0, 0.0)
    for k in (2, 4):
        for step in range(11):
            right = sure = 0.0
            for i in rows.tolist():
                mixture = step / 10 * votes(i, [j for j in rows.tolist() if j != i], k) + (1 - step / 10) * p(i)
                right, sure = right + (mixture.argmax() == y[i]), sure + mixture[y[i]]
            value = right + sure / len(rows)
            if value > best[0] + 1e-12:
                best = (value, k, step / 10)
    _, k, lam = best
    mixtures = [lam * votes(i, rows.tolist(), k) + (1 - lam) * p(i) for i in held_out.tolist()]
    right = sum(int(m.argmax() == y[i]) for m, i in zip(mixtures, held_out.tolist(), strict=True))
    loss = sum(-np.log(m[y[i]].clip(1e-30)) for m, i in zip(mixtures, held_out.tolist(), strict=True))
    return k, lam, right, loss


@both_engines
def test_knn_per_by_hand(make):
    federation = ragged(clients=6, sizes=(1, 2, 9, 30, 14), seen=4)
    engine = opened(make, "knn-per", NEIGHBOURS, federation)
    server = engine.advance(engine.start(), 0, 3)
    scores = client_scores(engine, engine.method, server, np.arange(6), TEST)
    chosen = []
    for client in range(6):
        k, lam, right, loss = by_hand(engine, server.theta, client)
        chosen.append((k, lam))
        assert scores[client, 1] == right
        assert scores[client, 3] == pytest.approx(loss, abs=1e-9)
    assert len(set(chosen)) > 2  # there was something to choose
    engine.close()


@both_engines
def test_knn_per_with_weight_0_is_the_global_model(make):
    results = []
    for name, settings in (("knn-per", NEIGHBOURS | {"max_weight": 0.0}), ("fedavg", {})):
        common = {"local_steps": 2, "client_lr": 0.05}
        engine = opened(make, name, common | settings)
        results.append(evaluate(engine, engine.method, engine.advance(engine.start(), 0, 3), TEST))
        engine.close()
    for one, two in zip(*results, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-12)
