"""Other tasks than classification on the command line, from a table to predictions."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

QUICK = ["--rounds", "4", "--eval-every", "2", "--clients-per-round", "2", "--processes", "1", "--set", "local_steps=2"]
OWN = '''
from dataclasses import dataclass

import pefll


@dataclass(frozen=True)
class Absolute(pefll.BaseTask):
    """The mean absolute error of one number."""

    scale: float = 1.0
    outputs = 1

    def loss(self, output, y):
        return self.scale * (output[:, 0] - y).abs()
'''


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """A table with whole numbers, floats and members of sets as labels, of eight cities."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(96, 3)), columns=["a", "b", "c"]).assign(
        city=[f"c{n}" for n in np.arange(96) % 8]
    )
    frame["price"] = (400 + 100 * frame.a + 10 * (np.arange(96) % 8)).round().astype(int)
    frame["size"] = 20 + frame.b
    frame["sport"], frame["music"] = (frame.a > 0).astype(int), (frame.b > 0.5).astype(int)
    path = tmp_path_factory.mktemp("table") / "t.csv"
    frame.to_csv(path, index=False)
    return path


def columns(table: Path, folder: Path, *names: str) -> Path:
    """Return a copy of the table with the features, the city and some labels."""
    pd.read_csv(table)[["a", "b", "c", "city", *names]].to_csv(folder / "some.csv", index=False)
    return folder / "some.csv"


def test_numbers_from_a_table_to_predictions(pefll, table, tmp_path):
    data, run = columns(table, tmp_path, "price", "size"), tmp_path / "run"
    said = pefll(
        *(
            "train",
            "--data",
            data,
            "--data-dir",
            tmp_path,
            "--label",
            "price,size",
            "--client-column",
            "city",
            "--out",
            run,
        ),
        *("--task", "regression loss_name=huber", *QUICK),
    )
    assert said.code == 0, said.err
    assert "rmse" in said.out
    assert 'task = "regression loss_name=huber"' in (run / "config.toml").read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["metrics"]["best"]["seen"]["rmse"] > 0
    assert "--task 'regression loss_name=huber'" in summary["command"]

    each = tmp_path / "each.csv"
    said = pefll("evaluate", run, "--json", "--per-client", each)
    assert json.loads(said.out)["seen"]["rmse"] == pytest.approx(summary["metrics"]["best"]["seen"]["rmse"])
    rows = list(csv.DictReader(each.open()))
    assert len(rows) == 8
    assert float(rows[0]["mae"]) > 0

    mine = tmp_path / "mine.csv"
    pd.read_csv(data).query("city == 'c3'").to_csv(mine, index=False)
    assert re.search(r"rmse \d", pefll("personalize", run, "--data", mine, "--out", tmp_path / "m.safetensors").out)
    said = pefll("predict", tmp_path / "m.safetensors", "--data", mine, "--out", tmp_path / "p.csv")
    assert re.search(r"12 samples with labels: rmse \d", said.out), said
    found = pd.read_csv(tmp_path / "p.csv")
    assert list(found) == ["sample", "price", "size"]
    assert 100 < found.price.mean() < 800  # in the unit of the labels

    said = pefll("personalize", run, "--data", data, "--each", "--out", tmp_path / "models")
    assert "8 personal models" in said.out
    assert "rmse" in pefll("show", run).out


def test_sets_from_a_table(pefll, table, tmp_path):
    data, run = columns(table, tmp_path, "sport", "music"), tmp_path / "run"
    said = pefll(
        "train",
        "--data",
        data,
        "--data-dir",
        tmp_path,
        "--label",
        "sport,music",
        "--client-column",
        "city",
        "--out",
        run,
        *QUICK,
    )
    assert said.code == 0, said.err
    assert "micro f1" in said.out
    mine = tmp_path / "mine.csv"
    pd.read_csv(data).query("city == 'c3'").to_csv(mine, index=False)
    pefll("personalize", run, "--data", mine, "--out", tmp_path / "m.safetensors")
    said = pefll("predict", tmp_path / "m.safetensors", "--data", mine)
    assert re.search(r"sample 0: (none|sport|music|sport, music)\n", said.out)
    usual = ("data", "summary", table, "--client-column", "city")
    assert "sets of 2" in pefll(*usual, "--label", "sport,music").out
    said = pefll(*usual, "--label", "price", "--task", "regression", "--picture", tmp_path / "p.png")
    assert "labels are 1 number" in said.out


