"""`pefll demo`, `tune`, `reproduce` and `cost`."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import torch

from pefll.cli.console import out
from pefll.data import federation_from_arrays
from pefll.experiments import costs
from pefll.training import fitting, run
from tests.cli.conftest import DIGITS


def test_demo_passes_its_options_on(pefll, monkeypatch, tmp_path):
    import types

    calls = []
    stub = types.ModuleType("pefll.experiments.demo")
    stub.demo = lambda *arguments: calls.append(arguments)
    monkeypatch.setitem(sys.modules, "pefll.experiments.demo", stub)
    assert pefll("demo", "--out", tmp_path / "d", "--seeds", 1).code == 0
    assert calls == [(tmp_path / "d", 1, out)]


TUNE = ["tune", "--data", "digits", "--model", "mlp", "--clients", 8, "--clients-per-round", 2, "--rounds", 2,
        "--method", "fedavg", "--set", "local_steps=2", "--eval-every", 1]  # fmt: skip


def test_tuning(pefll, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = pefll(*TUNE, "--grid", "client_lr=1e-3,1e-1", "--seeds", "0,1", "--at-once", 2)
    assert said.code == 0, said.err
    assert "client_lr=0.001 seed 1: " in said.err.replace("local_steps=2 ", "")
    assert "is the largest value tried" in said.out
    assert "wrote results/tune/digits-fedavg-n8.json" in said.out
    said = pefll(*TUNE, "--grid", "client_lr=1e-3,1e-1", "--seeds", "0,1")
    assert "0 runs to do" in said.err
    assert "--grid" in refused(*TUNE)
    refused(*TUNE, "--grid", "client_rl=1", match=r"'client_rl'.*'client_lr'.*PEFLL-A101")
    refused(*TUNE, "--grid", "client_lr=7", "--at-once", 0, match=r"--at-once .*\b0\b.*PEFLL-X017")
    refused(*TUNE, "--method", "fedav", "--grid", "client_lr=7", match=r"method 'fedav'.*PEFLL-A101")
    refused(*TUNE, "--grid", "client_lr=7", "--rounds", 3, match=r"\brounds\b.*\b2\b.*\b3\b.*PEFLL-X016")


def test_stopping_a_search(pefll, tmp_path, monkeypatch):
    from pefll.core.signals import Stopped
    from pefll.experiments import grid_search

    def stopped(*given):
        raise Stopped(3, 15)

    monkeypatch.setattr(grid_search, "run_search", stopped)
    said = pefll(*TUNE, "--grid", "client_lr=1", "--out", tmp_path)
    assert said.code == 128 + 15
    assert "The same command continues." in said.err


def test_a_second_ctrl_c_says_where_searches_and_tables_go_on_from(pefll, tmp_path, monkeypatch):
    from pefll.experiments import grid_search, reproduce

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(grid_search, "run_search", interrupted)
    monkeypatch.setattr(reproduce, "run_missing", interrupted)
    table = ["reproduce", "table1", "--only", "local/cifar10-100", "--results", tmp_path / "results"]
    for command in ([*TUNE, "--grid", "client_lr=1"], table):
        said = pefll(*command, "--out", tmp_path)
        assert said.code == 130
        assert said.err.startswith(f"Stopped at once. The same command continues from the files in {tmp_path} and ")
        said = pefll(*command, "--out", tmp_path / "none")
        assert (said.code, said.err) == (130, "stopped before there was anything to save\n")


def test_reproducing_a_table(pefll, refused, tmp_path, monkeypatch):
    from pefll.experiments import reproduce, table1

    cell = table1.Cell("digits", 10, "by-class 2", "Digits", 1100, model="mlp")
    monkeypatch.setattr(table1, "CELLS", (cell,))
    monkeypatch.setattr(table1, "recipe", lambda method, cell: {"local_steps": 2} if method == "fedavg" else {})
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "table1", "--only", "fedavg", "--rounds", 2, "--seeds", "0,1"]
    assert "2 runs are missing" in pefll(*words, "--dry-run").out
    assert "in budget" in pefll(*words, "--dry-run", "--budget", 5).out
    refused(*words, "--budget", 0, match=r"--budget .*\b0\.0\b.*PEFLL-C005")
    assert not (tmp_path / "results").exists()
    said = pefll(*words)
    assert said.code == 0, said.err
    assert "2 of 2 runs done" in said.err
    assert (tmp_path / "runs/table1/digits-10-fedavg-local_steps_2/seed-1/summary.json").is_file()
    table = (tmp_path / "results/table1.md").read_text()
    assert re.search(r"\| FedAvg \| \d", table)  # not bold: there is nobody to be better than
    shorter = refused("reproduce", "table1", "--only", "fedavg", "--rounds", 1, "--seeds", "0,1")
    assert shorter.startswith("runs/table1/digits-10-fedavg-local_steps_2/seed-0: ")
    assert re.search(r"\b2 rounds\b.*--out \[PEFLL-R105\]$", shorter)
    (tmp_path / "results/table1.md").unlink()
    assert "wrote results/table1.md" in pefll(*words, "--tables-only").out
    assert (tmp_path / "results/table1.md").read_text() == table
    nothing = pefll(*words, "--dry-run").out
    assert "0 runs are missing" in nothing
    assert "of a GPU" not in nothing
    refused("reproduce", "table2", match=r"experiment 'table2'.*'table1'.*PEFLL-A101")
    refused("reproduce", "table1", "--only", "digits-11", match=r"'digits-11'.*PEFLL-A101")
    assert "PEFLL-C012" in refused("reproduce", "table1", "--seeds", "a")

    def failing(*given, **more):
        return ["digits-10 fedavg seed 0: it diverged"]

    monkeypatch.setattr(reproduce, "run_missing", failing)
    said = pefll(*words)
    assert said.code == 2
    assert said.err == "error: 1 run failed: digits-10 fedavg seed 0: it diverged [PEFLL-C006]\n"
    assert "wrote results/table1.md" in said.out


def test_the_times_of_a_dry_run_are_those_of_a_gpu(pefll, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "table1", "--dry-run", "--only", "fedavg/femnist", "--seeds", 0]
    for gpu, device, last in (
        (False, "auto", "These are times on a GPU, but there is no GPU: a CPU takes much longer."),
        (False, "cpu", "These are times on a GPU, but there is no GPU: a CPU takes much longer."),
        (True, "cpu", "These are times on a GPU, but --device cpu uses none: a CPU takes much longer."),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert pefll(*words, "--device", device).out.splitlines()[-1] == last
    assert "times" not in pefll(*words).out


def test_what_reproduce_refuses_before_it_looks_for_results(refused, tmp_path, monkeypatch):
    from pefll.experiments import reproduce

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "read_results", None)
    monkeypatch.setattr(fitting, "train_all", None)
    Path("results").mkdir()
    for more in ([], ["--dry-run"], ["--tables-only"]):
        words = ["reproduce", "table1", *more]
        assert "PEFLL-A002" in refused(*words, "--rounds", -1)
        refused(*words, "--at-once", 0, match=r"--at-once .*\b0\b.*PEFLL-X017")
        refused(*words, "--device", "gpu", match=r"device 'gpu'.*PEFLL-T110")
        refused(*words, "--precision", "bf61", match=r"precision 'bf61'.*'bf16'.*PEFLL-A101")
        for nothing in ("", ","):
            refused(*words, "--only", nothing, match=r"--only .*PEFLL-X006")
    assert "PEFLL-C004" in refused("reproduce", "table1", "--dry-run", "--tables-only")
    assert refused("reproduce", "table1", "--tables-only", "--results", "none") == refused("results", "table", "none")
    assert not Path("none").exists()


def test_a_file_in_place_of_a_folder_is_noticed_before_anything_is_done(refused, labelled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fitting, "train_all", None)
    monkeypatch.setattr(costs, "method_costs", None)
    Path("file").touch()
    table = ["reproduce", "table1", "--results", "file"]
    for words in (
        ["results", "add", labelled, "--to", "file"],
        [*TUNE, "--grid", "client_lr=1", "--to", "file"],
        ["cost", labelled, "--out", "file/x"],
        table,
        [*table, "--dry-run"],
        [*table, "--tables-only"],
    ):
        refused(*words, match=r"\bfile: Not a directory.*PEFLL-A102")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_new_client_pays(pefll, refused, labelled, tmp_path):
    fedavg = trained_beside(pefll, tmp_path)
    said = pefll("cost", labelled, fedavg, "--out", tmp_path / "c")
    assert said.code == 0, said.err
    assert "digits, 8 clients: a new client with" in said.out
    rows = {row["method"]: row for row in csv.DictReader((tmp_path / "c.csv").open())}
    theta = 4 * run.load(fedavg).method.problem.model.size
    assert rows["fedavg"]["bytes_down"] == str(theta)
    assert int(rows["pefll"]["bytes_down"]) > theta
    assert "| FedAvg |" in (tmp_path / "c.md").read_text()
    # A result file is as good as the run's folder.
    assert pefll("results", "add", fedavg, "--to", tmp_path / "results").code == 0
    (path,) = (tmp_path / "results").iterdir()
    for source in (path, tmp_path / "results"):
        assert pefll("cost", source, "--out", tmp_path / "d").code == 0
        (row,) = csv.DictReader((tmp_path / "d.csv").open())
        assert row | {"seconds": ""} == rows["fedavg"] | {"seconds": ""}
    # What differs by more than the seed is not one row, and says how it differs.
    other = json.loads(path.read_text())
    other["settings"]["client_lr"], other["precision"] = 0.125, "bf16"
    del other["settings"]["weight_decay"]  # as in a result that is older than that
    (tmp_path / "results" / "other.json").write_text(json.dumps(other))
    assert pefll("cost", tmp_path / "results", "--out", tmp_path / "e").code == 0
    table = (tmp_path / "e.md").read_text()
    assert "| FedAvg, client_lr 0.125, bf16 |" in table
    assert "| FedAvg, client_lr 0.01, float32 |" in table
    assert "PEFLL-R119" in refused("cost", tmp_path)
    (tmp_path / "no.json").write_text("[]")
    assert "PEFLL-X002" in refused("cost", tmp_path / "no.json")
    (fedavg / "summary.json").unlink()
    assert "PEFLL-X001" in refused("cost", fedavg)


def test_what_a_new_client_pays_for_other_tasks(pefll, refused, tmp_path):
    """`pefll cost` and `pefll results add` ended with a KeyError."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 4)).astype(np.float32)
    own = {"client": np.repeat(np.arange(12), 20), "x": x}
    np.savez(tmp_path / "numbers.npz", y=x @ np.arange(4, dtype=np.float32), **own)
    np.savez(tmp_path / "sets.npz", y=x[:, :3] > 0, **own)
    short = ["--rounds", "2", "--eval-every", "1", "--method", "fedavg", "--processes", "1"]
    for name in ("numbers", "sets"):
        assert pefll("train", "--data", tmp_path / f"{name}.npz", *short, "--out", tmp_path / name).code == 0
    runs = [tmp_path / "numbers", tmp_path / "sets"]
    assert pefll("results", "add", *runs, "--to", tmp_path / "results").code == 0
    for number, sources in enumerate((runs, [tmp_path / "results"])):
        said = pefll("cost", *sources, "--out", tmp_path / f"cost{number}")
        assert said.code == 0, said.err
        table = (tmp_path / f"cost{number}.md").read_text()
        assert "| method | unseen, RMSE | exchanges |" in table
        assert "| method | unseen, micro F1, % | exchanges |" in table
    assert "| seen, RMSE | unseen, RMSE |" in pefll("results", "table", tmp_path / "results").out
    federation = federation_from_arrays(x, x[:, 0], np.repeat(np.arange(12), 20), unseen=0.25)
    fitting.fit(federation, "fedavg", rounds=1, local_steps=1, clients_per_round=2, out=tmp_path / "python")
    assert pefll("results", "add", tmp_path / "python", "--to", tmp_path / "other").code == 0
    for source in (tmp_path / "python", tmp_path / "other"):
        refused("cost", source, match=r"data that was given in Python.*PEFLL-X019")


