"""A comparison of finished runs as Markdown, LaTeX or CSV: means over seeds, the best in bold, a paired test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pefll.core.arguments import listed, text
from pefll.core.arguments import path as as_path
from pefll.core.errors import PefllError, unknown
from pefll.core.files import make_folder, write_csv, write_whole
from pefll.core.wording import either, first_few, harmless
from pefll.report.compared import Cell, Column, ComparisonTable, Row
from pefll.report.groups import SeedGroup, group_runs, has_curve, names_of, task_of
from pefll.report.markup import markdown
from pefll.report.pairs import paired_test
from pefll.report.plots import check_drawable, draw_curves
from pefll.report.runs import (
    StoredRun,
    describe_data,
    in_per_cent,
    mean_and_std,
    mean_std_text,
    read_run,
    run_in_memory,
    same_data,
    same_metric,
)
from pefll.report.significance import LEAST_CLIENTS
from pefll.runs.record import GROUPS, MEASURES, figures_in, meant, runs_below

TABLES = ("md", "tex", "csv")


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs side by side, in a table for each metric that chooses best rounds.

    Attributes:
        tables: the tables; runs with the same metric are in one.
        unfinished: names of the runs that are left out because they are not finished.
    """

    tables: list[ComparisonTable]
    unfinished: list[str]

    def __repr__(self) -> str:
        return self.markdown()

    def _repr_markdown_(self) -> str:
        """Return what a notebook shows."""
        return self.markdown()

    @property
    def rows(self) -> list[Row]:
        """The rows of all tables."""
        return [row for table in self.tables for row in table.rows]

    @property
    def columns(self) -> list[Column]:
        """The columns of all tables, each once."""
        return list(dict.fromkeys(column for table in self.tables for column in table.columns))

    @property
    def note(self) -> str:
        """What the figures and marks mean, in sentences; for several tables, a line for each."""
        return "\n".join(table.note for table in self.tables)

    def markdown(self) -> str:
        """Return the tables in Markdown, each with a note below it; several tables have titles."""
        several = len(self.tables) > 1
        return "\n".join(f"**{markdown(table.title)}**\n\n" * several + table.markdown() for table in self.tables)

    def latex(self) -> str:
        """Return the tables in LaTeX; they need the package booktabs."""
        first, *others = self.tables
        texts = [first.latex(), *(one.latex(f"comparison-{one.metric.replace('_', '-')}") for one in others)]
        return "% \\usepackage{booktabs}\n" + "\n".join(texts)

    def records(self) -> list[dict[str, Any]]:
        """Return a dictionary for each cell: the row, the column, all figures and the paired test.

        Figures are numbers, NaN if there is none. CSV has the same.
        """
        found = []
        for row in self.rows:
            for column, cell in row.cells.items():
                mean, std = mean_and_std(cell.values) if cell.values else (math.nan, None)
                test = cell.behind
                found.append(
                    {
                        "data": row.data,
                        "runs": row.runs.label,
                        "method": row.runs.runs[0].text("method"),
                        "task": task_of(row.runs.runs[0]),
                        "clients": column.group,
                        "measure": column.measure,
                        "seeds": len(cell.values),
                        "unit": "%" if cell.per_cent else "",
                        "mean": mean,
                        "std": math.nan if std is None else std,
                        "best": int(cell.best),
                        "behind_best": math.nan if test is None else 0.0 - test.points,
                        # Too few clients have no interval: its ends are infinite.
                        "low": math.nan if test is None or math.isinf(test.high) else 0.0 - test.high,
                        "high": math.nan if test is None or math.isinf(test.low) else 0.0 - test.low,
                        "p": math.nan if test is None or test.clients < LEAST_CLIENTS else test.p,
                        "test_clients": 0 if test is None else test.clients,
                        "test_seeds": 0 if test is None else test.seeds,
                    }
                )
        return found

    def write(self, path: Path | str) -> None:
        """Write the comparison to a file; its ending, .md, .tex or .csv, chooses the format."""
        path = as_path(path)
        form = path.suffix.removeprefix(".")
        if form not in TABLES:
            raise PefllError(
                f"cannot write {path.name}; choose a name that ends in .md, .tex or .csv, and draw curves with "
                f"{either('`pefll show RUNS --format pdf`', 'comparison.plot(FILE)')}",
                code="PEFLL-O620",
            )
        make_folder(path.parent)
        if form == "csv":
            write_csv(path, map(_in_csv, self.records()))
        else:
            write_whole(path, (self.markdown() if form == "md" else self.latex()).encode())

    def plot(self, out: Path | str) -> list[Path]:
        """Draw the rows' curves as `pefll show` does, and return the files. It needs matplotlib, from the extra `plot`.

        Args:
            out: the file; its ending, .png, .pdf or .svg, chooses the format. The curves of another metric are in a
                file of their own, whose name ends in the metric's.
        """
        out = as_path(out)
        check_drawable(out)
        drawn = [table for table in self.tables if any(has_curve(run) for row in table.rows for run in row.runs.runs)]
        written = []
        for number, table in enumerate(drawn or self.tables[:1]):  # one without a curve has an error that says so
            written.append(out.with_stem(f"{out.stem}-{table.metric}") if number else out)
            _draw(table, written[-1])
        return written


