"""All statements of the paper about its figures, on one page, with what our results say of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pefll.core.files import make_folder, write_whole
from pefll.experiments import table1
from pefll.experiments.evidence import Evidence
from pefll.experiments.experiment import CIFAR10, CIFAR100, FEMNIST, Compared, Experiment, Point, Statement
from pefll.experiments.pages import markdown_table, overall, verdict_lines

PLACE = "tab:results"
SMALL = 5.0  # percentage points: the paper calls differences up to this small (CIFAR-100, n=500)
_CELLS = (*CIFAR10, *CIFAR100, *FEMNIST)
_GROUPS = ("seen", "unseen")
_ALMOST_ALL = [cell for cell in _CELLS if (cell.data, cell.clients) != ("cifar100", 100)]
_BASELINES = [row for row in table1.ROWS if row.name not in table1.OURS]
_TRAINED_ON_CLIENTS = ("per-fedavg", "pfedme", "fedrep")


def _falls(row: str, cells: Sequence[table1.Cell], **limits: float | None) -> list[Compared]:
    """Return how accuracy changes from the first of the cells to the last, for seen and unseen clients."""
    return [Compared(Point(row, cells[-1], group), Point(row, cells[0], group), **limits) for group in _GROUPS]


def _table1() -> Experiment:
    """Return Table 1 as an experiment with the paper's statements about it."""
    fewer: dict[str, float | None] = {"least": None, "most": 0.0}
    stable: dict[str, float | None] = {"least": -SMALL, "most": None}
    statements = (
        Statement(
            "In all settings, except CIFAR-100 with 100 clients, PeFLL is more accurate than the other methods",
            PLACE,
            [
                Compared(Point("pefll", cell, group), Point(row.name, cell, group))
                for cell in _ALMOST_ALL
                for group in _GROUPS
                for row in _BASELINES
            ],
        ),
        Statement(
            f"PeFLL is almost as accurate on unseen as on seen clients (at most {SMALL:g} points less)",
            PLACE,
            [Compared(Point("pefll", cell, "unseen"), Point("pefll", cell, "seen"), **stable) for cell in _ALMOST_ALL],
        ),
        *(
            Statement(
                f"{table1.TITLES[row]} is less accurate with 1,000 clients, which have fewer samples, than with 100",
                "sec:experiments",
                [one for cells in (CIFAR10, CIFAR100) for one in _falls(row, cells, **fewer)],
            )
            for row in ("pfedhn", *_TRAINED_ON_CLIENTS, "knn-per")
        ),
        Statement(
            f"PeFLL stays as accurate with 1,000 clients as with 100 (at most {SMALL:g} points less)",
            "sec:experiments",
            [one for cells in (CIFAR10, CIFAR100) for one in _falls("pefll", cells, **stable)],
        ),
    )
    about = "The paper's FEMNIST has 3,597 writers; ours is a subset of 328."
    rows = [row for row in table1.ROWS if row in _BASELINES or row.name == "pefll"]  # the others are not in the paper
    return Experiment("table1", "Table 1", about, table1.CELLS, rows, statements=statements)


TABLE1 = _table1()


def write_page(evidences: Sequence[Evidence], folder: Path) -> Path:
    """Write the verdicts on all statements as Markdown into a folder, and return the file's path."""
    make_folder(folder)
    path = folder / "statements.md"
    write_whole(path, markdown(evidences).encode())
    return path


def markdown(evidences: Sequence[Evidence]) -> str:
    """Return the page: a table of the statements with one verdict each, then the figures of each experiment."""
    body, details = [], []
    for evidence in evidences:
        experiment = evidence.experiment
        if experiment.question != Experiment.question:
            continue  # its statements are not the paper's
        verdicts = evidence.verdicts()
        for text, place in dict.fromkeys((one.text, one.place) for one in verdicts):
            own = [one for one in verdicts if (one.text, one.place) == (text, place)]
            words = text.replace("|", r"\|")  # a bar would end the cell
            body.append([words, f"`{place}`", overall(own), f"`pefll reproduce {experiment.name}`"])
        if verdicts:
            about = [experiment.about, ""] if experiment is TABLE1 else []  # the other pages say it themselves
            details += ["", f"## {experiment.title}", "", *about, *verdict_lines(verdicts)]
    lines = [
        "# What the paper says, and what our results say",
        "",
        "    pefll reproduce --missing --tables-only",
        "",
        "Each line is a statement of the paper about its figures. It holds if it holds in all places: federations, "
        "groups of clients, or methods. The command trains what is missing of its runs.",
        "",
        *markdown_table(["the paper says", "where", "our results", "command"], body),
        *details,
    ]
    return "\n".join(lines) + "\n"
