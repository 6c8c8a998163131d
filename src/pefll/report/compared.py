"""The table of a comparison: rows, columns and cells, as Markdown and LaTeX, with a note on what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from pefll.core.wording import first_few
from pefll.report.groups import SeedGroup, note_of_undefined, repeated_note
from pefll.report.markup import latex, latex_figure, latex_note, markdown, markdown_figure
from pefll.report.pairs import COUNTS, federation_of, sums_of
from pefll.report.runs import MISSING, mean_std_text
from pefll.report.significance import LEAST_CLIENTS, SURE, Difference
from pefll.runs.client_names import makes_clients
from pefll.runs.record import behind, metric_word

_SMALL = 0.001  # smaller p are not written out
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

    @property
    def distance(self) -> str:
        """How far the row is behind the best one, its 95% interval, and p; an em dash without a test."""
        if self.behind is None or self.behind.clients < LEAST_CLIENTS:
            return MISSING
        points, low, high, p = self.behind[:4]
        ends = [f"{0.0 - end:.1f}" if self.per_cent else f"{0.0 - end:.3g}" for end in (points, high, low)]
        return f"{ends[0]} [{ends[1]}, {ends[2]}], " + (f"p = {p:.2g}" if p >= _SMALL else f"p < {_SMALL}")


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


@dataclass(frozen=True, repr=False)
class ComparisonTable:
    """Runs with the same first metric: a row for each setting, a column for each group of clients and measure.

    Attributes:
        metric: the metric that chooses the best round of these runs.
        columns: the columns, in order.
        rows: the rows; those of the same data stand together.
        shares: the measures that are in per cent.
        same_description: names of runs, by the number of their data, where other data have the same description.
        intervals: whether each column of figures has one of differences from the best row.
    """

    metric: str
    columns: list[Column]
    rows: list[Row]
    shares: set[str]
    same_description: dict[int, str]
    intervals: bool = False

    def __repr__(self) -> str:
        return self.markdown()

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
        if self.has_data:
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
        starred = {column for row in self.rows for column, cell in row.cells.items() if cell.is_worse}
        if self.intervals and self._tested:
            found.append("Behind the best: the difference, its 95% interval over clients, and p.")
        if told := set(self._tested) if self.intervals else starred:
            sizes: dict[str, set[int]] = {}
            for column, test in tests:
                if column in told:
                    sizes.setdefault(column.group, set()).add(test.clients)
            who = first_few(f"{_span(numbers)} {group}" for group, numbers in sizes.items())
            seeds = {test.seeds for column, test in tests if column in told}
            averaged = "" if seeds == {1} else "; a client that is in several seeds is averaged over them"
            if seeds != {1} and self._seeds_have_other_clients:
                averaged = "; each seed has clients of its own"
            found.append(
                (f"*: behind the best, p < {SURE} in" if starred else "p is that of")
                + f" a two-sided paired sign-flip test. Its unit is a client: {who} clients, {_span(seeds)} "
                f"seed{'s' * (seeds != {1})}{averaged}. The test does not cover the randomness of training, and is not "
                "corrected for several comparisons."
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
        return all(makes_clients(run.value("partition")) for run in chain(*groups)) and all(
            len(set(map(federation_of, runs))) == len(runs) for runs in groups
        )

    @property
    def _names_settings(self) -> bool:
        return any(", " in row.title and not row.runs.named for row in self.rows)

    @property
    def _has_loss(self) -> bool:
        return any(column.measured(self.metric) == "loss" for column in self.columns)

    @property
    def has_data(self) -> bool:
        """Whether rows are of different data."""
        return len({row.data for row in self.rows}) > 1

    @property
    def _tested(self) -> list[Column]:
        """The columns with a paired test of enough clients."""
        tests = {column: [row.cells[column].behind for row in self.rows] for column in self.columns}
        return [column for column, own in tests.items() if any(test and test.clients >= LEAST_CLIENTS for test in own)]

    @property
    def _with_intervals(self) -> list[Column]:
        return self._tested if self.intervals else []

    def _headings(self) -> list[str]:
        texts = [
            text
            for column in self.columns
            for text in (column.heading, f"{column.heading}: behind the best")[: 1 + (column in self._with_intervals)]
        ]
        return ["runs", "n", *texts]

    def markdown(self) -> str:
        """Return the table in Markdown, with a note below it."""
        data = self.has_data
        headings = self._headings()
        lines = [["data"] * data + headings, ["---"] * (1 + data) + ["--:"] * (len(headings) - 1)]
        for row in self.rows:
            line = [markdown(text) for text in [row.data] * data + [row.runs.label, str(len(row.runs.runs))]]
            for column in self.columns:
                cell = row.cells[column]
                line.append(markdown_figure(cell.text, best=cell.best))
                line += [markdown(cell.distance)] * (column in self._with_intervals)
            lines.append(line)
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{table}\n\n{markdown(self.note)}\n"

    def latex(self, name: str = "comparison") -> str:
        """Return the table in LaTeX, with the label tab:name; it needs the package booktabs."""
        width = len(self._headings())
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
                if self.has_data:
                    lines.append(rf"    \multicolumn{{{width}}}{{l}}{{\emph{{{latex(row.data)}}}}} \\")
            before = row.data
            cells = []
            for column in self.columns:
                cell = row.cells[column]
                cells.append(latex_figure(cell.figure, best=cell.best, worse=cell.is_worse))
                cells += [latex_note(cell.distance)] * (column in self._with_intervals)
            lines.append(f"    {' & '.join([latex(row.title), str(len(row.runs.runs)), *cells])} \\\\")
        return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""])


def _span(numbers: set[int]) -> str:
    """Return the smallest and the largest of some numbers as text, once if they are equal."""
    return " to ".join(map(str, sorted({min(numbers), max(numbers)})))
