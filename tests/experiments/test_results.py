from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

import pefll
from pefll.core.errors import PefllError
from pefll.experiments.results import collect, file_name, markdown_table, read_results
from pefll.runs.config import Config
from pefll.runs.record import RunFolder
from pefll.training.fitting import fit
from tests.federations import ragged

COMMITTED = Path(__file__).parents[2] / "results"


def result(seed: int, seen: float, unseen: float, dataset: str = "cifar10") -> dict:
    def both(value: float) -> dict:
        return {"per_sample": value}

    return {
        "command": f"pefll train --data {dataset} --clients 100 --seed {seed}",
        "dataset": dataset,
        "method": "pefll",
        "num_clients": 100,
        "seed": seed,
        "timing": "alone",
        "train_seconds": 10.0,
        "eval_seconds": 2.0,
        "accuracy": {"best": {"seen": both(seen), "unseen": both(unseen)}},
    }


def test_a_finished_run_becomes_one_small_file(tmp_path):
    data = dataclasses.replace(ragged(), names=tuple("abcdefgh"))
    fit(data, rounds=4, eval_every=2, local_steps=1, clients_per_round=2, out=tmp_path / "run", embedding="linear")
    path = collect(RunFolder(tmp_path / "run"), tmp_path / "results")
    assert path.name == "arrays-pefll-n8-local_steps_1-embedding_linear-seed0.json"
    kept = json.loads(path.read_text())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    del summary["check"], summary["fingerprints"]  # of the file, and of code that has a name
    assert summary.pop("client_names") == {"seen": list("abcdef"), "unseen": ["g", "h"]}
    assert "client_names" not in kept, "they may be people"
    assert {key: kept[key] for key in summary} == summary
    assert [row["round"] for row in kept["validation"]] == [2, 4]
    assert kept["command"] == ""  # data given in Python is not made again by a command
    assert read_results(tmp_path / "results") == [kept]


@dataclasses.dataclass(frozen=True)
class Own(pefll.PeFLL):
    """A method with a colon in its name, and a setting with letters that file systems refuse."""

    note: str = ""


def test_names_of_files_are_valid_everywhere(tmp_path):
    method = "tests.experiments.test_results:Own"
    fit(ragged(), method, rounds=1, local_steps=1, clients_per_round=2, note='a/b:c*"?', out=tmp_path / "run")
    path = collect(RunFolder(tmp_path / "run"), tmp_path / "results")
    assert path.parent == tmp_path / "results"
    assert path.name == "arrays-tests.experiments.test_results_Own-n8-local_steps_1-note_a_b_c_-seed0.json"
    assert collect(RunFolder(tmp_path / "run"), tmp_path / "results") == path


def test_a_result_of_another_run_is_never_overwritten(tmp_path):
    quick = {"eval_every": 2, "local_steps": 1, "clients_per_round": 2}
    names = []
    for rounds, unseen, out in ((4, 6, "a"), (2, 6, "b"), (2, 5, "c"), (2, 6, "b"), (4, 6, "a")):
        fit(ragged(seen=unseen), rounds=rounds, out=tmp_path / out, **quick)
        names.append(collect(RunFolder(tmp_path / out), tmp_path / "results").stem)
    first = "arrays-pefll-n8-local_steps_1-seed0"
    assert names == [first, f"{first}-rounds2", f"{first}-2", f"{first}-rounds2", first]
    assert [one["rounds"] for one in read_results(tmp_path / "results")] == [2, 2, 4]


def test_results_from_before_a_hyper_parameter_count_as_the_same(tmp_path):
    """A setting that a result does not name did not exist, and had its default's effect; other values are others."""
    out = tmp_path / "run"
    fit(ragged(), "pfedme", rounds=2, local_rounds=1, new_epochs=1, clients_per_round=2, out=out)
    path = collect(RunFolder(out), tmp_path / "results")
    new = json.loads(path.read_text())
    assert new["settings"]["new_lr"] == 0.0
    old = new | {"settings": {name: value for name, value in new["settings"].items() if name != "new_lr"}}
    path.write_text(json.dumps(old))
    assert collect(RunFolder(out), tmp_path / "results") == path
    assert json.loads(path.read_text()) == new
    other = new | {"settings": new["settings"] | {"new_lr": 0.03}}
    assert len(markdown_table([old, new | {"seed": 1}]).splitlines()) == 3
    assert len(markdown_table([old, other | {"seed": 1}]).splitlines()) == 4


