from __future__ import annotations

import io
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.report.groups import group_runs, labels_of
from pefll.report.runs import StoredRun, mean_and_std, number, read_run, read_runs
from pefll.report.show import show

from .conftest import MakeRun


def test_reads_what_was_written(make_run: MakeRun) -> None:
    run = read_run(make_run("a", seen=0.8, unseen=0.7))
    assert run.finished
    assert run.name == "a"
    assert run.text("dataset") == "CIFAR-10"
    assert run.best_round == 90
    assert run.rounds.tolist() == list(range(10, 101, 10))
    np.testing.assert_allclose(run.megabytes, np.arange(1, 11) * 40.0)
    np.testing.assert_allclose(run.validation("unseen", "per_sample"), np.arange(1, 11) * 0.07)
    assert run.accuracy("final", "unseen", "masked") == pytest.approx(0.7 - 0.05 + 0.02)


def test_an_unfinished_run_takes_its_values_from_the_config(make_run: MakeRun) -> None:
    run = read_run(make_run(finished=False, unseen=None, evaluations=3, seed=4))
    assert not run.finished
    assert (run.value("method"), run.value("dataset"), run.value("seed"), run.value("rounds")) == (
        "pefll",
        "cifar10",
        4,
        100,
    )
    assert run.value("partition") is None, "left open in the config"
    assert run.value("num_clients") is None, "left open in the config"
    assert run.text("partition") == "—"
    assert run.best_round == 30
    assert np.isnan(run.validation("unseen", "per_sample")).all()
    assert run.accuracy("best", "seen", "per_sample") is None


def test_a_run_without_evaluations_has_no_best_round(make_run: MakeRun) -> None:
    assert read_run(make_run(finished=False, evaluations=0)).best_round is None


def test_numbers_are_finite_and_not_truth_values() -> None:
    assert number(3) == 3.0
    assert [number(value) for value in (None, "3", True, math.nan, math.inf)] == [None] * 5


def test_a_line_cut_off_by_a_crash_is_left_out(make_run: MakeRun) -> None:
    folder = make_run(evaluations=4)
    folder.history_file.write_text(folder.history_file.read_text()[:-20])
    assert read_run(folder).rounds.tolist() == [10, 20, 30]


def test_evaluations_made_again_replace_the_old_ones(make_run: MakeRun) -> None:
    folder = make_run(evaluations=4)
    again = folder.history()[1] | {"seconds": 99.0}
    folder.append_history(again)
    run = read_run(folder)
    assert run.rounds.tolist() == [10, 20]
    assert run.history[-1]["seconds"] == 99.0


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        (
            "history.jsonl",
            '{"round": 1}\nnot json\n{"round": 3}\n',
            r"history\.jsonl.*line 2 .*PEFLL-R008",
        ),
        (
            "history.jsonl",
            '{"round": 1}\n[1, 2]\n',
            r"history\.jsonl.*line 2 .*PEFLL-R008",
        ),
        ("history.jsonl", '{"seconds": 1}\n', r"history\.jsonl.*line 1 .*PEFLL-R008"),
        ("history.jsonl", '{"round": 1, "seen": 0.5}\n', r"line 1 .*PEFLL-O010"),
        ("history.jsonl", b"\xff\xfe\xff", "PEFLL-R008"),
        ("summary.json", "[]", "PEFLL-R009"),
        ("summary.json", "{", "PEFLL-R009"),
        ("config.toml", "method = ", "PEFLL-R001"),
    ],
)
def test_damage_is_one_sentence(make_run: MakeRun, file: str, content: str | bytes, sentence: str) -> None:
    folder = make_run()
    (folder.path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PefllError, match=sentence) as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_run_is_refused(make_run: MakeRun) -> None:
    folder = make_run()
    folder.config_file.unlink()
    with pytest.raises(PefllError, match="PEFLL-R120"):
        read_run(folder)


def test_a_folder_given_twice_counts_once_and_order_is_kept(make_run: MakeRun) -> None:
    a, b = make_run("a"), make_run("b")
    assert [run.name for run in read_runs([b, a, b])] == ["b", "a"]


def test_runs_that_differ_only_by_seed_are_one_group(make_run: MakeRun) -> None:
    folders = [
        make_run("a0", seed=0),
        make_run("b0", seed=0, method="fedavg"),
        make_run("a1", seed=1),
        make_run("a1-again", seed=1),
        make_run("c0", seed=0, settings={"local_steps": 7}),
        make_run("a2", seed=2, finished=False),
    ]
    # What is asked for decides; where the data lie and what computes does not.
    config = folders[2].config_file
    config.write_text(config.read_text().replace('data_dir = "data"', 'data_dir = "/elsewhere"'))
    groups = group_runs(read_runs(folders))
    assert {group.label: [run.name for run in group.runs] for group in groups} == {
        "pefll": ["a0", "a1", "a2"],
        "fedavg": ["b0"],
        "pefll local_steps 7": ["c0"],
    }


