"""Runs of other tasks than classification, from data to personal models, in Python."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from sklearn.datasets import load_diabetes

import pefll
from benchmarks.diabetes import STUDY
from benchmarks.regressions import command
from pefll.cli.tables import best_table, seeds_table
from pefll.core.errors import PefllError
from pefll.core.tree import leaves
from pefll.runs.config import Config
from pefll.tasks.names import inferred
from tests.cli.conftest import pefll as pefll_command  # noqa: F401
from tests.federations import ragged
from tests.tasks.labels import SIZES, with_numbers, with_sets

QUICK: dict[str, Any] = {"eval_every": 1, "clients_per_round": 2, "local_steps": 2, "engine": "serial", "processes": 1}


def diabetes() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return samples, the disease's progression after a year, and clients: groups of age and sex."""
    data = load_diabetes()
    age, sex = data.data[:, 0], data.data[:, 1] > 0
    group = np.digitize(age, np.quantile(age, np.arange(1, 10) / 10))
    x = np.delete(data.data, [0, 1], axis=1) / data.data.std()
    return x.astype(np.float32), data.target, np.array([f"{'ab'[int(s)]}{g}" for s, g in zip(sex, group, strict=True)])


def test_a_real_regression_end_to_end(tmp_path):
    x, y, client = diabetes()
    federation = pefll.federation_from_arrays(x, y, client, labels="numbers", unseen=0.2)
    assert "1 number each" in repr(federation)
    settings = {"rounds": 40, "local_steps": 6, "eval_every": 10, "clients_per_round": 4, "engine": "serial"}
    ours = pefll.fit(federation, "pefll", out=tmp_path / "pefll", client_lr=0.01, processes=1, **settings)
    theirs = pefll.fit(federation, "fedavg", client_lr=0.01, processes=1, **settings)
    # Age and sex hardly change how the disease progresses, so a model for each group gains little here.
    best = ours.summary["metrics"]["best"]
    assert best["seen"]["rmse"] < 1.05 * theirs.summary["metrics"]["best"]["seen"]["rmse"]
    assert best["unseen"]["r2"] > 0.2  # better than their mean
    assert "accuracy" not in ours.summary
    assert ours.summary["task"] == "regression"

    # Errors are better when smaller, in the choice of the best round and in tables.
    errors = [row["seen"]["rmse"] for row in ours.history]
    assert ours.summary["best_round"] == ours.history[int(np.argmin(errors))]["round"]

    loaded = pefll.load(tmp_path / "pefll")
    assert loaded.evaluate(federation=federation) == ours.evaluate()
    mine = client == "a3"
    model = loaded.personalize(x[mine], y[mine])
    model.save(tmp_path / "a3.safetensors")
    again = pefll.PersonalModel.load(tmp_path / "a3.safetensors")
    np.testing.assert_array_equal(again.predict(x[mine]), model.predict(x[mine]))
    assert again.metrics(x[mine], y[mine])["rmse"] == pytest.approx(
        float(np.sqrt(np.mean((model.predict(x[mine]) - y[mine]) ** 2))), rel=1e-5
    )
    with pytest.raises(PefllError, match="PEFLL-M500"):
        again.probabilities(x[mine])


def test_a_real_regression_from_a_raw_file_by_one_command(pefll_command, tmp_path):  # noqa: F811
    """The small form of `python -m benchmarks.diabetes`: columns as measured, then raw rows to predictions."""
    data, run, answers = tmp_path / "diabetes.csv", tmp_path / "run", tmp_path / "answers.csv"
    STUDY.write(data)
    frame = pd.read_csv(data)
    assert frame.s2.mean() > 100 > 5 > frame.s5.mean(), "raw scales"
    said = pefll_command(*command(STUDY, "all columns", "pefll", data, 0), "--rounds", "60", "--out", run)
    assert said.code == 0, said.err
    unseen = json.loads((run / "summary.json").read_text())["metrics"]["best"]["unseen"]
    assert unseen["rmse"] < 0.85 * frame.target.std(), "better than the mean of all patients"
    assert "column 'bmi': number, standardised" in said.err
    assert pefll_command("personalize", run, "--data", data, "--each", "--out", tmp_path / "models").code == 0
    said = pefll_command("predict", tmp_path / "models", "--data", data, "--out", answers)
    assert said.code == 0, said.err
    found = pd.read_csv(answers)
    errors = found.iloc[:, -1].to_numpy() - frame.target.to_numpy()[found["sample"]]
    assert len(found) == len(frame)
    assert np.sqrt(np.mean(errors**2)) < 0.85 * frame.target.std(), "in the unit of the file"


