"""Trains the missing runs of the paper's tables and figures in batches, and writes each result when its run ends."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from pefll.core.errors import Diverged, PefllError, unknown
from pefll.core.progress import say
from pefll.core.signals import TIME_IS_UP, Stopped
from pefll.core.wording import argument, counted
from pefll.data import Federation
from pefll.experiments import table1
from pefll.experiments.comparison import Comparison, Found, compare
from pefll.experiments.evidence import Evidence
from pefll.experiments.experiment import Experiment, Row
from pefll.experiments.results import Result, collect, read_results
from pefll.experiments.table1 import Cell, Job
from pefll.experiments.timing import Speed, estimate, has_rounds, read_trials, speeds
from pefll.experiments.tune import chunks, delete_checkpoints, in_words, raise_first, tuned_settings
from pefll.methods import METHODS, hyperparameters, typed_settings
from pefll.report.table import duration, new_table
from pefll.runs.config import Config
from pefll.runs.federations import federations_of
from pefll.runs.record import RunFolder, seed_folder
from pefll.training import fitting, run
from pefll.training.resolve import RunSpec, resolve

Federations = dict[tuple[str, int], Federation]  # (cell's name, seed) -> federation


class TableStatus(NamedTuple):
    """All runs of an experiment, and which of them are done.

    Attributes:
        jobs: all runs.
        missing: requested runs without a result.
        found: existing results of all seeds.
        speeds: speeds of earlier runs on a GPU, for time estimates.
        rounds: number of training rounds.
        left_out: "method/cell" -> number of results that are ignored, because their settings differ from the chosen
            ones. Methods with a matching result are not listed.
        name: name of the experiment.
    """

    jobs: list[Job]
    missing: list[Job]
    found: Found
    speeds: list[Speed]
    rounds: int
    left_out: dict[str, int]
    name: str = "table1"

    def comparison(self) -> Comparison:
        """Return Table 1 from the results so far."""
        return compare(self.found, table1.CELLS, self.rounds, table1.SEEDS)

    def evidence(self, experiment: Experiment) -> Evidence:
        """Return the evidence for an experiment's statements."""
        return Evidence(experiment, self.found, table1.SEEDS, self.rounds)


def _table1() -> Experiment:
    rows = [Row(method, method) for method in table1.ROWS if method in METHODS]
    return Experiment("table1", "Table 1", "", table1.CELLS, rows)


def read_status(
    results: Path, seeds: Sequence[int], rounds: int, only: str | None = None, experiment: Experiment | None = None
) -> TableStatus:
    """Return which results of an experiment exist, and which runs are missing.

    Args:
        results: folder of results; its subfolder `tune` has tuned hyper-parameters.
        seeds: seeds of the requested runs.
        rounds: number of rounds of each run.
        only: names of methods, cells (cifar10-100) or data sets, separated by commas or slashes. Only their runs are
            requested. None for all.
        experiment: the experiment; None for Table 1.
    """
    whole = experiment is None or experiment.name == "table1"
    experiment = experiment or _table1()
    names, cells = parse_only(only) if whole else parse_only(only, experiment)
    have = read_results(results) if results.is_dir() else []
    # If a run exists in several precisions, use tf32, the default of a GPU.
    have.sort(key=lambda result: result.get("precision") != "tf32")
    jobs: list[Job] = []
    missing: list[Job] = []
    found: Found = {}
    left_out: dict[str, int] = {}
    for cell in experiment.cells:
        for row in experiment.rows:
            if row.method not in METHODS or row.data not in ("", cell.data):
                continue
            wanted = _jobs(row, cell, seeds, results / "tune", experiment)
            by_seed: dict[int, Result] = {}
            for result in have:
                if _is_of(result, wanted[0], rounds):
                    by_seed.setdefault(result["seed"], result)
            found[row.name, cell.name] = [by_seed[seed] for seed in sorted(by_seed)]
            others = [result for result in have if whole and not by_seed and _is_in(result, wanted[0], rounds)]
            if others:
                left_out[f"{row.name}/{cell.name}"] = len(others)
            jobs += wanted
            if row.name in names and cell.name in cells:
                missing += [job for job in wanted if job.seed not in by_seed]
    known = speeds([*have, *read_trials(results / "tune")])
    return TableStatus(jobs, missing, found, known, rounds, left_out, experiment.name)


