"""The vector engine as CUDA graphs. These need a GPU; everywhere else they are skipped."""

from __future__ import annotations

import pytest
import torch

from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.errors import PefllError
from pefll.evaluation import evaluate
from pefll.methods import METHODS, build_method
from pefll.run import fit
from tests.federations import flat, problem_of, ragged

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMALL = {"pefll": {"local_steps": 5}, "fedavg": {"local_steps": 5}, "local": {"epochs": 2}}


@pytest.mark.parametrize("model", ["mlp", "lenet"])
@pytest.mark.parametrize("name", METHODS)
def test_a_graph_does_what_the_serial_engine_does(name, model):
    federation = ragged(shape=(1, 16, 16) if model == "lenet" else (6,), pixels=model == "lenet")
    method = build_method(name, problem_of(federation, model), SMALL[name])
    states, scores, costs = [], [], []
    for make, place in ((SerialEngine, {}), (VectorEngine, {"device": "cuda"})):
        engine = make(federation, method, seed=1, clients_per_round=3, dtype=torch.float64, **place)
        server = engine.start()
        server = engine.advance(server, 0, 2)
        server = engine.advance(server, 2, 3)  # a second stretch of the same graph
        states.append(flat(server))
        scores.append(evaluate(engine, method, server, 2))
        costs.append(vars(engine.ledger))
        engine.close()
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-8)
    assert scores[0].seen.per_sample == pytest.approx(scores[1].seen.per_sample, abs=1e-12)
    assert scores[0].unseen.loss == pytest.approx(scores[1].unseen.loss, abs=1e-6)
    assert costs[0] == costs[1]


def test_capturing_changes_nothing():
    federation = ragged()
    method = build_method("pefll", problem_of(federation), {"local_steps": 3})
    engine = VectorEngine(federation, method, seed=1, clients_per_round=3, device="cuda", dtype=torch.float64)
    server = engine.start()
    before = flat(server)
    after = flat(engine.advance(server, 0, 4))
    assert torch.equal(flat(server), before)  # the state that was given is not written to
    again = VectorEngine(federation, method, seed=1, clients_per_round=3, device="cuda", dtype=torch.float64)
    state = again.start()
    for t in range(4):
        state = again.advance(state, t, 1)
    torch.testing.assert_close(flat(state), after, rtol=0, atol=1e-10)


def test_a_run_stopped_and_resumed_goes_on_where_it_was(tmp_path):
    federation = ragged()
    settings = {"local_steps": 3, "clients_per_round": 3, "eval_every": 2, "device": "cuda", "precision": "float64"}
    whole = fit(federation, rounds=8, out=tmp_path / "whole", **settings)
    fit(federation, rounds=4, out=tmp_path / "parts", **settings)
    parts = fit(federation, rounds=8, out=tmp_path / "parts", **settings)
    torch.testing.assert_close(flat(parts.final), flat(whole.final), rtol=0, atol=1e-9)
    assert whole.summary["engine"] == "vector"
    assert whole.summary["client_steps_per_second"] > 0


def test_divergence_is_noticed():
    federation = ragged()
    with pytest.raises(PefllError, match="NaN"):
        fit(federation, "fedavg", rounds=40, client_lr=1e30, client_clip=0.0, clients_per_round=3, device="cuda")