def test_a_task_of_ones_own_must_be_named_by_its_user(pefll, refused, table, tmp_path, monkeypatch):
    (tmp_path / "mytask.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    data, run = columns(table, tmp_path, "size"), tmp_path / "run"
    task = "mytask:Absolute scale=2.0"
    said = pefll(
        *(
            "train",
            "--data",
            data,
            "--data-dir",
            tmp_path,
            "--label",
            "size",
            "--client-column",
            "city",
            "--out",
            run,
            "--task",
            task,
            *QUICK,
        )
    )
    assert said.code == 0, said.err
    monkeypatch.setattr("pefll.core.plugins._allowed", set())  # as in another process
    refused("evaluate", run, match="mytask:Absolute.*PEFLL-M001")
    said = pefll("evaluate", run, "--task", "mytask:Absolute")
    assert said.code == 0, said.err
    assert pefll("train", "--resume", run, "--task", "mytask:Absolute", "--rounds", 5).code == 0
    mine = tmp_path / "mine.csv"
    pd.read_csv(data).query("city == 'c3'").to_csv(mine, index=False)
    made = pefll("personalize", run, "--data", mine, "--out", tmp_path / "m.safetensors", "--task", "mytask:Absolute")
    (loss,) = re.findall(r"was made from: loss ([0-9.]+)\.\n", made.out)
    monkeypatch.setattr("pefll.core.plugins._allowed", set())
    refused("predict", tmp_path / "m.safetensors", "--data", mine, match="mytask:Absolute.*PEFLL-M001")
    said = pefll("predict", tmp_path / "m.safetensors", "--data", mine, "--task", "mytask:Absolute")
    assert "sample 0: " in said.out
    assert f"with labels: loss {loss}\n" in said.out


def test_a_search_for_numbers(pefll, table, tmp_path):
    data = columns(table, tmp_path, "price")
    said = pefll(
        *("tune", "--data", data, "--label", "price", "--client-column", "city", "--task", "regression"),
        *("--method", "fedavg", "--grid", "client_lr=1e-9,0.05", "--rounds", 3, "--eval-every", 1, "--processes", 1),
        *("--out", tmp_path / "runs", "--to", tmp_path / "to"),
    )
    assert said.code == 0, said.err
    assert "validation RMSE seen" in said.err
    (kept,) = map(json.loads, (path.read_text() for path in (tmp_path / "to").glob("*.json")))
    assert (kept["metric"], kept["task"], kept["best"]["settings"]) == ("rmse", "regression", {"client_lr": 0.05})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (["--label", "price,sise"], "sise.*PEFLL-D176"),
        (["--label", "size", "--task", "multilabel"], "PEFLL-D505"),
        (["--label", "size", "--task", "regresion"], "regression.*PEFLL-A101"),
        (["--label", "size", "--task", "nowhere:Task"], "PEFLL-A106"),
        (["--label", "price,city"], "city.*PEFLL-D506"),
        (["--label", "size", "--partition", "by-class 2", "--clients", "4"], "PEFLL-D507"),
        (["--label", "size", "--method", "knn-per"], "PEFLL-S521"),
    ],
)
def test_what_does_not_fit_is_one_sentence(pefll, table, tmp_path, given, match):
    data = columns(table, tmp_path, "price", "size")
    said = pefll(
        "train", "--data", data, "--data-dir", tmp_path, "--client-column", "city", "--out", tmp_path / "r", *given
    )
    assert said.code == 2
    (error,) = [line for line in said.err.splitlines() if not line.startswith(("reading", "keeping"))]
    assert re.search(match, error)
    assert not (tmp_path / "r").exists()
