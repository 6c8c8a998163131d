"""New clients with other class proportions: whose samples they get, and what is said about them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from rich.console import Console

from pefll.data import load_samples, make_federation
from pefll.data.samples import TEST, TRAIN, VALIDATION
from pefll.experiments.evidence import FAILS, HOLDS, NOTHING, Evidence
from pefll.experiments.experiment import Row
from pefll.experiments.extrapolation import ALPHAS, CELL, EXPERIMENT, NewClientAccuracy, gap, new_clients
from pefll.experiments.pages import write_page
from pefll.experiments.reproduce import most_valuable_first, read_status, run_missing
from pefll.experiments.table1 import Cell


def rows(federation, split, clients) -> set[int]:
    return {int(row) for client in clients for row in federation.indices(client, split)}


def test_new_clients_have_samples_that_nobody_trained_on():
    trained = make_federation(load_samples("digits"), partition="dirichlet 0.1", clients=20, seed=0)
    data = new_clients(trained, 0, alphas=(0.1, 10.0), group=5)
    assert (data.num_clients, data.num_seen) == (10, 0)
    assert data.normalise == trained.normalise

    def images(federation, split, clients) -> set[bytes]:
        return {federation.x[row].numpy().tobytes() for row in rows(federation, split, clients)}

    everyone = range(trained.num_clients)
    own = images(data, TRAIN, range(10))
    assert own <= images(trained, VALIDATION, everyone)
    assert not own & images(trained, TRAIN, range(trained.num_seen))
    assert images(data, TEST, range(10)) <= images(trained, TEST, everyone)
    # Labels stay with their images, and a larger concentration makes classes more even.
    labels = {trained.x[row].numpy().tobytes(): int(trained.y[row]) for row in rows(trained, VALIDATION, everyone)}
    some = rows(data, TRAIN, range(10))
    assert all(labels[data.x[row].numpy().tobytes()] == int(data.y[row]) for row in some)
    share = data.histograms() / data.histograms().sum(axis=1, keepdims=True)
    assert share[:5].max(axis=1).mean() > share[5:].max(axis=1).mean() + 0.2


def test_a_run_is_measured_on_them(tmp_path):
    cell = Cell("digits", 20, "dirichlet 0.1", "Digits", 1100, clients_per_round=2, model="mlp", tag="dirichlet-0.1")
    methods = (
        Row("PeFLL", settings={"local_steps": 2, "embedding": "linear"}),
        Row("Local", "local", {"epochs": 1}),
    )
    small = dataclasses.replace(EXPERIMENT, cells=(cell,), rows=methods, measure=NewClientAccuracy((0.1, 1.0), 5))
    results = tmp_path / "results"
    status = read_status(results, (0,), 2, None, small)
    run_missing(status, results, tmp_path / "runs", tmp_path, 3, Console(quiet=True), scheduler=most_valuable_first)
    assert read_status(results, (0,), 2, None, small).missing == []
    kept = {name: json.loads(next(results.glob(f"digits-{name}-n*")).read_text()) for name in ("pefll", "local")}
    pefll, local = (one["measured"]["extrapolation"] for one in kept.values())
    assert pefll["alphas"] == [0.1, 1.0]
    assert pefll["samples"] == local["samples"]  # the same clients for all methods
    assert [len(group) for group in pefll["correct"]] == [5, 5]
    assert pefll["correct"] != local["correct"]
    assert (np.array(pefll["correct"]) <= np.array(pefll["masked"]) + 1).all()


def result(seed: int, right: dict[float, int]) -> dict:
    measured = {
        "alphas": list(ALPHAS),
        "samples": [[10, 10]] * len(ALPHAS),
        "correct": [[right.get(alpha, 5)] * 2 for alpha in ALPHAS],
    }
    both = {group: {"per_sample": 0.5, "masked": 0.5} for group in ("seen", "unseen")}
    return {"seed": seed, "accuracy": {"best": both}, "measured": {"extrapolation": measured}}


def test_statements_and_the_page(tmp_path):
    found = {
        ("PeFLL", CELL.name): [result(seed, {0.1: 9, 1.0: 8}) for seed in (0, 1)],
        ("Local", CELL.name): [result(seed, {0.1: 8, 1.0: 4}) for seed in (0, 1)],
        ("kNN-Per", CELL.name): [result(seed, {0.1: 10, 0.5: 9}) for seed in (0, 1)],
    }
    assert gap(found["PeFLL", CELL.name], 0.1, found["Local", CELL.name], 0.1).basis == "clients"
    assert gap(found["PeFLL", CELL.name], 1.0, found["Local", CELL.name], 0.1).points == pytest.approx(0)
    both = Evidence(EXPERIMENT, found, (0, 1), 5000)
    words = {one.where: one.word for one in both.verdicts()}
    assert words["Local at α = 0.1 − Local at α = 1"] == HOLDS
    assert words["PeFLL at α = 1 − kNN-Per at α = 0.5"] == FAILS
    assert words["PeFLL at α = 1 − kNN-Per at α = 0.9"] == HOLDS
    assert words["PeFLL at α = 1 − Local at α = 1"] == HOLDS
    assert words["PeFLL at α = 0.1 − kNN-Per at α = 0.1"] == FAILS
    assert words["PeFLL at α = 0.1 − FedRep at α = 0.1"] == NOTHING
    paths = write_page(both, tmp_path)
    assert paths[-1].name == "extrapolation.png"
    assert "| PeFLL | 2 | 90.0 ± 0.0 |" in paths[0].read_text()
