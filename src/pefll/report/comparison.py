"""A comparison of finished runs as Markdown, LaTeX or CSV: means over seeds, the best in bold, a paired test."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pefll.core.arguments import listed
from pefll.core.arguments import path as as_path
from pefll.core.errors import PefllError, unknown
from pefll.core.files import make_folder, write_csv, write_whole
from pefll.core.wording import first_few
from pefll.report.runs import (
    MISSING,
    SeedGroup,
    StoredRun,
    describe_data,
    group_runs,
    mean_and_std,
    mean_std_text,
    read_runs,
    repeated_note,
    same_data,
    same_metric,
    task_of,
)
from pefll.report.significance import Difference, Pair, paired_bootstrap
from pefll.runs.record import ERRORS, GROUPS, MEASURES, figures_in, is_share, metric_word, runs_below

TABLES = ("md", "tex", "csv")
SURE = 0.05  # largest p-value of a difference that is called one
# The counts of right samples in a summary that a measure is a ratio of; other measures have no paired test.
_COUNTS = {"per_sample": "correct", "masked": "masked"}
_OVER_CLIENTS = ("per_client", "worst_tenth")  # of the metric that chooses the best round
_WORDS = {"per_sample": "", "per_client": "mean over clients", "masked": "masked", "worst_tenth": "worst tenth"}
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    }
)


class Column(NamedTuple):
    """A column of figures: a group of clients, `"seen"` or `"unseen"`, and a metric, such as `record.MEASURES`."""

    group: str
    measure: str

    @property
    def heading(self) -> str:
        """The column's name in a table."""
        return ", ".join(filter(None, (self.group, _WORDS.get(self.measure, metric_word(self.measure)))))


@dataclass(frozen=True)
class Cell:
    """The figures of one row in one column.

    Attributes:
        values: the test metric of each seed that has one; shares, such as accuracies, in per cent.
        best: whether no mean of the same data is better, as the table shows it. Errors are better when smaller.
        behind: the paired comparison with the best row; None for the best row, and if they share no seeds or clients.
        per_cent: whether the values are in per cent.
    """

    values: list[float]
    best: bool = False
    behind: Difference | None = None
    per_cent: bool = True

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
        """Mean ± standard deviation."""
        return mean_std_text(self.values, self.per_cent)


@dataclass(frozen=True)
class Row:
    """Runs that differ only by seed, and their cells by column."""

    data: str
    runs: SeedGroup
    cells: dict[Column, Cell]


