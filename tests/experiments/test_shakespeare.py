"""`pefll reproduce shakespeare` on a few short roles: all methods run, and the page has their curves."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from rich.console import Console

from pefll import models
from pefll.experiments import shakespeare
from pefll.experiments.evidence import FAILS, HOLDS, NOTHING, Evidence
from pefll.experiments.pages import write_page
from pefll.experiments.paper import EXPERIMENTS
from pefll.experiments.reproduce import most_valuable_first, read_status, run_missing
from pefll.experiments.shakespeare import EXPERIMENT, experiment, first_reached
from pefll.experiments.table1 import Cell
from pefll.experiments.timing import client_steps
from pefll.experiments.training_cost import Curve
from pefll.methods import METHODS
from pefll.models import CharLSTM, embedding

ROLES = Cell("shakespeare_tenth", 10, "natural", "10 roles", 600, clients_per_round=2, model="lstm")


def line(seed):
    letters = np.random.default_rng(seed).choice(list("to be or not"), size=820)
    return {"user": f"role {seed}", "text": "".join(letters)}


def test_it_is_known():
    assert EXPERIMENTS["shakespeare"] is EXPERIMENT
    assert {row.method for row in EXPERIMENT.rows} <= set(METHODS)
    assert len(EXPERIMENT.rows) == 6


def test_a_run_takes_so_many_steps(tmp_path):
    status = read_status(tmp_path, (0,), 100, None, EXPERIMENT)
    steps = {job.method: client_steps(job, 100) for job in status.missing}
    assert steps["fedavg"] == steps["pefll"] == 100 * 10 * 50


def test_when_an_accuracy_is_reached():
    one = Curve(np.array([1, 2, 3]), np.array([0.5, 1.0, 1.5]), {"seen": np.array([10.0, 30.0, 20.0])})
    assert first_reached(one, "rounds", 15.0) == 2
    assert first_reached(one, "gigabytes", 15.0) == 1.0
    assert first_reached(one, "rounds", 31.0) is None
    assert first_reached(one, "rounds", None) is None


def found(**rises):
    """Return results whose accuracy rises by so much a round; each of PeFLL's rounds sends as much as two of others."""

    def result(name, rise):
        return {
            "seed": 0,
            "rounds": 4,
            "bytes_down": 8 * 10**9 if name == "PeFLL" else 4 * 10**9,
            "bytes_up": 0,
            "accuracy": {"best": {group: {"per_sample": 4 * rise} for group in ("seen", "unseen")}},
            "validation": [{"round": at, "seen": rise * at, "unseen": rise * at} for at in range(1, 5)],
        }

    cell = EXPERIMENT.cells[0].name
    return {(name.replace("_", "-"), cell): [result(name, rise)] for name, rise in rises.items()}


def test_the_papers_two_statements(tmp_path):
    def judged(**rises):
        return Evidence(EXPERIMENT, found(**rises), (0,), 5000).verdicts()

    *ahead, seen, unseen = judged(PeFLL=0.10, FedAvg=0.04, Per_FedAvg=0.10, kNN_Per=0.09)
    assert [one.word for one in ahead] == [HOLDS, HOLDS, FAILS, FAILS, HOLDS, HOLDS, NOTHING, NOTHING]
    assert {one.place for one in ahead} == {"fig:shakespeare_rounds"}
    # PeFLL has 10 and 20% after 2 and 4 GB, and FedAvg has 8 and 16%.
    assert seen[3:] == unseen[3:] == ("3.0 apart", "+2.0 to +4.0 (budgets)", FAILS)
    assert [one.word for one in judged(PeFLL=0.10, FedAvg=0.05)[-2:]] == [HOLDS, HOLDS]
    assert [one.word for one in judged(PeFLL=0.10)[-2:]] == [NOTHING, NOTHING]


def test_rounds_are_fewer_than_the_papers(tmp_path):
    assert {cell.rounds_of(5000) for cell in EXPERIMENT.cells} == {500}
    assert "The paper trains for 5,000 rounds; we train for 500" in EXPERIMENT.about


def test_a_page_without_results(tmp_path):
    page, *_ = write_page(read_status(tmp_path, (0,), 100, None, EXPERIMENT).evidence(EXPERIMENT), tmp_path)
    assert "| kNN-Per | — | — | — | — | — |" in page.read_text()


@pytest.mark.slow
def test_all_rows_run_and_the_page_is_written(tmp_path, monkeypatch):
    (tmp_path / "shakespeare").mkdir()
    text = "\n".join(json.dumps(line(seed)) for seed in range(10))
    (tmp_path / "shakespeare" / "roles.jsonl").write_text(text)
    small = partial(CharLSTM, hidden=8)  # LEAF's takes minutes here
    monkeypatch.setitem(models.MODELS, "lstm", small)
    monkeypatch.setattr(embedding, "CharLSTM", small)
    quick = {"batch_size": 2}
    few = {
        "fedavg": {"local_steps": 1},
        "pefll": {"local_steps": 1, "descriptor_batch": 2, "hypernetwork": "S"},
        "pefll-plus": {"local_steps": 1, "descriptor_batch": 2, "hypernetwork": "S"},
        "knn-per": {"local_steps": 1},
        "fedrep": {"head_epochs": 1, "new_epochs": 1, "batch_size": 600},
    }
    rows = [row._replace(settings={**row.settings, **quick, **few.get(row.method, {})}) for row in shakespeare.ROWS]
    monkeypatch.setattr(shakespeare, "ROWS", tuple(rows))
    what = experiment(ROLES)
    status = read_status(tmp_path / "results", (0,), 1, None, what)
    assert len(status.missing) == 6
    console = Console(quiet=True)
    failed = run_missing(
        status, tmp_path / "results", tmp_path / "runs", tmp_path, 1, console, scheduler=most_valuable_first,
        keep_weights=False, device="cpu", engine="serial", processes=1,
    )  # fmt: skip
    assert failed == []
    done = read_status(tmp_path / "results", (0,), 1, None, what)
    assert done.missing == []
    page, *others = write_page(done.evidence(what), tmp_path)
    assert [path.suffix for path in others] == [".csv", ".png"]
    text = page.read_text()
    for name in ("PeFLL", "PeFLL+", "FedAvg", "Per-FedAvg", "kNN-Per", "FedRep"):
        assert f"| {name} | 1 | " in text
