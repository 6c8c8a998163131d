"""The list of missing runs that `pefll reproduce --dry-run` prints: what they are for, and their time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from pefll.core.wording import counted
from pefll.experiments.reproduce import SeedBatch, TableStatus
from pefll.experiments.table1 import Job
from pefll.experiments.trials import in_words
from pefll.report.table import duration

_HEADINGS = ("GPU time", "cell", "method", "seeds")


class Line(NamedTuple):
    """Runs that differ only by seed: a cell for each heading, and a sentence with everything else."""

    cells: tuple[str, str, str, str]
    details: str


def missing_runs(status: TableStatus, queue: Sequence[SeedBatch], budget: float | None = None) -> Group:
    """Return a list of the missing runs in order, with their estimated GPU time; it fits into 80 columns.

    Args:
        status: has the number of missing runs and of rounds.
        queue: the missing runs, in order.
        budget: time budget in seconds; runs over budget are listed last. None for no limit.
    """
    left = math.inf if budget is None else budget
    fitting, others = [], []
    for batch in queue:
        fits = batch.cut(left)
        left -= fits.seconds
        fitting.append(fits)
        others.append(batch._replace(jobs=batch.jobs[len(fits.jobs) :]))
    every = [_lines(fitting), _lines(others)]
    table = [_HEADINGS, *(line.cells for part in every for line in part)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    parts: list[RenderableType] = [Text(_title(status), style="italic")]
    if status.missing:
        parts.append(Text(_aligned(_HEADINGS, widths), style="bold"))
    parts += _shown(every[0], widths, "")
    if budget is not None:
        number = sum(len(batch.jobs) for batch in fitting)
        words = f"in budget: {counted(number, 'run')}, {duration(budget - left)} of {duration(budget)}"
        parts += [Text(words, style="bold"), *_shown(every[1], widths, "dim")]
    total = duration(sum(batch.seconds for batch in queue))
    parts.append(Text(f"all: {counted(len(status.missing), 'run')}, {total}", style="bold"))
    return Group(*parts)


def _title(status: TableStatus) -> str:
    missing = len(status.missing)
    fewer = any(job.cell.rounds_of(status.rounds) < status.rounds for job in status.missing)
    rounds = f"{'at most ' if fewer else ''}{counted(status.rounds, 'round')} each"
    return f"{counted(missing, 'run')} {'is' if missing == 1 else 'are'} missing, {rounds}"


def _lines(queue: Sequence[SeedBatch]) -> list[Line]:
    lines = []
    for batch in queue:
        same: dict[str, list[Job]] = {}
        for job in batch.jobs:
            same.setdefault(_details(job), []).append(job)
        for details, jobs in same.items():
            seeds = ",".join(str(job.seed) for job in jobs)
            cells = (duration(len(jobs) * batch.each), jobs[0].cell.name, jobs[0].method, seeds)
            lines.append(Line(cells, f"{details}; steps/s: {batch.basis}"))
    return lines


def _details(job: Job) -> str:
    """Return what a run is for, and its settings."""
    settings = f"{job.source}: {in_words(job.settings)}" if job.settings else job.source
    later = "".join(f"; evaluated with {in_words(one)}" for one in job.evaluations if one)
    return f"for {', '.join(job.experiments)}; {settings}{later}"


def _shown(lines: Sequence[Line], widths: Sequence[int], style: str) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for line in lines:
        parts.append(Text(_aligned(line.cells, widths), style=style))
        parts.append(
            Padding(Text(line.details, style="dim", overflow="fold", no_wrap=False), (0, 0, 0, 4), expand=False)
        )
    return parts


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].rjust(widths[0])
    rest = (cell.ljust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join((first, *rest)).rstrip()