@dataclass(frozen=True)
class ComparisonTable:
    """Runs with the same first metric: a row for each setting, a column for each group of clients and measure.

    Attributes:
        metric: the metric that chooses the best round of these runs.
        columns: the columns, in order.
        rows: the rows; those of the same data stand together.
    """

    metric: str
    columns: list[Column]
    rows: list[Row]

    @property
    def title(self) -> str:
        """What the figures are, and which of them are in per cent."""
        shares = {cell.per_cent for row in self.rows for cell in row.cells.values() if cell.values}
        names = list(dict.fromkeys(_measured(self.metric, column) for column in self.columns))
        names = [name for name in names if name != "masked" or len(names) == 1]  # masked is an accuracy, too
        what = first_few(map(metric_word, names))
        return f"Test {what}" + (" in %" if False not in shares else " (shares in %)" if True in shares else "")

    @property
    def note(self) -> str:
        """What the figures and marks mean, in sentences."""
        sentences = [f"{self.title} at the best round, mean ± standard deviation over n seeds; bold: the best."]
        if any(cell.is_worse for row in self.rows for cell in row.cells.values()):
            sentences.append(
                f"*: behind the best by a paired bootstrap over clients, p < {SURE}, without a correction for several "
                "comparisons."
            )
        if self._has_data:
            sentences.append("Only rows of the same data can be compared.")
        if len({row.runs.runs[0].text("task") for row in self.rows}) > 1 and self._has_loss:
            sentences.append("Losses of different tasks cannot be compared.")
        if repeated := repeated_note([row.runs for row in self.rows]):
            sentences.append(repeated)
        return " ".join(sentences)

    @property
    def _has_loss(self) -> bool:
        return any(_measured(self.metric, column) == "loss" for column in self.columns)

    @property
    def _has_data(self) -> bool:
        return len({row.data for row in self.rows}) > 1

    def _texts(self) -> list[list[str]]:
        """Return the leading cells of each row: data if they differ, the runs, and the number of seeds."""
        return [[*([row.data] if self._has_data else []), row.runs.label, str(len(row.runs.runs))] for row in self.rows]

    def _headings(self) -> list[str]:
        return [*(["data"] if self._has_data else []), "runs", "n", *(column.heading for column in self.columns)]

    def markdown(self) -> str:
        """Return the table in Markdown, with a note below it."""
        leading = 2 + self._has_data
        lines = [self._headings(), ["---"] * (leading - 1) + ["--:"] * (1 + len(self.columns))]
        for texts, row in zip(self._texts(), self.rows, strict=True):
            lines.append([*map(_escaped, texts), *(_markdown_figure(row.cells[column]) for column in self.columns)])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{table}\n\n{_escaped(self.note)}\n"

    def latex(self) -> str:
        """Return the table in LaTeX; it needs the package booktabs."""
        leading = 2 + self._has_data
        lines = [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{_latex(self.note)}}}",
            rf"  \begin{{tabular}}{{{'l' * (leading - 1)}r{'r' * len(self.columns)}}}",
            r"    \toprule",
            f"    {' & '.join(map(_latex, self._headings()))} \\\\",
            r"    \midrule",
        ]
        before = None
        for texts, row in zip(self._texts(), self.rows, strict=True):
            if before not in (None, row.data):
                lines.append(r"    \midrule")
            before = row.data
            figures = [_latex_figure(row.cells[column]) for column in self.columns]
            lines.append(f"    {' & '.join([*map(_latex, texts), *figures])} \\\\")
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
        return "\n".join(f"**{_escaped(table.title)}**\n\n" * several + table.markdown() for table in self.tables)

    def latex(self) -> str:
        """Return the tables in LaTeX; they need the package booktabs."""
        return "\n".join(
            ["% \\usepackage{booktabs}\n" + self.tables[0].latex(), *(one.latex() for one in self.tables[1:])]
        )

    def records(self) -> list[dict[str, Any]]:
        """Return a dictionary for each cell: the row, the column, all figures and the paired test. CSV has the same."""
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
                        "mean": _figure(mean, cell.per_cent),
                        "std": _figure(std, cell.per_cent),
                        "best": int(cell.best),
                        "behind_best": _figure(None if test is None else -test.points),
                        "low": _figure(None if test is None else -test.high),
                        "high": _figure(None if test is None else -test.low),
                        "p": "" if test is None else f"{test.p:.4g}",
                    }
                )
        return found

    def write(self, path: Path | str) -> None:
        """Write the comparison to a file; its ending, .md, .tex or .csv, chooses the format."""
        path = as_path(path)
        form = path.suffix.removeprefix(".")
        if form not in TABLES:
            raise PefllError(f"cannot write {path.name}; choose a name that ends in .md, .tex or .csv", "PEFLL-O620")
        make_folder(path.parent)
        if form == "csv":
            write_csv(path, self.records())
        else:
            write_whole(path, (self.markdown() if form == "md" else self.latex()).encode())


def compare(paths: Any, measures: Any = ()) -> Comparison:
    """Return a comparison of runs.

    Args:
        paths: run folders, or folders with runs in them; one path, or a list.
        measures: per_sample, per_client, masked, worst_tenth, or metrics of the runs' task; one or several. By default
            the metric that chooses the best round.
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
    for group in group_runs(runs):
        same = next((block for block in blocks if same_data(block[0].runs[0], group.runs[0])), None)
        blocks.append([group]) if same is None else same.append(group)
    groups = [who for who in GROUPS if any(run.accuracy("best", who, metric) is not None for run in runs)]
    columns = [Column(who, measure) for measure in measures for who in groups]
    rows = []
    for block, data in zip(blocks, _names_of([block[0].runs[0] for block in blocks]), strict=True):
        cells = {column: _cells(block, column) for column in columns}
        rows += [
            Row(data, group, {column: cells[column][place] for column in columns}) for place, group in enumerate(block)
        ]
    return ComparisonTable(metric, columns, rows)


def _measures_of(run: StoredRun) -> set[str]:
    """Return the names of a finished run's test metrics."""
    best = figures_in(run.summary).get("best")
    groups = best.values() if isinstance(best, dict) else ()
    names = {name for group in groups if isinstance(group, dict) for name in group}
    return names | set(MEASURES if run.metric == "per_sample" else ())


