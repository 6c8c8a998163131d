"""Rows of Table 1 with steps on the device: they are evaluated from the run that the row without steps trains."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from pefll.experiments import reproduce, table1
from pefll.experiments.comparison import compare, latex, markdown, rows
from pefll.experiments.jobs import merged, personal_steps, split_settings
from pefll.experiments.reproduce import cheapest_first, joined, read_status, run_missing
from pefll.experiments.results import markdown_table
from pefll.experiments.table1 import CELLS, OURS, TITLES, Cell
from pefll.experiments.trials import tuned_settings
from pefll.methods import personal_settings
from pefll.training import fitting, run

CELL = Cell("digits", 10, "by-class 2", "Digits, n=10", 1100, model="mlp")
TRAINED = "digits-pefll-n10-embedding_linear-local_steps_2-seed0.json"
REFINED = "digits-pefll-n10-embedding_linear-local_steps_2-refine_steps_10-refine_lr_0.01-seed0.json"


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(table1, "CELLS", (CELL,))
    monkeypatch.setattr(reproduce, "METHODS", {name: reproduce.METHODS[name] for name in ("fedavg", "pefll")})
    best = {"settings": {"embedding": "linear", "local_steps": 2, "refine_lr": 0.01, "refine_steps": 5}}
    tuned = tmp_path / "results" / "tune"
    tuned.mkdir(parents=True)
    (tuned / "digits-pefll-n10.json").write_text(json.dumps({"best": best}))
    return tmp_path / "results"


def train(results, only="pefll,pefll-ten-steps", seeds=(0,), **changes):
    status = read_status(results, seeds, 2, only)
    out = results.parent / "runs"
    assert run_missing(status, results, out, results.parent, 3, Console(quiet=True), **changes) == []
    return status


def names(results) -> list[str]:
    return sorted(path.name for path in results.glob("*.json"))


def test_one_training_makes_both_results(results, monkeypatch):
    trained = []
    whole = fitting.train_all
    monkeypatch.setattr(fitting, "train_all", lambda specs, **more: trained.extend(specs) or whole(specs, **more))
    status = train(results, seeds=(0, 1))
    assert [job.seed for job in status.missing] == [0, 1]
    assert len(trained) == 2
    # A search never switches the steps on for a row without them.
    assert all("refine_steps" not in spec.config.settings for spec in trained)
    assert len(names(results)) == 4
    assert {TRAINED, REFINED} <= set(names(results))
    plain, refined = (json.loads((results / name).read_text()) for name in (TRAINED, REFINED))
    assert refined["settings"] == plain["settings"] | {"refine_steps": 10, "refine_lr": 0.01}
    assert refined["accuracy"]["as_trained"] == plain["accuracy"]["best"]
    assert refined["accuracy"]["best"] != plain["accuracy"]["best"]
    assert refined["evaluation"] == "pefll evaluate RUN --set refine_steps=10 --set refine_lr=0.01"
    # It is what `pefll evaluate` says about the run.
    folder = next((results.parent / "runs").glob("digits-10-pefll*")) / "seed-0"
    again = run.load(folder).with_settings(refine_steps=10, refine_lr=0.01)
    again = again.evaluate("test")
    assert again.unseen._asdict() == refined["accuracy"]["best"]["unseen"]
    counts = refined["client_counts"]["unseen"]
    assert sum(counts["correct"]) / sum(counts["samples"]) == refined["accuracy"]["best"]["unseen"]["per_sample"]
    done = read_status(results, (0, 1), 2)
    assert [job.method for job in done.missing] == ["fedavg", "fedavg"]
    assert done.left_out == {}
    assert [len(done.found[row, CELL.name]) for row in ("pefll", "pefll-ten-steps")] == [2, 2]
    assert "`; " not in markdown_table([plain])
    assert "; pefll evaluate RUN --set refine_steps=10 --set refine_lr=0.01` |" in markdown_table([refined])


def test_an_existing_result_of_the_trained_run_is_not_written_again(results):
    train(results, "pefll", keep_weights=False)
    before = (results / TRAINED).read_bytes()
    (job,) = read_status(results, (0,), 2, "pefll,pefll-ten-steps").missing
    assert job.evaluations == ({"refine_steps": 10, "refine_lr": 0.01},)
    assert read_status(results, (0,), 2).left_out == {}  # the other row's results are no results of this row
    train(results)
    assert names(results) == [REFINED, TRAINED]
    assert (results / TRAINED).read_bytes() == before


def test_a_finished_run_is_evaluated_without_training(results, monkeypatch):
    train(results, "pefll")
    status = read_status(results, (0,), 2, "pefll-ten-steps")
    (batch,) = cheapest_first(status, 3, results.parent / "runs")
    assert batch.each == pytest.approx(reproduce.EVALUATION_SECONDS, abs=0.1)
    monkeypatch.setattr(fitting, "train", None)
    train(results)
    assert REFINED in names(results)


def test_rows_of_one_run_are_merged(results):
    (both,) = read_status(results, (0,), 2, "pefll,pefll-ten-steps").missing
    (alone,) = read_status(results, (0,), 2, "pefll").missing
    assert both.evaluations == ({}, {"refine_steps": 10, "refine_lr": 0.01})
    assert merged([both, alone]) == [both]
    assert merged([alone, both]) == [both]
    assert merged([alone, both._replace(seed=1)]) == [alone, both._replace(seed=1)]
    assert joined([read_status(results, (0,), 2, name) for name in ("pefll", "pefll-ten-steps")]).missing == [both]


def test_settings_of_training_and_of_evaluation():
    assert split_settings("pefll", {"client_lr": 0.1, "refine_lr": 1e-3}) == ({"client_lr": 0.1}, {})
    assert split_settings("pefll", {"refine_steps": 10}) == ({}, {"refine_steps": 10, "refine_lr": 5e-4})
    assert split_settings("fedavg", {"client_lr": 0.1}) == ({"client_lr": 0.1}, {})
    assert personal_settings("pefll") == ("refine_steps", "refine_lr")
    assert personal_settings("fedavg") == ()
    assert [personal_steps(name, {"refine_steps": 3}) for name in ("pefll", "fedavg")] == [3, 0]


def fake(seed: int, accuracy: float) -> dict:
    both = {group: {"per_sample": accuracy} for group in ("seen", "unseen")}
    return {"seed": seed, "accuracy": {"best": both}}


def test_rows_that_are_not_in_the_paper_do_not_take_seeds_away():
    name = CELLS[0].name
    found = {(row, name): [fake(seed, 0.8) for seed in range(5)] for row in ("fedavg", "pefll")}
    before = compare(found, CELLS[:1], 5000, range(3))
    found |= {("pefll-plus-ten-steps", name): [fake(0, 0.9)]}
    table = compare(found, CELLS[:1], 5000, range(3))
    for key, entry in before.entries.items():
        if entry.mean is not None:
            assert table.entries[key]._replace(best=entry.best) == entry
    text = markdown(table)
    assert "| PeFLL+, ten steps on the device | **90.0** [1 of 5 seeds] |" in text
    assert "| PeFLL, ten steps on the device | — |" in text
    assert "| seen | CIFAR-10, n=100 | PeFLL+, ten steps on the device | FedAvg | +10.0 |" in text
    assert "PeFLL+, ten steps on the device & \\textbf{90.0} [1 of 5 seeds] \\\\" in latex(table)
    assert [row["mean"] for row in rows(table) if row["method"] == "pefll-plus-ten-steps"] == ["90.00"] * 2
    assert [TITLES[row] for row in OURS] == list(TITLES.values())[7:]


def test_settings_for_new_clients_serve_other_numbers_of_clients_where_there_are_no_others(tmp_path):
    def write(name: str, rate: float) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({"best": {"settings": {"client_lr": rate}}}))

    write("digits-pefll-plus-n100-holding-out-0.1", 0.1)
    assert tuned_settings("pefll-plus", "digits", 500, tmp_path) == (
        {"client_lr": 0.1},
        "tuned at n=100 for new clients",
    )
    write("digits-pefll-plus-n1000", 0.2)
    assert tuned_settings("pefll-plus", "digits", 500, tmp_path) == ({"client_lr": 0.2}, "tuned at n=1000")
    assert tuned_settings("pefll-plus", "digits", 100, tmp_path).settings == {"client_lr": 0.1}
