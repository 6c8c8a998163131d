"""pFedHN: torch's SGD on the hypernetwork and its table, and what a new client does."""

from __future__ import annotations

import pytest
import torch

from pefll.engines.serial import SerialEngine
from tests.methods.by_hand import PLAIN, both_engines, loss_of, models_of, opened

EMBEDDINGS = PLAIN | {
    "local_steps": 1,
    "batch_size": 0,
    "client_lr": 1.0,
    "embedding_size": 3,
    "hypernetwork": "S",
    "server_lr": 0.02,
    "embedding_lr": 0.05,
    "server_decay": 0.01,
    "server_clip": 0.0,
    "new_rounds": 3,
}


@pytest.mark.parametrize("new_lr", [0.0, 0.3])
@both_engines
def test_pfedhn_is_torchs_sgd_on_the_hypernetwork_and_its_table(make, new_lr):
    engine = opened(make, "pfedhn", EMBEDDINGS | {"new_lr": new_lr}, c=2)
    server = engine.start()
    phi, table = server.hypernetwork.clone().requires_grad_(), server.embeddings.clone().requires_grad_()
    groups = [{"params": [phi], "lr": 0.02}, {"params": [table], "lr": 0.05}]
    sgd = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.01)
    state = server
    for t in range(4):
        chosen = engine._sample(t if make is SerialEngine else torch.tensor(t)).tolist()
        sgd.zero_grad()
        total = sum(loss_of(engine, i, engine.method.h(phi, table[i][None])[0]) for i in chosen)
        total.backward()
        phi.grad /= 2  # the mean for what clients share; an embedding is one client's
        sgd.step()
        state = engine.advance(state, t, 1)
    torch.testing.assert_close(state.hypernetwork, phi.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(state.embeddings, table.detach(), rtol=0, atol=1e-9)
    v = server.newcomer.clone().requires_grad_()
    sgd = torch.optim.SGD([v], lr=new_lr or 0.05, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        sgd.zero_grad()
        loss_of(engine, 3, engine.method.h(state.hypernetwork, v[None])[0]).backward()
        sgd.step()
    models = models_of(engine, state)
    for client, embedding in ((1, state.embeddings[1]), (3, v.detach())):
        wanted = engine.method.h(state.hypernetwork, embedding[None])[0]
        torch.testing.assert_close(models[client], wanted, rtol=0, atol=1e-9)
    engine.close()


@both_engines
def test_pfedhn_with_a_frozen_hypernetwork_changes_only_embeddings(make):
    engine = opened(make, "pfedhn", EMBEDDINGS | {"server_lr": 0.0, "server_decay": 0.0}, c=1)
    server = engine.start()
    after = engine.advance(server, 0, 1)
    assert torch.equal(after.hypernetwork, server.hypernetwork)
    changed = (after.embeddings != server.embeddings).any(dim=1)
    assert int(changed.sum()) == 1
    engine.close()


def test_a_new_clients_exchanges_have_other_batches():
    engine = opened(SerialEngine, "pfedhn", {"local_steps": 1, "batch_size": 2, "embedding_size": 3})
    one = engine._client(2, 0)
    theta = engine.method.problem.model.init(0, "x").double()
    changes = [engine.method.adapt(one, theta, exchange=t) for t in (0, 0, 1)]
    assert torch.equal(changes[0], changes[1])
    assert not torch.equal(changes[0], changes[2])
    engine.close()
