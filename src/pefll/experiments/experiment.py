"""What an experiment declares: its runs, its tables beside the paper's, and the paper's statements about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pefll.experiments import table1
from pefll.experiments.table1 import Cell, Measure

if TYPE_CHECKING:
    from pefll.experiments.evidence import Evidence, Verdict

Reported = tuple[float, float]  # the paper's mean and standard deviation, in per cent
CIFAR10, CIFAR100, FEMNIST = table1.CELLS[:3], table1.CELLS[3:6], table1.CELLS[6:7]


class Row(NamedTuple):
    """A method with some settings, run in each cell of an experiment."""

    name: str  # on the command line, and in tables
    method: str = "pefll"
    settings: Mapping[str, Any] = {}  # other than those of Table 1 in the same cell
    data: str = ""  # the only data set that it is run on; "" for all


class Point(NamedTuple):
    """One mean of a table, and the paper's."""

    row: str
    cell: Cell
    group: str = "seen"
    measure: str = "per_sample"  # a field of `pefll.Accuracy`
    paper: Reported | None = None


class Panel(NamedTuple):
    """One table; a line has a title and a point for each column, or None for an empty place."""

    title: str
    corner: str
    columns: Sequence[str]
    lines: Sequence[tuple[str, Sequence[Point | None]]]


class Compared(NamedTuple):
    """Two points of a statement: how far is the first one ahead of the second?

    Attributes:
        first: of which more is said.
        second: what it is compared with.
        least: the percentage points that the first must be ahead by, at least; None for no limit.
        most: the percentage points that it may be ahead by, at most; None for no limit.
    """

    first: Point
    second: Point
    least: float | None = 0.0
    most: float | None = None


class Statement(NamedTuple):
    """Something that the paper says about its figures."""

    text: str
    place: str  # label in the paper's source
    compared: Sequence[Compared]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Attributes:
        name: on the command line.
        title: for readers.
        about: what was done, in Markdown; also where it departs from the paper.
        cells: federations.
        rows: what is run in each of them.
        panels: tables of accuracies.
        statements: what the paper says about them.
        measure: what is measured of each run beyond its accuracies.
        sections: makes more Markdown from results.
        judge: makes more verdicts from results.
        draw: draws into a folder, and returns the files.
        stem: of the files that are written; "" for the name.
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

    @property
    def file_stem(self) -> str:
        """The name of its files without their endings."""
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
        title: of the table.
        cells: its columns.
        lines: a point for each line, by title; its cell is that of the column.
        paper: the paper's figures for each line, in the order of the cells; a missing place is None.
        rows: of the experiment; a line whose row is not run on a cell's data is empty there.
    """
    only = {row.name: row.data for row in rows}
    made = []
    for heading, point in lines.items():
        figures = (paper or {}).get(heading, [None] * len(cells))
        made.append(
            (
                heading,
                [
                    point._replace(cell=cell, paper=figure) if only.get(point.row, "") in ("", cell.data) else None
                    for cell, figure in zip(cells, figures, strict=True)
                ],
            )
        )
    return Panel(title, "", [cell.title for cell in cells], made)


def all_views(
    cells: Sequence[Cell], rows: Sequence[Row], paper: Mapping[str, Sequence[Reported | None]]
) -> list[Panel]:
    """Return four tables with a line for each row: seen and unseen clients, with and without label masking.

    The paper's figures stand beside seen clients with masking, which is what its ablations report.
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
