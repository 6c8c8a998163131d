"""Tables and figures of the paper besides Table 1: what they run, what they say, on small cells of digits."""

from __future__ import annotations

import csv
import json

import pytest
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.experiments import table1
from pefll.experiments.evidence import FAILS, HOLDS, NOTHING, OPEN, Evidence, Gap, gap_over_seeds, judged
from pefll.experiments.experiment import Compared, Experiment, Point, Row, Statement, panel
from pefll.experiments.gpu_time import Work, work_of
from pefll.experiments.gpu_time import write_page as write_minutes
from pefll.experiments.jobs import is_same_run
from pefll.experiments.pages import markdown, overall, write_page
from pefll.experiments.paper import EXPERIMENTS
from pefll.experiments.reproduce import SeedBatch, joined, most_valuable_first, parse_only, read_status, run_missing
from pefll.experiments.statements import TABLE1
from pefll.experiments.statements import markdown as statements_of
from pefll.experiments.table1 import Cell
from pefll.experiments.timing import gpu_seconds
from pefll.methods import METHODS, typed_settings
from pefll.methods.descriptor_size import MANY_CLIENTS
from pefll.models.embedding import EMBEDDINGS
from pefll.training import fitting

CELL = Cell("digits", 10, "by-class 2", "Digits, n=10", 1100, model="mlp")
WIDE = Cell("digits", 20, "by-class 2", "Digits, n=20", 1100, clients_per_round=2, model="mlp")
ROWS = (
    Row("one", settings={"hypernetwork": "S", "local_steps": 2, "embedding": "linear"}),
    Row("three", settings={"hypernetwork": "M", "local_steps": 2, "embedding": "linear"}),
    Row("plain", "fedavg", {"local_steps": 2}),
)


def experiment(**changes) -> Experiment:
    lines = {row.name: Point(row.name, CELL) for row in ROWS} | {"masked": Point("one", CELL, "unseen", "masked")}
    given = {
        "name": "small",
        "title": "Small",
        "about": "About it.",
        "cells": (CELL, WIDE),
        "rows": ROWS,
        "panels": [panel("Both", (CELL, WIDE), lines, {"one": [(88.7, 0.3), None]})],
        "statements": [Statement("One is ahead", "tab:x", [Compared(Point("one", CELL), Point("plain", CELL))])],
    }
    return Experiment(**given | changes)


def train(results, what, seeds=(0, 1), only=None, **changes):
    status = read_status(results, seeds, 2, only, what)
    quiet = Console(quiet=True)
    folders = results.parent / "runs", results.parent
    assert run_missing(status, results, *folders, 3, quiet, scheduler=most_valuable_first, **changes) == []
    return status


def test_an_experiment_runs_what_is_missing_once_and_writes_its_page(tmp_path, monkeypatch):
    results, what = tmp_path / "results", experiment()
    status = train(results, what, only="one,plain,digits-10")
    assert len(status.missing) == 2 * 2
    name = "digits-pefll-n10-embedding_linear-hypernetwork_S-local_steps_2-seed0.json"
    assert name in [path.name for path in results.glob("*.json")]
    done = read_status(results, (0, 1), 2, "one,plain,digits-10", what)
    assert done.missing == []
    monkeypatch.setattr(fitting, "train_all", None)
    train(results, what, only="one,plain,digits-10")
    page, table = write_page(done.evidence(what), results)
    text = page.read_text()
    assert "pefll reproduce small" in text
    assert "| *seeds* | 3 | 3 |" in text
    kept = [json.loads(path.read_text()) for path in results.glob("digits-pefll-n10-*S-*.json")]
    mean = sum(100 * one["accuracy"]["best"]["unseen"]["masked"] for one in kept) / 2
    assert f"| masked | {mean:.1f} " in text
    assert "[2 of 3 seeds] (88.7 ± 0.3) |" in text
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert next(row["mean"] for row in rows if row["line"] == "masked") == f"{mean:.2f}"
    assert rows[-1]["verdict"] in (HOLDS, FAILS, OPEN)
    assert "clients" in rows[-1]["interval"]