def _measured(metric: str, column: Column) -> str:
    """Return the metric of a column: that of the runs, `metric`, for its means over clients."""
    return metric if column.measure in _OVER_CLIENTS else column.measure


def _names_of(runs: Sequence[StoredRun]) -> list[str]:
    """Return a name for the data of each run; data with the same description get the run's name, too."""
    names = [describe_data(run) for run in runs]
    return [f"{name} ({run.name})" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)]


def _cells(block: Sequence[SeedGroup], column: Column) -> list[Cell]:
    """Return the cell of each group of runs on the same data."""
    metric = block[0].runs[0].metric
    share = is_share(column.measure, metric)
    measured = _measured(metric, column)
    sign = -1 if measured in ERRORS else 1
    # Losses of different tasks are different functions, so that none of them is the best.
    comparable = measured != "loss" or len({group.runs[0].text("task") for group in block}) == 1
    values = [
        [100 * value if share else value for run in group.runs if (value := run.accuracy("best", *column)) is not None]
        for group in block
    ]
    means = [mean_and_std(one)[0] if one else -sign * math.inf for one in values]
    top = int(np.argmax(sign * np.array(means)))
    cells = []
    for place, (one, mean) in enumerate(zip(values, means, strict=True)):
        is_best = comparable and bool(one) and mean_std_text([mean], share) == mean_std_text([means[top]], share)
        pairs = _pairs(block[place], block[top], column) if place != top else []
        cells.append(Cell(one, is_best, paired_bootstrap(pairs) if pairs else None, share))
    return cells


def _pairs(mine: SeedGroup, best: SeedGroup, column: Column) -> list[Pair]:
    """Return the counts of each seed that both groups have on the same clients."""
    others = {run.value("seed"): run for run in best.runs}
    pairs = []
    for run in mine.runs:
        other = others.get(run.value("seed"))
        if other is None or run.config.get("data_sha256") != other.config.get("data_sha256"):
            continue
        ours, theirs = _counts(run, column), _counts(other, column)
        if ours is not None and theirs is not None and np.array_equal(ours[0], theirs[0]) and ours[0].sum():
            pairs.append(Pair(ours[0], ours[1], theirs[1]))
    return pairs


def _counts(run: StoredRun, column: Column) -> tuple[Any, Any] | None:
    """Return each client's number of samples and of right ones, int64 [n] each; None if the summary has none."""
    groups, name = (run.summary or {}).get("client_counts"), _COUNTS.get(column.measure)
    counts = groups.get(column.group) if isinstance(groups, dict) else None
    if not isinstance(counts, dict) or name is None or not {"samples", name} <= counts.keys():
        return None
    try:
        samples, right = (np.array(counts[key], dtype=np.int64) for key in ("samples", name))
    except (ValueError, TypeError, OverflowError):
        return None
    return (samples, right) if samples.ndim == 1 and samples.shape == right.shape else None


def _figure(value: float | None, per_cent: bool = True) -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{round(value, 4) + 0.0:.4f}" if per_cent else f"{value:.6g}"  # -0.0 + 0.0 is 0.0


def _escaped(text: str) -> str:
    """Return a text in which Markdown finds no marks."""
    return re.sub(r"([\\|*_<\[\]`])", r"\\\1", text)


def _markdown_figure(cell: Cell) -> str:
    text = _escaped(cell.text)
    return f"**{text}**" if cell.best else text


def _latex(text: str) -> str:
    return (
        text.translate(_LATEX)
        .replace("±", r"$\pm$")
        .replace("*:", r"$^*$:")
        .replace("p <", "$p$ $<$")
        .replace(MISSING, "---")
    )


def _latex_figure(cell: Cell) -> str:
    text = _latex(cell.figure)
    return (rf"\textbf{{{text}}}" if cell.best else text) + ("$^*$" if cell.is_worse else "")
