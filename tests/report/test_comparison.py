"""Comparisons of runs: the figures, the best, the paired test, and three formats."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import pefll
from pefll.core.errors import PefllError
from pefll.report import compare, show
from pefll.report.compared import Column
from pefll.report.markup import latex_note
from pefll.report.pairs import sums_of
from pefll.report.runs import read_runs
from pefll.report.significance import Pair, sign_flip_test
from pefll.runs.config import Config
from pefll.runs.record import RunFolder

from .conftest import MakeRun, measures

SEEN, UNSEEN = Column("seen", "per_sample"), Column("unseen", "per_sample")


def counts(correct: list[int]) -> dict[str, Any]:
    group = {"samples": [10] * len(correct), "correct": correct, "masked": correct}
    return {"client_counts": {"seen": group, "unseen": {"samples": [4], "correct": [2], "masked": [2]}}}


@pytest.fixture
def three(make_run: MakeRun) -> list[RunFolder]:
    """PeFLL with two seeds, FedAvg with two seeds, and one run of another setting that is as good as PeFLL."""
    return [
        make_run("all/pefll/seed-0", seed=0, seen=0.80, unseen=0.70, **counts([8] * 30)),
        make_run("all/pefll/seed-1", seed=1, seen=0.84, unseen=0.72, **counts([8] * 29 + [9])),
        make_run("all/fed_avg/seed-0", method="fedavg", seed=0, seen=0.60, unseen=0.90, **counts([6] * 30)),
        make_run("all/fed_avg/seed-1", method="fedavg", seed=1, seen=0.62, unseen=0.80, **counts([6] * 30)),
        make_run("all/other", settings={"lr": 0.1}, seed=0, seen=0.818, **counts([8] * 29 + [7])),
    ]


def test_means_the_best_and_the_paired_test(three: list[RunFolder], make_run: MakeRun) -> None:
    make_run("all/going", finished=False)
    found = compare(three[0].path.parents[1])
    assert found.unfinished == ["going"]
    assert found.columns == compare(three[0].path, "accuracy").columns == [SEEN, UNSEEN]
    assert [row.runs.label for row in found.rows] == ["fedavg", "pefll lr 0.1", "pefll"]
    fedavg, other, mine = (row.cells[SEEN] for row in found.rows)
    assert mine.values == pytest.approx([80, 84])
    assert (fedavg.best, other.best, mine.best) == (False, False, True)
    pairs = []  # each seed has clients of its own
    for one in ([10] * 30, [6] * 30, [8] * 30), ([10] * 30, [6] * 30, [8] * 29 + [9]):
        places = [[0] * 30 * len(pairs) + part + [0] * 30 * (1 - len(pairs)) for part in one]
        pairs.append(Pair(*map(np.array, places)))
    assert fedavg.behind == sign_flip_test(pairs)
    assert fedavg.is_worse
    assert other.behind is not None, "one seed that both have"
    assert not other.is_worse, "two samples' difference is chance"
    assert mine.behind is None
    assert fedavg.text == f"61.0 ± {statistics.stdev([60, 62]):.1f}*"
    assert [row.cells[UNSEEN].best for row in found.rows] == [True, False, False]


def test_markdown_latex_and_csv(three: list[RunFolder], tmp_path: Path) -> None:
    found = compare([folder.path for folder in three], ["per_sample", "masked", "worst_tenth"])
    for name in ("a/t.md", "a/t.tex", "a/t.csv"):
        found.write(tmp_path / name)
    lines = (tmp_path / "a/t.md").read_text().splitlines()
    assert lines[0].startswith("| runs | n | seen | unseen | seen, masked | unseen, masked | seen, worst tenth |")
    assert lines[2].startswith("| pefll | 2 | **82.0 ± 2.8** | 71.0 ± 1.4 | **84.0 ± 2.8** |")
    assert lines[3].startswith("| fedavg | 2 | 61.0 ± 1.4\\* | **85.0 ± 7.1** |")
    assert lines[4].startswith("| pefll lr 0.1 | 1 | 81.8 |")
    assert all(line.count("|") == 9 for line in lines[:5])
    latex = (tmp_path / "a/t.tex").read_text()
    assert r"PeFLL & 2 & \textbf{82.0 $\pm$ 2.8} & 71.0 $\pm$ 1.4 &" in latex
    assert r"FedAvg & 2 & 61.0 $\pm$ 1.4$^*$ &" in latex
    assert latex.count(r"\\") == 4
    assert r"\begin{tabular}{lrrrrrrr}" in latex
    rows = list(csv.DictReader((tmp_path / "a/t.csv").open(encoding="utf-8")))
    assert len(rows) == 3 * 6
    fedavg = next(row for row in rows if row["method"] == "fedavg" and row["measure"] == "per_sample")
    assert (fedavg["clients"], fedavg["mean"], fedavg["seeds"], fedavg["best"]) == ("seen", "61.0000", "2", "0")
    assert float(fedavg["low"]) <= float(fedavg["behind_best"]) <= float(fedavg["high"])
    assert float(fedavg["p"]) < 0.05
    assert {row["p"] for row in rows if row["measure"] == "worst_tenth"} == {""}, "there are no counts for a test"


def test_what_latex_and_markdown_take_for_marks(make_run: MakeRun) -> None:
    """In LaTeX, < > | and " were other letters of the usual fonts; in Markdown, $ began a formula."""
    texts = ["50%", 'x|y<z>"w"', r"\&#{}~^$", "*z*", "a\n\nb"]
    folders = [make_run(f"r{k}", settings={"a_b": text}) for k, text in enumerate(texts)]
    latex = compare([folder.path for folder in folders]).latex()
    assert r"PeFLL, a\_b 50\% &" in latex
    assert r"PeFLL, a\_b x\textbar{}y\textless{}z\textgreater{}''w'' &" in latex
    assert r"\textbackslash{}\&\#\{\}\textasciitilde{}\textasciicircum{}\$" in latex
    assert r"PeFLL, a\_b a b &" in latex, "an empty line ends a paragraph"
    text = compare([folder.path for folder in folders]).markdown()
    assert r"pefll a\_b x\|y\<z\>" in text
    assert r"\*z\*" in text
    assert r"\\\&#{}\~^\$ |" in text


