"""A comparison of finished runs as Markdown, LaTeX or CSV: means over seeds, the best in bold, a paired test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pefll.core.arguments import listed
from pefll.core.arguments import path as as_path
from pefll.core.errors import PefllError, unknown
from pefll.core.files import make_folder, write_csv, write_whole
from pefll.core.wording import first_few
from pefll.report.groups import SeedGroup, group_runs, names_of, note_of_undefined, repeated_note, task_of
from pefll.report.markup import latex, latex_figure, latex_note, markdown, markdown_figure
from pefll.report.pairs import COUNTS, makes_clients, paired_test, sums_of
from pefll.report.runs import (
    StoredRun,
    describe_data,
    in_per_cent,
    mean_and_std,
    mean_std_text,
    read_runs,
    same_data,
    same_metric,
)
from pefll.report.significance import LEAST_CLIENTS, SURE, Difference
from pefll.runs.record import GROUPS, MEASURES, behind, figures_in, meant, metric_word, runs_below

TABLES = ("md", "tex", "csv")
_WORDS = {"per_sample": "", "per_client": "mean over clients", "masked": "masked", "worst_tenth": "worst tenth"}


class Column(NamedTuple):
    """A column of figures: a group of clients, `"seen"` or `"unseen"`, and a metric, such as `record.MEASURES`."""

    group: str
    measure: str

    @property
    def heading(self) -> str:
        """The column's name in a table."""
        return ", ".join(filter(None, (self.group, _WORDS.get(self.measure, metric_word(self.measure)))))

    def measured(self, metric: str) -> str:
        """Return the metric of the column: that of the runs, `metric`, for its means over clients."""
        return behind(self.measure, metric)


@dataclass(frozen=True)
class Cell:
    """The figures of one row in one column.

    Attributes:
        values: the test metric of each seed that has one; shares, such as accuracies, in per cent.
        best: whether no mean of the same data is better, as the table shows it. Errors are better when smaller.
        behind: the paired comparison with the best row; None for the best row, and if they share no seeds or clients.
        per_cent: whether the values are in per cent.
        seeds: number of seeds of the row; a metric may be undefined for some of them.
    """

    values: list[float]
    best: bool = False
    behind: Difference | None = None
    per_cent: bool = True
    seeds: int = 0

    @property
    def is_worse(self) -> bool:
        """Whether the paired test finds that the best row is better."""
        return self.behind is not None and self.behind.points < 0 and self.behind.p < SURE

    @property
    def text(self) -> str:
        """Mean ± standard deviation, and a star if the best row is better by the paired test."""
        return self.figure + ("*" if self.is_worse else "")

    @property
    def figure(self) -> str:
        """Mean ± standard deviation, and the number of seeds with a value, if others have none."""
        fewer = f" ({len(self.values)} of {self.seeds})" if 0 < len(self.values) < self.seeds else ""
        return mean_std_text(self.values, self.per_cent) + fewer


@dataclass(frozen=True)
class Row:
    """Runs that differ only by seed, and their cells by column."""

    data: str
    runs: SeedGroup
    cells: dict[Column, Cell]

    @property
    def title(self) -> str:
        """The name of the runs with the title of the method, as papers write it."""
        return self.runs.title


