"""The declaration of an experiment: its runs, its tables, and the paper's statements about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pefll.experiments import table1
from pefll.experiments.table1 import Cell, Measure
from pefll.experiments.table1 import Row as Row

if TYPE_CHECKING:
    from pefll.experiments.evidence import Evidence, Verdict

Reported = tuple[float, float]  # the paper's mean and standard deviation, in per cent
CIFAR10, CIFAR100, FEMNIST = table1.CELLS[:3], table1.CELLS[3:6], table1.CELLS[6:7]


class Point(NamedTuple):
    """One mean of a table, with the paper's mean."""

    row: str
    cell: Cell
    group: str = "seen"
    measure: str = "per_sample"  # a field of `pefll.Accuracy`
    paper: Reported | None = None


class Panel(NamedTuple):
    """One table. A line has a title and a point for each column; None leaves the cell empty."""

    title: str
    corner: str
    columns: Sequence[str]
    lines: Sequence[tuple[str, Sequence[Point | None]]]


class Compared(NamedTuple):
    """Two points that a statement compares.

    Attributes:
        first: the point that the statement is about.
        second: the point that `first` is compared with.
        least: first - second must exceed this, in percentage points; None for no limit.
        most: first - second must not exceed this, in percentage points; None for no limit.
    """

    first: Point
    second: Point
    least: float | None = 0.0
    most: float | None = None


class Statement(NamedTuple):
    """A statement of the paper about its figures."""

    text: str
    place: str  # label in the paper's source
    compared: Sequence[Compared]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper, or one like them.

    Attributes:
        name: name on the command line.
        title: heading of the experiment's page.
        about: Markdown that says what was done, and how it differs from the paper.
        cells: federations of the experiment.
        rows: methods and settings that are run in each cell.
        panels: tables of accuracies.
        statements: the paper's statements about these accuracies.
        measure: an additional measurement of each run.
        sections: returns more Markdown for the page.
        judge: returns more verdicts.
        question: the heading of the verdicts.
        draw: draws figures into a folder, and returns their paths.
        stem: name of the output files without extension; "" for `name`.
    """

    name: str
    title: str
    about: str
    cells: Sequence[Cell]
    rows: Sequence[Row]
    panels: Sequence[Panel] = ()
    statements: Sequence[Statement] = ()
    measure: Measure | None = None
    sections: Callable[[Evidence], list[str]] | None = None
    judge: Callable[[Evidence], list[Verdict]] | None = None
    draw: Callable[[Evidence, Path], list[Path]] | None = None
    stem: str = ""
    question: str = "What the paper says"

    @property
    def file_stem(self) -> str:
        """Name of the output files without extension."""
        return self.stem or self.name


def panel(
    title: str,
    cells: Sequence[Cell],
    lines: Mapping[str, Point],
    paper: Mapping[str, Sequence[Reported | None]] | None = None,
    rows: Sequence[Row] = (),
) -> Panel:
    """Return a table with a column for each cell.

    Args:
        title: title of the table.
        cells: cells of the table, one per column.
        lines: title of each line, and a point of which everything except the cell is used.
        paper: the paper's figures for each line, in the order of the cells; None for a missing figure.
        rows: rows of the experiment. If a row is not run on a cell's data, its line is empty in that column.
    """
    by_name = {row.name: row for row in rows}
    made = []
    for heading, point in lines.items():
        figures = (paper or {}).get(heading, [None] * len(cells))
        made.append(
            (
                heading,
                [
                    None
                    if point.row in by_name and not by_name[point.row].runs_in(cell)
                    else point._replace(cell=cell, paper=figure)
                    for cell, figure in zip(cells, figures, strict=True)
                ],
            )
        )
    return Panel(title, "", [cell.title for cell in cells], made)


def all_views(
    cells: Sequence[Cell], rows: Sequence[Row], paper: Mapping[str, Sequence[Reported | None]]
) -> list[Panel]:
    """Return four tables with a line for each row: seen and unseen clients, with and without label masking.

    The paper's figures are in the table of seen clients with masking, because the paper's ablations report these.
    """
    return [
        panel(
            f"{group.capitalize()} clients, {'with' if measure == 'masked' else 'without'} label masking",
            cells,
            {row.name: Point(row.name, cells[0], group, measure) for row in rows},
            paper if (group, measure) == ("seen", "masked") else None,
            rows,
        )
        for group in ("seen", "unseen")
        for measure in ("masked", "per_sample")
    ]