def test_rows_of_other_data_are_compared_among_themselves(make_run: MakeRun) -> None:
    make_run("x/a", **counts([9] * 9))
    make_run("x/b", method="fedavg", seen=0.9, **counts([9] * 9))
    make_run("x/c", asked={"data": "cifar100", "data_sha256": "z"}, dataset="CIFAR-100", seen=0.3, **counts([3] * 9))
    folder = make_run("x/d", method="fedavg", asked={"data_sha256": "other samples"}, **counts([9] * 9))
    found = compare(folder.path.parent)
    assert [(row.data, row.cells[SEEN].best) for row in found.rows] == [
        ("CIFAR-10, by-class 2, 100 clients (1)", False),
        ("CIFAR-10, by-class 2, 100 clients (1)", True),
        ("CIFAR-100, by-class 2, 100 clients", False),  # there is no choice
        ("CIFAR-10, by-class 2, 100 clients (3)", False),
    ]
    assert [row.runs.label for row in found.rows] == ["pefll", "fedavg", "pefll", "fedavg"], "not names of folders"
    assert "Data (1): a and b. Data (3): d." in found.note
    assert found.markdown().startswith("| data | runs | n |")
    assert found.latex().count(r"\midrule") == 3


def of_regression(rmse: float) -> dict[str, Any]:
    group = {"rmse": rmse, "per_client": rmse + 1, "worst_tenth": rmse + 9, "r2": 0.5, "mae": None}
    return {"accuracy": None, "metrics": {"best": {"seen": group, "unseen": None}}, "client_counts": None}