def _draw(table: ComparisonTable, out: Path) -> None:
    """Draw the curves of a table's rows, whose names are those of a user or those that `pefll show` gives."""
    named = [
        replace(row.runs, label=f"{row.runs.label}, {row.data}") if table.has_data else row.runs
        for row in table.rows
        if row.runs.named
    ]
    draw_curves([run for row in table.rows for run in row.runs.runs], out, named)


def compare(runs: Any, measures: Any = (), intervals: bool = False) -> Comparison:
    """Return a comparison of runs, with rows in the order of the runs.

    Args:
        runs: run folders, folders with runs in them, or runs of `fit` and `load`; one, or a list. Or a dictionary of
            these with the names of the rows, such as `{"PeFLL": ["runs/a-0", "runs/a-1"], "Ditto": "runs/b"}`.
        measures: per_sample, per_client, masked, worst_tenth, or metrics of the runs' task; one or several. By default
            the metric that chooses the best round. "accuracy" is per_sample.
        intervals: whether tables also say how far a row is behind the best one, with a 95% interval and p.
    """
    chosen = [measures] if isinstance(measures, str) else listed(measures, "measures", "['per_sample']")
    if not isinstance(runs, Mapping):
        return comparison(_read(runs), chosen, intervals=intervals)
    named = {harmless(text(name, "the name of a row")): _read(given) for name, given in runs.items()}
    return comparison([run for own in named.values() for run in own], chosen, named, intervals)


def _read(given: Any) -> list[StoredRun]:
    """Return runs from folders or from memory, in their order; a run given twice counts once."""
    alone = isinstance(given, str | Path) or _is_run(given)
    found: dict[object, StoredRun] = {}
    for one in [given] if alone else listed(given, "the runs", "['runs/a', 'runs/b']"):
        if _is_run(one):
            found.setdefault(id(one), run_in_memory(one.config, one.history, one.summary, f"run {len(found) + 1}"))
            continue
        for folder in runs_below(as_path(one)):
            if (place := folder.path.resolve()) not in found:
                found[place] = read_run(folder)
    return list(found.values())


def _is_run(value: Any) -> bool:
    """Return whether a value is a run of `fit` or `load`, which reports do not import."""
    return all(hasattr(value, name) for name in ("config", "history", "summary"))


def comparison(
    runs: Sequence[StoredRun],
    measures: Sequence[str] = (),
    named: Mapping[str, Sequence[StoredRun]] | None = None,
    intervals: bool = False,
) -> Comparison:
    """Return a comparison of the finished ones of some runs; `named` has the runs of each row, see `compare`."""
    finished = [run for run in runs if run.finished]
    if not finished:
        raise PefllError("no run is finished, so there is nothing to compare", code="PEFLL-O621")
    known = {name for run in finished for name in _measures_of(run)}
    measures = [meant(measure, known) if isinstance(measure, str) else measure for measure in measures]
    for measure in measures:
        if measure not in known:
            raise unknown("measure", str(measure), known)
    tables = [_table(same, measures, _groups(same, named)) for same in same_metric(finished)]
    tables = [replace(one, intervals=intervals) for one in tables if one.columns]
    return Comparison(tables, [run.name for run in runs if not run.finished])