def test_an_unfinished_run_is_not_a_result(tmp_path):
    fit(ragged(), rounds=2, local_steps=1, clients_per_round=2, out=tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(PefllError, match="PEFLL-X001"):
        collect(RunFolder(tmp_path / "run"), tmp_path / "results")


def test_table_has_mean_and_std_over_seeds_beside_the_paper():
    table = markdown_table([result(0, 0.88, 0.80), result(1, 0.90, 0.90), result(0, 0.5, 0.3, "cifar100")])
    _, _, cifar10, cifar100 = table.splitlines()
    assert "| cifar10, 100 | pefll | 2 | 89.0 ± 1.4 | 89.0 ± 0.8 | 85.0 ± 7.1 | 89.3 ± 2.2 | 12 |" in cifar10
    assert "`pefll train --data cifar10 --clients 100`" in cifar10
    assert "| 1 | 50.0 | 56.0 ± 0.3 | 30.0 | 35.2 ± 1.4 |" in cifar100


def test_a_table_of_groups_without_samples_leaves_the_cell_empty():
    nobody = result(0, 0.5, 0.5)
    nobody["accuracy"]["best"]["unseen"] = None
    assert "| 50.0 | 89.0 ± 0.8 | — | 89.3 ± 2.2 |" in markdown_table([nobody])


def test_runs_that_shared_a_device_tell_no_time():
    shared = [result(seed, 0.5, 0.5) | {"timing": "shared the device with 2 other runs"} for seed in range(3)]
    assert "| 89.3 ± 2.2 |  | `pefll" in markdown_table(shared)
    assert "| 89.3 ± 2.2 | 12 | `pefll" in markdown_table([*shared, result(3, 0.5, 0.5)])
    turns = result(3, 0.5, 0.5) | {"timing": "took turns with 2 other runs; seconds are of this run's own turns"}
    assert "| 89.3 ± 2.2 | 12 | `pefll" in markdown_table([*shared, turns])


def test_seeds_of_one_setting_are_one_row_however_they_were_asked_for():
    said = result(1, 0.9, 0.9) | {
        "command": "pefll train --set client_lr=0.002 --data cifar10 --precision tf32 --seed 1"
    }
    other = result(2, 0.9, 0.9) | {"precision": "bf16"}
    rows = markdown_table([said]).splitlines()[2:]
    assert len(rows) == 1
    assert "| `pefll train --data cifar10` |" in rows[0]
    assert len(markdown_table([said, result(0, 0.9, 0.9), other]).splitlines()) == 4


def test_a_run_without_rounds_takes_the_time_of_its_test():
    local = result(0, 0.5, 0.4) | {"rounds": 0, "train_seconds": 0.0, "eval_seconds": 0.0, "test_seconds": 7.0}
    rows = markdown_table([local, result(0, 0.6, 0.5) | {"rounds": 9, "test_seconds": 7.0}]).splitlines()[2:]
    assert sorted(row.split(" | ")[-2] for row in rows) == ["12", "7"]


def asked(result: dict) -> Config:
    """The settings in the command of a result."""
    words = shlex.split(result["command"])[2:]
    pairs = list(zip(words[::2], words[1::2], strict=True))
    types = {each.name: type(each.default) for each in dataclasses.fields(Config)}
    names = [(name[2:].replace("-", "_"), value) for name, value in pairs if name != "--set"]
    given = [value.partition("=") for name, value in pairs if name == "--set"]
    settings = {name: type(result["settings"][name])(value) for name, _, value in given}
    return Config(settings=settings, **{name: types[name](value) for name, value in names})


def test_names_of_committed_results_are_unchanged():
    found = {path: json.loads(path.read_text()) for path in COMMITTED.glob("*.json")}
    results = {path: one for path, one in found.items() if isinstance(one, dict) and "accuracy" in one}
    assert len(results) > 400
    assert {path.stem for path in results} == {file_name(asked(one), one) for one in results.values()}
    for path, one in results.items():
        assert path.stem == file_name(asked(one), one)


# One setting each that the file's name, the place or the row did not have.
OTHERS = {
    "the run": {},
    "schedule": {"lr_schedule": "cosine"},
    "schedule of one's own": {"lr_schedule": lambda t: 0.5},
    "another schedule of the same name": {"lr_schedule": lambda t: 0.25},
    "sampling": {"sampling": "samples"},
    "loss": {"task": "classification label_smoothing=0.1"},
    "loss of one's own": {"task": pefll.Classification(own_loss=lambda o, y: o.logsumexp(1) - o[:, 0])},
    "another one": {"task": pefll.Classification(own_loss=lambda o, y: o.logsumexp(1) - 2 * o[:, 0])},
    "evaluations": {"eval_every": 1},
    "model": {"model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3, bias=False))},
    "rounds": {"rounds": 3},
}


def test_runs_that_differ_by_more_than_the_seed_have_other_places_and_rows(tmp_path):
    """`results add` wrote over the first run, and `results table` had the mean of different experiments."""
    usual = {"rounds": 2, "eval_every": 2, "local_steps": 1, "clients_per_round": 2, "device": "cpu"}
    federation, target = ragged(), tmp_path / "results"
    places = {}
    for name, other in OTHERS.items():
        for seed in (0, 1):
            fit(federation, "fedavg", **usual | other, seed=seed, out=tmp_path / name / str(seed))
            places[name, seed] = collect(RunFolder(tmp_path / name / str(seed)), target)
    x = federation.x.clone()
    x[0] += 1  # data of the same name
    fit(dataclasses.replace(federation, x=x), "fedavg", **usual, seed=0, out=tmp_path / "data")
    places["data", 0] = collect(RunFolder(tmp_path / "data"), target)
    assert len(set(places.values())) == 2 * len(OTHERS) + 1
    results = read_results(target)
    assert len(results) == len(places)
    rows = [line.split(" | ") for line in markdown_table(results).splitlines()[2:]]
    assert len(rows) == len(OTHERS) + 1
    assert sorted(row[2] for row in rows) == ["1"] + ["2"] * len(OTHERS)
    assert any("lr_schedule=cosine" in row[-1] for row in rows), "the row says what it is, although it has no command"
    # Adding runs again finds their own files.
    before = {path: path.read_text() for path in target.iterdir()}
    for (name, seed), place in places.items():
        folder = tmp_path / "data" if name == "data" else tmp_path / name / str(seed)
        assert collect(RunFolder(folder), target) == place
    assert {path: path.read_text() for path in target.iterdir()} == before


def test_an_earlier_result_without_options_is_not_written_over(tmp_path):
    fit(ragged(), "fedavg", rounds=1, local_steps=1, clients_per_round=2, out=tmp_path / "run")
    path = collect(RunFolder(tmp_path / "run"), tmp_path / "results")
    content = json.loads(path.read_text())
    del content["options"]
    path.write_text(json.dumps(content))
    again = collect(RunFolder(tmp_path / "run"), tmp_path / "results")
    assert again != path
    assert len(markdown_table(read_results(tmp_path / "results")).splitlines()) == 4
    again.write_text("[1]")  # somebody's own file
    assert collect(RunFolder(tmp_path / "run"), tmp_path / "results") not in (path, again)


def test_a_result_that_differs_in_nothing_counts_once():
    rows = markdown_table([result(0, 0.8, 0.8), result(0, 0.4, 0.4) | {"engine": "serial"}, result(1, 0.8, 0.8)])
    assert "| cifar10, 100 | pefll | 2 | 80.0 ± 0.0 |" in rows
    assert rows.endswith("Left out, as the same settings, data and seed as another: 1 result.")
    commands = [f"pefll train --data cifar10 --seed 0 {more}" for more in ("", "--lr-schedule cosine", "--task x:Y")]
    several = [result(0, 0.8, 0.8) | {"command": command} for command in commands]
    assert len(markdown_table(several).splitlines()) == 5


def numbers_of_clients(sets: bool = False) -> pefll.Federation:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 4)).astype(np.float32)
    y = x[:, :3] > 0 if sets else (x @ [1, 2, 3, 4]).astype(np.float32)
    return pefll.federation_from_arrays(x, y, np.repeat(np.arange(8), 20), unseen=0.25)