def parse_only(words: str | None, experiment: Experiment | None = None) -> tuple[set[str], set[str]]:
    """Return the names of the rows and of the cells in --only; all rows if it has no row, all cells if it has no cell.

    Args:
        words: argument `only` of `read_status`; a method means all rows of this method.
        experiment: experiment of these rows and cells; None for Table 1, whose rows are methods.

    Raises:
        PefllError: for unknown words, or an empty list.
    """
    every = table1.CELLS if experiment is None else experiment.cells
    names = {cell.name: {cell.name} for cell in every}
    for cell in every:
        names.setdefault(cell.data, set()).add(cell.name)
    rows: dict[str, set[str]] = {}
    for row in experiment.rows if experiment else [Row(method, method) for method in METHODS]:
        rows.setdefault(row.method, set()).add(row.name)
    rows |= {name: {name} for found in list(rows.values()) for name in found}
    listed = [word for word in re.split(r"[,/\s]+", words or "") if word]
    if words is not None and not listed:
        raise PefllError(
            f"{argument('only')} is empty; give methods, cells or data sets, such as pefll,cifar10-100, or leave it "
            "out to run all",
            code="PEFLL-X006",
        )
    wanted, cells = set(), set()
    for word in listed:
        if word in rows:
            wanted |= rows[word]
        elif word in names:
            cells |= names[word]
        else:
            raise unknown("method or cell", word, [*rows, *names])
    return wanted or set.union(*rows.values()), cells or {cell.name for cell in every}


def _jobs(row: Row, cell: Cell, seeds: Sequence[int], tuned: Path, experiment: Experiment) -> list[Job]:
    found = tuned_settings(row.method, cell.data, cell.clients, tuned)
    settings = typed_settings(row.method, table1.recipe(row.method, cell) | found.settings | dict(row.settings))
    source = f"{found.source}, {row.name}" if row.settings else found.source
    measures = () if experiment.measure is None else (experiment.measure,)
    return [Job(row.method, cell, seed, settings, source, measures) for seed in seeds]


def _is_of(result: Result, job: Job, rounds: int) -> bool:
    """Return whether a result has a job's method, cell, settings and measures; its seed may differ."""
    if not _is_in(result, job, rounds):
        return False
    if not all(measure.name in result.get("measured", {}) for measure in job.measures):
        return False
    defaults = hyperparameters(job.method)
    # Older results lack newer hyper-parameters, which then have their defaults.
    return bool(defaults | result["settings"] == defaults | job.settings)


def _is_in(result: Result, job: Job, rounds: int) -> bool:
    """Return whether a result has a job's method and cell; its settings may differ."""
    cell = job.cell
    facts = {
        "method": job.method,
        "dataset": cell.data,
        "num_clients": cell.clients,
        "partition": cell.partition,
        "rounds": rounds if has_rounds(job.method) else 0,
        "clients_per_round": cell.cohort,
    }
    if any(result.get(name) != value for name, value in facts.items()):
        return False
    unseen: float = result["num_unseen"] / result["num_clients"]
    return result["model"] in (cell.model, "auto") and round(10 * unseen) == 1


# The order of the runs, and the time budget.


class SeedBatch(NamedTuple):
    """Runs of one method in one cell that train as one batch; they differ in seed or settings.

    Attributes:
        jobs: the runs.
        each: estimated device seconds per run.
        basis: text that says what the estimate is based on.
    """

    jobs: Sequence[Job]
    each: float
    basis: str

    @property
    def seconds(self) -> float:
        """Estimated device seconds of all runs."""
        return len(self.jobs) * self.each

    def cut(self, seconds: float) -> SeedBatch:
        """Return a batch of the first runs, as many as fit into `seconds`; it may be empty."""
        fitting = sum(number * self.each <= seconds for number in range(1, len(self.jobs) + 1))
        return self._replace(jobs=self.jobs[:fitting])


def cheapest_first(status: TableStatus, at_once: int, out: Path) -> list[SeedBatch]:
    """Return the missing runs as batches, the cheapest first.

    Args:
        status: status with the missing runs.
        at_once: number of seeds in a batch.
        out: folder of runs; for a stopped run, only the rounds after its checkpoint are counted.
    """
    groups: dict[tuple[str, str], list[Job]] = {}
    for job in status.missing:
        groups.setdefault((job.cell.name, job.method), []).append(job)
    found = [_batch(part, status, out) for jobs in groups.values() for part in chunks(jobs, at_once)]
    return sorted(found, key=lambda batch: batch.seconds)


def most_valuable_first(status: TableStatus, at_once: int, out: Path) -> list[SeedBatch]:
    """Return the missing runs of several experiments as batches.

    Runs are sorted by clients per round, then seed, then cost. A batch is filled up with the next runs of the same
    method and cell, because a batch trains faster than single runs.

    Args:
        status: status with the missing runs.
        at_once: number of runs in a batch.
        out: folder of runs; for a stopped run, only the rounds after its checkpoint are counted.
    """
    costs = [(job, _batch([job], status, out).each) for job in status.missing]
    waiting = [job for job, _ in sorted(costs, key=lambda one: (one[0].cell.cohort, one[0].seed, one[1]))]
    found = []
    while waiting:
        first = waiting[0]
        kind = (first.method, first.cell, first.measures)
        alike = [job for job in waiting if (job.method, job.cell, job.measures) == kind][:at_once]
        found.append(_batch(alike, status, out))
        waiting = [job for job in waiting if not any(job is taken for taken in alike)]
    return found


