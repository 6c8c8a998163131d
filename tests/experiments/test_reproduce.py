"""Table 1: what is missing, what it takes, and the tables that come of it, on small cells of digits."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import pytest
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.experiments import reproduce, table1
from pefll.experiments.comparison import write_tables
from pefll.experiments.evidence import Evidence
from pefll.experiments.experiment import Experiment
from pefll.experiments.jobs import absent_data_words
from pefll.experiments.missing import missing_runs
from pefll.experiments.pages import diverged_words
from pefll.experiments.pages import markdown as page
from pefll.experiments.paper import EXPERIMENTS
from pefll.experiments.reproduce import (
    cheapest_first,
    joined,
    most_valuable_first,
    parse_only,
    read_status,
    run_missing,
)
from pefll.experiments.table1 import CELLS, TITLES, Cell, Job, Row
from pefll.experiments.timing import Estimate, client_steps, estimate, read_trials, speeds
from pefll.report.table import duration
from pefll.runs.record import RunFolder
from pefll.training import fitting

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
    monkeypatch.setattr(table1, "ROWS", [row for row in table1.ROWS if not row.settings])
    monkeypatch.setattr(reproduce, "METHODS", {name: reproduce.METHODS[name] for name in SETTINGS})
    (tmp_path / "results" / "tune").mkdir(parents=True)
    for method, settings in SETTINGS.items():
        for cell in SMALL:
            path = tmp_path / "results" / "tune" / f"digits-{method}-n{cell.clients}.json"
            path.write_text(json.dumps({"best": {"settings": settings}}))
    return tmp_path / "results"


def train(results, seeds=(0, 1), only=None, rounds=2, at_once=3, **changes):
    status = read_status(results, seeds, rounds, only)
    out, data = results.parent / "runs", results.parent
    return status, run_missing(status, results, out, data, at_once, Console(quiet=True), **changes)


def names(results) -> list[str]:
    return sorted(path.name for path in results.glob("*.json"))


def test_everything_is_run_once(results, monkeypatch):
    status, failures = train(results)
    assert (len(status.missing), failures) == (2 * 3 * 2, [])
    assert len(names(results)) == 12
    assert "digits-fedavg-n10-local_steps_2-seed0.json" in names(results)
    assert "--model mlp" in json.loads(next(results.glob("*.json")).read_text())["command"]
    done = read_status(results, (0, 1), 2)
    assert done.missing == []
    assert all(len(found) == 2 for found in done.found.values())
    monkeypatch.setattr(fitting, "train_all", None)
    assert train(results)[1] == []
    # Other seeds, rounds or hyper-parameters are other runs; Local has no rounds.
    assert len(read_status(results, (0, 1, 2), 2).missing) == 6
    assert {job.method for job in read_status(results, (0, 1), 3).missing} == {"fedavg", "pefll"}
    (results / "tune" / "digits-fedavg-n20.json").write_text(json.dumps({"best": {"settings": {"client_lr": 0.5}}}))
    assert [(job.method, job.cell.clients, job.seed) for job in read_status(results, (0, 1), 2).missing] == [
        ("fedavg", 20, 0),
        ("fedavg", 20, 1),
    ]


def test_large_federations_need_three_seeds_in_table_1_only(tmp_path):
    sizes = read_status(tmp_path, None, 5000, None, EXPERIMENTS["hypernetwork-size"])
    assert {(job.cell.clients, job.seed) for job in sizes.missing} == {
        *((100, seed) for seed in range(3)),
        *((clients, 0) for clients in (500, 1000)),
    }
    natural = read_status(tmp_path, None, 5000, "femnist", EXPERIMENTS["unlabeled"])
    assert {job.seed for job in natural.missing} == {0, 1, 2}
    assert {job.seed for job in read_status(tmp_path, None, 5000, "pefll/cifar10-500").missing} == {0, 1, 2}
    assert {job.seed for job in read_status(tmp_path, (4, 5), 5000, None, EXPERIMENTS["descriptors"]).missing} == {4, 5}


def test_tables_come_from_result_files_alone(results, monkeypatch):
    train(results)
    monkeypatch.setattr(fitting, "train_all", None)
    status = read_status(results, (0, 1), 2)
    paths = write_tables(status.comparison(), results)
    first = [path.read_text() for path in paths]
    assert [path.name for path in paths] == ["table1.md", "table1.tex", "table1.csv"]
    write_tables(read_status(results, (0, 1), 2).comparison(), results)
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
    assert first[0].count("| PeFLL |") == 2 + 4 + 1  # two halves, a test in each half and cell, its searches
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


def test_seeds_that_are_asked_for_do_not_take_others_out_of_the_table(results):
    train(results, seeds=(0, 1, 2))
    before = write_tables(read_status(results, (0, 1, 2), 2).comparison(), results)[0].read_text()
    assert "±" in before
    assert write_tables(read_status(results, (7, 8), 2).comparison(), results)[0].read_text() == before


def test_results_that_a_later_tuning_has_left_behind_are_named(results):
    train(results, seeds=(0,), only="fedavg")
    assert read_status(results, (0,), 2).left_out == {}
    (results / "tune" / "digits-fedavg-n20.json").write_text(json.dumps({"best": {"settings": {"client_lr": 0.5}}}))
    status = read_status(results, (0,), 2)
    assert status.left_out == {"fedavg/digits-20": 1}
    assert "tuned at n=20: client_lr=0.5;" in shown(status, cheapest_first(status, 3, results.parent / "runs"))


def test_only_what_is_asked_for_is_run(results):
    status, _ = train(results, seeds=(0,), only="fedavg/digits-10")
    assert [(job.method, job.cell.name) for job in status.missing] == [("fedavg", "digits-10")]
    assert len(names(results)) == 1
    assert len(read_status(results, (0,), 2, "fedavg").missing) == 1
    assert len(read_status(results, (0,), 2, "digits").missing) == 5
    table = read_status(results, (0,), 2, "pefll").comparison()
    assert table.entries["seen", "fedavg", "digits-10"].mean is not None  # tables show what there is


def test_words_for_methods_and_cells():
    assert parse_only(None) == (set(TITLES), {cell.name for cell in CELLS})
    assert parse_only("pefll") == ({"pefll"}, {cell.name for cell in CELLS})
    methods, cells = parse_only("local, fedavg/cifar10,femnist-328")
    assert methods == {"local", "fedavg"}
    assert cells == {"cifar10-100", "cifar10-500", "cifar10-1000", "femnist-328"}
    with pytest.raises(PefllError, match=r"'cifar10-200'.*PEFLL-A101"):
        parse_only("cifar10-200")
    for nothing in ("", " ,/"):
        with pytest.raises(PefllError, match="PEFLL-X006"):
            parse_only(nothing)


def test_a_run_that_diverges_does_not_stop_the_others(results):
    wild = {"local_steps": 2, "client_lr": 1e30}
    (results / "tune" / "digits-fedavg-n10.json").write_text(json.dumps({"best": {"settings": wild}}))
    _, failures = train(results, seeds=(0,), only="digits-10", engine="vector")
    assert len(failures) == 1
    assert failures[0].startswith("digits-10 fedavg seed 0: ")
    assert len(names(results)) == 2
    # It is not trained again before its record is deleted, or its settings change.
    status = read_status(results, (0, 1), 2, "fedavg/digits-10")
    assert status.diverged == {"fedavg/digits-10": {0: ["float32"]}}
    assert [job.seed for job in status.missing] == [1]
    evidence = Evidence(Experiment("t", "T", "", SMALL, [Row("fedavg", "fedavg")]), {}, (0,), 2, status.diverged)
    assert "These runs diverged and have no figures: fedavg/digits-10 (seed 0 in float32)." in page(evidence)
    # If another precision is asked for, it is trained in that one.
    asked = {
        precision: [
            job.seed for job in read_status(results, (0, 1), 2, "fedavg/digits-10", precision=precision).missing
        ]
        for precision in ("float32", "float64")
    }
    assert asked == {"float32": [1], "float64": [0, 1]}
    (record,) = (results / "diverged").glob("*.json")
    assert record.name.endswith("-float32-seed-0.json")
    kept = record.read_bytes()
    other = record.with_name(record.name.replace("float32", "float64"))
    other.write_text(json.dumps(json.loads(kept) | {"precision": "float64"}))
    both = read_status(results, (0, 1), 2, "fedavg/digits-10", precision="float64")
    assert [job.seed for job in both.missing] == [1]
    assert diverged_words(both.diverged).endswith(": fedavg/digits-10 (seed 0 in float32 and float64).")
    other.unlink()
    record.unlink()
    assert len(read_status(results, (0, 1), 2, "fedavg/digits-10").missing) == 2
    record.write_bytes(kept)
    (results / "tune" / "digits-fedavg-n10.json").write_text(json.dumps({"best": {"settings": {"local_steps": 2}}}))
    assert len(read_status(results, (0, 1), 2, "fedavg/digits-10").missing) == 2


def test_of_runs_in_several_precisions_the_usual_one_stands_for_them(results):
    train(results, seeds=(0,), only="fedavg")
    (path, *_) = sorted(results.glob("digits-fedavg-*.json"))
    for name, precision in (("a", "bf16"), ("b", "tf32"), ("c", "bf16")):  # whatever comes first in the folder
        (results / f"{name}.json").write_text(json.dumps(json.loads(path.read_text()) | {"precision": precision}))
    path.unlink()
    found = read_status(results, (0,), 2).found
    assert {one["precision"] for runs in found.values() for one in runs if one["method"] == "fedavg"} >= {"tf32"}
    assert not any(one["precision"] == "bf16" for runs in found.values() for one in runs)


def job(method="pefll", cell=CELLS[0], settings=None, seed=0) -> Job:
    return Job(method, cell, seed, settings or {}, "defaults")


def test_steps_of_a_run():
    assert client_steps(job(), 5000) == 5000 * 5 * 50
    assert client_steps(job(cell=CELLS[2], settings={"local_steps": 10}), 100) == 100 * 50 * 10
    assert client_steps(job("local"), 5000) == 200 * 100 * 13  # 400 samples are 13 batches of 32
    # Gradients are counted: two for each step of Per-FedAvg, and heads and bodies alike.
    assert client_steps(job("per-fedavg"), 10) == 10 * 5 * 13 * 2
    assert client_steps(job("per-fedavg", settings={"variant": "hf"}), 10) == 10 * 5 * 13 * 4
    assert client_steps(job("fedrep"), 10) == 10 * 5 * 13 * (5 + 1)
    assert client_steps(job("pfedme"), 10) == 10 * 5 * 20 * 3


def measured(**more):
    return {
        "method": "pefll", "dataset": "cifar10", "num_clients": 100, "num_seen": 90, "num_unseen": 10, "rounds": 5000,
        "seed": 4, "model": "lenet", "device": "NVIDIA H200", "clients_per_round": 5, "local_steps": 50, "lockstep": 3,
        "settings": {}, "train_seconds": 300.0, "eval_seconds": 24.0, "test_seconds": 2.0, "finished": "2026-11-16",
        **more,
    }  # fmt: skip


def test_time_is_reckoned_from_the_most_similar_run_on_a_gpu():
    def estimated(job, *results):
        return estimate(job, speeds(results), 5000)

    # (300 + 24) / 3 + 2 seconds of the device for 1,250,000 steps, of the same method in the same cell.
    assert estimated(job(), measured()) == (pytest.approx(110), "11364 in cifar10-100")
    assert estimated(job(settings={"local_steps": 25}), measured()).seconds == pytest.approx(55)
    # A run of the same method tells more than one of another method, even in the same cell.
    faster = measured(method="fedavg", dataset="cifar100", train_seconds=150.0, finished="2026-11-17")
    assert estimated(job("fedavg"), measured(), faster).basis == "20833 in cifar100-100"
    # Else one with about as many clients at once, and of those the fastest: others may have shared their GPU.
    big = measured(num_clients=1000, clients_per_round=50)
    assert estimated(job("knn-per"), measured(), faster, big).basis == "20833 in fedavg cifar100-100"
    assert estimated(job("knn-per", CELLS[1]), measured(), faster, big).basis == "113636 in pefll cifar10-1000"
    assert estimated(job("knn-per", CELLS[6]), measured(), faster, big).basis == "20833 in fedavg cifar100-100"
    # What Local needs is in the time of the test.
    local = measured(method="local", rounds=0, local_steps=0, train_seconds=0, eval_seconds=0, test_seconds=26.0)
    assert estimated(job("local"), measured(), local) == (pytest.approx(26), "10000 in cifar10-100")
    assert estimated(job("local"), measured()).basis == "10000, a guess"  # no graph, so that others tell nothing
    assert estimated(job("fedavg"), local).basis == "23000, a guess"
    nothing = (measured(device="cpu (2 cores)"), measured(model="resnet20"))
    earlier = measured()
    del earlier["test_seconds"]  # which results did not have at first
    assert estimated(job(), earlier).seconds == pytest.approx(108)
    shared = measured()
    del shared["lockstep"]  # nobody knows with how many
    assert estimated(job(), *nothing, shared) == (1_250_000 / 23_000, "23000, a guess")
    again = measured(evaluation={"refine_steps": 10})  # it trained nothing, so its two seconds are of the test alone
    assert estimated(job(), again) == (1_250_000 / 23_000, "23000, a guess")
    assert estimated(job(cell=CELLS[2])).basis == "57000, a guess"


def test_trials_tell_how_fast_a_method_is(tmp_path):
    kept = ("seed", "settings", "train_seconds", "eval_seconds", "test_seconds", "lockstep", "device", "local_steps")
    trial = {key: measured()[key] for key in (*kept, "finished")} | {"error": None}
    protocol = {key: value for key, value in measured(method="fedrep").items() if key not in trial}
    del protocol["num_unseen"]
    content = protocol | {"best": None, "trials": [trial, {"settings": {}, "seed": 1, "error": "NaN"}]}
    (tmp_path / "cifar10-fedrep-n100.json").write_text(json.dumps(content))
    (speed,) = speeds(read_trials(tmp_path))
    assert (speed.method, speed.cell, speed.width) == ("fedrep", "cifar10-100", 5)
    assert speed.rate == pytest.approx(1_250_000 / 110)


def shown(status, queue, budget=None, width=100) -> str:
    console = Console(width=width, file=io.StringIO(), soft_wrap=True)
    console.print(missing_runs(status, queue, budget))
    return console.file.getvalue()


def test_what_is_missing_is_shown_with_its_time(results, tmp_path):
    status = read_status(results, (0, 1), 5000)
    text = shown(status, cheapest_first(status, 3, tmp_path))
    assert "12 runs are missing" in text
    assert "tuned at n=10" in text
    assert "23000, a guess" in text
    assert "in budget" not in text


def test_the_cheapest_come_first_and_what_does_not_fit_comes_behind(results, tmp_path):
    status = read_status(results, (0, 1), 230_000)  # which Local has not
    queue = cheapest_first(status, 3, tmp_path)
    assert [batch.jobs[0].method for batch in queue[:2]] == ["local", "local"]
    assert [batch.seconds for batch in queue] == sorted(batch.seconds for batch in queue)
    assert all(len(batch.jobs) == 2 for batch in queue)  # seeds of a method in a cell are trained together
    assert len(cheapest_first(status, 1, tmp_path)) == 12
    # 230,000 rounds of one client and two steps take 20 seconds, at the rate that is guessed.
    fedavg = next(batch for batch in queue if batch.jobs[0].method == "fedavg")
    assert fedavg.each == pytest.approx(20)
    assert [len(fedavg.cut(seconds).jobs) for seconds in (-5, 19, 21, 39, 41, 1e9)] == [0, 0, 1, 1, 2, 2]
    locals_ = sum(batch.seconds for batch in queue[:2])
    lines = shown(status, queue, locals_ + 65).splitlines()
    # Two seeds of Local twice, of FedAvg or PeFLL once, and one seed more.
    place = next(number for number, line in enumerate(lines) if line.startswith("in budget: 7 runs, "))
    assert lines[place].endswith(f" of {duration(locals_ + 65)}")
    assert lines[place - 2].endswith("  0")
    assert len(lines) > place + 3


def test_the_list_fits_into_80_columns_and_names_experiments(results, tmp_path):
    statuses = [read_status(results, (0, 1), 5000), read_status(results, (0,), 5000, None, EXPERIMENTS["fl-bench"])]
    status = joined(statuses)
    text = shown(status, most_valuable_first(status, 3, tmp_path), 60.0, width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[-3:] == ["digits-20", "fedavg", "0,1"] for line in lines)
    assert "    for table1; tuned at n=20: local_steps=2; steps/s: 23000, a guess" in [line.rstrip() for line in lines]
    assert "for fl-bench; fedavg-cifar10-100-fl-bench: " in text
    assert shown(status._replace(missing=[]), []).splitlines() == [
        "0 runs are missing, 5,000 rounds each",
        "all: 0 runs, 0.0 s",
    ]
    few = read_status(results, (0,), 5000, None, EXPERIMENTS["resnet"])
    assert shown(few, []).startswith("6 runs are missing, at most 5,000 rounds each")


def test_data_that_is_not_there_is_named(results, tmp_path):
    status = read_status(results, (0,), 5000)
    assert absent_data_words(status.missing, tmp_path) == ""  # digits come with the package
    status = joined([status, read_status(results, (0,), 5000, None, EXPERIMENTS["fl-bench"])])
    others = len([job for job in status.missing if job.cell.data != "digits"])
    assert absent_data_words(status.missing, tmp_path) == (
        f"{others} runs cannot start: {tmp_path} lacks cifar10, cifar100. Get data with `pefll data get cifar10`."
    )
    assert absent_data_words([], tmp_path) == ""


def test_runs_without_data_are_left_out_if_others_can_start(results):
    here, gone = read_status(results, (0,), 2, "fedavg"), read_status(results, (0,), 2, None, EXPERIMENTS["fl-bench"])
    said = Console(file=io.StringIO(), width=200)
    folders = results.parent / "runs", results.parent
    run_missing(joined([gone, here]), results, *folders, 3, said)
    assert len(names(results)) == 2
    assert f"cannot start: {results.parent} lacks cifar10, cifar100." in said.file.getvalue()
    with pytest.raises(PefllError, match="PEFLL-D120"):
        run_missing(gone, results, *folders, 3, said)


def test_a_run_that_was_stopped_has_less_to_do(results, tmp_path):
    status = read_status(results, (0,), 100, "fedavg,digits-10")
    (whole,) = cheapest_first(status, 3, tmp_path)
    folder = tmp_path / "digits-10-fedavg-local_steps_2" / "seed-0" / "checkpoints"
    (folder / "round-00000040").mkdir(parents=True)
    (folder / "round-00000075").mkdir()
    (half,) = cheapest_first(status, 3, tmp_path)
    assert half.each == pytest.approx(whole.each / 4)


def test_only_what_fits_is_run(results, monkeypatch):
    slow = {cell.name: 1e6 if cell.clients == 20 else 1.0 for cell in SMALL}
    monkeypatch.setattr(reproduce, "estimate", lambda job, *_: Estimate(slow[job.cell.name], "known"))
    _, failures = train(results, only="fedavg", budget=1000.0)
    assert failures == []
    assert names(results) == [f"digits-fedavg-n10-local_steps_2-seed{seed}.json" for seed in (0, 1)]


def test_what_was_just_measured_counts(results, monkeypatch):
    """The first batch shows that all others take far longer than there is time."""
    known = []

    def hopeful(job, speeds, rounds):
        known.append(list(speeds))
        return Estimate(1e6 if speeds else 1.0, "measured" if speeds else "too hopeful")

    monkeypatch.setattr(reproduce, "estimate", hopeful)
    monkeypatch.setattr(reproduce, "speeds", list)
    status = read_status(results, (0, 1), 2, "fedavg")._replace(speeds=[])
    said = Console(file=io.StringIO(), width=200)
    run_missing(status, results, results.parent / "runs", results.parent, 3, said, 1000.0)
    assert len(names(results)) == 2
    assert known[0] == []
    assert [one["seed"] for one in known[-1]] == [0, 1]
    assert "the budget does not cover the other 2 runs" in said.file.getvalue()


def test_when_the_time_is_up_everything_is_saved_and_goes_on_later(results, monkeypatch):
    """Two runs that were estimated to be quick, and are not: the time ends in the middle of them, wherever that is."""
    monkeypatch.setattr(reproduce, "estimate", lambda *_: Estimate(0.0, "too hopeful"))
    _, failures = train(results, only="fedavg,digits-10", rounds=20_000, budget=2.0, eval_every=5000)
    assert failures == []
    assert names(results) == []
    folders = list((results.parent / "runs").glob("*/seed-*"))
    assert len(folders) == 2
    rounds = [newest(RunFolder(folder)) for folder in folders]
    assert all(0 < done < 20_000 for done in rounds)
    # The same command goes on. Here it is told that there is little left, so that the test is short.
    monkeypatch.setattr(reproduce.fitting, "train", ended_soon(reproduce.fitting.train))
    train(results, only="fedavg,digits-10", rounds=20_000, eval_every=5000)
    assert [RunFolder(folder).summary()["rounds"] for folder in folders] == [done + 3 for done in rounds]


def newest(folder: RunFolder) -> int:
    return max(int(path.name.removeprefix("round-")) for path in folder.checkpoints.glob("round-*"))


def ended_soon(train_):
    """Train as ever, but only a few rounds more than there are in the newest checkpoint."""

    def shortened(engine, run, *others):
        config = dataclasses.replace(run.spec.config, rounds=newest(run.spec.folder) + 3)
        run.spec = dataclasses.replace(run.spec, config=config)
        return train_(engine, run, *others)

    return shortened


def test_each_result_is_written_as_its_run_ends(results, monkeypatch):
    """One of two runs that are trained together breaks down: the other's result is there."""
    write = RunFolder.write_summary

    def breaks(folder, summary):
        if summary["seed"] == 1:
            assert names(results) == ["digits-fedavg-n10-local_steps_2-seed0.json"]
            raise OSError("the machine is gone")
        write(folder, summary)

    monkeypatch.setattr(RunFolder, "write_summary", breaks)
    with pytest.raises(OSError, match="the machine is gone"):
        train(results, only="fedavg,digits-10")
    assert names(results) == ["digits-fedavg-n10-local_steps_2-seed0.json"]
