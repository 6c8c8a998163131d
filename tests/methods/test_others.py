"""Each of the paper's other methods: a round by hand, what new clients do, and its known limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pefll.data.federation import TEST, TRAIN
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.errors import PefllError
from pefll.evaluation import client_scores, evaluate
from pefll.fitting import fit
from pefll.methods import Problem, build_method, typed_settings
from pefll.models import Network, build_model
from pefll.tree import leaves
from tests.federations import flat, problem_of, ragged

both_engines = pytest.mark.parametrize("make", [SerialEngine, VectorEngine])
PLAIN = {"client_momentum": 0.0, "client_clip": 0.0, "weight_decay": 0.0}
SIZES = (2, 7, 30, 11)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))


def clients_of(seen: int = 3, clients: int = 4, sizes=SIZES):
    return ragged(clients=clients, sizes=sizes, seen=seen)


def opened(make, name, settings, federation=None, model=None, c=3, seed=0):
    federation = federation or clients_of()
    method = build_method(name, problem_of(federation, model or two_layers()), settings)
    return make(federation, method, seed=seed, clients_per_round=c, dtype=torch.float64)


def loss_of(engine, client: int, theta: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy on all training samples of a client, without any of our client code."""
    federation = engine.federation
    rows = federation.indices(client, TRAIN)
    return F.cross_entropy(engine.method.problem.model(theta, federation.x[rows].double()), federation.y[rows])


def grad(engine, client: int, theta: torch.Tensor) -> torch.Tensor:
    leaf = theta.detach().clone().requires_grad_()
    return torch.autograd.grad(loss_of(engine, client, leaf), leaf)[0]


def weighted(models) -> torch.Tensor:
    return (2 * models[0] + 7 * models[1] + 30 * models[2]) / 39


def models_of(engine, server) -> dict[int, torch.Tensor]:
    models = {}
    with torch.no_grad():
        for ids, cohort in engine.cohorts(np.arange(engine.federation.num_clients)):
            models |= dict(zip(ids.tolist(), engine.method.personalize(server, cohort).clone(), strict=True))
    return models


# Per-FedAvg.

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


# FedRep.

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
    with pytest.raises(PefllError, match="unknown layer of the model '7'"):
        build_method("fedrep", problem, {"head": "7"})


# pFedMe.

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


def nearer(engine, client: int, theta, w, steps: int):
    for _ in range(steps):
        theta = theta - 0.05 * (grad(engine, client, theta) + 3.0 * (theta - w))
    return theta


@both_engines
def test_pfedme_by_hand(make):
    engine = opened(make, "pfedme", ENVELOPE)
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
    wanted = nearer(engine, 3, after.theta, after.theta, 4)
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


# kNN-Per.

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


# pFedHN.

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


@both_engines
def test_pfedhn_is_torchs_sgd_on_the_hypernetwork_and_its_table(make):
    engine = opened(make, "pfedhn", EMBEDDINGS, c=2)
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
    sgd = torch.optim.SGD([v], lr=0.05, momentum=0.9, weight_decay=0.01)
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


# PeFLL with a label prior.

PRIOR = {"local_steps": 2, "batch_size": 4, "descriptor_size": 5, "hypernetwork": "S", "embedding": "mlp"}


@both_engines
def test_without_tau_it_is_pefll(make):
    states = []
    for name, settings in (("pefll-prior", {"tau": 0.0}), ("pefll", {})):
        engine = opened(make, name, PRIOR | settings)
        states.append(flat(engine.advance(engine.start(), 0, 3)))
        engine.close()
    torch.testing.assert_close(*states, rtol=0, atol=1e-12)


@both_engines
def test_the_prior_is_added_to_the_output_bias(make):
    federation = clients_of()
    models = {}
    for name, settings in (("pefll-prior", {"tau": 0.5, "epsilon": 0.01}), ("pefll", {})):
        engine = opened(make, name, PRIOR | settings, federation)
        models[name] = models_of(engine, engine.start())
        engine.close()
    histograms = torch.from_numpy(federation.histograms()).double()
    p = histograms / histograms.sum(1, keepdim=True)
    for client in range(4):
        difference = models["pefll-prior"][client] - models["pefll"][client]
        assert torch.equal(difference[:-3], torch.zeros(len(difference) - 3).double())
        torch.testing.assert_close(difference[-3:], 0.5 * (p[client] + 0.01).log(), rtol=0, atol=1e-10)


def test_histograms_are_counted_at_the_door():
    ledgers = []
    for name in ("pefll", "pefll-prior"):
        engine = opened(VectorEngine, name, PRIOR)
        engine.advance(engine.start(), 0, 1)
        ledgers.append(engine.ledger)
        engine.close()
    assert ledgers[1].up - ledgers[0].up == 8 * 3 * (3 + 1)  # from three clients, and one before the first round


@both_engines
def test_without_histograms_it_is_pefll_to_the_byte(make):
    states, ledgers = [], []
    for name, settings in (("pefll-prior", {"histogram": "false"}), ("pefll", {})):
        engine = opened(make, name, PRIOR | settings)
        states.append(flat(engine.advance(engine.start(), 0, 3)))
        ledgers.append(vars(engine.ledger))
        engine.close()
    assert torch.equal(*states)
    assert ledgers[0] == ledgers[1]