def test_unseen_clients_that_differ_need_models_of_their_own():
    """Half of the clients have the opposite slope. A descriptor of samples and numbers tells which half."""
    random = np.random.default_rng(0)
    client, x = np.repeat(np.arange(30), 20), random.normal(size=(600, 4))
    y = 100 + 10 * np.where(client % 2, 1, -1) * x[:, 0] + random.normal(size=600)
    federation = pefll.federation_from_arrays(x, y, client, unseen=0.2)
    settings = {"rounds": 40, "local_steps": 10, "eval_every": 20, "clients_per_round": 5, "client_lr": 0.02}
    ours = pefll.fit(
        federation, pefll.PeFLL(descriptor_size=4, server_lr=2e-3), engine="serial", processes=1, **settings
    )
    theirs = pefll.fit(federation, "fedavg", engine="serial", processes=1, **settings)
    assert ours.evaluate().unseen.rmse < 0.5 * theirs.evaluate().unseen.rmse


def test_sets_end_to_end(tmp_path):
    data = dataclasses.replace(with_sets(3, clients=5, seen=4), class_names=("sport", "music", "food"))
    run = pefll.fit(data, rounds=3, out=tmp_path, **QUICK)
    assert run.config.task == "multilabel"
    assert list(run.history[0]["seen"])[:3] == ["micro_f1", "per_client", "worst_tenth"]
    model = pefll.load(tmp_path).personalize(data.x[:9].numpy(), data.y[:9].bool().numpy())
    found = model.predict(data.x[:4].numpy())
    assert found.dtype == bool
    assert (found == (model.probabilities(data.x[:4].numpy()) > 0.5)).all()
    words = model.predict(data.x[:4].numpy(), names=True)
    assert words[0] == tuple(name for name, there in zip(data.class_names, found[0], strict=True) if there)


def test_labels_choose_the_task():
    x, client = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 4
    for y, name in (
        (np.arange(40) % 3, "Classification"),
        (x[:, 0], "Regression"),
        (x[:, :2], "Regression"),
        (x[:, :2] > 0, "MultiLabel"),
        ((x[:, :1] > 0).astype(int), "MultiLabel"),
    ):
        assert type(inferred(pefll.federation_from_arrays(x, y, client))).__name__ == name
    frame = pd.DataFrame(x, columns=list("abc")).assign(who=client, u=x[:, 0] > 0, v=x[:, 1] > 0)
    sets = pefll.federation_from_frame(frame, ["u", "v"], "who")
    assert (sets.labels, sets.class_names, sets.feature_names) == ("sets", ("u", "v"), ("a", "b", "c"))
    numbers = pefll.federation_from_frame(frame, "a,b", "who", features=["c"])
    assert (numbers.labels, tuple(numbers.y.shape)) == ("numbers", (40, 2))


def test_whole_numbers_become_numbers_for_a_regression():
    data = ragged(clients=4, seen=3, sizes=SIZES)
    run = pefll.fit(data, "fedavg", task=pefll.Regression(), rounds=1, **QUICK)
    assert run.model_spec.classes == 0
    assert run.evaluate(federation=data).seen.rmse == pytest.approx(run.summary["metrics"]["best"]["seen"]["rmse"])


def test_classification_is_as_before(tmp_path):
    """Its config, records and files do not mention a task."""
    data = ragged(clients=4, seen=3, sizes=SIZES)
    run = pefll.fit(data, "fedavg", rounds=2, out=tmp_path, **QUICK)
    assert run.config.task == ""
    assert {"task", "metrics", "client_metrics"}.isdisjoint(run.summary)
    assert list(run.history[0]["seen"]) == ["per_sample", "per_client", "masked", "worst_tenth", "loss"]
    assert {"task", "outputs", "label_columns"}.isdisjoint(run.model_spec.to_json())
    same = pefll.fit(data, "fedavg", task="classification", rounds=2, **QUICK)
    assert all(map(torch.equal, leaves(run.final), leaves(same.final)))


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_further_metrics_join_those_of_classification(engine, tmp_path):
    data = ragged(clients=4, seen=3, sizes=SIZES)
    task = pefll.Classification(label_smoothing=0.1, extra=["macro_f1", "auc"])
    run = pefll.fit(data, "pefll", task=task, rounds=1, out=tmp_path, **QUICK | {"engine": engine})
    best = run.summary["accuracy"]["best"]["seen"]
    assert list(best)[-2:] == ["macro_f1", "auc"]
    assert run.evaluate_clients()[0].metrics["accuracy"] == pytest.approx(
        run.summary["client_counts"]["seen"]["correct"][0] / run.summary["client_counts"]["seen"]["samples"][0]
    )
    assert pefll.load(tmp_path).method.problem.task == dataclasses.replace(task, classes=3)
    assert pefll.PersonalModel(
        run.personalize(data.x[:5].numpy(), data.y[:5].numpy()).network, run.model_spec
    ).task == (
        pefll.Classification(3)  # predictions need no metrics
    )


