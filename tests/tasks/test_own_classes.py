"""A user's own task whose labels are classes: its predictions and probabilities, and tasks that encode labels."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import pefll
from pefll.core.errors import PefllError
from pefll.core.tree import leaves
from tests.cli.conftest import pefll as pefll_command  # noqa: F401
from tests.federations import ragged

QUICK: dict[str, Any] = {"rounds": 3, "clients_per_round": 2, "local_steps": 2, "processes": 1, "client_lr": 0.1}
NAME = f"{__name__}:Ordinal"


@dataclass(frozen=True)
class Ordinal(pefll.BaseTask):
    """Three classes in an order, by one number."""

    labels = "classes"
    outputs = 1
    encoded = 3
    measured = (pefll.Metric("right", lambda output, y: (rounded(output) == y).to(output.dtype), bounds=(0, 1)),)

    def encode(self, y):
        return (y[:, None] == torch.arange(3)).float()

    def loss(self, output, y):
        return (output[:, 0] - y).square()

    def predict(self, output):
        return rounded(output)


@dataclass(frozen=True)
class WithChances(Ordinal):
    """The same, with probabilities."""

    def probabilities(self, output):
        return (-(output - torch.arange(3.0)).square()).softmax(dim=1)


@dataclass(frozen=True)
class Cautious(pefll.Classification):
    """Predicts class 0 unless another one is likely."""

    def predict(self, output):
        chances = output.softmax(dim=1)
        return torch.where(chances.max(dim=1).values > 0.9, chances.argmax(dim=1), 0)


@dataclass(frozen=True)
class TorchOneHot(Ordinal):
    """Encodes labels with a function that cannot be mapped over clients."""

    def encode(self, y):
        return torch.nn.functional.one_hot(y, 3).float()


@dataclass(frozen=True)
class Far(Ordinal):
    """Predicts classes that do not exist, if an output is far from those of ordinary models."""

    far: int = 7

    def predict(self, output):
        return torch.where(output[:, 0] > 100, self.far, rounded(output))


def rounded(output):
    return output[:, 0].round().clamp(0, 2).long()


def data():
    return ragged(clients=5, seen=4, sizes=(5, 9, 14))


def test_engines_agree():
    runs = [
        pefll.fit(data(), "pefll", task=Ordinal(), engine=engine, precision="float64", **QUICK)
        for engine in ("serial", "vector")
    ]
    for mine, other in zip(*(leaves(run.final) for run in runs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


def test_one_output_for_three_classes_from_a_run_to_predictions(tmp_path, pefll_command):  # noqa: F811
    federation, folder, one = data(), tmp_path / "run", tmp_path / "one.npz"
    run = pefll.fit(federation, "fedavg", task=Ordinal(), out=folder, engine="serial", **QUICK | {"rounds": 20})
    found = run.predictions()
    assert found.probabilities is None
    right = np.average(found.predicted == found.label, weights=found.client < 4)
    assert right == pytest.approx(run.evaluate().seen.right)
    x, y = federation.x.numpy(), federation.y.numpy()
    loaded = pefll.load(folder, task=NAME)
    model = loaded.personalize(x[:30], y[:30])
    wanted = model.predict(x[:30])
    assert len(set(wanted)) > 1
    assert model.class_names == ("0", "1", "2")
    with pytest.raises(PefllError, match=r"Ordinal gives no probabilities; use predict.*PEFLL-M505"):
        model.probabilities(x[:30])
    model.save(tmp_path / "me.safetensors")
    np.savez(one, x=x[:30], y=y[:30])
    words = ("--task", NAME, "--out", tmp_path / "answers.csv")
    said = pefll_command("predict", tmp_path / "me.safetensors", "--data", one, *words)
    assert said.code == 0, said.err
    assert f"{100 * np.mean(wanted == y[:30]):.1f}% of 30 samples are right" in said.out
    rows = list(csv.DictReader((tmp_path / "answers.csv").open()))
    assert [row["predicted"] for row in rows] == [str(each) for each in wanted]
    assert list(rows[0]) == ["sample", "predicted"]

    np.savez(one, x=x[:30], y=y[:30], client=np.array(["ann", "bob"]).repeat(15))
    said = pefll_command("personalize", folder, "--data", one, "--each", "--out", tmp_path / "models", "--task", NAME)
    assert said.code == 0, said.err
    said = pefll_command("predict", tmp_path / "models", "--data", one, *words, "--force")
    assert said.code == 0, said.err
    assert "30 samples with labels: right " in said.out
    again = pefll.predict_each(tmp_path / "models", one, task=NAME)
    rows = list(csv.DictReader((tmp_path / "answers.csv").open()))
    assert [int(row["predicted"]) for row in rows] == again.predicted.tolist() == again.frame().predicted.tolist()


def test_own_probabilities():
    run = pefll.fit(data(), "pefll", task=WithChances(), engine="serial", **QUICK)
    found, model = run.predictions(), run.model_of(0)
    x = run.federation.x[run.federation.indices(0, 2)].numpy()
    np.testing.assert_allclose(found.probabilities[found.client == 0], model.probabilities(x), atol=1e-6)
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1, atol=1e-6)
    chosen = found.probabilities[np.arange(len(found)), found.predicted]
    np.testing.assert_array_equal(found.frame().probability, chosen)


def test_a_classification_with_another_prediction_is_asked_for_it():
    run = pefll.fit(data(), "pefll", task=Cautious(), engine="serial", **QUICK)
    found = run.predictions()
    assert (found.probabilities.max(axis=1) < 0.9).any()
    assert not np.array_equal(found.predicted, found.probabilities.argmax(axis=1))
    unsure = found.probabilities.max(axis=1) < 0.9
    assert not found.predicted[unsure].any()


def test_an_encoding_that_cannot_be_mapped_is_refused_before_training(tmp_path):
    given = QUICK | {"task": TorchOneHot(), "out": tmp_path / "r"}
    with pytest.raises(PefllError, match=r"map encode of the task TorchOneHot .*torch\.arange.*PEFLL-E640"):
        pefll.fit(data(), "pefll", engine="vector", **given)
    assert not (tmp_path / "r").exists()
    assert pefll.fit(data(), "pefll", engine="serial", **given).summary["rounds"] == 3


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda self, output: output, r"returned a tensor \[\d+, 1\] of .*; it must return \[b, 3\], one column"),
        (lambda self, output: output[:, 0], r"returned a tensor \[\d+\] of .*; it must return a float tensor \[b, k\]"),
        (lambda self, output: output > 0, r"of torch.bool; it must return a float tensor \[b, k\]"),
        (lambda self, output: 1 / 0, r"probabilities of the task Mine failed: ZeroDivisionError"),
    ],
)
def test_wrong_probabilities_are_said_before_training(value, words):
    task = dataclass(frozen=True)(type("Mine", (Ordinal,), {"probabilities": value}))
    with pytest.raises(PefllError, match=words):
        pefll.fit(data(), "fedavg", task=task, engine="serial", rounds=1, processes=1)


@pytest.mark.filterwarnings("error:Converting a tensor")
def test_the_check_of_an_own_task_causes_no_warning_of_torch():
    pefll.fit(data(), "fedavg", task=Ordinal(), engine="serial", rounds=1, local_steps=1, processes=1)


def test_the_probabilities_of_sets():
    federation = data()
    sets = (federation.x[:, :2] > 0).numpy()
    client = np.arange(len(sets)) % 5
    run = pefll.fit(
        pefll.federation_from_arrays(federation.x.numpy(), sets, client, unseen=0.2), engine="serial", **QUICK
    )
    found = run.predictions()
    assert found.probabilities.shape == found.predicted.shape == (len(found), 2)
    assert ((found.probabilities > 0.5) == found.predicted).all()
    shown = np.stack(found.frame().probability.tolist())
    np.testing.assert_array_equal(shown, found.probabilities)


@pytest.mark.parametrize("far", [7, 3, -1])
def test_a_class_that_does_not_exist_is_one_sentence(far):
    """-1 had the name of the last class."""
    run = pefll.fit(data(), "fedavg", task=Far(far=far), engine="serial", **QUICK)
    model = run.personalize(data().x[:5], data().y[:5])
    assert set(model.predict(data().x)) <= {0, 1, 2}
    parameters = list(model.parameters())
    parameters[-1].data.fill_(1000)  # the bias of the last layer
    words = rf"predict of the task Far returned the class {far}; .* from 0 to 2.*PEFLL-S669"
    for asked in (model.predict, model.predict_with_probabilities):
        with pytest.raises(PefllError, match=words):
            asked(data().x)


def test_a_class_that_does_not_exist_is_found_before_training():
    class Unclamped(Ordinal):
        def predict(self, output):
            return (10 * output[:, 0]).round().long()

    with pytest.raises(PefllError, match=r"Unclamped returned the class .*clamp\(0, 2\)"):
        pefll.fit(data(), "fedavg", task=Unclamped(), engine="serial", **QUICK)
