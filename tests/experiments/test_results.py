from __future__ import annotations

import dataclasses
import json

import pytest

import pefll
from pefll.core.errors import PefllError
from pefll.experiments.results import collect, markdown_table, read_results
from pefll.runs.record import RunFolder
from pefll.training.fitting import fit
from tests.federations import ragged


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
    fit(ragged(), rounds=4, eval_every=2, local_steps=1, clients_per_round=2, out=tmp_path / "run", embedding="linear")
    path = collect(RunFolder(tmp_path / "run"), tmp_path / "results")
    assert path.name == "arrays-pefll-n8-local_steps_1-embedding_linear-seed0.json"
    kept = json.loads(path.read_text())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    del summary["check"], summary["fingerprints"]  # of the file, and of code that has a name
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
    assert len(markdown_table([old, new]).splitlines()) == 3
    assert len(markdown_table([old, other]).splitlines()) == 4


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