def test_a_run_resumes_with_its_task(tmp_path):
    data = with_numbers(1, clients=4, seen=3)
    whole = pefll.fit(data, "fedavg", task="regression loss_name=huber", rounds=4, **QUICK)
    pefll.fit(data, "fedavg", task="regression loss_name=huber", rounds=2, out=tmp_path, **QUICK)
    with pytest.raises(PefllError, match="PEFLL-R104"):
        pefll.fit(data, "fedavg", rounds=4, out=tmp_path, **QUICK)
    more = pefll.fit(data, "fedavg", task=pefll.Regression(loss_name="huber"), rounds=4, out=tmp_path, **QUICK)
    assert all(map(torch.equal, leaves(more.final), leaves(whole.final)))
    assert json.loads((tmp_path / "summary.json").read_text())["metrics"]["best"]["seen"]["rmse"] > 0


def test_early_stopping_knows_that_an_error_is_better_when_smaller():
    data = with_numbers(1, clients=4, seen=3)
    run = pefll.fit(
        data, "fedavg", rounds=30, client_lr=0.0, callbacks=[pefll.EarlyStopping(2, min_delta=0.0)], **QUICK
    )
    assert run.summary["rounds"] == 3  # nothing improves
    better = pefll.fit(data, "fedavg", rounds=5, client_lr=0.05, callbacks=[pefll.EarlyStopping(2)], **QUICK)
    assert better.summary["rounds"] == 5


class _Loss:
    """A loss that only this process knows."""

    def __call__(self, output, y):
        return (output - y).abs().mean(dim=1)


def test_a_loss_without_a_name_must_be_given_again(tmp_path):
    data, task = with_numbers(1, clients=4, seen=3), pefll.Regression(own_loss=_Loss())
    run = pefll.fit(data, "fedavg", task=task, rounds=1, out=tmp_path, **QUICK)
    with pytest.raises(PefllError, match=r"task=.*PEFLL-S516"):
        pefll.load(tmp_path)
    loaded = pefll.load(tmp_path, task=task)
    assert loaded.method.problem.task == run.method.problem.task
    with pytest.raises(PefllError, match="PEFLL-T500"):
        pefll.load(tmp_path, task=pefll.MultiLabel(4))
    run.personalize(data.x[:3].numpy(), data.y[:3].numpy()).save(tmp_path / "m.safetensors")
    assert pefll.PersonalModel.load(tmp_path / "m.safetensors").predict(data.x[:3].numpy()).shape == (3,)


@dataclasses.dataclass(frozen=True)
class Bad(pefll.BaseTask):
    """A task whose parts can be wrong."""

    wrong: str = ""
    outputs = 1

    def loss(self, output, y):
        if self.wrong == "raises":
            raise ValueError("no such thing")
        if self.wrong == "nan":
            return output[:, 0] / (y - y)
        loss = (output[:, 0] - y).square()
        return loss.mean() if self.wrong == "mean" else loss

    def encode(self, y):
        return y[:, None].expand(-1, 3) if self.wrong == "encode" else super().encode(y)

    def measure(self, output, batch, known):
        return {"samples": 1} if self.wrong == "sums" else super().measure(output, batch, known)

    def metrics(self, sums):
        if self.wrong == "figure":
            return {"loss": {}["no such key"]}
        found = super().metrics(sums)
        return {"nothing": {}, "text": "good", "name": {"per sample": 1.0}}.get(self.wrong, found)