def test_errors_are_better_when_smaller_and_not_in_per_cent(make_run: MakeRun) -> None:
    for name, method, rmse in (("a", "pefll", 0.05321), ("b", "fedavg", 0.0712), ("c", "local", 53.1)):
        folder = make_run(f"x/{name}", method=method, evaluations=0, **of_regression(rmse))
    found = compare(folder.path.parent)
    column = Column("seen", "rmse")
    assert found.columns == [column], "the metric that chooses the best round"
    assert [(row.runs.label, row.cells[column].best) for row in found.rows] == [
        ("pefll", True),
        ("fedavg", False),
        ("local", False),
    ]
    assert found.note.startswith("Test RMSE at the best round, mean")
    assert "There is no paired test for RMSE." in found.note
    assert "| runs | n | seen, RMSE |" in found.markdown()
    assert "| pefll | 1 | **0.053** |" in found.markdown()
    assert r"\textbf{0.053}" in found.latex()
    assert found.records()[0]["mean"] == 0.05321
    worst = compare(folder.path.parent, ["worst_tenth", "r2", "mae"])
    assert [cell.best for cell in worst.rows[2].cells.values()] == [False, True, False]
    assert worst.rows[2].cells[Column("seen", "mae")].text == "—"
    for wrong in ("per_sample", "accuracy"):
        with pytest.raises(PefllError, match=r"known are mae, per_client, r2, rmse, worst_tenth.*PEFLL-A101"):
            compare(folder.path.parent, wrong)


def test_errors_that_add_up_over_clients_have_a_paired_test(make_run: MakeRun) -> None:
    samples = [4, 2, 2, 2, 2, 2, 0]
    for name, method, rmse in (("a", "pefll", [1.0] * 6), ("b", "fedavg", [3.0, 2.0, 2.0, 2.0, 2.0, 2.0])):
        of_client = {"samples": samples, "rmse": [*rmse, None], "mae": [*rmse, None], "r2": [0.1] * 6 + [None]}
        root = math.sqrt(sum(n * each**2 for n, each in zip(samples, rmse, strict=False)) / 14)
        mean = sum(n * each for n, each in zip(samples, rmse, strict=False)) / 14
        group = {"rmse": root, "per_client": sum(rmse) / 6, "mae": mean, "r2": 0.5 if name == "a" else 0.4}
        told = {"metrics": {"best": {"seen": group, "unseen": None}}, "client_metrics": {"seen": of_client}}
        folder = make_run(f"x/{name}", method=method, evaluations=0, accuracy=None, client_counts=None, **told)
    found = compare(folder.path.parent, ["rmse", "mae", "per_client", "r2"])
    worse = {column.measure: cell for column, cell in found.rows[1].cells.items()}
    for measure, lead in (("rmse", math.sqrt(76 / 14) - 1), ("mae", 32 / 14 - 1), ("per_client", 13 / 6 - 1)):
        test = worse[measure].behind
        assert test is not None
        assert (test.points, test.p, test.clients) == (pytest.approx(-lead), 2 / 2**6, 6)
        assert worse[measure].text.endswith("*")
    assert worse["r2"].behind is None, "clients' R² do not add up to it"
    assert "There is no paired test for R²." in found.note
    record = next(one for one in found.records() if one["measure"] == "rmse" and not one["best"])
    assert 0 < record["low"] <= record["behind_best"] <= record["high"]
    (stored,) = read_runs([folder])
    assert sums_of(stored, "seen", "rmse")
    for wrong in ({"samples": [2**62] * 7}, {"rmse": [math.inf] * 7}, {"rmse": [1e308] * 7}, {"samples": [-1] * 7}):
        summary = (stored.summary or {}) | {"client_metrics": {"seen": of_client | wrong}}
        assert sums_of(dataclasses.replace(stored, summary=summary), "seen", "rmse") is None


