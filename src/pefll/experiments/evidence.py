"""Means over seeds, differences with intervals, and verdicts on the paper's statements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pefll.experiments.comparison import Entry, Found
from pefll.experiments.diverged import DivergedRuns
from pefll.experiments.experiment import Compared, Experiment, Point, Statement
from pefll.experiments.results import Result
from pefll.report import mean_and_std
from pefll.report.significance import Pair, paired_bootstrap

HOLDS, FAILS, OPEN, NOTHING = "holds", "does not hold", "not decided", "no results yet"
# Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom; the last one also serves for more.
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
_COUNTS = {"per_sample": "correct", "masked": "masked"}  # measure -> name of its counts per client in a result


class Gap(NamedTuple):
    """How far one point is ahead of another, in percentage points."""

    points: float
    low: float | None  # lower end of the 95% interval; None for one seed
    high: float | None  # upper end
    basis: str  # what the interval was computed over: clients, seeds, or "" without an interval
    seeds: int  # number of seeds

    @property
    def interval(self) -> str:
        """The interval as text."""
        if self.low is None or self.high is None:
            return "one seed"
        return f"{signed(self.low)} to {signed(self.high)} ({self.basis})"


class Verdict(NamedTuple):
    """Whether a statement of the paper holds in one comparison."""

    text: str
    place: str  # label of the statement's figure, table or section in the paper
    where: str  # the federation, and what was compared
    figure: str
    interval: str
    word: str  # HOLDS, FAILS, OPEN or NOTHING


class Evidence:
    """The results of an experiment.

    A cell has the wanted seeds, and each other seed that all its rows have.

    Args:
        experiment: the experiment.
        found: all results, by row and cell.
        seeds: the wanted seeds.
        rounds: of training.
        diverged: runs that diverged.
    """

    def __init__(
        self,
        experiment: Experiment,
        found: Found,
        seeds: Sequence[int],
        rounds: int,
        diverged: DivergedRuns | None = None,
    ) -> None:
        self.experiment, self.rounds, self.diverged = experiment, rounds, diverged or {}
        self._results: Found = {}
        self.wanted: dict[str, int] = {}
        for cell in experiment.cells:
            every = {row.name: found.get((row.name, cell.name), []) for row in experiment.rows}
            here = [row for row in experiment.rows if row.runs_in(cell)]
            kept = set(seeds).union(set.intersection(*({one["seed"] for one in every[row.name]} for row in here)))
            self.wanted[cell.name] = len(set().union(*(kept.intersection(row.seeds or kept) for row in here)))
            for name, results in every.items():
                self._results[name, cell.name] = [one for one in results if one["seed"] in kept]

    def results(self, row: str, cell: str) -> list[Result]:
        """Return the results of a row in a cell, sorted by seed."""
        return self._results.get((row, cell), [])

    def values(self, point: Point) -> dict[int, float]:
        """Return the test accuracies of a point in per cent, by seed."""
        scores = {one["seed"]: one["accuracy"]["best"][point.group] for one in self.results(point.row, point.cell.name)}
        return {seed: 100 * score[point.measure] for seed, score in scores.items() if score}

    def entry(self, point: Point) -> Entry:
        """Return the mean of a point, with the paper's mean."""
        values = list(self.values(point).values())
        mean, std = mean_and_std(values) if values else (None, None)
        row = next(row for row in self.experiment.rows if row.name == point.row)
        wanted = len(row.seeds) or self.wanted[point.cell.name]
        return Entry(point.group, point.row, point.cell, mean, std, len(values), wanted, point.paper, best=False)

    def gap(self, first: Point, second: Point) -> Gap | None:
        """Return how far one point is ahead of another, over the seeds that both have; None without common seeds.

        If all results have counts for the same clients, the interval is from a paired bootstrap over clients. Otherwise
        it is Student's interval over the seeds' differences.
        """
        mine, theirs = self.values(first), self.values(second)
        seeds = sorted(mine.keys() & theirs.keys())
        if not seeds:
            return None
        pairs = [pair for seed in seeds if (pair := self._pair(first, second, seed)) is not None]
        if len(pairs) == len(seeds):
            tested = paired_bootstrap(pairs)
            return Gap(tested.points, tested.low, tested.high, "clients", len(seeds))
        return gap_over_seeds([mine[seed] - theirs[seed] for seed in seeds])

    def _pair(self, first: Point, second: Point, seed: int) -> Pair | None:
        one, other = (
            next(one for one in self.results(point.row, point.cell.name) if one["seed"] == seed)
            for point in (first, second)
        )
        same_clients = (first.group, first.cell) == (second.group, second.cell)
        if not same_clients or one.get("data_sha256") != other.get("data_sha256"):
            return None
        counts = [(result.get("client_counts") or {}).get(first.group) or {} for result in (one, other)]
        names = [_COUNTS.get(point.measure, "") for point in (first, second)]
        if not all(name in count for name, count in zip(names, counts, strict=True)) or not sum(counts[0]["samples"]):
            return None
        parts = (counts[0]["samples"], counts[0][names[0]], counts[1][names[1]])
        return Pair(*(np.array(part, dtype=np.int64) for part in parts))

    def verdicts(self) -> list[Verdict]:
        """Return a verdict for each comparison of each statement."""
        more = self.experiment.judge(self) if self.experiment.judge else []
        found = [
            self._judge(statement, pair) for statement in self.experiment.statements for pair in statement.compared
        ]
        return [*found, *more]

    def _judge(self, statement: Statement, pair: Compared) -> Verdict:
        where = _where(pair)
        gap = self.gap(pair.first, pair.second)
        if gap is None:
            return Verdict(statement.text, statement.place, where, "", "", NOTHING)
        word = judged(gap, pair.least, pair.most)
        return Verdict(statement.text, statement.place, where, signed(gap.points), gap.interval, word)


def signed(value: float) -> str:
    """Return a number with its sign and one decimal place; zero is +0.0."""
    return f"{round(value, 1) + 0.0:+.1f}"


def gap_over_seeds(differences: Sequence[float]) -> Gap:
    """Return the mean of the seeds' differences, with Student's interval."""
    mean, std = mean_and_std(differences)
    n = len(differences)
    if std is None:
        return Gap(mean, None, None, "", n)
    half = _T[min(n - 1, len(_T)) - 1] * std / math.sqrt(n)
    return Gap(mean, mean - half, mean + half, "seeds", n)


def judged(gap: Gap, least: float | None, most: float | None) -> str:
    """Return whether a gap is within limits: HOLDS, FAILS or OPEN.

    FAILS means that the mean is outside the limits. HOLDS means that the whole interval is inside. Everything else is
    OPEN. With one seed there is no interval, and only the mean decides.
    """
    low, high = (gap.points if end is None else end for end in (gap.low, gap.high))
    if (least is not None and gap.points <= least) or (most is not None and gap.points > most):
        return FAILS
    inside = (least is None or low > least) and (most is None or high <= most)
    return HOLDS if inside else OPEN


def _where(pair: Compared) -> str:
    """Return the federation and what is compared there, or both federations."""
    first, second = _point_words(pair.first), _point_words(pair.second)
    if pair.first.cell == pair.second.cell:
        return f"{pair.first.cell.title}: {first} − {second}"
    return f"{first}: {pair.first.cell.title} − {pair.second.cell.title}"


def _point_words(point: Point) -> str:
    masked = " with mask" if point.measure == "masked" else ""
    return f"{point.row}{masked} ({point.group})"
