"""FedRep: a round by hand, heads that stay with their clients, and FedAvg as its limit."""

from __future__ import annotations

import pytest
import torch

from pefll.core.errors import PefllError
from pefll.data.samples import TRAIN
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method
from tests.federations import flat, problem_of
from tests.methods.by_hand import PLAIN, both_engines, clients_of, loss_of, models_of, opened, two_layers

HEADS = PLAIN | {"batch_size": 64, "head_epochs": 2, "new_epochs": 4, "client_lr": 0.1}


def fit_head(engine, client: int, body, head, steps: int):
    join = engine.method.parts.join
    for _ in range(steps):
        leaf = head.clone().requires_grad_()
        head = head - 0.1 * torch.autograd.grad(loss_of(engine, client, join(body, leaf)), leaf)[0]
    return head


@both_engines
def test_fedrep_by_hand(make):
    engine = opened(make, "fedrep", HEADS, c=2)
    parts = engine.method.parts
    server = engine.start()
    assert (len(server.body), len(server.head), server.heads.shape) == (6 * 4 + 4, 4 * 3 + 3, (4, 15))
    count = engine.federation.count[TRAIN].double()
    for t in range(3):
        after = engine.advance(server, t, 1)
        chosen = [i for i in range(4) if not torch.equal(after.heads[i], server.heads[i])]
        assert len(chosen) == 2
        assert max(chosen) < 3
        bodies = []
        for i in chosen:
            head = fit_head(engine, i, server.body, server.heads[i], 2)
            torch.testing.assert_close(after.heads[i], head, rtol=0, atol=1e-10)
            leaf = server.body.clone().requires_grad_()
            bodies.append(
                leaf.detach() - 0.1 * torch.autograd.grad(loss_of(engine, i, parts.join(leaf, head)), leaf)[0]
            )
        share = count[chosen] / count[chosen].sum()
        torch.testing.assert_close(after.body, share @ torch.stack(bodies), rtol=0, atol=1e-10)
        server = after
    models = models_of(engine, server)
    for i in range(3):  # seen clients: the newest body and the head they kept
        assert torch.equal(models[i], parts.join(server.body, server.heads[i]))
    wanted = parts.join(server.body, fit_head(engine, 3, server.body, server.head, 4))
    torch.testing.assert_close(models[3], wanted, rtol=0, atol=1e-10)
    engine.close()


@both_engines
def test_fedrep_with_an_empty_head_is_fedavg(make):
    federation = clients_of(sizes=(9,))
    common = {"client_lr": 0.1, "batch_size": 4}
    states = []
    for name, settings in (("fedrep", {"head": "none"}), ("fedavg", {"local_steps": 3})):
        engine = opened(make, name, common | settings, federation)
        states.append(flat(engine.advance(engine.start(), 0, 4)))
        engine.close()
    assert torch.equal(*states)


def test_heads_do_not_cross_the_door():
    engine = opened(VectorEngine, "fedrep", HEADS)
    server = engine.start()
    engine.advance(server, 0, 2)
    body = 8 * len(server.body)
    assert (engine.ledger.down, engine.ledger.up) == (2 * 3 * body, 2 * 3 * (body + 8))  # and the number of samples
    engine.close()


def test_a_head_can_be_any_layer():
    problem = problem_of(clients_of(), two_layers())
    assert build_method("fedrep", problem, {"head": "0"}).parts.size == 28
    with pytest.raises(PefllError, match=r"layer .*'7'.*PEFLL-A101"):
        build_method("fedrep", problem, {"head": "7"})