def test_a_run_of_another_table_is_taken(tmp_path, monkeypatch):
    """The same method, data, seed and settings: Table 1's run serves the experiment, and its row's name is its own."""
    monkeypatch.setattr(table1, "CELLS", (CELL,))
    monkeypatch.setattr(table1, "recipe", lambda method, cell: {"local_steps": 2} if method == "fedavg" else {})
    results = tmp_path / "results"
    status = read_status(results, (0,), 2, "fedavg")
    run_missing(status, results, tmp_path / "runs", tmp_path, 3, Console(quiet=True))
    found = read_status(results, (0,), 2, "plain", experiment())
    assert [job.cell for job in found.missing] == [WIDE]
    assert [one["seed"] for one in found.found["plain", CELL.name]] == [0]
    assert found.left_out == {}


def test_results_keep_counts_with_absent_classes_ruled_out(tmp_path):
    train(tmp_path / "results", experiment(cells=(CELL,)), seeds=(0,), only="one", keep_weights=False)
    assert [path.name for path in (tmp_path / "runs").rglob("*.safetensors")] == []
    (path,) = (tmp_path / "results").glob("*.json")
    one = json.loads(path.read_text())
    for group in ("seen", "unseen"):
        counts = one["client_counts"][group]
        assert sum(counts["masked"]) / sum(counts["samples"]) == one["accuracy"]["best"][group]["masked"]


def test_few_clients_come_first_then_small_seeds_and_runs_of_a_kind_train_together(tmp_path):
    status = read_status(tmp_path, (0, 1), 5000, None, experiment())
    queue = most_valuable_first(status, 3, tmp_path)
    widths = [batch.jobs[0].cell.cohort for batch in queue]
    assert widths == sorted(widths)
    assert sum(len(batch.jobs) for batch in queue) == 12
    for batch in queue:
        assert len({(job.method, job.cell.name) for job in batch.jobs}) == 1
    pefll = [batch for batch in queue if batch.jobs[0].method == "pefll" and batch.jobs[0].cell == CELL]
    assert [[job.seed for job in batch.jobs] for batch in pefll] == [[0, 0, 1], [1]]


def test_what_several_experiments_miss_is_run_once(tmp_path):
    twin = Row("again", settings={"hypernetwork": "M", "local_steps": 2, "embedding": "linear", "client_lr": 2e-3})
    other = experiment(name="other", rows=(twin, Row("new", settings={"local_steps": 3})))
    statuses = [read_status(tmp_path, (0, 1), 2, None, what) for what in (experiment(), other)]
    assert [len(status.missing) for status in statuses] == [12, 8]
    assert len(joined(statuses).missing) == 12 + 4  # `again` is `three` with a default in words


def test_gpu_minutes_count_each_run_once(tmp_path):
    """Two experiments with the same rows: what is done and what is missing counts for the first of them."""
    results = tmp_path / "results"
    train(results, experiment(cells=(CELL,)), (0,), only="plain")
    (path,) = results.glob("*.json")
    run = json.loads(path.read_text()) | {"device": "NVIDIA H200", "wall_seconds": 90.0, "lockstep": 3}
    path.write_text(json.dumps(run | {"test_seconds": 6.0}))
    again = run | {"evaluation": "pefll evaluate RUN --set refine_steps=1", "test_seconds": 3.0}
    assert (gpu_seconds(again), gpu_seconds(run | {"device": "cpu (2 cores)"})) == (3.0, 0.0)
    trial = {"settings": {}, "seed": 0, "error": None, "lockstep": 1, "wall_seconds": 12.0, "test_seconds": 0.0}
    (results / "tune").mkdir()
    search = {"method": "fedavg", "dataset": "digits", "model": "mlp", "num_clients": 10, "rounds": 2}
    search |= {"clients_per_round": 1, "device": "NVIDIA H200", "trials": [trial, trial | {"error": "no"}]}
    (results / "tune" / "digits-fedavg-n10.json").write_text(json.dumps(search | {"best": None}))
    statuses = {name: read_status(results, (0,), 2, None, experiment(cells=(CELL,))) for name in ("first", "second")}
    works = work_of(statuses, results, lambda status: [SeedBatch([job], 60.0, "") for job in status.missing])
    assert works == [
        Work("first", 1, 90 / 3 + 6, 2, 120.0),
        Work("second", 0, 0),
        Work("searches", 1, 12.0),
        Work("all", 2, 48.0, 2, 120.0),
    ]
    text = write_minutes(works, results).read_text()
    assert "| first | 1 | 0.6 | 2 | 2.0 |" in text
    assert "| all | 2 | 0.8 | 2 | 2.0 |" in text


