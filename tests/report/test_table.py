from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pefll.report import compare, show
from pefll.report.folding import fold
from pefll.report.groups import labels_of
from pefll.report.runs import read_runs
from pefll.report.table import costs_table, duration, grouped_table, percent, runs_table

from .conftest import MakeRun, printed


def line_of(text: str, start: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line


def test_a_finished_run_shows_its_test_accuracies(make_run: MakeRun, console: Console) -> None:
    text = printed(console, runs_table(read_runs([make_run("mine", seen=0.8123, unseen=0.7)])))
    cells = re.split(r"\s{2,}", line_of(text, "pefll").strip())
    assert cells == ["pefll", "90", "81.2 / 70.0", "76.2 / 65.0", "83.2 / 72.0", "51.2 / 40.0"]
    assert "not finished" not in text


def test_runs_are_named_by_what_differs(make_run: MakeRun, console: Console) -> None:
    folders = [
        make_run("x/one", settings={"lr": 0.1}, seed=1),
        make_run("x/two", settings={"lr": 0.1}, seed=2),
        make_run("y/one", settings={"lr": 0.2}),
        make_run("other", method="fedavg"),
    ]
    names = ["pefll lr 0.1, seed 1", "pefll lr 0.1, seed 2", "pefll lr 0.2", "fedavg"]
    assert labels_of(read_runs(folders)) == names
    for table in (runs_table, costs_table):  # the same names in both
        flat = " ".join(printed(console, table(read_runs(folders))).split())
        assert all(words in flat for words in ("pefll lr 0.1,", "pefll lr 0.2", "fedavg"))
    twice = [folders[3], make_run("z/other", method="fedavg")]
    assert labels_of(read_runs(twice)) == ["fedavg (other)", "fedavg (z/other)"], "only the folders differ"


def test_names_are_folded_at_spaces(make_run: MakeRun, console: Console) -> None:
    """At 80 columns "classification" was "classificatio" and "n"."""
    task = {"task": "mine:Classification_of_a_very_long_name"}
    folders = [make_run("a", method="fedavg"), make_run("b", method="fedavg", asked=task, settings={"local_steps": 7})]
    assert fold("fedavg classification, local_steps 7", 16) == ["fedavg", "classification,", "local_steps 7"]
    assert fold("pefll rounds 300, clients 40, lr 1", 25) == ["pefll rounds 300,", "clients 40, lr 1"]
    assert fold("own_loss=mine:focal", 14) == ["own_loss=mine:", "focal"]
    assert fold("a" * 9, 4) == ["aaaa", "aaaa", "a"]
    assert fold("", 4) == [""]
    for table in (runs_table, costs_table):
        words = printed(console, table(read_runs(folders))).split()
        assert "local_steps" in words
        assert any(word.startswith("Classification_") and word[-1] == "_" for word in words), "after punctuation"


def test_an_unfinished_run_shows_marked_validation_accuracy(make_run: MakeRun, console: Console) -> None:
    folders = [make_run("going", finished=False, evaluations=5, seen=0.8, unseen=0.7), make_run("done")]
    text = printed(console, runs_table(read_runs(folders)))
    cells = re.split(r"\s{2,}", line_of(text, "pefll (going)").strip())
    assert cells == ["pefll (going)", "—", "—", "40.0 / 35.0*", "42.0 / 37.0*", "10.0 /", "5.0*"]
    assert "*" not in line_of(text, "pefll (done)")
    assert "* not finished: validation accuracy" in text


def test_missing_values_are_em_dashes(make_run: MakeRun, console: Console) -> None:
    nothing = make_run("nothing", finished=False, evaluations=0)
    alone = make_run("alone", unseen=None, client_steps_per_second=None)
    text = printed(console, runs_table(read_runs([nothing, alone])))
    assert line_of(text, "pefll (nothing)").split()[2:] == ["—"] * 5
    assert "80.0 /    —" in line_of(text, "pefll (alone)")
    text = printed(console, costs_table(read_runs([nothing, alone])))
    assert line_of(text, "pefll (nothing)").split() == [
        "pefll",
        "(nothing)",
        "cifar10",
        "—",
        "0",
        "of",
        "0",
        "—",
        "—",
        "—",
        "—",
    ]


def test_costs(make_run: MakeRun, console: Console) -> None:
    folders = [make_run("mine", seed=3), make_run("going", finished=False, evaluations=5)]
    text = printed(console, costs_table(read_runs(folders)))
    assert re.split(r"\s{2,}", line_of(text, "pefll, seed 3").strip()) == [
        *("pefll, seed 3", "CIFAR-10", "90+10", "100", "3", "1 h 02 m", "8,612", "300", "100")
    ]
    going = re.split(r"\s{2,}", line_of(text, "pefll, seed 0").strip())
    assert going == ["pefll, seed 0", "cifar10", "—", "50 of", "0", "25.0 s", "—", "150", "50"]


def test_time_on_a_shared_device_is_marked(make_run: MakeRun, console: Console) -> None:
    text = printed(console, costs_table(read_runs([make_run("three", lockstep=3), make_run("one", lockstep=1)])))
    assert "1 h 02 m*" in line_of(text, "pefll (three)")
    assert "*" not in line_of(text, "pefll (one)")
    assert "* trained together with other runs" in text
    assert "*" not in printed(console, costs_table(read_runs([make_run("older")])))
    others = make_run("processes", lockstep=1, timing="shared the device with other processes: seconds are of ...")
    assert "1 h 02 m*" in line_of(printed(console, costs_table(read_runs([others]))), "pefll")


def test_time_of_runs_that_took_turns_is_their_own(make_run: MakeRun, console: Console) -> None:
    turns = make_run("three", lockstep=3, timing="took turns with 2 other runs; seconds are of this run's own turns")
    text = printed(console, costs_table(read_runs([turns, make_run("one", lockstep=1, timing="alone")])))
    assert "1 h 02 m‡" in line_of(text, "pefll (three)")
    assert "‡ took turns with other runs: the time includes only its own turns" in text
    assert "*" not in text
    assert "‡" not in line_of(text, "pefll (one)")


def test_a_run_without_rounds_trains_as_it_is_tested(make_run: MakeRun, console: Console) -> None:
    alone = make_run("alone", method="local", evaluations=0, rounds=0, train_seconds=0.0, test_seconds=75.2, lockstep=2)
    text = printed(console, costs_table(read_runs([alone, make_run("mine", test_seconds=5.0)])))
    assert "1 m 15 s*†" in line_of(text, "local")
    assert "1 h 02 m " in line_of(text, "pefll")
    assert "* trained together" in text
    assert "† no rounds: clients train during the test; this is the time of the test" in " ".join(text.split())
    assert "†" not in printed(console, costs_table(read_runs([make_run("other")])))


@pytest.mark.parametrize("make_table", [runs_table, costs_table, grouped_table])
def test_readable_at_80_columns(make_run: MakeRun, console: Console, make_table: object) -> None:
    folders = [
        make_run(f"cifar10-by-class-2-pefll-seed-{seed}[{seed}]", seed=seed, seen=1.0, bytes_down=12_345_678_901)
        for seed in range(2)
    ]
    folders += [make_run("not-finished-yet", method="fedavg", finished=False, seen=1.0)]
    text = printed(console, make_table(read_runs(folders)))  # type: ignore[operator]
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "…" not in text, "a cut number"


def test_square_brackets_are_not_markup(make_run: MakeRun, console: Console) -> None:
    runs = read_runs([make_run("same[1]"), make_run("same[2]")])
    for table in (runs_table, costs_table):
        assert "pefll (same[1])" in printed(console, table(runs))


def test_mean_and_sample_std_over_seeds(make_run: MakeRun, console: Console) -> None:
    seen, unseen = [0.801, 0.823, 0.87], [0.7, 0.75, 0.61]
    folders = [
        make_run(f"a{seed}", seed=seed, seen=s, unseen=u) for seed, (s, u) in enumerate(zip(seen, unseen, strict=True))
    ]
    folders += [make_run("other", method="fedavg", unseen=None), make_run("a9", seed=9, finished=False)]
    table = grouped_table(read_runs(folders))
    assert table is not None
    lines = [re.split(r"\s{2,}", line.strip()) for line in printed(console, table).splitlines()]

    def spread(values: list[float], shift: float) -> str:
        percents = [100 * (value + shift) for value in values]
        return f"{statistics.mean(percents):.1f} ± {statistics.stdev(percents):.1f}"

    shifts = (0.0, -0.05, 0.02, -0.3)
    assert ["pefll", "3", "seen", *(spread(seen, shift) for shift in shifts)] in lines
    assert ["unseen", *(spread(unseen, shift) for shift in shifts)] in lines
    assert ["fedavg", "1", "seen", "80.0", "75.0", "82.0", "50.0"] in lines
    assert "CIFAR-10, by-class 2" in str(table.title)
    more = make_run("more", method="fedavg", asked={"data": "cifar100", "data_sha256": "x"}, dataset="CIFAR-100")
    other = grouped_table(read_runs([*folders, more]))
    assert other is not None
    assert "on CIFAR" not in str(other.title)
    lines = [line.split() for line in printed(console, other).splitlines()]
    assert ["pefll", "CIFAR-10", "3", "seen"] in [line[:4] for line in lines], "data that differ are named"


def test_no_groups_no_table(make_run: MakeRun) -> None:
    assert grouped_table(read_runs([make_run("a", seed=0), make_run("b", seed=1, settings={"lr": 1.0})])) is None


def test_fewer_values_than_seeds_is_said(make_run: MakeRun, console: Console) -> None:
    folders = [make_run("a", seed=0), make_run("b", seed=1), make_run("c", seed=2, accuracy={})]
    text = printed(console, grouped_table(read_runs(folders)))
    assert "80.0 ± 0.0 (2)" in text
    assert "(k): only k of the n seeds have a value" in text


def of_sets(micro_f1: float | None) -> dict[str, Any]:
    group = {"micro_f1": micro_f1, "per_client": micro_f1, "worst_tenth": micro_f1, "auc": None, "loss": 0.5}
    return {"accuracy": None, "metrics": {"best": {"seen": group, "unseen": None}}, "task": "multilabel"}


def test_an_undefined_metric_has_its_reason(make_run: MakeRun, console: Console) -> None:
    """It was an em dash, and a row of two seeds had the one figure of the other seed, without a word."""
    folders = [make_run(f"x/{seed}", seed=seed, evaluations=0, **of_sets(f1)) for seed, f1 in ((0, 0.5), (1, None))]
    why = "—: no value of micro F1, which needs a positive label or prediction."
    for table in (runs_table(read_runs(folders)), grouped_table(read_runs(folders))):
        assert why in " ".join(printed(console, table).split())
    assert why not in printed(console, runs_table(read_runs(folders[:1])))
    found = compare([folder.path for folder in folders], ["micro_f1", "auc"])
    assert [cell.text for cell in found.rows[0].cells.values()] == ["50.0 (1 of 2)", "—"]
    assert "(k of n): only k of the n seeds have a value." in found.note
    assert f"{why} —: no value of AUC, which needs positive and negative labels." in found.note
    assert "(1 of 2)" in found.latex()


def test_a_metric_that_is_undefined_at_every_evaluation_has_no_curve(
    make_run: MakeRun, console: Console, tmp_path: Path
) -> None:
    """`pefll show` said that unseen clients had not been evaluated, and failed because there was nothing to draw."""
    folder = make_run("x/a", evaluations=0, **of_sets(None))
    group = {"micro_f1": None, "per_client": None, "worst_tenth": None, "loss": 0.5}
    for round_ in (10, 20):
        folder.append_history({"round": round_, "seen": group, "unseen": group})
    show([folder.path], tmp_path, console)
    show([folder.path, make_run("x/b").path], tmp_path, console)
    text = " ".join(console.export_text().split())
    assert text.count("No curve of a: no value of micro F1, which needs a positive label or prediction.") == 2
    assert "not evaluated" not in text
    assert (tmp_path / "curves.png").exists()


def test_durations_and_percents() -> None:
    spans = [0.04, 12.34, 59.94, 59.96, 61, 3599.6, 3600, 7 * 3600 + 59.6 * 60, None]
    assert [duration(span) for span in spans] == [
        *("0.0 s", "12.3 s", "59.9 s", "1 m 00 s", "1 m 01 s", "1 h 00 m", "1 h 00 m", "8 h 00 m", "—")
    ]
    assert [percent(value) for value in (0.12345, 1.0, None)] == ["12.3", "100.0", "—"]
