"""Baselines with the settings of FL-bench: what is run, and what its page says."""

from __future__ import annotations

import csv

import pytest
from rich.console import Console

from pefll.experiments import table1
from pefll.experiments.evidence import FAILS, HOLDS, NOTHING, Evidence
from pefll.experiments.experiment import Experiment
from pefll.experiments.fl_bench import CASES, EXPERIMENT, Differences, batches
from pefll.experiments.jobs import split_settings
from pefll.experiments.pages import write_page
from pefll.experiments.reproduce import read_status, run_missing
from pefll.experiments.table1 import CELLS, Cell, Row
from pefll.experiments.timing import client_steps
from pefll.methods import hyperparameters


def test_epochs_are_steps():
    assert [batches(cell) for cell in CELLS[:3]] == [13, 3, 2]
    steps = {case.ours: case.settings for case in CASES}
    assert [steps[f"fedavg-cifar10-{n}"]["local_steps"] for n in (100, 500, 1000)] == [65, 15, 10]
    assert [steps[f"per-fedavg-cifar100-{n}"]["meta_steps"] for n in (100, 500, 1000)] == [6, 1, 1]
    assert [steps[f"pfedme-cifar100-{n}"]["local_rounds"] for n in (100, 500, 1000)] == [65, 15, 10]


def test_one_seed_of_each_case_is_missing(tmp_path):
    """Settings of a search are replaced, not kept: each result has the settings that its row shows."""
    status = read_status(tmp_path, (0, 1, 2), 5000, None, EXPERIMENT)
    theirs = [job for job in status.missing if job.source.endswith("-fl-bench")]
    assert sorted(job.source for job in theirs) == sorted(case.theirs for case in CASES)
    assert {job.seed for job in theirs} == {0}
    assert len(status.missing) == len(CASES) * (3 + 1)
    for job in theirs:
        (case,) = [case for case in CASES if case.theirs == job.source]
        assert job.settings == split_settings(case.method, dict(case.settings))[0]
    (job,) = [job for job in theirs if (job.method, job.cell.clients) == ("per-fedavg", 1000)]
    assert client_steps(job, 10) == 10 * 50 * 1 * 2
    assert read_status(tmp_path, (1, 2), 5000, "fedavg-cifar10-100-fl-bench", EXPERIMENT).missing == []


def test_words():
    assert Differences(6.0, 5.0).word == "explained"
    assert Differences(-6.0, -5.1).word == "not explained"
    assert Differences(5.0, 9.0).word == "nothing to explain"
    assert Differences(6.0, None).word == NOTHING
    assert Differences(None, None).word == NOTHING


def result(accuracy: float) -> dict:
    both = {group: {"per_sample": accuracy} for group in ("seen", "unseen")}
    return {"seed": 0, "accuracy": {"best": both}}


def test_the_page_has_figures_and_settings_side_by_side(tmp_path):
    name = CELLS[0].name
    found = {
        ("fedavg-cifar10-100", name): [result(0.633)],
        ("fedavg-cifar10-100-fl-bench", name): [result(0.53)],
        ("pfedhn-cifar10-100", name): [result(0.88)],
        ("pfedhn-cifar10-100-fl-bench", name): [result(0.70)],
    }
    page, table = write_page(Evidence(EXPERIMENT, found, (0, 1, 2), 5000), tmp_path)
    text = page.read_text()
    assert (
        "| FedAvg | CIFAR-10, n=100 | seen | 63.3 (+15.8) | 53.0 (+5.5) | 47.5 | not explained | local_steps=65 "
        in text
    )
    assert "| FedAvg | CIFAR-10, n=100 | unseen | 63.3 (+14.7) | 53.0 (+4.4) | 48.6 | explained | the same |" in text
    assert "| pFedHN | CIFAR-10, n=100 | seen | 88.0 (+0.2) | 70.0 (-17.8) | 87.8 | nothing to explain |" in text
    verdicts = [row for row in csv.DictReader(table.read_text().splitlines()) if row["line"].startswith("FedAvg")]
    assert [row["verdict"] for row in verdicts[:3]] == [FAILS, HOLDS, NOTHING]
    assert "What the paper says" not in text
    gone = {"pfedme-cifar100-100-fl-bench/cifar100-100": {0: ["bf16"]}}
    text = write_page(Evidence(EXPERIMENT, found, (0, 1, 2), 5000, gone), tmp_path)[0].read_text()
    assert "| pFedMe | CIFAR-100, n=100 | seen | — | diverged | 39.6 | no results yet |" in text


def test_the_page_names_the_settings_of_pfedhn():
    (case,) = [case for case in CASES if case.method == "pfedhn"]
    used = hyperparameters("pfedhn") | case.settings
    names = ("client_lr", "client_momentum", "weight_decay", "client_clip")
    assert [used[name] for name in names] == [0.005, 0.9, 5e-5, 50]
    assert "at a rate of 0.005 with momentum 0.9, decay 5e-5 and clipping at 50" in EXPERIMENT.about
    assert [used[name] for name in ("server_lr", "server_momentum", "server_decay", "server_clip")] == [
        *(0.01, 0.9, 1e-3, 50)
    ]
    for other in CASES:
        assert other is case or all((hyperparameters(other.method) | other.settings)[name] == 0 for name in names[1:])


def test_a_row_may_have_few_seeds_in_one_cell(tmp_path, monkeypatch):
    cells = [Cell("digits", n, "by-class 2", f"Digits, n={n}", 1100, model="mlp") for n in (10, 20)]
    monkeypatch.setattr(table1, "CELLS", cells)
    short = {"meta_steps": 1, "personal_steps": 1, "client_momentum": 0.0}
    rows = [Row("mine", "fedavg", {"local_steps": 1}), Row("theirs", "per-fedavg", short, "digits-10", seeds=(0,))]
    what = Experiment("small", "Small", "", cells, rows)
    status = read_status(tmp_path, (0, 1), 2, None, what)
    assert [(job.method, job.cell.clients, job.seed) for job in status.missing] == [
        *(("fedavg", 10, seed) for seed in (0, 1)),
        ("per-fedavg", 10, 0),
        *(("fedavg", 20, seed) for seed in (0, 1)),
    ]
    assert run_missing(status, tmp_path, tmp_path / "runs", tmp_path, 3, Console(quiet=True)) == []
    done = read_status(tmp_path, (0, 1), 2, None, what)
    assert done.missing == []
    evidence = Evidence(what, done.found, (0, 1), 2)
    assert (len(evidence.results("mine", "digits-10")), len(evidence.results("theirs", "digits-10"))) == (2, 1)
    assert evidence.results("theirs", "digits-10")[0]["local_steps"] == pytest.approx(2)