def test_runs_of_several_tasks_are_not_ranked_together(make_run: MakeRun) -> None:
    make_run("x/a", evaluations=0, **of_regression(7.0))
    folder = make_run("x/b", method="fedavg")
    found = compare(folder.path.parent)
    assert [table.metric for table in found.tables] == ["rmse", "per_sample"]
    assert [[column.heading for column in table.columns] for table in found.tables] == [
        ["seen, RMSE"],
        ["seen", "unseen"],
    ]
    assert [row.runs.label for row in found.rows] == ["pefll", "fedavg"]  # each is alone in its table
    assert not any(table.rows[0].cells[table.columns[0]].best for table in found.tables), "there is no choice"
    assert "bold" not in found.note
    assert re.findall(r"\*\*(Test .*)\*\*", found.markdown()) == ["Test RMSE", "Test accuracy in %"]
    latex = found.latex()
    assert (latex.count(r"\begin{table}"), latex.count(r"\usepackage")) == (2, 1)
    assert [record["measure"] for record in found.records()] == ["rmse", "per_sample", "per_sample"]
    assert [table.metric for table in compare(folder.path.parent, "rmse").tables] == ["rmse"]


def test_tasks_are_named_plainly_and_losses_of_different_tasks_are_not_ranked(make_run: MakeRun) -> None:
    for name, rmse, task in (("a", 0.5, "regression"), ("b", 0.7, "regression loss_name=huber")):
        summary = of_regression(rmse)
        summary["metrics"]["best"]["seen"]["loss"] = rmse
        folder = make_run(f"x/{name}", method="fedavg", evaluations=0, asked={"task": task}, **summary, task=task)
    found = compare(folder.path.parent, ["rmse", "loss"])
    assert [row.runs.label for row in found.rows] == ["fedavg", "fedavg loss_name huber"]
    best = [[cell.best for cell in row.cells.values()] for row in found.rows]
    assert best == [[True, False], [False, False]]
    (table,) = found.tables
    assert table.title == "Test RMSE and loss"
    plain = make_run("x/c", method="fedavg", evaluations=0)
    smooth = make_run("x/d", method="fedavg", evaluations=0, asked={"task": "classification label_smoothing=0.1"})
    found = compare([plain.path, smooth.path])
    assert [row.runs.label for row in found.rows] == [
        "fedavg",
        "fedavg label_smoothing 0.1",
    ]


def of_own_metrics(accuracy: float, top2: float, gap: float) -> dict[str, Any]:
    group = measures(accuracy) | {"loss": 1.0, "top2": top2, "gap": gap}
    best = {"seen": group, "unseen": group}
    return {"accuracy": {"best": best, "final": best}, "shares": ["per_sample", "top2"], "errors": ["loss", "gap"]}


def test_own_shares_are_in_per_cent_and_own_errors_better_when_smaller(make_run: MakeRun, tmp_path: Path) -> None:
    """The caption said that shares are in %, but top2 was 0.983."""
    make_run("x/a", **of_own_metrics(0.92, 0.983, 4.5))
    make_run("x/b", method="fedavg", **of_own_metrics(0.81, 0.9, 2.5))
    found = compare(tmp_path / "x", ["per_sample", "top2", "gap"])
    assert found.tables[0].title == "Test accuracy in %, top2 in % and gap"
    assert "| pefll | 1 | **92.0** | **92.0** | **98.3** | **98.3** | 4.50 | 4.50 |" in found.markdown()
    assert r"PeFLL & 1 & \textbf{92.0} & \textbf{92.0} & \textbf{98.3} & \textbf{98.3} & 4.50 & 4.50" in found.latex()
    assert r"FedAvg & 1 & 81.0 & 81.0 & 90.0 & 90.0 & \textbf{2.50} & \textbf{2.50}" in found.latex()
    assert {(one["measure"], one["unit"], one["mean"]) for one in found.records() if one["method"] == "pefll"} == {
        ("per_sample", "%", 92.0),
        ("top2", "%", 98.3),
        ("gap", "", 4.5),
    }
    assert compare(tmp_path / "x", ["per_sample", "top2"]).tables[0].title == "Test accuracy and top2 in %"
    earlier = make_run("x/c", method="local", **of_own_metrics(0.7, 0.8, 3.5) | {"shares": None, "errors": 7})
    found = compare([tmp_path / "x", earlier.path], ["top2"])
    assert [row.cells[Column("seen", "top2")].text for row in found.rows] == ["98.3", "90.0", "80.0"], "one unit"


