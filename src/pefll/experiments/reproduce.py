"""Trains the missing runs of the paper's tables and figures in batches, and writes each result when its run ends."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from pefll.core.errors import Diverged, PefllError, unknown
from pefll.core.progress import say
from pefll.core.signals import TIME_IS_UP, Stopped
from pefll.core.wording import argument, counted
from pefll.data import Federation
from pefll.experiments import table1
from pefll.experiments.comparison import Comparison, Found, compare
from pefll.experiments.diverged import Seeds, diverged_seeds, read_diverged, write_diverged
from pefll.experiments.evidence import Evidence
from pefll.experiments.experiment import Experiment, Row
from pefll.experiments.grid_search import chunks, delete_checkpoints, raise_first
from pefll.experiments.jobs import (
    absent_data,
    absent_data_words,
    evaluated,
    is_in_cell,
    is_result_of,
    merged,
    split_settings,
)
from pefll.experiments.results import Result, collect, read_results
from pefll.experiments.table1 import Cell, Job
from pefll.experiments.timing import EVALUATION_SECONDS, Speed, estimate, read_trials, speeds
from pefll.experiments.trials import tuned_settings
from pefll.methods import METHODS, personal_settings, typed_settings
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
        found: existing results, of all seeds.
        speeds: of earlier runs on a GPU; time estimates are based on them.
        rounds: of training.
        left_out: number of results ignored because their settings differ from the chosen ones, by "method/cell"; only
            where no result matches.
        name: of the experiment.
        diverged: runs that diverged; they are missing only in another precision, if one is asked for.
    """

    jobs: list[Job]
    missing: list[Job]
    found: Found
    speeds: list[Speed]
    rounds: int
    left_out: dict[str, int]
    name: str = "table1"
    diverged: Mapping[str, Seeds] = {}

    def comparison(self) -> Comparison:
        """Return Table 1 from the results so far."""
        return compare(self.found, table1.CELLS, self.rounds, table1.SEEDS)

    def evidence(self, experiment: Experiment) -> Evidence:
        """Return the evidence for an experiment's statements."""
        return Evidence(experiment, self.found, table1.SEEDS, self.rounds, self.diverged)


def _table1() -> Experiment:
    return Experiment("table1", "Table 1", "", table1.CELLS, [row for row in table1.ROWS if row.method in METHODS])


def read_status(
    results: Path,
    seeds: Sequence[int] | None,
    rounds: int,
    only: str | None = None,
    experiment: Experiment | None = None,
    precision: str | None = None,
) -> TableStatus:
    """Return which results of an experiment exist, and which runs are missing.

    Args:
        results: folder of results; its subfolder `tune` has tuned hyper-parameters.
        seeds: seeds of the requested runs; None for those that the experiment needs.
        rounds: number of rounds of each run.
        only: names of methods, cells (cifar10-100) or data sets, separated by commas or slashes. Only their runs are
            requested. None for all.
        experiment: the experiment; None for Table 1.
        precision: only runs that diverged in this precision are not tried again; None for any precision.
    """
    whole = experiment is None or experiment.name == "table1"
    experiment = experiment or _table1()
    names, cells = parse_only(only, experiment)
    have = [one for one in read_results(results) if "accuracy" in one] if results.is_dir() else []
    # If a run exists in several precisions, use tf32, the default of a GPU.
    have.sort(key=lambda result: result.get("precision") != "tf32")
    jobs: list[Job] = []
    missing: list[Job] = []
    found: Found = {}
    left_out: dict[str, int] = {}
    diverged: dict[str, Seeds] = {}
    records = read_diverged(results)
    for cell in experiment.cells:
        for row in experiment.rows:
            if row.method not in METHODS or not row.runs_in(cell):
                continue
            asked = needed_seeds(cell, whole) if seeds is None else seeds
            wanted = _jobs(row, cell, asked, results / "tune", experiment)
            by_seed: dict[int, Result] = {}
            for result in have:
                if is_result_of(result, wanted[0], rounds):
                    by_seed.setdefault(result["seed"], result)
            found[row.name, cell.name] = [by_seed[seed] for seed in sorted(by_seed)]
            others = [result for result in have if whole and not by_seed and is_in_cell(result, wanted[0], rounds)]
            if others:
                left_out[f"{row.name}/{cell.name}"] = len(others)
            jobs += wanted
            seen = diverged_seeds(records, wanted[0], rounds)
            failed = {seed: precisions for seed, precisions in seen.items() if seed not in by_seed}
            if failed:
                diverged[f"{row.name}/{cell.name}"] = failed
            if row.name in names and cell.name in cells:
                closed = {seed for seed, precisions in failed.items() if precision is None or precision in precisions}
                open_seeds = set(row.seeds or asked) - by_seed.keys() - closed
                missing += [job for job in wanted if job.seed in open_seeds]
    known = speeds([*have, *read_trials(results / "tune")])
    return TableStatus(jobs, merged(missing), found, known, rounds, left_out, experiment.name, diverged)