FAULTS: list[tuple[str, Callable[[], Any], str]] = [
    ("loss that raises", lambda: {"task": Bad("raises")}, "ValueError.*no such thing.*PEFLL-S522"),
    ("mean loss", lambda: {"task": Bad("mean")}, "PEFLL-S523"),
    ("loss with NaN", lambda: {"task": Bad("nan")}, "PEFLL-S524"),
    ("wrong encoding", lambda: {"task": Bad("encode")}, "PEFLL-S525"),
    ("no sums", lambda: {"task": Bad("sums")}, "PEFLL-S520"),
    ("no metrics", lambda: {"task": Bad("nothing")}, r"Bad returned {}.*PEFLL-S528"),
    ("metrics that are none", lambda: {"task": Bad("text")}, "PEFLL-S528"),
    ("metrics that raise", lambda: {"task": Bad("figure")}, "no such key.*PEFLL-S527"),
    ("metrics without names", lambda: {"task": Bad("name")}, "PEFLL-S502"),
    ("not a task", lambda: {"task": object()}, "PEFLL-S518"),
    ("other labels", lambda: {"task": pefll.Classification()}, "numbers.*PEFLL-S500"),
    ("sets for numbers", lambda: {"task": pefll.MultiLabel()}, "PEFLL-S500"),
    ("kNN-Per", lambda: {"method": "knn-per"}, "PEFLL-S521"),
    ("label prior", lambda: {"method": "pefll-prior"}, "PEFLL-S519"),
    ("label prior of PeFLL+", lambda: {"method": "pefll-plus"}, "PEFLL-S519"),
    ("model too wide", lambda: {"model": torch.nn.Linear(6, 4)}, "PEFLL-N009"),
    ("metric that raises", lambda: {"task": pefll.Regression(extra=[pefll.Metric("m", int)])}, "PEFLL-S526"),
    ("wrong columns", lambda: {"task": pefll.Regression(mean=[0, 0], deviation=[1, 1])}, "PEFLL-S507"),
    ("metric twice", lambda: {"task": pefll.Regression(extra=[pefll.Metric("rmse", len)])}, "PEFLL-S503"),
    ("metric without name", lambda: {"task": pefll.Regression(extra=[pefll.Metric("a b", len)])}, "PEFLL-S502"),
]