def test_a_client_without_labels_has_equal_shares():
    federation = ragged(clients=8, sizes=(9,), seen=6)
    trained = fit(federation, "pefll-prior", rounds=2, processes=1, **PRIOR | {"embedding": "mlp-unlabeled"})
    x, y = (part[federation.indices(7, TRAIN)].numpy() for part in (federation.x, federation.y))
    told, untold = (trained.personalize(x, labels).network.state_dict() for labels in (y, None))
    *same, bias = told
    assert all(torch.equal(told[name], untold[name]) for name in same)
    p = torch.bincount(torch.from_numpy(y), minlength=3) / len(y)
    moved = (p + 1e-3).log() - torch.full((3,), 1 / 3 + 1e-3).log()
    torch.testing.assert_close(told[bias] - untold[bias], moved, rtol=0, atol=1e-5)


def test_settings_that_are_true_or_false():
    for words, wanted in ((("true", "yes", "1", True, 1), True), (("False", "no", "0", False, 0), False)):
        assert {typed_settings("pefll-prior", {"histogram": word})["histogram"] for word in words} == {wanted}
    with pytest.raises(PefllError, match="pefll-prior: histogram must be true or false, not 'perhaps'"):
        typed_settings("pefll-prior", {"histogram": "perhaps"})


# All of them.


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("pfedme", "121182 numbers for each of 1000000 clients are 485 GB in a state"),
        ("pfedhn", "set embedding_size, or take fewer clients"),
    ],
)
def test_a_state_that_fits_into_no_memory_gives_a_sentence(name, sentence):
    model = Network(build_model("lenet", (3, 32, 32), 10))
    assert build_method(name, Problem(model, (3, 32, 32), 10, 1000), {}).local_steps > 0
    with pytest.raises(PefllError, match=sentence):
        build_method(name, Problem(model, (3, 32, 32), 10, 1_000_000), {})


def test_gradients_of_per_fedavg_are_all_counted():
    problem = problem_of(clients_of(), two_layers())
    counts = [build_method("per-fedavg", problem, {"variant": v, "epochs": 3}).local_epochs for v in ("fo", "hf")]
    assert counts == [6, 12]


def test_clients_drop_in_and_out():
    """What a client keeps waits for it as it was, however many rounds go by without it."""
    for name, settings, kept in (("fedrep", HEADS, "heads"), ("pfedme", ENVELOPE, "personal")):
        engine = opened(VectorEngine, name, settings, c=1)
        server = engine.start()
        for t in range(8):
            (who,) = engine._sample(torch.tensor(t)).tolist()
            after = engine.advance(server, t, 1)
            changed = (getattr(after, kept) != getattr(server, kept)).any(dim=1).nonzero().flatten().tolist()
            assert changed == [who]
            server = after
        engine.close()


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("per-fedavg", {"variant": "so"}, "unknown variant of per-fedavg 'so'"),
        ("per-fedavg", {"batch_size": 0}, "batch_size and epochs must be at least 1"),
        ("per-fedavg", {"variant": "hf", "difference": 0.0}, "difference must be more than 0"),
        ("fedrep", {"body_epochs": 0}, "batch_size and body_epochs must be at least 1"),
        ("pfedme", {"inner_steps": 0}, "local_rounds and inner_steps must be at least 1"),
        ("knn-per", {"few_neighbours": 20}, "many_neighbours no less"),
        ("knn-per", {"max_weight": 1.5}, "max_weight at most 1"),
        ("pfedhn", {"local_steps": 0}, "local_steps must be at least 1"),
        ("pfedhn", {"hypernetwork": "XL"}, "hypernetwork size"),
        ("pefll-prior", {"epsilon": 0.0}, "epsilon must be more than 0"),
    ],
)
def test_settings_that_make_no_sense(name, settings, sentence):
    with pytest.raises(PefllError, match=sentence):
        build_method(name, problem_of(clients_of(), two_layers()), settings)


def test_training_helps():
    """Of three classes that overlap, every method tells more apart than chance does, for seen clients and new ones."""
    federation = ragged(clients=12, sizes=(40,), seen=10)
    settings = {
        "per-fedavg": {"client_lr": 0.05, "inner_lr": 0.05, "batch_size": 8},
        "fedrep": {"client_lr": 0.05, "batch_size": 8},
        "pfedme": {"client_lr": 0.02, "batch_size": 8},
        "knn-per": {"client_lr": 0.05, "local_steps": 10, "batch_size": 8},
        "pfedhn": {"client_lr": 0.05, "local_steps": 10, "batch_size": 8, "server_lr": 0.02},
        "pefll-prior": {"client_lr": 0.02, "local_steps": 10, "server_lr": 2e-3},
    }
    for name, chosen in settings.items():
        method = build_method(name, problem_of(federation, "mlp"), chosen)
        engine = VectorEngine(federation, method, seed=0, clients_per_round=5)
        server = engine.advance(engine.start(), 0, 40)
        result = evaluate(engine, method, server, TEST)
        engine.close()
        assert result.seen.per_sample > 0.65, name
        assert result.unseen.per_sample > 0.65, name
        assert all(leaf.isfinite().all() for leaf in leaves(server))