def needed_seeds(cell: Cell, table: bool) -> tuple[int, ...]:
    """Return the seeds that Table 1 (`table`) or another experiment needs in a cell.

    Outside of Table 1 one seed is enough in cells of 500 and 1000 clients: their runs take long, and intervals over so
    many clients are narrow.
    """
    return table1.SEEDS if table or cell.clients <= 100 or cell.partition == "natural" else table1.SEEDS[:1]


def parse_only(words: str | None, experiment: Experiment | None = None) -> tuple[set[str], set[str]]:
    """Return the names of the rows and of the cells in --only; all rows if it has no row, all cells if it has no cell.

    Args:
        words: see `read_status`; a method that is no row's name stands for all its rows.
        experiment: whose rows and cells; None for Table 1.

    Raises:
        PefllError: for unknown words, or an empty list.
    """
    experiment = experiment or _table1()
    every = experiment.cells
    names = {cell.name: {cell.name} for cell in every}
    for cell in every:
        names.setdefault(cell.data, set()).add(cell.name)
    rows: dict[str, set[str]] = {}
    for row in experiment.rows:
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
    # A search may use steps on the device. Only a row decides whether its clients take them.
    steps = personal_settings(row.method)[:1]
    chosen = {name: value for name, value in found.settings.items() if name not in steps}
    settings = typed_settings(row.method, table1.recipe(row.method, cell) | chosen | dict(row.settings))
    training, evaluation = split_settings(row.method, settings)
    source = found.source
    if row.settings and not evaluation:  # a row may choose all that was searched
        source = row.name if chosen.keys() <= row.settings.keys() else f"{source}, {row.name}"
    measures = () if experiment.measure is None else (experiment.measure,)
    job = Job(row.method, cell, 0, training, source, measures, (evaluation,), (experiment.name,))
    return [job._replace(seed=seed) for seed in seeds]


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
    rounds = jobs[0].cell.rounds_of(status.rounds)
    alone = estimate(jobs[0], status.speeds, rounds)
    left = sum(_share_left(RunFolder(_folder(out, job)), rounds) for job in jobs) / len(jobs)
    evaluations = sum(bool(one) for job in jobs for one in job.evaluations) / len(jobs)
    return SeedBatch(jobs, left * alone.seconds + EVALUATION_SECONDS * evaluations, alone.basis)


def joined(statuses: Sequence[TableStatus]) -> TableStatus:
    """Return the missing runs of several experiments as one status, each run once."""
    missing = merged(job for status in statuses for job in status.missing)
    return statuses[0]._replace(missing=missing, name="--missing")


def _share_left(folder: RunFolder, rounds: int) -> float:
    """Return the fraction of a run that is still to do; at least 2%, because the final test takes time."""
    done = [int(path.name.removeprefix("round-")) for path in folder.checkpoints.glob("round-" + 8 * "[0-9]")]
    return max(0.02, 1 - max(done, default=0) / max(rounds, 1))


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

    Runs whose data is absent are left out, with a sentence, if others can start.

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
    wanted: dict[RunSpec, tuple[dict[str, Any], ...]] = {}  # evaluations of each run that is training

    def keep(spec: RunSpec, ended: run.Run, measured: dict[str, Any] | None = None) -> None:
        assert spec.folder is not None
        made.append(ended.summary)
        done = f"{len(made)} of {len(possible or status.missing)} runs done"
        if {} in wanted[spec]:
            done = f"wrote {collect(spec.folder, results, measured)}: {done}"
        say(console, done)

    absent = absent_data(status.missing, data_dir)
    possible = [job for job in status.missing if job.cell.data not in absent]
    if absent and possible:
        say(console, absent_data_words(status.missing, data_dir))
    pending = status._replace(missing=possible or status.missing)
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
        wanted = {spec: job.evaluations for spec, job in zip(specs, jobs, strict=True)}
        seconds = None if budget is None else ends - time.monotonic()
        measures = jobs[0].measures
        observers = [callback for measure in measures for callback in measure.callbacks()]
        at_end = None if measures else keep
        outcomes = fitting.train_all(specs, console=console, ended=at_end, seconds=seconds, callbacks=observers)
        for spec, outcome in zip(specs, outcomes, strict=True):
            assert spec.folder is not None
            if isinstance(outcome, Diverged):
                failures.append(f"{spec.title}: {outcome}")
                say(console, f"wrote {write_diverged(spec, outcome, results)}; delete it to train this run again")
            elif isinstance(outcome, run.Run):
                # Only after all runs of the batch: measuring needs the device.
                if measures:
                    keep(spec, outcome, {measure.name: measure.of(outcome, spec.folder.path) for measure in measures})
                    for measure in measures if {} in wanted[spec] else ():
                        measure.written(spec.folder.path)
                for evaluation in filter(None, wanted[spec]):
                    path = collect(spec.folder, results, evaluated=evaluated(outcome, evaluation, console))
                    say(console, f"wrote {path}")
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
            rounds=job.cell.rounds_of(rounds),
            clients_per_round=job.cell.clients_per_round,
            prior_clients=job.cell.prior_clients,
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