def test_data_given_in_python_are_told_apart_by_the_summary(make_run: MakeRun) -> None:
    folders = [make_run("a", seed=0, num_clients=100), make_run("b", seed=1, num_clients=50)]
    assert len(group_runs(read_runs(folders))) == 1
    for folder in folders:
        folder.config_file.write_text(folder.config_file.read_text().replace('"cifar10"', '"arrays"'))
    assert [group.label for group in group_runs(read_runs(folders))] == ["pefll (a)", "pefll (b)"]


def test_labels_say_what_sets_groups_apart(make_run: MakeRun) -> None:
    folders = [make_run("first", dataset="one"), make_run("second", settings={"lr": 0.1}, dataset="two")]
    assert [group.label for group in group_runs(read_runs(folders))] == ["pefll one", "pefll two, lr 0.1"]
    folders = [make_run("third", settings={"lr": 0.1}), make_run("fourth", settings={"lr": 0.2})]
    assert [group.label for group in group_runs(read_runs(folders))] == ["pefll lr 0.1", "pefll lr 0.2"]


def test_a_name_has_every_setting_that_differs_and_is_no_default(make_run: MakeRun) -> None:
    """FedAvg with cross-entropy and 50 steps, beside FedAvg with a focal loss and 7 steps, named the steps alone."""
    focal = {"task": "classification own_loss=mine:focal"}
    folders = [
        make_run("a", method="fedavg"),
        make_run("b", method="fedavg", asked=focal, task=focal["task"], settings={"local_steps": 7, "x": 1, "y": 2}),
        make_run("c", asked={"lr_schedule": "cosine", "sampling": "samples", "eval_every": 5}),
        make_run("d", asked={"partition": "by-class 5", "data_sha256": "other"}),
    ]
    assert labels_of(read_runs(folders)) == [
        "fedavg",
        "fedavg own_loss focal, local_steps 7, x 1, y 2",
        "pefll eval_every 5, lr_schedule cosine, sampling samples",
        "pefll partition by-class 5",
    ]
    assert labels_of(read_runs(folders[:1])) == ["fedavg"]


def test_a_default_that_was_given_is_no_difference(make_run: MakeRun) -> None:
    """`--set local_steps=50` was a row of its own beside the default, which is 50."""

    def made(name: str, size: int, given: bool, seed: int, data: str = "cifar10") -> StoredRun:
        asked = {"data": data, "data_sha256": f"{data} {seed}"}
        settings = {"size": size}
        folder = make_run(name, seed=seed, asked=asked, dataset=data, settings=settings if given else None)
        summary = json.loads(folder.summary_file.read_text())
        folder.summary_file.write_text(json.dumps(summary | {"settings": settings}))
        return read_run(folder)

    runs = [made("a", 10, False, 0), made("b", 10, True, 1)]
    assert [(group.label, len(group.runs)) for group in group_runs(runs)] == [("pefll", 2)]
    # The default of other data is none here.
    runs += [made("c", 62, True, 2), made("d", 62, False, 0, "cifar100")]
    groups = group_runs(runs, name_data=False)
    assert [(group.label, len(group.runs)) for group in groups] == [("pefll", 2), ("pefll size 62", 1), ("pefll", 1)]


def test_what_an_unfinished_run_does_not_know_is_no_difference(make_run: MakeRun) -> None:
    """Its data set has the name in the settings, and its model may be "auto"."""
    folders = [make_run("a", model="lenet"), make_run("b", method="fedavg", finished=False)]
    assert labels_of(read_runs(folders)) == ["pefll", "fedavg"]
    folders.append(make_run("c", method="local", asked={"model": "mlp"}, model="mlp"))
    assert labels_of(read_runs(folders)) == ["pefll", "fedavg", "local model mlp"]


def test_settings_that_an_earlier_version_lacks_had_the_default(make_run: MakeRun) -> None:
    folders = [make_run("a", seed=0), make_run("b", seed=1)]
    config = folders[1].config_file
    config.write_text(config.read_text().replace('sampling = "uniform"\n', ""))
    (group,) = group_runs(read_runs(folders))
    assert (group.label, len(group.runs)) == ("pefll", 2)


def test_mean_and_std_are_the_samples() -> None:
    values = [0.5, 0.7, 0.9, 0.2]
    mean, std = mean_and_std(values)
    assert mean == pytest.approx(statistics.mean(values))
    assert std == pytest.approx(statistics.stdev(values))
    assert mean_and_std([0.3]) == (0.3, None)


def test_names_from_a_stranger_change_neither_table_nor_terminal(make_run: MakeRun, tmp_path: Path) -> None:
    """A summary may have markup, escape codes, halves of letters, and numbers that no float can hold."""
    name = "\x1b[2J\x1b]0;x\x07[/] $x^$ \ud800\u202e"
    folder = make_run("a", dataset=name, partition=name, num_seen=10**400, method="[/b] fedavg\x9b2J")
    run = read_run(folder)
    assert run.value("dataset") == "[2J]0;x[/] $x^$ \ufffd"
    screen = io.StringIO()
    show([folder.path], tmp_path / "out", Console(file=screen, width=200), formats=("svg",))
    assert "[/] $x^$ \ufffd" in screen.getvalue()
    assert "\x1b" not in screen.getvalue()
    assert "\x9b" not in screen.getvalue()
    assert list((tmp_path / "out").glob("*.svg"))
    assert number(10**400) is None
