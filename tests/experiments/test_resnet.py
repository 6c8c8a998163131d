"""ResNet-20: cells with fewer rounds and a model of their own, their time, and the page."""

from __future__ import annotations

import csv
import json

import pytest
from rich.console import Console

from pefll.experiments import table1
from pefll.experiments.evidence import FAILS, HOLDS, NOTHING, Evidence
from pefll.experiments.experiment import Experiment, Point, panel
from pefll.experiments.pages import markdown, write_page
from pefll.experiments.reproduce import most_valuable_first, read_status, run_missing
from pefll.experiments.resnet import CELLS, EXPERIMENT, ROUNDS
from pefll.experiments.table1 import Cell, Row


def test_a_run_is_short_enough(tmp_path):
    status = read_status(tmp_path, (0, 1, 2), 5000, None, EXPERIMENT)
    queue = most_valuable_first(status, 3, tmp_path)
    assert sum(len(batch.jobs) for batch in queue) == 2 * (3 + 1 + 1)
    for batch in queue:
        assert batch.each <= (240 if batch.jobs[0].cell.clients == 100 else 360)
    assert [cell.rounds_of(5000) for cell in CELLS] == list(ROUNDS.values())
    assert [cell.rounds_of(100) for cell in CELLS] == [100] * 3
    assert table1.CELLS[0].rounds_of(5000) == 5000
    assert [cell.name for cell in CELLS] == [f"cifar10-{n}-resnet20" for n in ROUNDS]


def test_a_cell_may_have_fewer_rounds_than_others(tmp_path, monkeypatch):
    many = Cell("digits", 10, "by-class 2", "Digits, n=10", 1100, model="mlp")
    few = Cell("digits", 20, "by-class 2", "Digits, n=20", 1100, model="tiny", tag="tiny", rounds=2)
    monkeypatch.setattr(table1, "CELLS", (many,))
    row = Row("mine", "fedavg", {"local_steps": 1})
    what = Experiment(
        "small", "Small", "", (many, few), [row], [panel("P", (many, few), {"mine": Point("mine", many)})]
    )
    status = read_status(tmp_path, (0,), 4, None, what)
    assert run_missing(status, tmp_path, tmp_path / "runs", tmp_path, 3, Console(quiet=True)) == []
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {name: one["rounds"] for name, one in found.items()} == {
        "digits-fedavg-n10-local_steps_1-seed0.json": 4,
        "digits-fedavg-n20-tiny-local_steps_1-seed0.json": 2,
    }
    done = read_status(tmp_path, (0,), 4, None, what)
    assert done.missing == []
    assert "after 4 rounds (Digits, n=10), 2 rounds (Digits, n=20), at the round" in markdown(done.evidence(what))
    _, table = write_page(done.evidence(what), tmp_path)
    assert [row["rounds"] for row in csv.DictReader(table.read_text().splitlines())] == ["4", "2"]
    # A result of another model is none of this cell's.
    other = Experiment("other", "Other", "", (few._replace(model="mlp"),), [row])
    assert len(read_status(tmp_path, (0,), 4, None, other).missing) == 1


def result(method: str, seed: int, accuracy: list[float]) -> dict:
    both = {group: {"per_sample": accuracy[-1]} for group in ("seen", "unseen")}
    rounds = [500, 1000, 2000]
    return {
        "method": method, "seed": seed, "rounds": 2000, "bytes_down": 1, "bytes_up": 1, "accuracy": {"best": both},
        "validation": [{"round": at, "seen": a, "unseen": a / 2} for at, a in zip(rounds, accuracy, strict=True)],
    }  # fmt: skip


def test_curves_are_named_by_method():
    assert {row.title for row in EXPERIMENT.rows} == {"PeFLL", "FedAvg"}


def test_the_page_shows_curves_and_judges_them(tmp_path):
    cell = CELLS[0].name
    found = {
        ("PeFLL-100", cell): [result("pefll", seed, [0.2, 0.6, 0.8]) for seed in (0, 1)],
        ("FedAvg-100", cell): [result("fedavg", seed, [0.3, 0.4, 0.5]) for seed in (0, 1)],
    }
    page, table, *drawn = write_page(Evidence(EXPERIMENT, found, (0, 1, 2), 5000), tmp_path)
    text = page.read_text()
    assert "The paper trains for 5,000 rounds; we train for 2,000 (n=100), 1,200 (n=500), 800 (n=1000)" in text
    assert "| CIFAR-10, n=100 | 1,000 | unseen | 30.0 | 20.0 |" in text
    assert "| PeFLL | 80.0 ± 0.0 [2 of 3 seeds] | — | — |" in text
    assert "| 2 | CIFAR-10, n=100: seen | 67% of budgets | last behind at 500 rounds | does not hold |" in text
    verdicts = [row for row in csv.DictReader(table.read_text().splitlines()) if row["table"] == "statements"]
    assert [row["verdict"] for row in verdicts] == [HOLDS] * 2 + [NOTHING] * 4 + [FAILS] * 2 + [NOTHING] * 4
    pytest.importorskip("matplotlib")
    assert [path.name for path in drawn] == ["resnet.png"]
