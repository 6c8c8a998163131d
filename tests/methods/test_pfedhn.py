"""pFedHN: torch's SGD on the hypernetwork and its table, and what a new client does."""

from __future__ import annotations

import pytest
import torch

from pefll.engines.serial import SerialEngine
from tests.methods.by_hand import (
    PLAIN,
    batches_asked_for,
    both_engines,
    clients_of,
    grad_on,
    loss_of,
    models_of,
    opened,
    samples_in,
)

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


def cut(parameters: torch.Tensor, limit: float) -> None:
    """Cut a gradient as torch does; one that is not longer than the limit would show nothing."""
    if limit:
        assert torch.nn.utils.clip_grad_norm_(parameters, limit) > limit


@pytest.mark.parametrize(("new_lr", "clip"), [(0.0, 0.0), (0.3, 0.0), (0.3, 0.02)])
@both_engines
def test_pfedhn_is_torchs_sgd_on_the_hypernetwork_and_its_table(make, new_lr, clip):
    engine = opened(make, "pfedhn", EMBEDDINGS | {"new_lr": new_lr, "server_clip": clip}, clients_of(clients=5), c=2)
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
        cut(phi, clip)  # each one's own norm, not that of both together
        cut(table, clip)
        sgd.step()
        state = engine.advance(state, t, 1)
    torch.testing.assert_close(state.hypernetwork, phi.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(state.embeddings, table.detach(), rtol=0, atol=1e-9)
    embeddings = {1: state.embeddings[1]}
    for client in (3, 4):  # new ones, each with a cut of its own
        v = server.newcomer.clone().requires_grad_()
        sgd = torch.optim.SGD([v], lr=new_lr or 0.05, momentum=0.9, weight_decay=0.01)
        for _ in range(3):
            sgd.zero_grad()
            loss_of(engine, client, engine.method.h(state.hypernetwork, v[None])[0]).backward()
            cut(v, clip)
            sgd.step()
        embeddings[client] = v.detach()
    models = models_of(engine, state)
    for client, embedding in embeddings.items():
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


def test_a_new_clients_exchanges_have_other_batches(monkeypatch):
    federation = clients_of(sizes=(30,))
    local = {"local_steps": 2, "batch_size": 4, "client_lr": 0.1, "new_rounds": 20, "new_lr": 0.3}
    engine = opened(SerialEngine, "pfedhn", EMBEDDINGS | local, federation)
    server = engine.start()
    asked = batches_asked_for(monkeypatch)
    model = models_of(engine, server)[3]  # seen clients ask for no gradient
    assert len(asked) == 20 * 2
    drawn = [samples_in(federation, batch) for batch in asked]
    assert len(set(zip(drawn[::2], drawn[1::2], strict=True))) == 20
    v = server.newcomer.clone().requires_grad_()
    sgd = torch.optim.SGD([v], lr=0.3, momentum=0.9, weight_decay=0.01)
    for exchange in range(20):
        theta = engine.method.h(server.hypernetwork, v[None])[0]
        local_model = theta.detach()
        for batch in asked[2 * exchange : 2 * exchange + 2]:
            local_model = local_model - 0.1 * grad_on(engine, batch, local_model)
        sgd.zero_grad()
        theta.backward(theta.detach() - local_model)  # the way back stands for the gradient
        sgd.step()
    wanted = engine.method.h(server.hypernetwork, v.detach()[None])[0]
    torch.testing.assert_close(model, wanted, rtol=0, atol=1e-9)
    engine.close()
