"""GPU minutes of the paper's experiments: those of finished runs, and an estimate for missing runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from pefll.core.files import make_folder, write_whole
from pefll.experiments.jobs import is_same_run
from pefll.experiments.pages import markdown_table
from pefll.experiments.reproduce import SeedBatch, TableStatus
from pefll.experiments.results import Result
from pefll.experiments.table1 import Job
from pefll.experiments.timing import gpu_seconds, read_trials

_HEADINGS = ("experiment", "runs done", "GPU minutes", "runs missing", "GPU minutes left")
SEARCHES = "searches"
ALL = "all"


class Work(NamedTuple):
    """The runs of an experiment. A run that serves several experiments counts for the first of them only.

    Attributes:
        name: of the experiment.
        done: number of finished runs.
        seconds: GPU seconds of the finished runs; runs that shared a GPU divide its time among them.
        missing: number of missing runs.
        left: estimated GPU seconds of the missing runs.
    """

    name: str
    done: int
    seconds: float
    missing: int = 0
    left: float = 0.0

    @property
    def words(self) -> tuple[str, ...]:
        """The work as a row of a table."""
        return self.name, str(self.done), f"{self.seconds / 60:.1f}", str(self.missing), f"{self.left / 60:.1f}"


def work_of(
    statuses: Mapping[str, TableStatus], results: Path, batches_of: Callable[[TableStatus], Sequence[SeedBatch]]
) -> list[Work]:
    """Return the work of each experiment, then that of the searches, then the sum.

    Args:
        statuses: the status of each experiment, by name.
        results: the folder of results, with the searches in `tune`.
        batches_of: returns the missing runs of a status as batches with estimated times.
    """
    counted: dict[Any, Result] = {}
    listed: list[Job] = []
    works = []
    for name, status in statuses.items():
        found = {_key(one): one for ones in status.found.values() for one in ones}
        new = {key: one for key, one in found.items() if key not in counted}
        missing = [job for job in status.missing if not any(is_same_run(job, other) for other in listed)]
        counted |= new
        listed += missing
        left = sum(batch.seconds for batch in batches_of(status._replace(missing=missing)))
        trained = sum("evaluation" not in one for one in new.values())  # the others are evaluations of trained runs
        works.append(Work(name, trained, sum(map(gpu_seconds, new.values())), len(missing), left))
    trials = read_trials(results / "tune")
    works.append(Work(SEARCHES, len(trials), sum(map(gpu_seconds, trials))))
    return [*works, Work(ALL, *(sum(column) for column in list(zip(*works, strict=True))[1:]))]


def _key(result: Result) -> Any:
    """Return what tells a result from others; every status has read its own copy."""
    return result["command"], result["seed"], result["finished"], result.get("evaluation")


def summary_table(works: Sequence[Work]) -> Table:
    """Return the work as a table for the screen."""
    table = Table(*_HEADINGS)
    for work in works:
        table.add_row(*work.words, style="bold" if work.name == ALL else "")
    return table


def write_page(works: Sequence[Work], folder: Path) -> Path:
    """Write the work as Markdown into a folder, and return the file's path."""
    make_folder(folder)
    lines = [
        "# GPU minutes",
        "",
        "    pefll reproduce --missing --tables-only",
        "",
        "GPU minutes of finished runs, and an estimate for the missing runs. Runs that shared a GPU divide its time "
        "among them. A run that serves several experiments counts for the first of them. Runs that were replaced later "
        "(`results/exploration`) and measurements of speed are not counted.",
        "",
        *markdown_table(_HEADINGS, [work.words for work in works]),
    ]
    path = folder / "gpu_minutes.md"
    write_whole(path, ("\n".join(lines) + "\n").encode())
    return path