def _groups(runs: Sequence[StoredRun], named: Mapping[str, Sequence[StoredRun]] | None) -> list[SeedGroup]:
    """Return the rows of runs with the same metric: those that a user has named, or runs that differ only by seed."""
    if named is None:
        return group_runs(runs, name_data=False)
    found = []
    for name, own in named.items():
        groups = group_runs([run for run in own if any(run is one for one in runs)], name_data=False)
        for one, other in itertools.combinations(groups, 2):
            if same_data(one.runs[0], other.runs[0]):
                raise PefllError(
                    f"the row {name!r} has runs that differ by more than their seed: {one.label} and {other.label}; "
                    "give each a name of its own",
                    code="PEFLL-O623",
                )
        found += [replace(group, label=name, named=True) for group in groups]
    return found


def _table(runs: Sequence[StoredRun], measures: Sequence[str], groups: Sequence[SeedGroup]) -> ComparisonTable:
    """Return the table of finished runs with the same metric; without columns if they have none of the measures."""
    metric = runs[0].metric
    have = {name for run in runs for name in _measures_of(run)}
    measures = [name for name in measures if name in have] if measures else [metric]
    blocks: list[list[SeedGroup]] = []
    for group in groups:
        same = next((block for block in blocks if same_data(block[0].runs[0], group.runs[0])), None)
        blocks.append([group]) if same is None else same.append(group)
    clients = [who for who in GROUPS if any(run.accuracy("best", who, metric) is not None for run in runs)]
    columns = [Column(who, measure) for measure in measures for who in clients]
    shares = {measure for measure in measures if in_per_cent(runs, measure)}
    described = [describe_data(block[0].runs[0]) for block in blocks]
    again = {number: text for number, text in enumerate(described, 1) if described.count(text) > 1}
    rows = []
    for number, (block, data) in enumerate(zip(blocks, described, strict=True), 1):
        cells = {column: _cells(block, column, column.measure in shares) for column in columns}
        rows += [
            Row(
                f"{data} ({number})" if number in again else data,
                group,
                {column: cells[column][place] for column in columns},
            )
            for place, group in enumerate(block)
        ]
    names = dict(zip(map(id, runs), names_of(runs), strict=True))
    which = {
        number: first_few(names[id(run)] for group in blocks[number - 1] for run in group.runs) for number in again
    }
    return ComparisonTable(metric, columns, rows, shares, which)


def _measures_of(run: StoredRun) -> set[str]:
    """Return the names of a finished run's test metrics."""
    best = figures_in(run.summary).get("best")
    groups = best.values() if isinstance(best, dict) else ()
    names = {name for group in groups if isinstance(group, dict) for name in group}
    return names | set(MEASURES if run.metric == "per_sample" else ())


def _cells(block: Sequence[SeedGroup], column: Column, share: bool) -> list[Cell]:
    """Return the cell of each group of runs on the same data; none is the best if there is no choice."""
    measured = column.measured(block[0].runs[0].metric)
    sign = -1 if any(run.has_error(column.measure) for group in block for run in group.runs) else 1
    # Losses of different tasks are different functions, so that none of them is the best.
    comparable = measured != "loss" or len({task_of(group.runs[0]) for group in block}) == 1
    values = [
        [100 * value if share else value for run in group.runs if (value := run.accuracy("best", *column)) is not None]
        for group in block
    ]
    means = [mean_and_std(one)[0] if one else -sign * math.inf for one in values]
    comparable &= sum(map(bool, values)) > 1
    top = int(np.argmax(sign * np.array(means)))
    cells = []
    for place, (one, mean) in enumerate(zip(values, means, strict=True)):
        is_best = comparable and bool(one) and mean_std_text([mean], share) == mean_std_text([means[top]], share)
        is_tested = comparable and place != top
        test = paired_test(block[place], block[top], *column, share) if is_tested else None
        cells.append(Cell(one, is_best, test, share, len(block[place].runs)))
    return cells


def _in_csv(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with its figures as text: per cent with four digits after the point, and "" for NaN."""
    return {
        key: _figure(value, record["unit"] == "%" and key != "p") if isinstance(value, float) else value
        for key, value in record.items()
    }


def _figure(value: float, per_cent: bool) -> str:
    if math.isnan(value):
        return ""
    return f"{round(value, 4) + 0.0:.4f}" if per_cent else f"{value:.6g}"  # -0.0 + 0.0 is 0.0