def test_words_for_rows():
    what = experiment()
    everywhere = {CELL.name, WIDE.name}
    assert parse_only(None, what) == ({"one", "three", "plain"}, everywhere)
    assert parse_only("one,digits-20", what) == ({"one"}, {WIDE.name})
    assert parse_only("pefll", what) == ({"one", "three"}, everywhere)
    with pytest.raises(PefllError, match=r"'two'.*PEFLL-A101"):
        parse_only("two", what)


def result(seed: int, right: list[int], masked: list[int] | None = None) -> dict:
    samples = [10] * len(right)
    counts = {"samples": samples, "correct": right} | ({"masked": masked} if masked else {})
    scores = {"per_sample": sum(right) / sum(samples), "masked": sum(masked or right) / sum(samples)}
    return {
        "seed": seed,
        "data_sha256": str(seed),
        "accuracy": {"best": {"seen": scores, "unseen": None}},
        "client_counts": {"seen": counts},
    }


def evidence(first: list[dict], second: list[dict], **changes) -> Evidence:
    what = experiment(cells=(CELL,), **changes)
    return Evidence(what, {("one", CELL.name): first, ("plain", CELL.name): second}, (0, 1, 2), 2)


def test_one_page_has_every_statement_with_its_verdict_and_figures():
    first, second = [result(0, [9, 8]), result(1, [9, 9])], [result(0, [7, 6]), result(1, [8, 8])]
    ours = Statement("|θ| is small", "tab:y", [Compared(Point("plain", CELL), Point("one", CELL))])
    asked = evidence(first, second, statements=(*experiment().statements, ours))
    text = statements_of([asked, evidence(first, second, question="Is it explained?")])
    assert "| One is ahead | `tab:x` | holds | `pefll reproduce small` |" in text
    assert r"| \|θ\| is small | `tab:y` | does not hold | `pefll reproduce small` |" in text
    assert text.count("One is ahead") == 2  # in the table and above the figures; other questions are not the paper's
    assert "| 1 | Digits, n=10: one (seen) − plain (seen) | +15.0 |" in text


def test_table_1_compares_federations_and_groups():
    stays = TABLE1.statements[-1].compared
    names = [(pair.first.cell.name, pair.second.cell.name, pair.first.group) for pair in stays]
    assert names[:2] == [("cifar10-1000", "cifar10-100", "seen"), ("cifar10-1000", "cifar10-100", "unseen")]
    wide = stays[0]._replace(first=Point("one", WIDE), second=Point("one", CELL))
    results = {("one", cell.name): [result(0, right)] for cell, right in ((CELL, [9]), (WIDE, [5, 5]))}
    what = experiment(statements=(Statement("It stays", "tab:z", [wide]),))
    (verdict,) = Evidence(what, results, (0,), 2).verdicts()
    assert (verdict.figure, verdict.word) == ("-40.0", FAILS)
    assert verdict.where == "one (seen): Digits, n=20 − Digits, n=10"


def test_gaps_are_paired_by_seed_and_client():
    first, second = Point("one", CELL), Point("plain", CELL)
    both = evidence([result(0, [9, 8]), result(1, [9, 9])], [result(0, [7, 6]), result(2, [0, 0])])
    gap = both.gap(first, second)
    assert gap == (pytest.approx(20), pytest.approx(20), pytest.approx(20), "clients", 1)
    # Old results have no counts with the mask: the interval is of seeds then, and there is none for one seed.
    masked = evidence([result(0, [9, 8]), result(1, [9, 9])], [result(0, [7, 6]), result(1, [7, 5])])
    gap = masked.gap(first._replace(measure="masked"), second._replace(measure="masked"))
    assert gap.basis == "seeds"
    assert gap.points == pytest.approx(25)
    assert gap.high - gap.points == pytest.approx(12.71 * 5)
    assert evidence([result(0, [9])], [result(1, [9])]).gap(first, second) is None
    assert gap_over_seeds([3.0]) == (3.0, None, None, "", 1)
    assert evidence([result(0, [9])], []).gap(first._replace(group="unseen"), first) is None


def test_seeds_that_all_rows_have_count_and_others_do_not():
    many = [result(seed, [5]) for seed in (0, 1, 2, 7)]
    rows = ROWS[::2]
    assert len(evidence(many, many[:3], rows=rows).results("one", CELL.name)) == 3
    assert len(evidence(many, many[2:], rows=rows).results("one", CELL.name)) == 4
    assert len(evidence(many, [], rows=rows).results("one", CELL.name)) == 3


