"""The examples of docs/tasks.md, on both engines."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import pefll
from pefll.core import plugins
from pefll.core.tree import leaves
from pefll.tasks.names import labels_for, name_of, task_of
from tests.federations import ragged
from tests.tasks.labels import SIZES, with_numbers, with_sets

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
EXAMPLES = {
    "loss_name": lambda: with_numbers(1, clients=4, seen=3),
    "MultiLabel": lambda: with_sets(3, clients=4, seen=3),
    "def focal": lambda: ragged(clients=4, seen=3, sizes=SIZES),
    "within_ten": lambda: with_numbers(1, clients=4, seen=3),
    "class GCE": lambda: ragged(clients=4, seen=3, sizes=SIZES),
    "Quantile": lambda: with_numbers(1, clients=4, seen=3),
}
QUICK = {"rounds": 2, "eval_every": 1, "clients_per_round": 2, "local_steps": 3, "processes": 1}


@pytest.mark.parametrize("word", EXAMPLES)
def test_an_example_runs_and_both_engines_agree(word, monkeypatch):
    """In float64, so that equal weights after training show equal gradients."""
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if word in code]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    federation, runs = EXAMPLES[word](), []
    fit = pefll.fit
    module = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)
    x_new = federation.x[:5].numpy()
    y_new = federation.y[:5].numpy()
    for engine in ("serial", "vector"):

        def quick(*given, engine=engine, **more):
            runs.append(fit(*given, **more, **QUICK, engine=engine, precision="float64"))
            return runs[-1]

        monkeypatch.setattr(pefll, "fit", quick)
        vars(module).update(federation=federation, x_new=x_new, y_new=y_new)
        exec(code, vars(module))
    serial, vector = runs
    assert len(serial.history) == 2
    assert serial.history[0]["seen"] != serial.history[1]["seen"], "models change, so that equal ones show something"
    for mine, other in zip(leaves(serial.final), leaves(vector.final), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
    figures = [[value for group in run.evaluate().rows().values() for value in group.values()] for run in runs]
    np.testing.assert_allclose(*[np.array(row, dtype=float) for row in figures], rtol=1e-6)


def test_the_focal_loss_of_the_page_is_finite_for_sure_and_wrong_predictions():
    """The log of a softmax was -inf, so that training ended with NaN at client_lr=0.2."""
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "def focal" in code]
    found: dict[str, Any] = {}
    exec(code[: code.index("run =")], found)
    scores = torch.tensor([[200.0, 0.0], [0.0, 200.0], [0.3, 0.1]], requires_grad=True)
    losses = found["focal"](scores, torch.tensor([0, 0, 1]))
    losses.sum().backward()
    p = scores[2].detach().softmax(dim=0)[1]
    assert losses.detach().tolist() == pytest.approx([0.0, 200.0, float(-((1 - p) ** 2) * p.log())])
    assert torch.isfinite(scores.grad).all()


def test_the_command_line_sets_the_parameter_of_the_loss_of_the_page(monkeypatch):
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "class GCE" in code]
    (task,) = re.findall(r"--task '(mine:GCE .*)'", PAGE)
    module = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    exec(code[: code.index("run =")], vars(module))
    monkeypatch.setattr(plugins, "_allowed", {"mine:GCE"})
    found = task_of(task)
    assert (type(found).__name__, found.q) == ("GCE", 0.4)
    for call in ("mine:GCE(q=0.4)", "mine:GCE( q=0.4, class_weights=[1, 2.5] )", "mine:GCE(q=0.4,label_smoothing=0)"):
        assert labels_for(call) == "classes"
        assert name_of(task_of(call)) == "mine:GCE" + " class_weights=1.0,2.5" * ("[" in call) + " q=0.4"
    deep = f"mine:GCE(q={'not ' * 2000}1)"
    for wrong in ("mine:GCE(0.4, focal=2)", "mine:GCE(q=0.4, focal", "mine:GCE(q=0.4)(focal=2)", deep):
        with pytest.raises(pefll.PefllError, match="PEFLL-A113"):
            task_of(wrong)
    with pytest.raises(pefll.PefllError, match="PEFLL-A101"):
        task_of("GCE(q=0)")
    scores = torch.tensor([[1.0, 0.0], [-200.0, 200.0]], requires_grad=True)
    losses = found.loss(scores, torch.tensor([0, 0]))
    losses.sum().backward()
    p = float(torch.tensor(1.0).sigmoid())
    assert losses.tolist() == pytest.approx([(1 - p**0.4) / 0.4, 2.5], rel=1e-2)
    assert torch.isfinite(scores.grad).all()
