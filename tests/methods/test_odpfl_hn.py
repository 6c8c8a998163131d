"""ODPFL-HN: a round by hand, no use of labels but in training, and PeFLL without labels as its limit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from pefll.core.errors import PefllError
from pefll.data.samples import TRAIN
from pefll.methods import build_method, settings_for
from tests.federations import problem_of
from tests.methods.by_hand import PLAIN, both_engines, clients_of, grad, models_of, opened, two_layers

CLOSE = {"rtol": 0, "atol": 1e-12}
WHOLE = PLAIN | {"batch_size": 64, "client_lr": 0.1, "local_steps": 2, "hypernetwork": "S", "server_clip": 0.0}
ODPFL = WHOLE | {"descriptor_batch": 0, "descriptor_size": 3, "server_lr": 1e-2}


def encoding(engine, client: int, encoder):
    federation = engine.federation
    return engine.method.phi(encoder, federation.x[federation.indices(client, TRAIN)].double(), None).mean(dim=0)


@both_engines
def test_odpfl_hn_by_hand(make):
    """The gradient of the sum of θ_i · Δθ_i, with constant Δθ_i, by both networks at once; then Adam of torch."""
    engine = opened(make, "odpfl-hn", ODPFL)
    method, server = engine.method, engine.start()
    h, phi = (each.clone().requires_grad_() for each in (server.hypernetwork, server.encoder))
    adam = torch.optim.Adam([h, phi], lr=1e-2)
    for t in range(2):
        adam.zero_grad()
        theta = method.h(h, torch.stack([encoding(engine, i, phi) for i in range(3)]))
        loss = torch.zeros(())
        for i, before in enumerate(theta.detach()):
            after = before
            for _ in range(2):
                after = after - 0.1 * grad(engine, i, after)
            loss = loss + theta[i] @ (before - after) / 3
        loss.backward()
        adam.step()
        server = engine.advance(server, t, 1)
        torch.testing.assert_close(server.hypernetwork, h.detach(), **CLOSE)
        torch.testing.assert_close(server.encoder, phi.detach(), **CLOSE)
    for i, model in models_of(engine, server).items():  # seen and new alike, without a step
        torch.testing.assert_close(model, method.h(h, encoding(engine, i, phi)[None])[0].detach(), **CLOSE)
    engine.close()


@both_engines
def test_odpfl_hn_is_pefll_without_labels(make):
    """From the same networks, if PeFLL does not standardise its descriptors."""
    other = PLAIN | {"weight_decay": 0.01, "batch_size": 4, "client_lr": 0.1, "local_steps": 3, "server_clip": 0.1}
    mine = opened(make, "odpfl-hn", other | {"descriptor_size": 3, "descriptor_batch": 0})
    del other["weight_decay"]
    theirs = {"embedding": "mlp-unlabeled", "descriptor_size": 3, "descriptor_batch": 0, "lambda_theta": 0.005}
    pefll = opened(make, "pefll", other | theirs)
    start, wanted = mine.start(), pefll.start()
    wanted = wanted._replace(
        hypernetwork=start.hypernetwork.clone(),
        embedder=start.encoder.clone(),
        shift=torch.zeros_like(wanted.shift),
        scale=torch.ones_like(wanted.scale),
    )
    wanted, after = pefll.advance(wanted, 0, 3), mine.advance(start, 0, 3)
    torch.testing.assert_close(after.hypernetwork, wanted.hypernetwork, **CLOSE)
    torch.testing.assert_close(after.encoder, wanted.embedder, **CLOSE)
    mine.close()
    pefll.close()


@both_engines
def test_a_new_client_needs_no_labels(make):
    federation = clients_of()
    y = federation.y.clone()
    y[torch.cat([federation.indices(3, split) for split in range(3)])] = -1
    models, encodings = [], []
    for data in (federation, dataclasses.replace(federation, y=y)):
        engine = opened(make, "odpfl-hn", ODPFL, data)
        server = engine.advance(engine.start(), 0, 2)
        models.append(models_of(engine, server)[3])
        ((_, cohort),) = engine.cohorts(np.array([3]))
        encodings.append(engine.method.descriptors(server, cohort))
        assert not engine.method.uses_labels
        assert not engine.method.trains_new_clients
        engine.close()
    assert torch.equal(*models)
    assert torch.equal(*encodings)
    assert encodings[0].shape == (1, 3)


@pytest.mark.parametrize("name", ["mlp", "linear", "two"])
def test_an_encoder_that_reads_labels_is_refused(name):
    with pytest.raises(PefllError, match="PEFLL-N570"):
        build_method("odpfl-hn", problem_of(clients_of(), two_layers()), {"encoder": name})


def test_descriptors_of_many_clients_have_the_size_that_pefll_takes():
    for clients, wanted in ((1000, 251), (1001, 64), (3000, 64)):
        problem = dataclasses.replace(problem_of(clients_of(), two_layers()), num_clients=clients)
        for name in ("pefll", "odpfl-hn"):
            method = build_method(name, problem, settings_for(name, problem, {}))
            assert method.descriptor == wanted
            assert settings_for(name, problem, {"descriptor_size": 0}) == {}