def test_results_of_other_tasks_have_their_own_metric(tmp_path):
    """`results add` ended with KeyError: 'per_sample' for a regression, and for labels that are sets."""
    usual = {"rounds": 2, "eval_every": 1, "local_steps": 1, "clients_per_round": 2}
    for seed, sets in itertools.product((0, 1), (False, True)):
        out, metric = tmp_path / f"{seed}-{sets}", "micro_f1" if sets else "rmse"
        run = fit(numbers_of_clients(sets), "fedavg", **usual, seed=seed, out=out)
        kept = json.loads(collect(RunFolder(out), tmp_path / "results").read_text())
        figures = {group: float(f"{run.history[0][group][metric]:.6g}") for group in ("seen", "unseen")}
        assert kept["validation"][0] == {"round": 1} | figures
    results = read_results(tmp_path / "results")
    accuracies, *others = markdown_table([*results, result(0, 0.9, 0.8)]).split("\n\n")
    assert accuracies.startswith("| data, clients | method | seeds | seen, % | paper |")
    assert len(others) == 2
    tables = {table.split(" | ")[3]: table.splitlines()[2:] for table in others}
    assert list(tables) == ["seen, micro F1, %", "seen, RMSE"]
    assert all(len(rows) == 1 and rows[0].split(" | ")[2] == "2" and " ± " in rows[0] for rows in tables.values())
    undefined = next(one for one in results if "micro_f1" in one["metrics"]["best"]["seen"])
    undefined["metrics"]["best"]["seen"]["micro_f1"] = None
    assert "| arrays, 8 | fedavg | 1 | — | " in markdown_table([undefined])
