"""A loss and metrics of a user's own: their names in texts, their checks, and what errors advise."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch

import pefll
from pefll.core import plugins
from pefll.core.errors import PefllError
from tests.federations import ragged
from tests.tasks.labels import with_numbers

CODE = """
import pefll

def absolute(scores, y):
    return (scores[:, 0] - y).abs()

def late(scores, y):
    loss = (scores[:, 0] - y).abs()
    return loss if loss.sum() > 0 else 2 * loss

two = pefll.Metric("two", lambda scores, y: scores[:, 0])
"""
TEXT = "classification own_loss=ownmine:absolute extra=ownmine:two"
QUICK = {"rounds": 1, "clients_per_round": 2, "local_steps": 1, "processes": 1}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The module with the code; nobody has named it in this process."""
    (tmp_path / "ownmine.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_allowed", set())
    monkeypatch.delitem(sys.modules, "ownmine", raising=False)
    import ownmine

    return ownmine


def test_the_advice_for_code_in_a_task_works(mine, tmp_path, monkeypatch):
    run = pefll.fit(ragged(), "fedavg", task=TEXT, out=tmp_path / "r", **QUICK)
    monkeypatch.setattr(plugins, "_allowed", set())
    with pytest.raises(PefllError, match=r"'ownmine:absolute' and 'ownmine:two'.*PEFLL-M001") as refused:
        pefll.load(tmp_path / "r")
    (advised,) = re.findall(r"pass task='([^']*)'", str(refused.value))
    assert advised == TEXT
    (named,) = re.findall(r"PEFLL_CODE=(\S+)", str(refused.value))
    for wrong in ("ownmine:absolute", "ownmine:absolute,ownmine:two"):
        with pytest.raises(PefllError, match=r"own_loss=module:function.*PEFLL-S518"):
            pefll.load(tmp_path / "r", task=wrong)
    monkeypatch.setattr(plugins, "_allowed", set())
    assert pefll.load(tmp_path / "r", task=advised).method.problem.task == run.method.problem.task
    monkeypatch.setattr(plugins, "_allowed", set())
    monkeypatch.setenv("PEFLL_CODE", named)
    assert pefll.load(tmp_path / "r").method.problem.task == run.method.problem.task


def test_the_command_line_advises_its_own_option(pefll_command, mine, tmp_path, monkeypatch):
    pefll.fit(ragged(), "fedavg", task=TEXT, out=tmp_path / "r", **QUICK)
    monkeypatch.setattr(plugins, "_allowed", set())
    assert f"--task '{TEXT}'" in pefll_command("evaluate", str(tmp_path / "r"))


@pytest.fixture
def pefll_command(capsys, monkeypatch):
    from pefll.cli import main

    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["pefll", *words])
        with pytest.raises(SystemExit):
            main()
        return " ".join(capsys.readouterr().err.split())

    return call


def test_a_run_tells_of_another_task_than_its_own(mine, tmp_path, recwarn):
    task = pefll.Classification(own_loss=mine.absolute, extra=[mine.two])
    pefll.fit(ragged(), "fedavg", task=task, out=tmp_path / "r", **QUICK)
    pefll.load(tmp_path / "r", task=task)
    assert not [each for each in recwarn if "given one has other" in str(each.message)]
    with pytest.warns(UserWarning, match="given one has other extra"):
        pefll.load(tmp_path / "r", task=pefll.Classification(own_loss=mine.absolute))


@pytest.mark.parametrize(("value", "place"), [("losses.focal", "losses:focal"), ("focal", "mine:focal")])
def test_a_loss_without_a_module(value, place):
    with pytest.raises(PefllError, match=rf"write module:function, such as own_loss={place}.*PEFLL-S512"):
        pefll.fit(ragged(), "fedavg", task=f"classification own_loss={value}", **QUICK)


def test_a_loss_that_reads_a_value_is_refused_before_training(mine, tmp_path):
    task = pefll.Classification(own_loss=mine.late)
    given = {"task": task, "out": tmp_path / "r", **QUICK}
    with pytest.raises(PefllError, match=r"own_loss late .*ownmine\.py, line 9.*torch\.where.*serial.*PEFLL-E640"):
        pefll.fit(ragged(), "fedavg", engine="vector", **given)
    assert not (tmp_path / "r").exists()
    pefll.fit(ragged(), "fedavg", engine="serial", **given)


def test_a_metric_that_reads_a_value_is_refused_before_training():
    metric = pefll.Metric("m", lambda scores, y: scores[:, 0] if scores.sum() > 0 else scores[:, 1])
    with pytest.raises(PefllError, match=r"the metric 'm' over clients.*PEFLL-E640"):
        pefll.fit(ragged(), "fedavg", task=pefll.Classification(extra=[metric]), engine="vector", **QUICK)


@pytest.mark.parametrize("kind", [pefll.Classification, pefll.Regression])
def test_a_metric_that_returns_a_mean_is_named(kind):
    metric = pefll.Metric("mistakes", lambda output, y: (output.sum() - y.sum()).abs())
    with pytest.raises(PefllError, match=r"metric 'mistakes' returned .*one number per sample.*PEFLL-S640"):
        pefll.fit(ragged(), "fedavg", task=kind(extra=[metric]), **QUICK)


def test_a_subclass_of_regression_gets_the_labels_that_extra_gets():
    """It got [b, 1], so that output[:, 0] - y compared each sample with all others."""
    near = pefll.Metric("near", lambda output, y: (output[:, 0] - y).abs() < 5, bounds=(0, 1))

    class Near(pefll.Regression):
        @property
        def measured(self):
            return (near, *super().measured)

    data = with_numbers(1, clients=4, seen=3)
    own, extra = (
        pefll.fit(data, "fedavg", task=task, **QUICK).evaluate().seen
        for task in (Near(), pefll.Regression(extra=[near]))
    )
    for name in ("near", "rmse", "mae", "r2", "loss"):
        assert getattr(own, name) == getattr(extra, name), name


class Measured(pefll.Classification):
    """Overrides what a classification makes from `extra`."""

    measured = (pefll.Metric("margin", lambda scores, y: scores.amax(dim=1)),)


class Plain(pefll.Classification):
    """Has an __init__ of its own, although `bind` makes a copy with the number of classes."""

    def __init__(self, q=0.7):
        super().__init__()
        object.__setattr__(self, "q", q)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Measured, r"the task Measured has `measured` of its own.*give own metrics as extra=\[\.\.\.\] .*S644"),
        (Plain, r"bind of the task Plain failed: .*'classes'.*; make Plain a frozen dataclass .*S661"),
    ],
)
def test_a_subclass_of_classification_is_told_what_to_do(task, words):
    with pytest.raises(PefllError, match=words):
        pefll.fit(ragged(), "fedavg", task=task(), **QUICK)


def test_errors_name_the_function_of_a_loss():
    def too_short(scores, y):
        return torch.nn.functional.cross_entropy(scores, y)

    with pytest.raises(PefllError, match=r"own_loss too_short of the task Classification returned .*PEFLL-S523"):
        pefll.fit(ragged(), "fedavg", task=pefll.Classification(own_loss=too_short), **QUICK)


def test_classes_with_names_are_no_numbers():
    x, client = np.arange(60.0).reshape(30, 2), np.repeat(np.arange(5), 6)
    likes = pefll.federation_from_arrays(x, np.array(["no", "yes"] * 15), client, unseen=0.2)
    with pytest.raises(PefllError, match=r"classes with names are no numbers.*in data of your own.*PEFLL-S500"):
        pefll.fit(likes, "fedavg", task=pefll.Regression(), **QUICK)
