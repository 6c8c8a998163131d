"""What a client that was never seen goes through, and what that costs it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from pefll import PersonalModel, load
from pefll.backend import client_axis
from pefll.core.errors import PefllError
from pefll.data.samples import TEST, TRAIN
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.experiments.costs import NAMES
from pefll.methods import METHODS, build_method
from pefll.methods.contract import ClientState, client_state, each, everyone
from pefll.training.cost import cost_of_new_client
from pefll.training.evaluation import Evaluator, evaluate
from pefll.training.fitting import fit
from tests.engines.test_engines import SETTINGS, slow_beyond_the_paper
from tests.federations import flat, problem_of, ragged

QUICK = {"rounds": 4, "eval_every": 2, "clients_per_round": 3, "processes": 1}
TRAINING = sorted(name for name, kind in METHODS.items() if kind().trains_new_clients and name != "local")


def federation_():
    return ragged(clients=8, sizes=(2, 5, 9, 14), seen=6)


# The cost.

D, SAMPLES = 6 * 3 + 3, 14
STEP = 2 * 2 * SAMPLES * 6 * 3  # a linear model's product, forward, and its weights' gradient
COSTS = {
    # exchanges, floats down, floats up, FLOPs
    "fedavg": ({}, 1, D, 0, 0),
    "local": ({"epochs": 3}, 1, D, 0, 3 * STEP),
    "per-fedavg": ({"personal_steps": 5}, 1, D, 0, 5 * STEP),
    "fedrep": ({"new_epochs": 4}, 1, D, 0, 4 * STEP),
    "pfedme": ({"new_epochs": 4}, 1, D, 0, 4 * STEP),
    "pfedhn": ({"new_rounds": 4, "local_steps": 2, "embedding_size": 3}, 5, 5 * D, 4 * D, 4 * 2 * STEP),
    # The embedding network is linear: 3 classes to a descriptor of 5.
    "pefll": ({"embedding": "linear", "descriptor_size": 5}, 2, 3 * 5 + 5 + D, 5, None),
    "pefll-prior": ({"embedding": "linear", "descriptor_size": 5}, 2, 3 * 5 + 5 + D, 5 + 3, None),
    "pefll-plus": ({"embedding": "linear", "descriptor_size": 5}, 2, 3 * 5 + 5 + D, 5 + 3, None),
    "knn-per": ({}, 1, D, 0, None),
    "fedprox": ({}, 1, D, 0, 0),
    "scaffold": ({}, 1, D, 0, 0),
    "ditto": ({"new_epochs": 4}, 1, D, 0, 4 * STEP),
    "apfl": ({"new_epochs": 4}, 1, D, 0, 4 * STEP),
    "fedper": ({"new_epochs": 4}, 1, D, 0, 4 * STEP),
    "lg-fedavg": ({"new_epochs": 4, "shared": "none"}, 1, D, 0, 4 * STEP),
    "fedbabu": ({"tune_epochs": 4}, 1, D, 0, 4 * STEP),
    # The encoder has layers of 6 to 100 and 100 to 5; its outputs are averaged.
    "odpfl-hn": ({"descriptor_size": 5}, 2, 700 + 505 + D, 5, 2 * SAMPLES * (6 * 100 + 100 * 5 + 5)),
}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_cost_by_hand(name):
    settings, exchanges, down, up, flops = COSTS[name]
    federation = federation_()
    assert int(federation.count[TRAIN, 7]) == SAMPLES
    whole = {} if name in ("fedavg", "pefll", "pefll-prior", "pefll-plus", "knn-per") else {"batch_size": 64}
    method = build_method(name, problem_of(federation, nn.Linear(6, 3)), settings | whole)
    engine = SerialEngine(federation, method, 0, 3)
    server = engine.start()
    engine.close()
    cost = cost_of_new_client(federation, method, server, 7)
    assert (cost.exchanges, cost.bytes_down, cost.bytes_up) == (exchanges, 4 * down, 4 * up)
    if flops is not None:
        assert cost.flops == flops
    else:
        assert 0 < cost.flops < 20 * STEP  # forward passes, no training
    assert cost.seconds > 0


def test_the_tables_of_costs_have_a_title_for_every_method():
    assert METHODS.keys() <= NAMES.keys()


def test_only_new_clients_have_that_cost():
    federation = federation_()
    method = build_method("fedavg", problem_of(federation), {})
    for client in (5, 8):
        with pytest.raises(PefllError, match="PEFLL-T103"):
            cost_of_new_client(federation, method, None, client)


# The door.


class Numbers:
    """A method's functions for clients, for a door without a method behind it."""

    def add(self, client, more, mine):
        return ClientState(mine + more + client.id)