def _batch(jobs: Sequence[Job], status: TableStatus, out: Path) -> SeedBatch:
    alone = estimate(jobs[0], status.speeds, status.rounds)
    left = sum(_share_left(RunFolder(_folder(out, job)), status.rounds) for job in jobs) / len(jobs)
    return SeedBatch(jobs, left * alone.seconds, alone.basis)


def joined(statuses: Sequence[TableStatus]) -> TableStatus:
    """Return the missing runs of several experiments as one status, each run once."""
    missing: list[Job] = []
    for job in (job for status in statuses for job in status.missing):
        twin = next((place for place, other in enumerate(missing) if _is_same(job, other)), None)
        if twin is None:
            missing.append(job)
        else:  # two experiments need the same run, so it takes the measurements of both
            both = dict.fromkeys((*missing[twin].measures, *job.measures))
            missing[twin] = missing[twin]._replace(measures=tuple(both))
    return statuses[0]._replace(missing=missing, name="--missing")


def _is_same(job: Job, other: Job) -> bool:
    defaults = hyperparameters(job.method) if job.method == other.method else {}
    return (job.method, job.cell, job.seed, defaults | job.settings) == (
        *(other.method, other.cell, other.seed),
        defaults | other.settings,
    )


def _share_left(folder: RunFolder, rounds: int) -> float:
    """Return the fraction of a run that is still to do; at least 2%, because the final test takes time."""
    done = [int(path.name.removeprefix("round-")) for path in folder.checkpoints.glob("round-" + 8 * "[0-9]")]
    return max(0.02, 1 - max(done, default=0) / max(rounds, 1))


def missing_table(status: TableStatus, queue: Sequence[SeedBatch], budget: float | None = None) -> Table:
    """Return a table of the missing runs in order, with their estimated GPU time.

    Args:
        status: status with the missing runs and the number of rounds.
        queue: the missing runs, in order.
        budget: time budget in seconds; runs that do not fit are listed last. None for no limit.
    """
    missing = len(status.missing)
    table = new_table(
        f"{counted(missing, 'run')} {'is' if missing == 1 else 'are'} missing, {counted(status.rounds, 'round')} each"
    )
    wide = ("settings", "steps/s")
    for heading in ("cell", "method", "seeds", "settings", "GPU time", "steps/s"):
        table.add_column(
            heading, justify="right" if heading == "GPU time" else "left", no_wrap=heading not in wide, overflow="fold"
        )
    left = math.inf if budget is None else budget
    fitting, others = [], []
    for batch in queue:
        fits = batch.cut(left)
        left -= fits.seconds
        fitting.append(fits)
        others.append(batch._replace(jobs=batch.jobs[len(fits.jobs) :]))
    _add_rows(table, fitting, "")
    if budget is not None:
        runs, end = sum(len(batch.jobs) for batch in fitting), f"of {duration(budget)}"
        table.add_row("in budget", "", str(runs), "", duration(budget - left), end, style="bold")
        _add_rows(table, others, "dim")
    total = sum(batch.seconds for batch in queue)
    table.add_row("all", "", str(len(status.missing)), "", duration(total), "", style="bold")
    return table


def _add_rows(table: Table, queue: Sequence[SeedBatch], style: str) -> None:
    for batch in queue:
        same: dict[str, list[Job]] = {}
        for job in batch.jobs:
            same.setdefault(f"{job.source}: {in_words(job.settings)}" if job.settings else job.source, []).append(job)
        for settings, jobs in same.items():
            job, seeds = jobs[0], ",".join(str(job.seed) for job in jobs)
            words = (job.cell.name, job.method, seeds, settings, duration(len(jobs) * batch.each), batch.basis)
            table.add_row(*words, style=style)


# Training.

Scheduler = Callable[[TableStatus, int, Path], list[SeedBatch]]


