"""Mistakes in a user's own task: each is one sentence that names the class, the part, and what it must be."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import pefll
from pefll.core.errors import Diverged, PefllError
from pefll.core.wording import for_the_command_line
from pefll.data.samples import TEST
from pefll.runs.personal import metrics_of
from pefll.tasks import checking
from pefll.tasks.names import checked_task
from pefll.tasks.settings import settings_in
from tests.tasks.labels import with_numbers

QUICK: dict[str, Any] = {"rounds": 1, "clients_per_round": 2, "local_steps": 1, "processes": 1, "engine": "serial"}


@dataclass(frozen=True)
class Distance(pefll.BaseTask):
    """A task without mistakes."""

    outputs = 1

    def loss(self, output, y):
        return (output[:, 0] - y).abs()


def with_part(name: str, value: Any) -> type:
    """Return a task class `Mine`, of which one part is replaced."""
    return dataclass(frozen=True)(type("Mine", (Distance,), {name: value}))


def bug(*given: Any) -> None:
    raise ValueError("my bug")


class Nothing(pefll.BaseTask):
    """Defines nothing."""


@dataclass(frozen=True)
class NeedsSetting(Distance):
    """Cannot be made without its setting."""

    q: float = 0.0

    def __post_init__(self) -> None:
        if not self.q:
            raise ValueError("q is missing")


def distance(output, y):
    return (output[:, 0] - y).abs()


METRIC = pefll.Metric("m", distance)
INFINITE = pefll.Metric("ratio", lambda output, y: (output[:, 0] - y).abs() / (0 * y))
PAIRS = pefll.Metric("pairs", lambda output, y: (output - y).abs())
BUG = pefll.Metric("m", bug)
OUTSIDE = pefll.Metric("o", distance, bounds=(0, 1))
NO_BOUNDS = pefll.Metric("m", distance, bounds=(1, 0))
NO_FIGURE = pefll.Metric("odds", distance, figure=lambda total, samples: math.inf)
MISTAKES: list[tuple[str, Any, str]] = [
    ("outputs", "1", r"attribute outputs of the task Mine is '1'; it must be the number of .*S662"),
    ("outputs", 0, r"attribute outputs of the task Mine is 0.*S662"),
    ("outputs", 1.0, r"attribute outputs of the task Mine is 1\.0.*S662"),
    ("outputs", True, r"attribute outputs of the task Mine is True.*S662"),
    ("outputs", lambda self: 1, r"attribute outputs of the task Mine is a method.*or a property.*S662"),
    ("outputs", property(bug), r"outputs of the task Mine failed: ValueError in .*my bug; it must.*S661"),
    ("encoded", "a", r"attribute encoded of the task Mine is 'a'; it must be the length.*S662"),
    ("encoded", 3, r"encode of the task Mine returned \[\d+, 1\].* must return \[b, 3\].*; or set encoded = 1 .*S525"),
    ("errors", None, r"attribute errors of the task Mine is None; it must be a tuple.*S662"),
    ("errors", "loss", r"attribute errors of the task Mine is 'loss'; it must be a tuple.*S662"),
    ("errors", ("los",), r"unknown metric among the errors of the task Mine 'los'.*loss"),
    ("labels", "number", r"attribute labels of the task Mine is 'number'; it must be 'classes'.*S662"),
    ("measured", METRIC, r"attribute measured of the task Mine is a Metric; it must be a tuple of pefll.Metric.*S662"),
    ("measured", ("macro_f1",), r"measured has 'macro_f1'; each must be a pefll.Metric \[PEFLL-S501\]"),
    ("measured", property(bug), r"measured of the task Mine failed: .*my bug.*S661"),
    ("measured", (INFINITE,), r"metric 'ratio' is NaN or infinite for ordinary outputs and the label -?\d.*T582"),
    ("measured", (NO_FIGURE,), r"metric 'odds' of the task Mine is inf for ordinary outputs.*S665"),
    ("bind", lambda self, data: None, r"bind of the task Mine returned None; it must return .*`return self`.*S662"),
    ("bind", lambda self, data: 3, r"bind of the task Mine returned 3.*S662"),
    ("bind", bug, r"bind of the task Mine failed: ValueError in .*my bug.*S661"),
    ("check", bug, r"check of the task Mine failed: ValueError in .*my bug; it must return nothing.*S661"),
    ("check", lambda self, data: False, r"check of the task Mine returned False; it must return nothing.*S662"),
    ("bounds", lambda self: [], r"bounds of the task Mine returned \[\]; it must return a dict.*S662"),
    ("predict", lambda self, output: None, r"predict of the task Mine returned None; it must return a tensor.*S662"),
    ("predict", lambda self, output: output.mean(), r"predict of the task Mine returned a tensor \[\].*S662"),
    ("predict", lambda self, output: output.tolist(), r"predict of the task Mine returned \[\[.*S662"),
    ("predict", lambda self, output: output.numpy(), r"predict of the task Mine returned .*array.*S662"),
    ("predict", bug, r"predict of the task Mine failed: ValueError.*my bug.*S661"),
    ("metrics", lambda self, sums: [1.0], r"metrics of the task Mine returned \[1\.0\]; it must return a dict.*S528"),
    ("metrics", lambda self, sums: {"a": math.nan}, r"metric 'a' of the task Mine is nan for ordinary .*S665"),
    ("metrics", lambda self, sums: {"a": 1.0, "b": math.inf}, r"metric 'b' of the task Mine is inf for ordinary.*S665"),
    ("metrics", lambda self, sums: {"a": 1} if sums.samples > 1 else {"b": 1}, r"names a for some .* and b for.*S667"),
    ("measure", bug, r"measure of the task Mine failed.*my bug.*S526"),
    ("measured", (BUG,), r"the metric 'm' of the task Mine failed for a batch: ValueError in .*my bug.*S526"),
    ("measured", (OUTSIDE,), r"'o' of the task Mine is \d.* for ordinary .* label .* bounds are \(0, 1\); .*S642"),
    ("measured", (NO_BOUNDS,), r"metric 'm' has bounds \(1, 0\); give the smallest and the largest.*S643"),
    ("measured", (PAIRS,), r"metric 'pairs' of the task Mine returned \[3, 3\] for 3 .*\[5, 5\] for 5; .*S641"),
    ("loss", lambda self, y, output: y - output[:, 0], r"failed for outputs \[(\d+), 1\] and labels \[\1\].*S522"),
    ("loss", lambda self, output, y: 1.0, r"loss of the task Mine returned 1\.0 .*compute it in torch .*S523"),
    ("loss", lambda self, output, y: distance(output, y).mean(), r"loss of the task Mine returned \[\].*average.*S523"),
    (
        "loss",
        lambda self, output, y: (output - y[:, None]).abs(),
        r"Mine returned \[\d+, 1\].*mean\(dim=1\).*S523",
    ),
    ("loss", lambda self, output, y: (output - y).abs(), r"Mine returned .* each sample with all others.*S523"),
    ("loss", lambda self, output, y: distance(output.detach(), y), r"loss of the task Mine has no gradient.*S663"),
    ("loss", lambda self, output, y: distance(output, y).round(), r"loss of the task Mine has no gradient.*S663"),
    ("loss", lambda self, output, y: (output[:, 0] > y).long(), r"loss of the task Mine has no gradient.*S663"),
    ("loss", lambda self, output, y: distance(output, y).double(), r"Mine returned torch\.float64 .*to\(output.*S664"),
    ("loss", lambda self, output, y: distance(output, y) / 0, r"loss of the task Mine .* and the label -?\d.*S524"),
]


@pytest.mark.parametrize(
    ("name", "value", "words"), MISTAKES, ids=[f"{name}-{place}" for place, (name, *_) in enumerate(MISTAKES)]
)
def test_a_mistake_in_a_part_of_a_task_is_one_sentence(name, value, words, tmp_path):
    data = with_numbers(1, clients=4, seen=3)
    with pytest.raises(PefllError, match=words) as caught:
        pefll.fit(data, "fedavg", task=with_part(name, value), out=tmp_path / "r", **QUICK)
    assert len(str(caught.value)) < 400
    assert not isinstance(caught.value, Diverged)
    assert not (tmp_path / "r").exists(), "it is found before training"


def test_the_task_itself_works():
    data = with_numbers(1, clients=4, seen=3)
    model = pefll.fit(data, "fedavg", task=Distance, **QUICK).personalize(data.x[:5].numpy(), data.y[:5].numpy())
    assert model.predict(data.x[:5].numpy()).shape == (5,)


def test_settings_of_a_class_without_a_decorator():
    task = type("Mine", (Distance,), {"__annotations__": {"q": float}, "q": 1.0})
    with pytest.raises(PefllError, match=r"'q' is no setting of the task Mine, .*@dataclass\(frozen=True\).*S668"):
        settings_in(["q=2"], task)
    assert settings_in(["q=2"], dataclass(frozen=True)(task)) == {"q": 2.0}


def test_parts_that_a_task_does_not_define():
    data = with_numbers(1, clients=4, seen=3)
    with pytest.raises(PefllError, match=r"the task Nothing does not define outputs, which must be .*PEFLL-S660"):
        pefll.fit(data, "fedavg", task=Nothing, **QUICK)
    with pytest.raises(PefllError, match=r"the task Silent does not define loss, which must return .*PEFLL-S660"):
        pefll.fit(data, "fedavg", task=type("Silent", (Nothing,), {"outputs": 1}), **QUICK)


def test_a_task_that_cannot_be_made():
    with pytest.raises(PefllError, match=r"the task NeedsSetting cannot be made: .*NeedsSetting\(name=value\).*S666"):
        checked_task(NeedsSetting)
    with for_the_command_line(), pytest.raises(PefllError, match=r"NeedsSetting NAME=VALUE \[PEFLL-S666\]"):
        checked_task(NeedsSetting)


@pytest.mark.parametrize(
    ("labels", "predict", "words"),
    [
        (
            "classes",
            lambda self, output: output,
            r"returned a tensor \[5, 3\].*whole numbers \[b\], such as output\.argm",
        ),
        ("classes", lambda self, output: output[:, 0], r"returned a tensor \[5\] of torch\.float32"),
        (
            "sets",
            lambda self, output: (output > 0).int(),
            r"returned .* of torch\.int32; .* return True for each",
        ),
    ],
)
def test_predictions_fit_the_kind_of_labels(labels, predict, words):
    random = np.random.default_rng(0)
    x, client = random.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 4
    y = np.arange(60) % 3 if labels == "classes" else random.integers(0, 2, (60, 3))
    body = {"labels": labels, "outputs": 3, "predict": predict, "encoded": 1 if labels == "classes" else 3}
    body["loss"] = lambda self, output, y: output.square().mean(dim=1)
    with pytest.raises(PefllError, match=rf"predict of the task Mine {words}.*PEFLL-S662"):
        pefll.fit(pefll.federation_from_arrays(x, y, client), "fedavg", task=type("Mine", (Nothing,), body), **QUICK)


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_an_infinite_metric_of_a_rare_label_is_named_although_training_is_fine(engine, monkeypatch):
    """The check before training does not see the sample, so the evaluation finds it."""
    monkeypatch.setattr(checking, "MOST_CHECKED", 1)
    federation = with_numbers(1, clients=4, seen=3)
    y = torch.where(federation.y.abs() < 0.1, 1.0, federation.y.abs())
    y[federation.rows_of_clients(TEST)] = 0
    federation = dataclasses.replace(federation, y=y)
    ratio = pefll.Metric("ratio", lambda output, y: (output[:, 0] - y).abs() / y)
    with pytest.raises(PefllError, match=r"the metric 'ratio' is NaN or infinite for .*PEFLL-T582") as caught:
        pefll.fit(federation, "fedavg", task=with_part("measured", (ratio,)), **QUICK | {"engine": engine})
    assert not isinstance(caught.value, Diverged)
    loss = with_part("loss", lambda self, output, y: distance(output, y.log()))
    with pytest.raises(PefllError, match=r"or correct the loss of the task Mine, which may be infinite.*PEFLL-E012"):
        pefll.fit(federation, "fedavg", task=loss, **QUICK | {"engine": engine})


def test_a_metric_that_leaves_its_bounds_later_ends_the_evaluation():
    """Weights of a trained model make outputs that the check before training has not seen."""
    size = pefll.Metric("size", lambda output, y: output[:, 0].abs(), bounds=(0, 1))
    data = with_numbers(1, clients=4, seen=3)
    with pytest.raises(PefllError, match=r"'size' of the task Mine is \d.* for client .* bounds are \(0, 1\); .*S642"):
        pefll.fit(data, "fedavg", task=with_part("measured", (size,)), client_lr=0.5, **QUICK | {"local_steps": 50})


def test_a_personal_models_metric_is_checked_against_its_bounds():
    size = pefll.Metric("size", lambda output, y: output[:, 0].abs(), bounds=(0, 1))
    task = pefll.Regression(mean=(5.0,), deviation=(1.0,), extra=[size])
    with pytest.raises(PefllError, match=r"'size' of the task Regression is 5.* on average for 3 samples.*S642"):
        metrics_of(task, torch.zeros(3, 1), torch.ones(3), 0)
    assert metrics_of(dataclasses.replace(task, mean=(0.5,)), torch.zeros(3, 1), torch.ones(3), 0)["size"] == 0.5


def test_an_infinite_figure_is_recorded_as_not_defined(tmp_path):
    """JSON has no infinity, and a run does not end because of one figure."""
    figure = lambda total, samples: math.inf if samples == 2 else 1.0  # noqa: E731
    odds = pefll.Metric("odds", distance, figure=figure)
    data = with_numbers(1, clients=4, seen=3)
    model = pefll.fit(data, "fedavg", task=with_part("measured", (METRIC, odds)), **QUICK).personalize(
        data.x[:5].numpy(), data.y[:5].numpy()
    )
    assert model.metrics(data.x[:3].numpy(), data.y[:3].numpy())["odds"] == 1.0
    assert math.isnan(model.metrics(data.x[:2].numpy(), data.y[:2].numpy())["odds"])


def test_losses_without_a_gradient_for_a_few_good_samples_are_fine():
    hinge = with_part("loss", lambda self, output, y: (1 - output[:, 0]).clamp(min=0) * 0)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    federation = pefll.federation_from_arrays(x, x[:, 0], np.arange(8) // 4, test=0.0, validation=0.0)
    pefll.fit(federation, "fedavg", task=hinge, **QUICK | {"clients_per_round": 1})


def test_samples_of_other_data_are_checked_with_a_sentence():
    data = with_numbers(1, clients=4, seen=3)

    def check(self, samples):
        if len(samples.y) < 10:
            raise ValueError("too few")

    run = pefll.fit(data, "fedavg", task=with_part("check", check), **QUICK)
    with pytest.raises(PefllError, match=r"check of the task Mine failed: ValueError in .*too few.*PEFLL-S661"):
        run.personalize(data.x[:5].numpy(), torch.zeros(5).numpy())


@pytest.mark.parametrize(
    ("metrics", "errors", "words"),
    [
        (lambda self, sums: {"gap": float(sums.loss) / float(sums.samples)}, ("loss",), "'gap' .* falls .* name it in"),
        (lambda self, sums: {"fit": -float(sums.loss)}, ("loss", "fit"), "'fit' .* rises .* take it out of"),
        (lambda self, sums: {"gap": float(sums.loss) / float(sums.samples)}, ("gap",), ""),
        (lambda self, sums: {"fit": -float(sums.loss)}, ("loss",), ""),
    ],
)
def test_an_error_that_is_not_marked_as_one_gets_a_note(metrics, errors, words, recwarn):
    """The best round would be the worst one."""
    task = dataclass(frozen=True)(type("Mine", (Distance,), {"metrics": metrics, "errors": errors}))
    pefll.fit(with_numbers(1, clients=4, seen=3), "fedavg", task=task, **QUICK)
    notes = [str(each.message) for each in recwarn if "while the loss falls" in str(each.message)]
    assert len(notes) == bool(words)
    assert not words or re.search(f"the metric {words} the task's `errors`", notes[0])