@pytest.mark.parametrize(("given", "code"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_what_does_not_fit_is_one_sentence_before_training(given, code, tmp_path):
    data = with_numbers(1, clients=4, seen=3)
    with pytest.raises(PefllError, match=code) as caught:
        pefll.fit(data, **{"method": "fedavg", "rounds": 1, "out": tmp_path / "r"} | given())
    assert len(str(caught.value)) < 400
    assert not (tmp_path / "r").exists()


def test_the_command_line_is_told_its_own_setting(pefll_command, tmp_path):  # noqa: F811
    STUDY.write(tmp_path / "data.csv")
    trained = command(STUDY, "all columns", "pefll", tmp_path / "data.csv", 0)
    words = ["pefll-prior" if word == "pefll" else word for word in trained]
    said = pefll_command(*words, "--rounds", "1", "--out", tmp_path / "run")
    assert said.code == 2
    assert "add --set histogram=false, or take the method pefll" in " ".join(said.err.split())


def test_a_task_without_metrics_has_its_loss():
    data = with_numbers(1, clients=4, seen=3)
    run = pefll.fit(data, "fedavg", rounds=1, task=Bad(), **QUICK)
    x, y = data.x[:5].numpy(), data.y[:5].numpy()
    model = run.personalize(x, y)
    assert model.metrics(x, y) == {"loss": pytest.approx(float(np.square(model.predict(x) - y).mean()), rel=1e-5)}
    assert str(run.evaluate()).startswith("seen loss ")


def test_partitions_by_class_need_classes():
    x, y, _ = diabetes()
    samples = pefll.samples_from_arrays(x, y, labels="numbers")
    for partition in ("by-class 2", "dirichlet 0.1"):
        with pytest.raises(PefllError, match="PEFLL-D507"):
            pefll.make_federation(samples, partition=partition, clients=5)


def test_labels_of_a_new_client_must_fit():
    data = with_numbers(2, clients=4, seen=3)
    run = pefll.fit(data, rounds=1, **QUICK)
    wrong = ((data.y[:5, 0], "S507"), (np.full((5, 2), np.inf), "D501"), (np.full((5, 2), np.nan), "T122"))
    for y, code in (*wrong, (["a"] * 5, "D504")):
        with pytest.raises(PefllError, match=code):
            run.personalize(data.x[:5].numpy(), y)
    model = run.personalize(data.x[:5].numpy(), data.y[:5].tolist())
    assert model.predict(data.x[:3].numpy()).shape == (3, 2)
    with pytest.raises(PefllError, match="PEFLL-M501"):
        model.metrics(data.x[:5].numpy(), data.y[:4].numpy())


@pytest.mark.parametrize("task", ["regresion", "regression mean=1,2 deviation=1,1", "regression deviation=0 mean=1"])
def test_a_file_with_a_task_that_makes_no_sense_is_damaged(task, tmp_path):
    data = with_numbers(1, clients=4, seen=3)
    model = pefll.fit(data, "fedavg", rounds=1, **QUICK).personalize(data.x[:5].numpy(), data.y[:5].numpy())
    model.spec = dataclasses.replace(model.spec, task=task)
    model.save(tmp_path / "m.safetensors")
    with pytest.raises(PefllError, match=r"damaged.*PEFLL-M503"):
        pefll.PersonalModel.load(tmp_path / "m.safetensors")


def test_a_client_without_labels_gets_numbers():
    data = with_numbers(2, clients=4, seen=3)
    run = pefll.fit(data, "pefll", embedding="mlp-unlabeled", rounds=1, **QUICK)
    given = run.personalize(data.x[:5].numpy(), data.y[:5].numpy())
    without = run.personalize(data.x[:5].numpy())
    np.testing.assert_array_equal(given.predict(data.x[:3].numpy()), without.predict(data.x[:3].numpy()))


@pytest.mark.parametrize(
    "method", sorted(set(pefll.METHODS) - {"knn-per", "pefll-prior", "pefll-plus", "pefll", "fedavg"})
)
def test_every_other_method_trains_numbers(method):
    settings = {name: value for name, value in QUICK.items() if name != "local_steps"}
    settings |= {"pfedhn": {"new_rounds": 1}, "local": {"epochs": 1}}.get(method, {})
    run = pefll.fit(with_numbers(1, clients=4, seen=3), method, rounds=1, **settings)
    assert np.isfinite(run.evaluate().unseen.rmse)


def test_images_and_encoded_labels():
    """A convolutional embedding network gets numbers as planes."""
    data = with_numbers(1, clients=4, seen=3, shape=(1, 8, 8))
    run = pefll.fit(data, pefll.PeFLL(embedding="convnet"), model="mlp", rounds=1, **QUICK)
    assert run.method.phi.module.net.conv1.weight.shape[1] == 2


def test_config_of_a_task():
    assert Config(task="regression").command() == "pefll train --data digits --task regression"


NEAR = pefll.Metric("near", lambda output, y: (output[:, 0] - y).abs() < 10, bounds=(0, 1))
FAR = pefll.Metric("far", lambda output, y: (output[:, 0] - y).abs(), smaller_is_better=True, bounds=(0, 999))
ROOT = pefll.Metric(
    "root", lambda output, y: (output[:, 0] - y).abs() < 10, lambda total, n: float(total), bounds=(0, 1)
)


@dataclasses.dataclass(frozen=True)
class Nearness(pefll.BaseTask):
    """A task whose first metric is a share of the user's own."""

    outputs = 1
    measured = (NEAR, FAR)

    def loss(self, output, y):
        return (output[:, 0] - y).square()


def test_own_shares_are_in_per_cent_everywhere(tmp_path):
    assert (NEAR.is_share, FAR.is_share, ROOT.is_share) == (True, False, False)
    federation = with_numbers(1, clients=4, seen=3)
    run = pefll.fit(federation, "fedavg", task=Nearness(), rounds=2, out=tmp_path / "a", **QUICK)
    assert run.summary["shares"] == ["near", "per_client", "worst_tenth"]
    assert run.summary["errors"] == ["loss", "far"]
    best = run.summary["metrics"]["best"]["seen"]
    assert str(run.evaluate()).startswith(f"seen near {100 * best['near']:.1f}%")
    table = printed_at_the_end([run.summary])
    assert f"{100 * best['near']:.1f}%" in table
    assert f"{100 * best['worst_tenth']:.1f}%" in table
    found = pefll.compare(tmp_path / "a", ["near", "far"])
    assert found.tables[0].title == "Test near in % and far"
    assert found.records()[0]["mean"] == pytest.approx(100 * best["near"])
    extra = pefll.Regression(extra=[NEAR, ROOT])
    run = pefll.fit(federation, "fedavg", task=extra, rounds=2, **QUICK)
    assert run.summary["shares"] == ["near"]


def printed_at_the_end(summaries):
    console = Console(record=True, width=120, file=io.StringIO())
    for table in (best_table(summaries[0]), seeds_table(summaries)):
        console.print(table)
    return console.export_text()
