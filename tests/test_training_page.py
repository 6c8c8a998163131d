"""The examples of docs/training.md run on every engine, and do what the page says."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import pytest
import torch

import pefll
from pefll.methods.averaging import update
from pefll.methods.optim import SGD, sgd_on_loss
from tests.federations import flat, ragged
from tests.test_documents import ROOT

PAGE = (ROOT / "docs" / "training.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.S)
QUICK = {"clients_per_round": 2, "eval_every": 1, "processes": 1, "device": "cpu"}


@pytest.fixture(params=["serial", "vector"])
def engine(request, monkeypatch):
    """The engine of `pefll.fit`, which also trains only a few quick rounds."""
    fit = pefll.fit

    def quickly(federation, method, *, rounds, **settings):
        steps = {} if isinstance(method, pefll.BaseMethod) or "local_steps" in settings else {"local_steps": 1}
        return fit(federation, method, rounds=min(rounds, 6), engine=request.param, **QUICK, **steps, **settings)

    monkeypatch.setattr(pefll, "fit", quickly)
    return request.param


@pytest.mark.parametrize("word", ["EarlyStopping", "class Print", "def warm_up", "def small_clients_first"])
def test_both_engines_reach_the_same_weights(word, monkeypatch):
    """In float64, so that equal weights after training show equal gradients."""
    fit, states = pefll.fit, {"serial": [], "vector": []}
    for engine in states:

        def quickly(*given, engine=engine, rounds, **more):
            more = QUICK | {"local_steps": 3, "rounds": min(rounds, 6), "precision": "float64"} | more
            run = fit(*given, **more, engine=engine)
            states[engine].append(flat(run.final))
            return run

        monkeypatch.setattr(pefll, "fit", quickly)
        run_example(word)
    torch.testing.assert_close(states["serial"], states["vector"], rtol=1e-9, atol=1e-11)


def run_example(word: str) -> dict:
    (code,) = [example for example in EXAMPLES if word in example]
    assert len(code.splitlines()) <= 15
    names = {"federation": ragged(clients=4)}
    exec(code, names)
    return names


def test_early_stopping(engine, monkeypatch, capsys):
    monkeypatch.setattr(pefll, "EarlyStopping", partial(pefll.EarlyStopping, min_delta=2.0))  # nothing is better
    code = next(example for example in EXAMPLES if "EarlyStopping" in example)
    names = {"federation": ragged(clients=4)}
    exec(code.replace("patience=10", "patience=2"), names)
    assert names["run"].summary["stopped"] == {"by": "EarlyStopping", "rounds": 6, "after_round": 3}
    assert names["run"].summary["rounds"] == 3
    assert "'rounds': 6" in capsys.readouterr().out


def test_a_callback_of_ones_own(engine, capsys):
    run_example("class Print")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines] == [["fedavg", "seed", "0", str(t)] for t in range(1, 7)]


def test_schedules(engine):
    run = run_example("def warm_up")["run"]
    assert run.config.server_lr_schedule == "step 100 0.5"
    assert run.config.lr_schedule.endswith(":warm_up")


def test_a_proximal_term(engine, monkeypatch):
    module = ModuleType("shown_near")
    vars(module).update(dataclass=dataclass, pefll=pefll, SGD=SGD, update=update, sgd_on_loss=sgd_on_loss)
    module.federation = ragged(clients=4)
    monkeypatch.setitem(sys.modules, "shown_near", module)
    (code,) = [example for example in EXAMPLES if "proximal" in example]
    assert len(code.splitlines()) <= 15
    exec(code, vars(module))
    # One step begins at the initial model, where the term has no gradient. Two steps feel it.
    models = [
        flat(pefll.fit(module.federation, module.Near(mu=mu, local_steps=steps, client_lr=0.5), rounds=1).final)
        for mu, steps in ((0.0, 1), (0.9, 1), (0.0, 2), (0.9, 2))
    ]
    torch.testing.assert_close(models[0], models[1], rtol=0, atol=0)
    assert (models[2] - models[3]).abs().max() > 1e-3


def test_sampling(engine):
    names = run_example("def small_clients_first")
    asked = names["small_clients_first"](0, names["federation"].count[0, :3].numpy(), 2, None)
    assert asked.tolist() == [0, 1]
    assert names["run"].config.sampling.endswith(":small_clients_first")


def test_a_search(engine, monkeypatch, tmp_path, capsys):
    tune = pefll.tune

    def quickly(federation, method, *, grid, rounds):
        places = {"out": tmp_path / "runs", "to": tmp_path / "to"}
        return tune(federation, pefll.FedAvg(local_steps=1), grid=grid, rounds=2, engine=engine, **QUICK, **places)

    monkeypatch.setattr(pefll, "tune", quickly)
    run_example("pefll.tune")
    assert "'client_lr': 0.0" in capsys.readouterr().out