def trained_beside(pefll, tmp_path) -> Path:
    assert pefll("train", *DIGITS, "--method", "fedavg", "--out", tmp_path / "fedavg").code == 0
    return tmp_path / "fedavg"


def test_reproducing_what_is_missing_of_all_experiments(pefll, refused, tmp_path, monkeypatch):
    from pefll.experiments import experiment, paper, table1

    cell = table1.Cell("digits", 10, "by-class 2", "Digits", 1100, model="mlp")
    monkeypatch.setattr(table1, "CELLS", ())
    row = experiment.Row("short", "fedavg", {"local_steps": 2})
    panel = experiment.panel("Seen", [cell], {"short": experiment.Point("short", cell)}, {"short": [(81.6, 0.7)]})
    small = experiment.Experiment("small", "A small one", "About it.", [cell], [row], [panel])
    monkeypatch.setattr(paper, "EXPERIMENTS", {"small": small})
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "--missing", "--rounds", 2, "--seeds", "0,1"]
    assert "2 runs are missing" in pefll(*words, "--dry-run").out
    assert "in budget" in pefll(*words, "--dry-run", "--budget", 5).out
    said = pefll(*words)
    assert said.code == 0, said.err
    assert "wrote results/small.md" in said.out
    assert "wrote results/table1.md" in said.out
    statements = (tmp_path / "results/statements.md").read_text()
    assert "| PeFLL stays as accurate with 1,000 clients as with 100" in statements  # of Table 1, without results
    assert (tmp_path / "runs/paper/digits-10-fedavg-local_steps_2/seed-1/summary.json").is_file()
    shown = pefll("reproduce", "small", "--rounds", 2, "--tables-only").out
    assert "[2 of 3 seeds] (81.6 ± 0.7) |" in shown
    assert "0 runs are missing" in pefll("reproduce", "small", "--rounds", 2, "--seeds", "0,1", "--dry-run").out
    assert "1 run is missing" in pefll(*words[:-1], "2", "--dry-run", "--only", "small").out
    assert "PEFLL-C036" in refused("reproduce")
    assert "PEFLL-C036" in refused("reproduce", "small", "--missing")
    refused("reproduce", "--missing", "--only", "smal", match=r"experiment 'smal'.*'small'.*PEFLL-A101")