@dataclass(frozen=True)
class ComparisonTable:
    """Runs with the same first metric: a row for each setting, a column for each group of clients and measure.

    Attributes:
        metric: the metric that chooses the best round of these runs.
        columns: the columns, in order.
        rows: the rows; those of the same data stand together.
        shares: the measures that are in per cent.
        same_description: names of runs, by the number of their data, where other data have the same description.
    """

    metric: str
    columns: list[Column]
    rows: list[Row]
    shares: set[str]
    same_description: dict[int, str]

    @property
    def title(self) -> str:
        """What the figures are, and which of them are in per cent."""
        shares = {column.measured(self.metric): column.measure in self.shares for column in self.columns}
        if len(shares) > 1:
            shares.pop("masked", None)  # an accuracy, too
        if all(shares.values()):
            return f"Test {first_few(map(metric_word, shares))} in %"
        return f"Test {first_few(metric_word(name) + ' in %' * share for name, share in shares.items())}"

    @property
    def note(self) -> str:
        """What the figures and marks mean, in sentences."""
        cells = [cell for row in self.rows for cell in row.cells.values()]
        runs = [run for row in self.rows for run in row.runs.runs]
        bold = "; bold: the best" if any(cell.best for cell in cells) else ""
        sentences = [f"{self.title} at the best round, mean ± standard deviation over n seeds{bold}."]
        if self._names_settings:
            sentences.append("Settings that a row does not name have their defaults.")
        sentences += self._sentences_about_the_test()
        if any(0 < len(cell.values) < cell.seeds for cell in cells):
            sentences.append("(k of n): only k of the n seeds have a value.")
        if undefined := note_of_undefined(runs, [column.measure for column in self.columns]):
            sentences.append(undefined)
        if self._has_data:
            sentences.append("Only rows of the same data can be compared.")
            sentences += [f"Data ({number}): {runs}." for number, runs in self.same_description.items()]
        else:
            sentences.append(f"Data: {self.rows[0].data}.")
        if len({row.runs.runs[0].text("task") for row in self.rows}) > 1 and self._has_loss:
            sentences.append("Losses of different tasks cannot be compared.")
        if repeated := repeated_note([row.runs for row in self.rows]):
            sentences.append(repeated)
        return " ".join(sentences)

    def _sentences_about_the_test(self) -> list[str]:
        """Return which test the stars are from, over how many clients, and where there are too few clients for one."""
        tests = [(column, cell.behind) for row in self.rows for column, cell in row.cells.items() if cell.behind]
        found = []
        if starred := {column for row in self.rows for column, cell in row.cells.items() if cell.is_worse}:
            sizes: dict[str, set[int]] = {}
            for column, test in tests:
                if column in starred:
                    sizes.setdefault(column.group, set()).add(test.clients)
            who = first_few(f"{_span(numbers)} {group}" for group, numbers in sizes.items())
            seeds = {test.seeds for column, test in tests if column in starred}
            averaged = "" if seeds == {1} else "; a client that is in several seeds is averaged over them"
            if seeds != {1} and self._seeds_have_other_clients:
                averaged = "; each seed has clients of its own"
            found.append(
                f"*: behind the best, p < {SURE} in a two-sided paired sign-flip test. Its unit is a client: {who} "
                f"clients, {_span(seeds)} seed{'s' * (seeds != {1})}{averaged}. The test does not cover the randomness "
                "of training, and is not corrected for several comparisons."
            )
        few = dict.fromkeys(column.group for column, test in tests if test.clients < LEAST_CLIENTS)
        if few:
            found.append(f"The test needs {LEAST_CLIENTS} clients, so that {first_few(few)} clients have none.")
        ranked = dict.fromkeys(column for row in self.rows for column, cell in row.cells.items() if cell.best)
        if untested := dict.fromkeys(column.measure for column in ranked if not self._has_sums(column)):
            words = first_few(_WORDS.get(name, metric_word(name)) for name in untested)
            found.append(f"There is no paired test for {words}.")
        return found

    def _has_sums(self, column: Column) -> bool:
        """Return whether a column's measure can have a paired test."""
        runs = (run for row in self.rows for run in row.runs.runs)
        return column.measure in COUNTS or any(sums_of(run, *column) for run in runs)

    @property
    def _seeds_have_other_clients(self) -> bool:
        """Whether no client is in several seeds of a row."""
        groups = [row.runs.runs for row in self.rows]
        return all(map(makes_clients, chain(*groups))) and all(
            len({run.config.get("data_sha256") for run in runs}) == len(runs) for runs in groups
        )

    @property
    def _names_settings(self) -> bool:
        return any(", " in row.title for row in self.rows)

    @property
    def _has_loss(self) -> bool:
        return any(column.measured(self.metric) == "loss" for column in self.columns)

    @property
    def _has_data(self) -> bool:
        return len({row.data for row in self.rows}) > 1

    def _headings(self) -> list[str]:
        return ["runs", "n", *(column.heading for column in self.columns)]

    def markdown(self) -> str:
        """Return the table in Markdown, with a note below it."""
        data = self._has_data
        lines = [["data"] * data + self._headings(), ["---"] * (1 + data) + ["--:"] * (1 + len(self.columns))]
        for row in self.rows:
            texts = [row.data] * data + [row.runs.label, str(len(row.runs.runs))]
            lines.append(
                [
                    *map(markdown, texts),
                    *(markdown_figure(row.cells[column].text, best=row.cells[column].best) for column in self.columns),
                ]
            )
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{table}\n\n{markdown(self.note)}\n"

    def latex(self, name: str = "comparison") -> str:
        """Return the table in LaTeX, with the label tab:name; it needs the package booktabs."""
        width = 2 + len(self.columns)
        lines = [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{latex_note(self.note)}}}",
            rf"  \label{{tab:{name}}}",
            rf"  \begin{{tabular}}{{l{'r' * (width - 1)}}}",
            r"    \toprule",
            f"    {' & '.join(['method', '$n$', *map(latex, self._headings()[2:])])} \\\\",
        ]
        before = None
        for row in self.rows:
            if row.data != before:
                lines.append(r"    \midrule")
                if self._has_data:
                    lines.append(rf"    \multicolumn{{{width}}}{{l}}{{\emph{{{latex(row.data)}}}}} \\")
            before = row.data
            cells = [
                latex_figure(cell.figure, best=cell.best, worse=cell.is_worse)
                for cell in map(row.cells.get, self.columns)
                if cell
            ]
            lines.append(f"    {' & '.join([latex(row.title), str(len(row.runs.runs)), *cells])} \\\\")
        return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""])


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, in a table for each metric that chooses best rounds.

    Attributes:
        tables: the tables; runs with the same metric are in one.
        unfinished: names of the runs that are left out because they are not finished.
    """

    tables: list[ComparisonTable]
    unfinished: list[str]

    def __str__(self) -> str:
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
                f"cannot write {path.name}; choose a name that ends in .md, .tex or .csv, and draw figures with "
                "`pefll show RUNS --format pdf`",
                code="PEFLL-O620",
            )
        make_folder(path.parent)
        if form == "csv":
            write_csv(path, map(_in_csv, self.records()))
        else:
            write_whole(path, (self.markdown() if form == "md" else self.latex()).encode())


def compare(paths: Any, measures: Any = ()) -> Comparison:
    """Return a comparison of runs.

    Args:
        paths: run folders, or folders with runs in them; one path, or a list.
        measures: per_sample, per_client, masked, worst_tenth, or metrics of the runs' task; one or several. By default
            the metric that chooses the best round. "accuracy" is per_sample.
    """
    several = [paths] if isinstance(paths, str | Path) else listed(paths, "the runs", "['runs/a', 'runs/b']")
    chosen = [measures] if isinstance(measures, str) else listed(measures, "measures", "['per_sample']")
    folders = [folder for path in several for folder in runs_below(as_path(path))]
    return comparison(read_runs(folders), chosen)


def comparison(runs: Sequence[StoredRun], measures: Sequence[str] = ()) -> Comparison:
    """Return a comparison of the finished ones of some runs; see `compare`."""
    finished = [run for run in runs if run.finished]
    if not finished:
        raise PefllError("no run is finished, so there is nothing to compare", code="PEFLL-O621")
    known = {name for run in finished for name in _measures_of(run)}
    measures = [meant(measure, known) if isinstance(measure, str) else measure for measure in measures]
    for measure in measures:
        if measure not in known:
            raise unknown("measure", str(measure), known)
    tables = [_table(same, measures) for same in same_metric(finished)]
    return Comparison([one for one in tables if one.columns], [run.name for run in runs if not run.finished])


def _table(runs: Sequence[StoredRun], measures: Sequence[str]) -> ComparisonTable:
    """Return the table of finished runs with the same metric; without columns if they have none of the measures."""
    metric = runs[0].metric
    have = {name for run in runs for name in _measures_of(run)}
    measures = [name for name in measures if name in have] if measures else [metric]
    blocks: list[list[SeedGroup]] = []
    for group in group_runs(runs, name_data=False):
        same = next((block for block in blocks if same_data(block[0].runs[0], group.runs[0])), None)
        blocks.append([group]) if same is None else same.append(group)
    groups = [who for who in GROUPS if any(run.accuracy("best", who, metric) is not None for run in runs)]
    columns = [Column(who, measure) for measure in measures for who in groups]
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


def _span(numbers: set[int]) -> str:
    """Return the smallest and the largest of some numbers as text, once if they are equal."""
    return " to ".join(map(str, sorted({min(numbers), max(numbers)})))


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