@pytest.mark.parametrize("make", [SerialEngine, VectorEngine])
def test_what_clients_keep_is_theirs_and_free(make):
    federation = federation_()
    engine = make(federation, build_method("fedavg", problem_of(federation), {}), 0, 3, dtype=torch.float64)
    memory = torch.arange(16.0).double().reshape(8, 2)
    ((ids, cohort),) = engine.cohorts(np.array([4, 1]))
    reply = cohort.run(Numbers().add, everyone(torch.tensor([100.0, 200.0]).double()), client_state(memory))
    after = cohort.keep(memory, reply)
    wanted = memory.clone()
    for client in (4, 1):
        wanted[client] += torch.tensor([100.0, 200.0]).double() + client
    assert torch.equal(after, wanted)
    assert torch.equal(memory, torch.arange(16.0).double().reshape(8, 2))
    assert (cohort.ledger.down, cohort.ledger.up, cohort.ledger.exchanges) == (2 * 16, 0, 1)
    assert cohort.bytes_to_send(each(reply.value)) == 0  # they made it themselves
    assert cohort.bytes_to_send(each(reply.value.clone())) == 16
    assert sorted(ids.tolist()) == sorted(cohort.ids.tolist()) == [1, 4]
    engine.close()


@pytest.mark.parametrize("make", [SerialEngine, VectorEngine])
def test_a_cohort_is_all_new_or_not_at_all(make):
    federation = federation_()
    engine = make(federation, build_method("fedavg", problem_of(federation), {}), 0, 3)
    kinds = {client: cohort.is_new for ids, cohort in engine.cohorts(np.array([7, 0, 6, 3])) for client in ids.tolist()}
    assert kinds == {0: False, 3: False, 6: True, 7: True}
    ((_, cohort),) = engine.cohorts(np.array([7, 6]))
    with pytest.raises(PefllError, match="PEFLL-E006"):
        cohort.run(Numbers().add, everyone(torch.zeros(2)), client_state(torch.zeros(8, 2)))
    engine.close()


# Evaluation, runs and files.