def test_tables_have_intervals_and_p_if_asked(three: list[RunFolder], console: Console, tmp_path: Path) -> None:
    """Only the CSV had them; a table said no more than a star."""
    show([each.path for each in three[:3]], tmp_path / "x", console, ["svg"], ["md"], [], intervals=True)
    found = compare([each.path for each in three[:3]], intervals=True)
    assert (tmp_path / "x" / "comparison.md").read_text() == found.markdown()
    best, fedavg = (
        line.split(" | ") for line in found.markdown().splitlines() if line.startswith(("| pefll", "| fedavg"))
    )
    record = next(one for one in found.records() if one["method"] == "fedavg" and one["clients"] == "seen")
    behind, low, high = (f"{record[name]:.1f}" for name in ("behind_best", "low", "high"))
    assert (best[3], fedavg[3]) == ("—", rf"{behind} \[{low}, {high}\], p \< 0.001")
    assert len(best) == len(fedavg) == 5, "two unseen clients are too few"
    assert f"& {behind} [{low}, {high}], $p < 0.001$ &" in found.latex()
    assert found.latex().count("&") == 3 * 4
    assert latex_note("1.0 [0.0, 2.0], p = 0.03") == "1.0 [0.0, 2.0], $p = 0.03$"
    assert "Behind the best: the difference" in found.note
    assert "Behind the best" not in compare([three[0].path], intervals=True).note


def test_a_user_names_and_orders_rows(three: list[RunFolder]) -> None:
    """Labels of own losses are long, and nobody could write others."""
    pefll_runs, fedavg, other = [each.path for each in three[:2]], three[2].path.parent, three[4].path
    given = {"ours, 100% & $x$": pefll_runs, "FedAvg": fedavg, "pefll too": [other]}
    found = compare(given)
    assert [row.runs.label for row in found.rows] == [row.title for row in found.rows] == list(given)
    assert [len(row.runs.runs) for row in found.rows] == [2, 2, 1]
    assert r"ours, 100\% \& \$x\$ & 2 & \textbf{82.0" in found.latex()
    assert "have their defaults" not in found.note, "these names name no settings"
    assert [one["runs"] for one in found.records()[::2]] == list(given)
    assert [row.runs.label for row in compare([other, *pefll_runs]).rows] == ["pefll lr 0.1", "pefll"], "as given"
    with pytest.raises(PefllError, match="PEFLL-O623"):
        compare({"mine": [*pefll_runs, other]})
    assert repr(found) == str(found) == found.markdown()
    assert repr(found.tables[0]) == found.tables[0].markdown()


def test_runs_in_memory_are_compared_like_their_folders(three: list[RunFolder]) -> None:
    runs = [
        SimpleNamespace(config=Config.load(one.config_file), history=one.history(), summary=one.summary())
        for one in three
    ]
    assert str(compare(runs).records()) == str(compare([one.path for one in three]).records())
    assert compare({"A": runs[2], "B": [three[0].path, runs[1]]}).rows[1].cells[SEEN].text == "82.0 ± 2.8"


def test_records_have_numbers(three: list[RunFolder]) -> None:
    """They were texts, which a data frame sorts as texts and cannot average."""
    records = compare([folder.path for folder in three], ["per_sample", "worst_tenth"]).records()
    numbers = ("mean", "std", "behind_best", "low", "high", "p")
    assert {type(one[name]) for one in records for name in numbers} == {float}
    alone = next(one for one in records if one["runs"] == "pefll lr 0.1" and one["measure"] == "worst_tenth")
    assert [name for name in numbers if math.isnan(alone[name])] == ["std", "behind_best", "low", "high", "p"]
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(records)
    assert {str(frame[name].dtype) for name in numbers} == {"float64"}


