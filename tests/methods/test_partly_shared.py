"""FedPer, LG-FedAvg and FedBABU: rounds by hand, and their limits: FedAvg and local training."""

from __future__ import annotations

import pytest
import torch

from pefll.core.errors import PefllError
from pefll.methods import build_method
from tests.federations import problem_of
from tests.methods.by_hand import PLAIN, both_engines, clients_of, grad, models_of, opened, two_layers, weighted

CLOSE = {"rtol": 0, "atol": 1e-12}
WHOLE = PLAIN | {"batch_size": 64, "client_lr": 0.1, "local_steps": 2}
BODY = slice(0, 6 * 4 + 4)  # of the two linear layers' 43 parameters, in the order of the flat vector
HEAD = slice(6 * 4 + 4, 43)


def descended(engine, client: int, theta, steps: int, only: slice = slice(0, 43), lr: float = 0.1):
    theta = theta.clone()
    for _ in range(steps):
        theta[only] = theta[only] - lr * grad(engine, client, theta)[only]
    return theta


@pytest.mark.parametrize(("name", "shared", "own"), [("fedper", BODY, HEAD), ("lg-fedavg", HEAD, BODY)])
@both_engines
def test_one_part_is_shared_and_the_other_stays(make, name, shared, own):
    engine = opened(make, name, WHOLE | {"new_epochs": 3})
    first = server = engine.start()
    start = engine.method.parts.join(server.shared, server.own)
    models = [start] * 3
    for t in range(3):
        models = [descended(engine, i, models[i], 2) for i in range(3)]
        mean = weighted(models)[shared]
        for model in models:
            model[shared] = mean
        server = engine.advance(server, t, 1)
        torch.testing.assert_close(server.shared, mean, **CLOSE)
        torch.testing.assert_close(server.owns[:3], torch.stack([model[own] for model in models]), **CLOSE)
    assert torch.equal(server.own, first.own)
    found = models_of(engine, server)
    for i in range(3):
        torch.testing.assert_close(found[i], models[i], **CLOSE)
    newcomer = start.clone()
    newcomer[shared] = mean
    torch.testing.assert_close(found[3], descended(engine, 3, newcomer, 3, own), **CLOSE)
    part = 8 * len(server.shared)
    assert (engine.ledger.down, engine.ledger.up) == (3 * 3 * part, 3 * 3 * (part + 8))  # and number of samples
    engine.close()


@pytest.mark.parametrize(("name", "settings"), [("fedper", {"head": "none"}), ("lg-fedavg", {"shared": "all"})])
@both_engines
def test_with_everything_shared_it_is_fedavg(make, name, settings):
    common = {"client_lr": 0.1, "batch_size": 4, "local_steps": 3}
    states = []
    for method, chosen in ((name, settings), ("fedavg", {})):
        engine = opened(make, method, common | chosen)
        after = engine.advance(engine.start(), 0, 3)
        models = models_of(engine, after)
        states.append((after[0], torch.stack([models[i] for i in range(4)])))
        engine.close()
    for mine, fedavg in zip(*states, strict=True):
        torch.testing.assert_close(mine, fedavg, **CLOSE)


@both_engines
def test_with_nothing_shared_clients_train_alone(make):
    engine = opened(make, "lg-fedavg", WHOLE | {"shared": "none", "new_epochs": 5})
    start = engine.start()
    after = engine.advance(start, 0, 2)
    for i, model in models_of(engine, after).items():
        torch.testing.assert_close(model, descended(engine, i, start.own, 4 if i < 3 else 5), **CLOSE)
    assert (engine.ledger.down, engine.ledger.up) == (0, 2 * 3 * 8)
    engine.close()


@both_engines
def test_fedbabu_by_hand(make):
    engine = opened(make, "fedbabu", WHOLE | {"tune_epochs": 3, "tune_lr": 0.05})
    server = engine.start()
    theta = engine.method.problem.model.init(0, "model").double()
    for t in range(3):
        theta = weighted([descended(engine, i, theta, 2, BODY) for i in range(3)])
        server = engine.advance(server, t, 1)
        torch.testing.assert_close(server.body, theta[BODY], **CLOSE)
    assert torch.equal(server.head, engine.method.problem.model.init(0, "model").double()[HEAD])  # as it was drawn
    for i, model in models_of(engine, server).items():  # seen and new alike train all layers
        torch.testing.assert_close(model, descended(engine, i, theta, 3, lr=0.05), **CLOSE)
    engine.close()


@both_engines
def test_fedbabu_without_a_head_and_without_fine_tuning_is_fedavg(make):
    common, models = {"client_lr": 0.1, "batch_size": 4, "local_steps": 3}, []
    for method, chosen in (("fedbabu", {"head": "none", "tune_epochs": 0}), ("fedavg", {})):
        engine = opened(make, method, common | chosen)
        models.append(models_of(engine, engine.advance(engine.start(), 0, 3))[3])
        engine.close()
    torch.testing.assert_close(*models, **CLOSE)


@pytest.mark.parametrize(("name", "setting"), [("fedper", "head"), ("lg-fedavg", "shared"), ("fedbabu", "head")])
def test_a_part_can_be_any_layer(name, setting):
    problem = problem_of(clients_of(), two_layers())
    theta = torch.arange(43.0)
    first, second = build_method(name, problem, {setting: "0"}).parts.split(theta)
    layer, rest = (first, second) if name == "lg-fedavg" else (second, first)
    assert torch.equal(layer, theta[BODY])
    assert torch.equal(rest, theta[HEAD])
    with pytest.raises(PefllError, match=r"layer .*'7'.*PEFLL-A101"):
        build_method(name, problem, {setting: "7"})