@pytest.mark.parametrize("name", sorted(METHODS))
def test_new_clients_who_must_train_are_scored_at_the_end_only(name, tmp_path):
    run = fit(federation_(), name, out=tmp_path / "run", **QUICK, **SETTINGS[name])
    rows = (
        [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
        if (name != "local")
        else []
    )
    for row in rows:
        assert row["seen"] is not None
        assert (row["unseen"] is None) == (name in TRAINING)
    assert run.summary["accuracy"]["best"]["unseen"] is not None
    assert run.summary["accuracy"]["final"]["unseen"] is not None
    assert (run.summary["client_steps_per_second"] is None) == (name == "local")


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_run_that_was_stopped_or_loaded_is_the_same_run(name, tmp_path):
    federation = federation_()
    whole = fit(federation, name, out=tmp_path / "whole", **QUICK, **SETTINGS[name])
    fit(federation, name, out=tmp_path / "parts", **(QUICK | {"rounds": 2}), **SETTINGS[name])
    parts = fit(federation, name, out=tmp_path / "parts", **QUICK, **SETTINGS[name])
    again = load(tmp_path / "whole")
    for other in (parts, again):
        assert torch.equal(flat(other.final), flat(whole.final))
        assert torch.equal(flat(other.server), flat(whole.server))
    # Seen clients have what they kept, and new ones start as they did.
    assert again.evaluate(federation=federation) == whole.evaluate()
    rows = federation.indices(7)
    x, y = federation.x[rows].numpy(), federation.y[rows].numpy()
    wanted = whole.personalize(x, y)
    wanted.save(tmp_path / "model.safetensors")
    for model in (again.personalize(x, y), PersonalModel.load(tmp_path / "model.safetensors")):
        np.testing.assert_allclose(model.probabilities(x), wanted.probabilities(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", TRAINING)
def test_everybody_in_other_data_is_new(name):
    run = fit(federation_(), name, **QUICK, **SETTINGS[name])
    other = ragged(clients=20, sizes=(5, 9), seen=15, seed=3)
    result = run.evaluate(federation=other)
    assert result.seen is None
    assert result.unseen is not None


@pytest.mark.parametrize("name", TRAINING)
def test_a_new_clients_model_does_not_depend_on_who_else_is_new(name):
    federation = federation_()
    method = build_method(name, problem_of(federation), SETTINGS[name])
    for make in (SerialEngine, VectorEngine):
        engine = make(federation, method, 0, 3, dtype=torch.float64)
        server = engine.advance(engine.start(), 0, 2)
        with torch.no_grad():
            ((ids, both),) = engine.cohorts(np.array([6, 7]))
            ((_, alone),) = engine.cohorts(np.array([7]))
            together = method.personalize(server, both)[ids.tolist().index(7)]
            torch.testing.assert_close(method.personalize(server, alone)[0], together, rtol=0, atol=1e-10)
        exam = Evaluator(engine, method, TEST).begin(server).wait()
        whole = evaluate(engine, method, server, TEST)
        assert exam.unseen is None
        np.testing.assert_allclose(exam.seen, whole.seen, rtol=0, atol=1e-12)
        engine.close()


FEWEST = {
    "per-fedavg": {"personal_steps": 1},
    "fedrep": {"head_epochs": 1, "new_epochs": 1},
    "pfedme": {"local_rounds": 2, "inner_steps": 1, "new_epochs": 1},
    "pfedhn": {"local_steps": 1, "new_rounds": 2},
    "knn-per": {"local_steps": 1},
    "fedprox": {"local_steps": 1},
    "scaffold": {"local_steps": 1},
    "ditto": {"global_steps": 1, "personal_steps": 1, "new_epochs": 1},
    "apfl": {"mixed_steps": 1, "new_epochs": 1},
    "fedper": {"local_steps": 1, "new_epochs": 1},
    "lg-fedavg": {"local_steps": 1, "new_epochs": 1},
    "fedbabu": {"local_steps": 1, "tune_epochs": 1},
    # Not Adam, whose first step is as long for a gradient of 1e-12 as for any other, whatever its sign.
    "pefll-prior": {"local_steps": 1, "embedding": "linear", "server_optimizer": "sgd"},
    "pefll-plus": {"local_steps": 1, "server_optimizer": "sgd", "refine_steps": 1},
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
# `a_gpu_can_record_it` and the kernels of other methods are the faster ones.
@slow_beyond_the_paper("name", but={"pefll", "fedavg", "local"}, also={"pfedhn", "pefll-prior", "pefll-plus"})
def test_the_kernels_take_the_methods(name, monkeypatch):
    """Where there is no GPU the kernels are interpreted: they give what torch's own operations give."""
    pytest.importorskip("triton", reason="Triton is not installed")
    federation = ragged(clients=3, shape=(1, 8, 8), sizes=(2, 3), seen=2, pixels=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 4), nn.ReLU(), nn.Linear(4, 3)
    )
    method = build_method(name, problem_of(federation, network), SETTINGS[name] | FEWEST.get(name, {}))
    results = []
    for dtype in (torch.float32, torch.float64):  # kernels are for float32 only
        monkeypatch.setattr(client_axis, "interpreted", device == "cpu")
        engine = VectorEngine(federation, method, 0, 2, device=device, dtype=dtype)
        server = engine.advance(engine.start(), 0, 1)
        scores = evaluate(engine, method, server, TEST)
        results.append((flat(server), scores))
        engine.close()
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-4)
    assert results[0][1].unseen.loss == pytest.approx(results[1][1].unseen.loss, abs=1e-3)