def test_latex_is_ready_for_a_paper(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("x/a", method="knn-per", settings={"k": 3})
    make_run("x/b", method="my.module:Mine")
    latex = compare(tmp_path / "x").latex()
    assert "Data: CIFAR-10, by-class 2, 100 clients.}" in latex
    assert latex.index(r"\caption") < latex.index(r"\label{tab:comparison}")
    assert "    kNN-Per & 1 &" in latex
    assert "    Mine & 1 &" in latex
    make_run("x/c", method="knn-per", asked={"data_sha256": "other"})
    latex = compare(tmp_path / "x").latex()
    headings = re.findall(r"\\multicolumn\{4\}\{l\}\{\\emph\{(.*)\}\}", latex)
    assert headings == [f"CIFAR-10, by-class 2, 100 clients ({number})" for number in (1, 2)]
    make_run("x/d", evaluations=0, **of_regression(7.0))
    assert r"\label{tab:comparison-rmse}" in compare(tmp_path / "x").latex()


def test_another_loss_is_named_whatever_else_differs(make_run: MakeRun, tmp_path: Path) -> None:
    """Rows were "fedavg local_steps 50" and "fedavg local_steps 7"; one of them had a focal loss."""
    focal = "classification own_loss=mine:focal"
    make_run("x/a", method="fedavg", settings={"local_steps": 50})
    make_run("x/b", method="fedavg", settings={"local_steps": 7}, asked={"task": focal}, task=focal)
    make_run("x/c", asked={"task": focal, "lr_schedule": "cosine"}, task=focal)
    assert [row.runs.label for row in compare(tmp_path / "x").rows] == [
        "fedavg local_steps 50",
        "fedavg own_loss focal, local_steps 7",
        "pefll own_loss focal, lr_schedule cosine",
    ]


@pytest.mark.parametrize(
    "bad", [None, 5, {"seen": 3}, {"seen": {"samples": [1]}}, {"seen": {"samples": ["a"], "correct": [[1]]}}]
)
def test_without_counts_there_is_no_test(make_run: MakeRun, bad: Any) -> None:
    folders = [make_run("a", **counts([8] * 9)), make_run("b", method="fedavg", seen=0.1, client_counts=bad)]
    (_, other) = compare([folder.path for folder in folders]).rows
    assert other.cells[SEEN].behind is None


def test_other_clients_or_seeds_are_no_pairs(make_run: MakeRun) -> None:
    best = make_run("a", **counts([8] * 9))
    other_seed = make_run("b", method="fedavg", seed=1, seen=0.1, **counts([1] * 9))
    other_clients = make_run("c", method="local", seen=0.1, **counts([1] * 8))
    found = compare([folder.path for folder in (best, other_seed, other_clients)])
    assert [row.cells[SEEN].behind for row in found.rows] == [None] * 3


@pytest.mark.parametrize(
    ("told", "clients", "meaning"),
    [
        ({"partition": "natural"}, 6, "averaged over them"),
        ({"partition": "natural", "client_names": None}, 0, ""),  # a run of an earlier version
        ({"partition": "by-class 2", "client_names": None}, 12, "each seed has clients of its own"),
        (
            {"partition": "by-class 2", "client_names": None, "asked": {"data_sha256": ""}},  # of an earlier version
            12,
            "each seed has clients of its own",
        ),
    ],
)
def test_a_client_is_one_unit_of_the_test_whatever_its_number(
    make_run: MakeRun, tmp_path: Path, told: dict[str, Any], clients: int, meaning: str
) -> None:
    """Seeds have clients in other orders, but the test averaged over the clients of the same number."""
    names, right = list("abcdef"), [9, 9, 9, 9, 9, 4]
    for seed, order in enumerate(([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0])):
        for method, correct in (("pefll", [right[k] for k in order]), ("fedavg", [3] * 6)):
            named = {"client_names": {"seen": [names[k] for k in order], "unseen": ["g"]}}
            kept = counts(correct) | named | told
            make_run(f"x/{method}-{seed}", method=method, seed=seed, seen=sum(correct) / 60, **kept)
    found = compare(tmp_path / "x")
    test = found.rows[0].cells[SEEN].behind
    if not clients:
        assert test is None
        return
    by_name = [Pair(np.array([10] * 6), np.array([3] * 6), np.array(right))]
    apart = [[10] * 6 + [0] * 6, [3] * 6 + [0] * 6, [*right, *[0] * 6]]
    of_seeds = [Pair(*map(np.array, apart)), Pair(*(np.array(part[6:] + part[:6][::-1]) for part in apart))]
    assert test == sign_flip_test(by_name * 2 if clients == 6 else of_seeds)
    assert test.clients == clients
    assert meaning in found.note


def test_what_cannot_be_compared(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a")
    for ask, code in (
        (lambda: compare(make_run("b", finished=False).path), "PEFLL-O621"),
        (lambda: compare(run.path, "precision"), "PEFLL-A101"),
        (lambda: compare(tmp_path / "nowhere"), "PEFLL-R120"),
        (lambda: compare(5), "PEFLL-A"),
        (lambda: compare(run.path).write(tmp_path / "t.docx"), "PEFLL-O620"),
    ):
        with pytest.raises(PefllError, match=code):
            ask()


def test_show_writes_tables_and_formats(three: list[RunFolder], console: Console, tmp_path: Path) -> None:
    paths = [folder.path for folder in three]
    written = show(paths, tmp_path / "out", console, ["pdf", "svg"], ["md", "tex"], ["masked"])
    names = ["curves.pdf", "curves.svg", "comparison.md", "comparison.tex"]
    assert [path.name for path in written] == names
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    assert (tmp_path / "out" / "curves.pdf").read_bytes().startswith(b"%PDF")
    assert "seen, masked" in (tmp_path / "out" / "comparison.md").read_text()
    for wrong in (["bmp"], ["md"], ["per_sample"]), (["png"], ["docx"], ["per_sample"]), (["png"], ["md"], ["loss"]):
        with pytest.raises(PefllError, match="PEFLL-A101"):
            show(paths, tmp_path / "other", console, *wrong)
    assert not (tmp_path / "other").exists()


def test_a_comparison_draws_its_curves_with_its_names(
    three: list[RunFolder], make_run: MakeRun, tmp_path: Path
) -> None:
    numbers = make_run("numbers", evaluations=0, **of_regression(7.0))
    numbers.append_history({"round": 1, "seconds": 1.0, "seen": {"rmse": 3.0}, "unseen": None})
    named = compare({"Ours, as in the paper before": three[0].path, "Number": numbers.path, "Theirs": three[2].path})
    assert named.plot(str(tmp_path / "a.svg")) == [tmp_path / "a.svg", tmp_path / "a-rmse.svg"]
    text = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- {name} -->" in text for name in ("Ours, as in the paper before", "Theirs"))
    with pytest.raises(PefllError, match="PEFLL-O009"):
        named.plot(tmp_path / "a.docx")
    with pytest.raises(PefllError, match="PEFLL-O006"):
        compare(make_run("none", evaluations=0).path).plot(tmp_path / "b.png")


def test_python_has_it() -> None:
    assert pefll.compare is compare


def test_a_row_is_named_by_what_differs_among_the_shown_runs(make_run: MakeRun, tmp_path: Path) -> None:
    """Rows had defaults of other rows' settings, the rounds of Local, and places of code."""
    make_run("x/a", asked={"lr_schedule": "__main__:make.<locals>.<lambda>", "rounds": 400, "eval_every": 5})
    make_run("x/b", method="local", asked={"rounds": 0})
    task = {"task": "classification own_loss=<in-Python>"}
    make_run(
        "x/c", method="fedavg", asked=task | {"rounds": 400, "eval_every": 5}, task="classification own_loss=<focal>"
    )
    make_run("x/d", method="fedavg", asked={"rounds": 400, "eval_every": 5, "sampling": "my.own:by_size"})
    usual = {"client_lr": 0.1, "steps": 50, "embedding": "cnn"}
    rounds = {"rounds": 400, "eval_every": 5}
    make_run("x/e", method="my.own:Mine", asked=rounds, settings={"steps": 7})
    own = {"embedding": "Sequential (given in Python)"}
    for name, given, every in (("f", {"client_lr": 0.2}, {}), ("g", {}, own), ("h", {"client_lr": 0.1}, {})):
        folder = make_run(f"x/{name}", method="fedrep", settings=given, asked=rounds)
        content = json.loads(folder.summary_file.read_text())
        code = {"fingerprints": {"embedding": [float(bool(every))]}}
        folder.summary_file.write_text(json.dumps(content | code | {"settings": usual | given | every}))
    latex = compare(tmp_path / "x").latex()
    rows = [line.split(" & ")[0].strip() for line in latex.splitlines() if line.count(" & ") == 3][1:]
    assert rows == [
        r"PeFLL, lr\_schedule lambda",
        "Local",
        r"FedAvg, own\_loss focal",
        r"FedAvg, sampling by\_size",
        "Mine",
        r"FedRep, client\_lr 0.2",
        "FedRep, embedding Sequential",
        "FedRep",
    ]
    assert "Settings that a row does not name have their defaults." in latex
    assert "Settings that" not in compare(tmp_path / "x" / "b").latex()
    again = compare([tmp_path / "x" / "h", make_run("x/i", method="fedrep", asked=rounds).path])
    assert [row.runs.label for row in again.rows] == ["fedrep client_lr 0.1", "fedrep"], "the default is not known"
    assert "    method & $n$ & seen & unseen" in latex


def test_there_is_no_star_where_none_can_be_significant(make_run: MakeRun, tmp_path: Path) -> None:
    """One client's worse model had a star; with ten clients, equal methods had one in 7% of comparisons."""
    for method, seen, right in (("pefll", 0.9, 9), ("fedavg", 0.2, 2)):
        for seed in (0, 1):
            unseen = {"samples": [10] * 5, "correct": [right] * 5, "masked": [right] * 5}
            group = {"samples": [10] * 6, "correct": [right] * 6, "masked": [right] * 6}
            few = {"client_counts": {"seen": group, "unseen": unseen}}
            asked = {"data_sha256": "one federation for all seeds"}
            make_run(f"x/{method}-{seed}", method=method, seed=seed, seen=seen, unseen=seen, asked=asked, **few)
    found = compare(tmp_path / "x")
    mine = found.rows[0].cells
    assert [mine[column].text for column in (SEEN, UNSEEN)] == ["20.0 ± 0.0*", "20.0 ± 0.0"]
    assert mine[SEEN].behind == sign_flip_test([Pair(*(np.array([n] * 6) for n in (10, 2, 9)))] * 2)
    assert (
        "*: behind the best, p < 0.05 in a two-sided paired sign-flip test. Its unit is a client: 6 seen clients, "
        "2 seeds; a client that is in several seeds is averaged over them. The test does not cover the randomness of "
        "training, and is not corrected for several comparisons. The test needs 6 clients, so that unseen clients have "
        "none."
    ) in found.note
    assert r"$^*$: behind the best, $p < 0.05$ in a two-sided" in found.latex()
    records = {(one["method"], one["clients"]): one for one in found.records()}
    assert (records["fedavg", "seen"]["test_clients"], records["fedavg", "seen"]["test_seeds"]) == (6, 2)
    assert math.isnan(records["fedavg", "unseen"]["low"]), "five clients have no interval"
    assert math.isnan(records["fedavg", "unseen"]["p"]), "nor a test, as the caption says"
    assert records["fedavg", "seen"]["p"] == found.rows[0].cells[SEEN].behind.p
    assert "no paired test for" not in found.note
    assert "There is no paired test for worst tenth." in compare(tmp_path / "x", ["per_sample", "worst_tenth"]).note
