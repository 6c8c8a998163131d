"""Accuracy against numbers counted by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from pefll.core.errors import PefllError
from pefll.data.samples import TEST, TRAIN, VALIDATION
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method
from pefll.methods.averaging import Server
from pefll.training.evaluation import Evaluator, accuracy_of, descriptors, evaluate, split_number
from pefll.training.figures import Accuracy, Evaluation, figures_type
from tests.federations import problem_of, ragged


def test_groups_are_summed_up():
    #              samples, right, right when masked, loss
    sums = np.array([[10, 5, 6, 20.0], [1, 1, 1, 0.5], [0, 0, 0, 0.0], [4, 0, 2, 8.0], [5, 5, 5, 1.5]])
    result = accuracy_of(sums)
    assert result.per_sample == 11 / 20
    assert result.per_client == pytest.approx((0.5 + 1 + 0 + 1) / 4)
    assert result.masked == 14 / 20
    assert result.worst_tenth == 0
    assert result.loss == 30 / 20
    assert accuracy_of(sums[2:3]) is None
    assert accuracy_of(sums[:0]) is None


def test_a_wrong_name_of_a_figure_says_which_there_are():
    accuracy = Accuracy(0.5, 0.4, 0.6, 0.2, 1.5)
    errors = figures_type(("rmse", "mae"), (), ())(1.0, 2.0)
    more = figures_type(("per_sample", "auc"), (), ())(0.5, 1.0)
    assert accuracy.accuracy == more.accuracy == 0.5
    for read, code, words in (
        (lambda: Evaluation(accuracy, None).accuracy, "T634", "seen.accuracy or unseen.accuracy"),
        (lambda: Evaluation(None, errors).mae, "T634", "seen.mae or unseen.mae"),
        (lambda: Evaluation(errors, errors).accuracy, "T633", "there are seen, unseen"),
        (lambda: errors.accuracy, "T633", "there are rmse, mae"),
        (lambda: accuracy.rmse, "T633", "per_sample"),
    ):
        with pytest.raises(PefllError, match=f"{words}.*PEFLL-{code}"):
            read()
    assert not hasattr(accuracy, "rmse")
    assert copy.deepcopy(Evaluation(accuracy, None)) == (accuracy, None)


def test_the_worst_tenth_is_a_tenth_of_the_clients():
    sums = np.zeros((30, 4))
    sums[:, 0] = 30
    sums[:, 1] = np.random.default_rng(0).permutation(30)
    assert accuracy_of(sums).worst_tenth == pytest.approx((0 + 1 + 2) / 3 / 30)


@pytest.mark.parametrize("make", [SerialEngine, VectorEngine])
@pytest.mark.parametrize("split", [TRAIN, VALIDATION, TEST])
def test_every_measure_against_a_count_by_hand(make, split):
    """A model that says what the features say: class k where feature k is the largest."""
    federation = ragged(clients=7, shape=(3,), sizes=(1, 2, 9, 30), seen=4)
    method = build_method("fedavg", problem_of(federation, nn.Linear(3, 3)), {})
    theta = torch.cat([torch.eye(3).reshape(-1), torch.zeros(3)])
    engine = make(federation, method, seed=0, clients_per_round=2)
    done = []
    result = evaluate(engine, method, Server(theta), split, done.append)
    engine.close()
    assert sum(done) == 7
    for group, clients in ((result.seen, range(4)), (result.unseen, range(4, 7))):
        right, masked, total, shares, loss = 0, 0, 0, [], 0.0
        for client in clients:
            rows = federation.indices(client, split).numpy()
            scores, y = federation.x.numpy()[rows].astype(float), federation.y.numpy()[rows]
            hits = scores.argmax(1) == y
            owned = np.unique(federation.y.numpy()[federation.indices(client, TRAIN).numpy()])
            only = np.full_like(scores, -np.inf)
            only[:, owned] = scores[:, owned]
            right, total = right + hits.sum(), total + len(y)
            masked += (only.argmax(1) == y).sum()
            shares.append(hits.mean())
            loss += (np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]).sum()
        assert group.per_sample == pytest.approx(right / total, abs=1e-7)
        assert group.per_client == pytest.approx(np.mean(shares), abs=1e-7)
        assert group.masked == pytest.approx(masked / total, abs=1e-7)
        assert group.worst_tenth == pytest.approx(min(shares), abs=1e-7)
        assert group.loss == pytest.approx(loss / total, abs=1e-5)
        assert 0 < right < total


@pytest.mark.parametrize(("share", "of_seen", "of_unseen"), [(0.001, 20, 20), (0.5, 25, 20), (1.0, 50, 30)])
def test_some_clients_of_each_group_stand_for_all(share, of_seen, of_unseen, monkeypatch):
    federation = ragged(clients=80, sizes=(2, 9), seen=50)
    method = build_method("fedavg", problem_of(federation), {})
    engine = SerialEngine(federation, method, seed=0, clients_per_round=2)
    asked = []
    cohorts = engine.cohorts
    monkeypatch.setattr(engine, "cohorts", lambda clients, _: asked.append(clients.tolist()) or cohorts(clients))
    server = engine.start()
    results = [evaluate(engine, method, server, TEST, share=share) for _ in range(2)]
    engine.close()
    assert results[0] == results[1]
    assert asked[0] == asked[1]
    seen, unseen = [c for c in asked[0] if c < 50], [c for c in asked[0] if c >= 50]
    assert len(seen) == len(set(seen)) == of_seen
    assert len(unseen) == len(set(unseen)) == of_unseen
    assert seen + unseen == asked[0]


def test_splits_by_name():
    assert [split_number(name) for name in ("train", "validation", "val", "test")] == [0, 1, 1, 2]
    with pytest.raises(PefllError, match=r"split 'tset'.*'test'.*PEFLL-A101"):
        split_number("tset")


@pytest.mark.parametrize("make", [SerialEngine, VectorEngine])
def test_descriptors_of_all_clients(make, monkeypatch):
    monkeypatch.setattr("pefll.engines.vector.SAMPLES_AT_ONCE", {"cpu": 7})
    federation = ragged(clients=7, sizes=(1, 2, 9, 30), seen=4)
    method = build_method("pefll", problem_of(federation), {"descriptor_size": 4, "embedding": "linear"})
    engine = make(federation, method, seed=0, clients_per_round=2, dtype=torch.float64)
    server = engine.start()
    v = descriptors(engine, method, server)
    weight, bias = method.phi.unflatten(server.embedder).values()
    histograms = federation.histograms()
    wanted = (histograms / histograms.sum(1, keepdims=True)) @ weight.numpy().T + bias.numpy()
    np.testing.assert_allclose(v, wanted, rtol=0, atol=1e-12)
    other = build_method("fedavg", problem_of(federation), {})
    assert descriptors(engine, other, server) is None
    engine.close()


@pytest.mark.parametrize("make", [SerialEngine, VectorEngine])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_an_exam_gives_what_an_evaluation_gives_each_time(make, share, monkeypatch):
    monkeypatch.setattr("pefll.engines.vector.SAMPLES_AT_ONCE", {"cpu": 50})
    federation = ragged(clients=70, sizes=(2, 9, 30), seen=40)
    method = build_method("pefll", problem_of(federation), {"descriptor_size": 4, "local_steps": 2})
    engine = make(federation, method, seed=0, clients_per_round=2)
    evaluator = Evaluator(engine, method, VALIDATION, share)
    state = engine.start()
    for rounds in range(3):
        state = engine.advance(state, rounds, 1)
        later = evaluator.begin(state)
        assert later.done()
        assert later.wait() == evaluate(engine, method, state, VALIDATION, share=share)
        assert later.seconds > 0
    engine.close()


@pytest.mark.parametrize("make", [SerialEngine, VectorEngine])
@pytest.mark.parametrize("name", ["pefll", "fedavg"])
def test_a_state_that_is_not_finite_is_noticed(make, name):
    federation = ragged()
    method = build_method(name, problem_of(federation), {})
    engine = make(federation, method, seed=0, clients_per_round=2)
    state = engine.start()
    broken = state._replace(**{state._fields[0]: torch.full_like(state[0], torch.nan)})
    for look in (
        lambda: evaluate(engine, method, broken, TEST),
        lambda: Evaluator(engine, method, VALIDATION).begin(broken).wait(),
    ):
        with pytest.raises(PefllError, match="PEFLL-E012"):
            look()
    engine.close()


def test_descriptors_that_are_not_finite_are_noticed():
    federation = ragged()
    method = build_method("pefll", problem_of(federation), {})
    for make in (SerialEngine, VectorEngine):
        engine = make(federation, method, seed=0, clients_per_round=2)
        state = engine.start()
        with pytest.raises(PefllError, match="PEFLL-E012"):
            descriptors(engine, method, state._replace(embedder=state.embedder * torch.inf))
        engine.close()
