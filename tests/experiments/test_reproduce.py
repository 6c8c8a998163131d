"""Table 1: what is missing, what it takes, and the tables that come of it, on small cells of digits."""

from __future__ import annotations

import csv
import io
import json

import pytest
from rich.console import Console

from pefll import run
from pefll.errors import PefllError
from pefll.experiments import reproduce, table1
from pefll.experiments.comparison import compare, latex, markdown, rows, write_tables
from pefll.experiments.reproduce import Job, client_steps, estimate, make_plan, missing_table, parse_only, run_missing
from pefll.experiments.table1 import CELLS, PAPER, ROWS, Cell

SMALL = (
    Cell("digits", 10, "by-class 2", "Digits, n=10", 1100, model="mlp"),
    Cell("digits", 20, "by-class 2", "Digits, n=20", 1100, clients_per_round=2, model="mlp"),
)
SETTINGS = {
    "local": {"epochs": 2},
    "fedavg": {"local_steps": 2},
    "pefll": {"local_steps": 2, "embedding": "linear"},
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(table1, "CELLS", SMALL)
    monkeypatch.setattr(reproduce, "METHODS", {name: reproduce.METHODS[name] for name in SETTINGS})
    (tmp_path / "results" / "tune").mkdir(parents=True)
    for method, settings in SETTINGS.items():
        for cell in SMALL:
            path = tmp_path / "results" / "tune" / f"digits-{method}-n{cell.clients}.json"
            path.write_text(json.dumps({"best": {"settings": settings}}))
    return tmp_path / "results"


def train(results, seeds=(0, 1), only="", rounds=2, at_once=3, **changes):
    plan = make_plan(results, seeds, rounds, only)
    out, data = results.parent / "runs", results.parent
    return plan, run_missing(plan, results, out, data, at_once, Console(quiet=True), **changes)


def names(results) -> list[str]:
    return sorted(path.name for path in results.glob("*.json"))


def test_everything_is_run_once(results, monkeypatch):
    plan, failures = train(results)
    assert (len(plan.missing), failures) == (2 * 3 * 2, [])
    assert len(names(results)) == 12
    assert "digits-fedavg-n10-local_steps_2-seed0.json" in names(results)
    assert "--model mlp" in json.loads(next(results.glob("*.json")).read_text())["command"]
    done = make_plan(results, (0, 1), 2)
    assert done.missing == []
    assert all(len(found) == 2 for found in done.found.values())
    monkeypatch.setattr(run, "outcomes_of", None)
    assert train(results)[1] == []
    # Other seeds, rounds or hyper-parameters are other runs; Local has no rounds.
    assert len(make_plan(results, (0, 1, 2), 2).missing) == 6
    assert {job.method for job in make_plan(results, (0, 1), 3).missing} == {"fedavg", "pefll"}
    (results / "tune" / "digits-fedavg-n20.json").write_text(json.dumps({"best": {"settings": {"client_lr": 0.5}}}))
    assert [(job.method, job.cell.clients, job.seed) for job in make_plan(results, (0, 1), 2).missing] == [
        ("fedavg", 20, 0),
        ("fedavg", 20, 1),
    ]


def test_tables_come_from_result_files_alone(results, monkeypatch):
    train(results)
    monkeypatch.setattr(run, "outcomes_of", None)
    plan = make_plan(results, (0, 1), 2)
    paths = write_tables(plan.comparison(), results)
    first = [path.read_text() for path in paths]
    assert [path.name for path in paths] == ["table1.md", "table1.tex", "table1.csv"]
    write_tables(make_plan(results, (0, 1), 2).comparison(), results)
    assert [path.read_text() for path in paths] == first
    table = list(csv.DictReader(first[2].splitlines()))
    kept = [json.loads(path.read_text()) for path in results.glob("digits-pefll-n20-*.json")]
    mean = sum(100 * one["accuracy"]["best"]["unseen"]["per_sample"] for one in kept) / 2
    (mine,) = [row for row in table if (row["clients"], row["method"], row["num_clients"]) == ("unseen", "pefll", "20")]
    assert mine["mean"] == f"{mean:.2f}"
    assert mine["seeds"] == "2"
    assert float(mine["lead_low"]) <= float(mine["lead"]) <= float(mine["lead_high"])
    # The lead is that of the two means, because both methods were on the same clients.
    (baseline,) = [
        row
        for row in table
        if (row["clients"], row["method"], row["num_clients"]) == ("unseen", mine["best_baseline"], "20")
    ]
    assert float(mine["lead"]) == pytest.approx(float(mine["mean"]) - float(baseline["mean"]), abs=0.02)
    assert first[0].count("| PeFLL |") == 2 + 4  # two halves, and a test in each half and cell
    assert "**" in first[0]
    assert "\\textbf" in first[1]


def test_counts_of_clients_are_those_of_the_accuracy(results):
    train(results, seeds=(0,), only="pefll,digits-20")
    (path,) = results.glob("*.json")
    one = json.loads(path.read_text())
    for group in ("seen", "unseen"):
        counts = one["client_counts"][group]
        assert len(counts["samples"]) == one[f"num_{group}"]
        assert sum(counts["correct"]) / sum(counts["samples"]) == one["accuracy"]["best"][group]["per_sample"]
    assert '"samples": [' in path.read_text()
    assert path.read_text().count("\n") < 150  # lists of counts take a line each


def test_only_what_is_asked_for_is_run(results):
    plan, _ = train(results, seeds=(0,), only="fedavg/digits-10")
    assert [(job.method, job.cell.name) for job in plan.missing] == [("fedavg", "digits-10")]
    assert len(names(results)) == 1
    assert len(make_plan(results, (0,), 2, "fedavg").missing) == 1
    assert len(make_plan(results, (0,), 2, "digits").missing) == 5
    table = make_plan(results, (0,), 2, "pefll").comparison()
    assert table.entries["seen", "fedavg", "digits-10"].mean is not None  # tables show what there is


def test_words_for_methods_and_cells():
    assert parse_only("") == (set(reproduce.METHODS), {cell.name for cell in CELLS})
    assert parse_only("pefll") == ({"pefll"}, {cell.name for cell in CELLS})
    methods, cells = parse_only("local, fedavg/cifar10,femnist-328")
    assert methods == {"local", "fedavg"}
    assert cells == {"cifar10-100", "cifar10-500", "cifar10-1000", "femnist-328"}
    with pytest.raises(PefllError, match="unknown method or cell 'cifar10-200'"):
        parse_only("cifar10-200")


def test_a_run_that_diverges_does_not_stop_the_others(results):
    wild = {"local_steps": 2, "client_lr": 1e30}
    (results / "tune" / "digits-fedavg-n10.json").write_text(json.dumps({"best": {"settings": wild}}))
    _, failures = train(results, seeds=(0,), only="digits-10", engine="vector")
    assert len(failures) == 1
    assert failures[0].startswith("digits-10 fedavg seed 0: ")
    assert len(names(results)) == 2


def test_the_papers_numbers():
    assert PAPER["cifar10", 100]["pefll"] == (89.0, 0.8, 89.3, 2.2)
    assert PAPER["cifar100", 100]["knn-per"] == (42.2, 0.9, 41.8, 1.2)
    assert PAPER["cifar10", 1000]["pfedhn"] == (66.0, 1.1, 57.8, 2.0)
    assert PAPER["femnist", 3597]["local"] == (62.2, 0.1, 62.1, 0.2)
    for column in PAPER.values():
        assert list(column) == [method for method in ROWS if method != "pefll-prior"]
    # PeFLL is ahead of all baselines everywhere but on unseen clients of CIFAR-100 at n=100.
    for key, column in PAPER.items():
        ahead = [column["pefll"][place] >= max(row[place] for row in column.values()) for place in (0, 2)]
        assert ahead == [True, key != ("cifar100", 100)]


def test_the_papers_femnist_never_stands_beside_the_subset():
    table = compare({}, CELLS, 5000, 3)
    for entry in table.entries.values():
        assert (entry.paper is None) == (
            entry.cell.data in ("femnist", "mnist_writers") or entry.method == "pefll-prior"
        )
    assert "90.1" not in markdown(table) + latex(table)
    assert "| PeFLL | — (89.0 ± 0.8) |" in markdown(table)
    assert len(rows(table)) == 2 * 9 * 8


def fake(method="pefll", seed=0, seen=0.9, counts=None, **more):
    both = {group: {"per_sample": seen} for group in ("seen", "unseen")}
    return {"method": method, "seed": seed, "accuracy": {"best": both}, "client_counts": counts, **more}


def test_bold_seeds_and_missing_tests():
    name = CELLS[0].name
    found = {("pefll", name): [fake(seen=0.9), fake(seed=1, seen=0.8)], ("local", name): [fake("local", seen=0.86)]}
    table = compare(found, CELLS[:1], 5000, 2)
    text = markdown(table)
    assert "| PeFLL | 85.0 ± 7.1 (89.0 ± 0.8) |" in text
    assert "| Local | **86.0** [1 of 2 seeds] (82.2 ± 0.6) |" in text
    assert "No two results with counts" in text
    assert "Local & \\textbf{86.0} [1 of 2 seeds] (82.2 $\\pm$ 0.6) \\\\" in latex(table)


def test_only_results_on_the_same_clients_are_paired():
    name = CELLS[0].name
    group = {"samples": [10, 10], "correct": [9, 8]}
    counts = {"seen": group, "unseen": group}

    def leads(data: str) -> int:
        found = {
            ("pefll", name): [fake(counts=counts, data_sha256="a")],
            ("local", name): [fake("local", counts=counts, data_sha256=data)],
        }
        return len(compare(found, CELLS[:1], 5000, 1).leads)

    assert leads("a") == 2
    assert leads("b") == 0


def job(method="pefll", cell=CELLS[0], settings=None) -> Job:
    return Job(method, cell, 0, settings or {}, "defaults")


def test_steps_of_a_run():
    assert client_steps(job(), 5000) == 5000 * 5 * 50
    assert client_steps(job(cell=CELLS[2], settings={"local_steps": 10}), 100) == 100 * 50 * 10
    assert client_steps(job("local"), 5000) == 200 * 40_000 / 32


def test_time_is_reckoned_from_results_on_a_gpu():
    def result(**more):
        return {
            "method": "pefll", "dataset": "cifar10", "num_clients": 100, "rounds": 5000, "seed": 4, "model": "lenet",
            "device": "NVIDIA H200", "clients_per_round": 5, "client_steps_per_second": 4000.0, "lockstep": 3,
            "train_seconds": 300.0, "eval_seconds": 30.0, "test_seconds": 2.0, "finished": "2026-11-16", **more,
        }  # fmt: skip

    assert estimate(job(), [result()], 5000) == (112.0, "seed 4")
    faster = result(finished="2026-11-17", client_steps_per_second=8000.0)
    big = result(clients_per_round=50, client_steps_per_second=20_000.0, num_clients=1000)
    known = [result(), faster, big]
    assert estimate(job("fedavg"), known, 5000).seconds == pytest.approx(1_250_000 / 24_000)
    assert estimate(job("fedavg", CELLS[1]), known, 5000).seconds == pytest.approx(6_250_000 / 60_000)
    assert estimate(job("fedavg"), known, 5000).basis == "24000 steps/s at c=5"
    nothing = estimate(job(), [result(device="cpu (2 cores)"), result(model="resnet20", rounds=3)], 5000)
    assert nothing == (1_250_000 / 8000, "guess: 8000 steps/s")


def test_what_is_missing_is_shown_with_its_time(results):
    table = missing_table(make_plan(results, (0, 1), 5000))
    console = Console(width=120, file=io.StringIO())
    console.print(table)
    text = console.file.getvalue()
    assert "12 runs are missing" in text
    assert "tuned at n=10" in text
    assert "guess: 8000 steps/s" in text