def test_verdicts():
    wide, narrow = Gap(1.0, -1.0, 3.0, "seeds", 3), Gap(1.0, 0.5, 1.5, "seeds", 3)
    assert [judged(gap, 0.0, None) for gap in (wide, narrow)] == [OPEN, HOLDS]
    assert [judged(gap, -2.0, 2.0) for gap in (wide, narrow)] == [OPEN, HOLDS]
    assert [judged(gap, 1.2, None) for gap in (wide, narrow)] == [FAILS, FAILS]
    assert judged(narrow, -0.5, 0.5) == FAILS
    assert judged(Gap(1.0, None, None, "", 1), 0.0, None) == HOLDS
    assert evidence([], []).verdicts()[0].word == NOTHING
    both = evidence([result(0, [9, 9])], [result(0, [8, 8])]).verdicts()
    assert [(one.figure, one.word) for one in both] == [("+10.0", HOLDS)]
    words = [both[0]._replace(word=word) for word in (HOLDS, OPEN, FAILS, NOTHING)]
    assert overall(words[:1]) == HOLDS
    assert overall(words[:2]) == "not decided (1 of 2 places hold)"
    assert overall(words) == "does not hold (1 of 3 places hold, 1 without results)"
    assert overall(words[3:]) == NOTHING
    page = markdown(evidence([result(0, [9])], [result(0, [8])], panels=[]))
    assert "1. One is ahead (`tab:x`): **holds**." in page


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_is_declared_can_be_run_and_read(name, tmp_path):
    what = EXPERIMENTS[name]
    assert what.name == name
    cells = {cell.name for cell in what.cells}
    assert len(cells) == len(what.cells)
    for row in what.rows:
        assert row.method in METHODS
        typed_settings(row.method, dict(row.settings))
        assert row.settings.get("embedding", "linear") in EMBEDDINGS
    rows = {row.name: row for row in what.rows}
    assert len(rows) == len(what.rows)
    points = [point for table in what.panels for _, points in table.lines for point in points if point]
    points += [point for one in what.statements for pair in one.compared for point in (pair.first, pair.second)]
    for point in points:
        assert point.cell.name in cells
        assert rows[point.row].runs_in(point.cell)
        assert point.cell.data != "femnist" or point.paper is None  # the paper's writers are others
    for table in what.panels:
        assert all(len(line) == len(table.columns) for _, line in table.lines)
    status = read_status(tmp_path, (0,), 5000, None, what)
    assert len(status.missing) == sum(row.runs_in(cell) for row in what.rows for cell in what.cells)
    assert f"pefll reproduce {name}" in markdown(status.evidence(what))


def test_some_of_the_papers_numbers():
    def figure(name: str, table: int, line: str, column: int):
        return dict(EXPERIMENTS[name].panels[table].lines)[line][column].paper

    assert figure("hypernetwork-size", 0, "L", 5) == (52.6, 1.0)
    assert figure("embedding", 0, "mlp", 2) == (87.5, 2.1)
    assert figure("regularisation", 0, "0.5", 2) == (86.2, 0.4)
    assert figure("label-masking", 1, "PeFLL + LM", 3) == (55.6, 1.6)
    assert figure("label-masking", 0, "PeFLL", 3) == (56.0, 0.3)
    assert figure("unlabeled", 0, "PeFLL", 0) == (84.5, 0.6)


def test_ablations_share_runs_with_table_1(tmp_path):
    """The middle size is Table 1's PeFLL, so that only the others are trained."""
    tuned = tmp_path / "tune"
    tuned.mkdir()
    best = {"best": {"settings": {"client_lr": 5e-4, "embedding": "convnet"}}}
    (tuned / "cifar10-pefll-n100.json").write_text(json.dumps(best))
    (job,) = read_status(tmp_path, (0,), 5000, "pefll/cifar10-100").missing
    (same,) = read_status(tmp_path, (0,), 5000, "M,cifar10-100", EXPERIMENTS["hypernetwork-size"]).missing
    assert is_same_run(job, same)
    (small,) = read_status(tmp_path, (0,), 5000, "S,cifar10-100", EXPERIMENTS["hypernetwork-size"]).missing
    assert not is_same_run(job, small)


def test_reproductions_keep_the_papers_descriptor_size():
    """New runs with more clients take a size of our own."""
    cells = {*table1.CELLS, *(cell for experiment in EXPERIMENTS.values() for cell in experiment.cells)}
    assert 100 <= max(cell.clients for cell in cells) <= MANY_CLIENTS
    assert not any("descriptor_size" in row.settings for row in table1.ROWS)