def run_missing(
    status: TableStatus,
    results: Path,
    out: Path,
    data_dir: Path,
    at_once: int,
    console: Console,
    budget: float | None = None,
    scheduler: Scheduler = cheapest_first,
    keep_weights: bool = True,
    **changes: Any,
) -> list[str]:
    """Train the missing runs, and write each result when its run ends.

    Args:
        status: status with the missing runs.
        results: folder of results.
        out: folder for runs; stopped runs in it are resumed.
        data_dir: folder of data sets.
        at_once: number of seeds of a method in a cell that share the device.
        console: console for progress.
        budget: time budget in seconds from now. Runs that do not fit are skipped. A run that still trains at the
            deadline is stopped with a checkpoint. None for no limit.
        scheduler: function that makes the queue of batches; `cheapest_first` or `most_valuable_first`.
        keep_weights: whether ended runs keep their checkpoints, about 600 MB each.
        changes: other fields of `Config`, such as device or eval_every.

    Returns:
        A sentence for each run that diverged.

    Raises:
        Stopped: after Ctrl-C, SIGTERM or the end of the terminal. Each run has then written a checkpoint.
    """
    ends = math.inf if budget is None else time.monotonic() + budget
    failures: list[str] = []
    federations: Federations = {}
    made: list[Result] = []

    def keep(spec: RunSpec, ended: run.Run, measured: dict[str, Any] | None = None) -> None:
        assert spec.folder is not None
        path = collect(spec.folder, results, measured)
        made.append(ended.summary)
        say(console, f"wrote {path}: {len(made)} of {len(status.missing)} runs done")

    pending = status
    while pending.missing:
        queue = scheduler(pending, at_once, out)
        jobs = next((fits for batch in queue if (fits := batch.cut(ends - time.monotonic()).jobs)), ())
        if not jobs:
            left = counted(len(pending.missing), "run")
            say(
                console,
                f"the budget does not cover the other {left}; see `pefll reproduce {status.name} --dry-run`",
            )
            break
        specs = list(_specs(jobs, status.rounds, out, data_dir, console, federations, changes))
        seconds = None if budget is None else ends - time.monotonic()
        measures = jobs[0].measures
        observers = [callback for measure in measures for callback in measure.callbacks()]
        at_end = None if measures else keep
        outcomes = fitting.train_all(specs, console=console, ended=at_end, seconds=seconds, callbacks=observers)
        for spec, outcome in zip(specs, outcomes, strict=True):
            assert spec.folder is not None
            if isinstance(outcome, Diverged):
                failures.append(f"{spec.title}: {outcome}")
            elif measures and isinstance(outcome, run.Run):
                # Measuring needs the device, so it waits until all runs of the batch have ended.
                keep(spec, outcome, {measure.name: measure.of(outcome, spec.folder.path) for measure in measures})
        if not keep_weights:
            delete_checkpoints(specs, outcomes)
        if any(isinstance(outcome, Stopped) and outcome.signal == TIME_IS_UP for outcome in outcomes):
            say(console, f"the budget is used up; run the same command to resume from {out}")
            break
        raise_first(outcomes)
        # The speeds of these runs improve the time estimates for the others.
        rest = [job for job in pending.missing if job not in jobs]
        pending = status._replace(missing=rest, speeds=[*status.speeds, *speeds(made)])
    return failures


def _specs(
    jobs: Sequence[Job],
    rounds: int,
    out: Path,
    data_dir: Path,
    console: Console,
    federations: Federations,
    changes: dict[str, Any],
) -> Iterator[RunSpec]:
    """Yield a spec for each job. `federations` is a cache, to which new federations are added."""
    configs = [
        Config(
            method=job.method,
            settings=job.settings,
            data=job.cell.data,
            data_dir=str(data_dir),
            partition=job.cell.partition,
            clients=job.cell.clients,
            model=job.cell.model,
            rounds=rounds,
            clients_per_round=job.cell.clients_per_round,
            seed=job.seed,
            **(changes | {key: value for measure in job.measures for key, value in measure.config.items()}),
        )
        for job in jobs
    ]
    # Methods in the same cell with the same seed share a federation, because reading and checking it takes time.
    lacking = {
        (job.cell.name, job.seed): config
        for job, config in zip(jobs, configs, strict=True)
        if (job.cell.name, job.seed) not in federations
    }
    federations.update(zip(lacking, federations_of(list(lacking.values()), console), strict=True))
    for job, config in zip(jobs, configs, strict=True):
        label = f"{job.cell.name} {job.method} seed {job.seed}"
        data = federations[job.cell.name, job.seed]
        yield resolve(config, data, _folder(out, job), runs=len(jobs), label=label)


def _folder(out: Path, job: Job) -> Path:
    """Return a run's folder. Its name contains the hyper-parameters, so that different runs have different folders.

    A run with callbacks and the same run without them have different folders, too.
    """
    tag = "".join(f"-{name}_{value}" for name, value in job.settings.items())
    tag += "-watched" if any(measure.callbacks() for measure in job.measures) else ""
    return seed_folder(out / f"{job.cell.name}-{job.method}{tag}", job.seed)
