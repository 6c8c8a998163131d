"""Run what is missing of Table 1, a batch at a time, and keep every result as it comes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from pefll import run
from pefll.config import Config
from pefll.data import Federation
from pefll.errors import Diverged, unknown
from pefll.experiments import table1
from pefll.experiments.comparison import Comparison, Found, Result, compare
from pefll.experiments.results import collect, read_results
from pefll.experiments.table1 import Cell
from pefll.experiments.tune import Settings, batches, chosen, raise_first
from pefll.methods import METHODS, hyperparameters, typed_settings
from pefll.progress import say
from pefll.record import RunFolder, seed_folder
from pefll.report.table import duration

# Where no result tells how fast a GPU is: client steps of LeNet (32 samples) in a second, a careful guess for an H200.
DEFAULT_RATE = 8000.0


class Job(NamedTuple):
    """One run of the table.

    Attributes:
        method: its name.
        cell: its federation.
        seed: of everything random.
        settings: hyper-parameters that are not the method's defaults.
        source: where they are from, in words.
    """

    method: str
    cell: Cell
    seed: int
    settings: Settings
    source: str


class Plan(NamedTuple):
    """All runs of the table, and which of them are done.

    Attributes:
        jobs: everything.
        missing: jobs without a result, of those that were asked for.
        found: the results that there are.
        others: all results in the folder, from which times are reckoned.
        rounds: of training.
        seeds: all of them.
    """

    jobs: list[Job]
    missing: list[Job]
    found: Found
    others: list[Result]
    rounds: int
    seeds: tuple[int, ...]

    def comparison(self) -> Comparison:
        """Return the table as far as it is."""
        return compare(self.found, table1.CELLS, self.rounds, len(self.seeds))


def make_plan(results: Path, seeds: Sequence[int], rounds: int, only: str = "") -> Plan:
    """Look which results there are and which are missing.

    Args:
        results: the folder of results, with tuned hyper-parameters in its folder `tune`.
        seeds: that every cell should have.
        rounds: that every run should have.
        only: names of methods, cells (cifar10-100) or data sets, with commas or slashes between them; what is missing
            elsewhere is not asked for. Empty for everything.
    """
    methods, cells = parse_only(only)
    have = read_results(results) if results.is_dir() else []
    jobs = [
        job
        for cell in table1.CELLS
        for method in table1.ROWS
        if method in METHODS
        for job in _jobs(method, cell, seeds, results / "tune")
    ]
    found: Found = {}
    missing = []
    for job in jobs:
        result = next((one for one in have if _is_of(one, job, rounds)), None)
        if result is not None:
            found.setdefault((job.method, job.cell.name), []).append(result)
        elif job.method in methods and job.cell.name in cells:
            missing.append(job)
    return Plan(jobs, missing, found, have, rounds, tuple(seeds))


def parse_only(words: str) -> tuple[set[str], set[str]]:
    """Return the methods and the names of the cells that some words stand for; all where no word is about them."""
    methods, cells = set(), set()
    names = {cell.name: {cell.name} for cell in table1.CELLS}
    for cell in table1.CELLS:
        names.setdefault(cell.data, set()).add(cell.name)
    for word in filter(None, re.split(r"[,/\s]+", words)):
        if word in METHODS:
            methods.add(word)
        elif word in names:
            cells |= names[word]
        else:
            raise unknown("method or cell", word, [*METHODS, *names])
    return methods or set(METHODS), cells or {cell.name for cell in table1.CELLS}


def _jobs(method: str, cell: Cell, seeds: Sequence[int], tuned: Path) -> list[Job]:
    found = chosen(method, cell.data, cell.clients, tuned)
    settings = typed_settings(method, table1.recipe(method, cell) | found.settings)
    return [Job(method, cell, seed, settings, found.source) for seed in seeds]


def _is_of(result: Result, job: Job, rounds: int) -> bool:
    """Whether a result is what a job would give."""
    cell = job.cell
    facts = {
        "method": job.method,
        "dataset": cell.data,
        "num_clients": cell.clients,
        "partition": cell.partition,
        "seed": job.seed,
        "rounds": rounds if _has_rounds(job.method) else 0,
        "clients_per_round": _cohort(cell),
    }
    if any(result.get(name) != value for name, value in facts.items()):
        return False
    defaults = hyperparameters(job.method)
    return (
        result["model"] in (cell.model, "auto")
        and round(10 * result["num_unseen"] / result["num_clients"]) == 1
        # A hyper-parameter that a result does not name did not exist when it was made, and had its default's effect.
        and defaults | result["settings"] == defaults | job.settings
    )


def _has_rounds(method: str) -> bool:
    return getattr(METHODS[method], "trains_in_rounds", True) is not False


def _cohort(cell: Cell) -> int:
    return cell.clients_per_round or math.ceil(cell.clients / 20)


# How long it will take.


class Estimate(NamedTuple):
    """Seconds of a device that a run alone takes, and what they are reckoned from, in words."""

    seconds: float
    basis: str


def estimate(job: Job, results: Sequence[Result], rounds: int) -> Estimate:
    """Reckon how long a run takes on a GPU.

    Args:
        job: the run.
        results: of earlier runs; those on a CPU tell nothing.
        rounds: of training.
    """
    on_gpu = [one for one in results if not str(one.get("device", "cpu")).startswith("cpu")]
    same = [
        one
        for one in on_gpu
        if (one["method"], one["dataset"], one["num_clients"]) == (job.method, job.cell.data, job.cell.clients)
        and one["rounds"] == (rounds if _has_rounds(job.method) else 0)
    ]
    if same:
        one = _latest(same)
        seconds = (one["train_seconds"] + one["eval_seconds"]) / one.get("lockstep", 1) + one.get("test_seconds", 0)
        return Estimate(seconds, f"seed {one['seed']}")
    rate, basis = _rate(on_gpu, job.cell)
    return Estimate(client_steps(job, rounds) / rate, basis)


def _rate(results: Sequence[Result], cell: Cell) -> tuple[float, str]:
    """Return client steps a second: of runs with the same model and about as many clients in a round."""
    known = [one for one in results if one.get("client_steps_per_second") and one["model"] in (cell.model, "auto")]
    if not known:
        return DEFAULT_RATE, f"guess: {DEFAULT_RATE:.0f} steps/s"
    apart = [abs(math.log(one["clients_per_round"] / _cohort(cell))) for one in known]
    like = _latest([one for one, far in zip(known, apart, strict=True) if far <= min(apart) + 1e-9])
    rate = float(like["client_steps_per_second"] * like.get("lockstep", 1))
    return rate, f"{rate:.0f} steps/s at c={like['clients_per_round']}"


def _latest(results: Sequence[Result]) -> Result:
    """Return the result that was finished last: what runs today is most like it."""
    return max(results, key=lambda one: str(one.get("finished", "")))


def client_steps(job: Job, rounds: int) -> float:
    """Return how many steps of SGD all clients do together in a run."""
    values = hyperparameters(job.method) | job.settings
    per_epoch = job.cell.train_samples / job.cell.clients / (values.get("batch_size") or 32)
    if not _has_rounds(job.method):
        return float(job.cell.clients * values.get("epochs", 1) * per_epoch)
    if "local_steps" in values:
        steps = float(values["local_steps"])
    else:
        # What is done for a new client is no part of a round.
        epochs = (value for name, value in values.items() if name.endswith("epochs") and not name.startswith("new"))
        steps = per_epoch * sum(epochs) or values.get("local_rounds", 1) * values.get("inner_steps", 1)
    return rounds * _cohort(job.cell) * steps


def missing_table(plan: Plan) -> Table:
    """Return what is missing, with the time that a GPU will need for it."""
    title = f"{len(plan.missing)} runs are missing, {plan.rounds} rounds each"
    table = Table("cell", "method", "seeds", "settings", "GPU time", "reckoned from", title=title)
    table.title_justify = "left"
    groups: dict[tuple[str, str], list[Job]] = {}
    for job in plan.missing:
        groups.setdefault((job.cell.name, job.method), []).append(job)
    total = 0.0
    for (cell, method), jobs in groups.items():
        seconds, basis = estimate(jobs[0], plan.others, plan.rounds)
        total += len(jobs) * seconds
        seeds = ",".join(str(job.seed) for job in jobs)
        table.add_row(cell, method, seeds, jobs[0].source, duration(len(jobs) * seconds), basis)
    table.add_section()
    table.add_row("all", "", str(len(plan.missing)), "", duration(total), "", style="bold")
    return table


# Running it.


def run_missing(
    plan: Plan, results: Path, out: Path, data_dir: Path, at_once: int, console: Console, **changes: Any
) -> list[str]:
    """Train everything that is missing, and write each batch's results before the next one starts.

    Args:
        plan: what is missing.
        results: where results go.
        out: a folder for runs; those that were stopped are resumed.
        data_dir: where data sets lie.
        at_once: how many runs share the device: seeds of a method, and methods in the same cell.
        console: shows progress.
        changes: other fields of `Config`: device, eval_every, ...

    Returns:
        A sentence for each run that diverged.

    Raises:
        Stopped: after Ctrl-C or SIGTERM, with a checkpoint of each run written.
    """
    failures = []
    done = 0
    for batch in _batches_of_cells(plan.missing, at_once):
        orders = list(_orders(batch, plan.rounds, out, data_dir, console, changes))
        outcomes = run.outcomes_of(orders, console=console)
        for order, outcome in zip(orders, outcomes, strict=True):
            if isinstance(outcome, run.Run) and order.out is not None:
                say(console, f"wrote {collect(RunFolder(Path(order.out)), results)}")
                done += 1
            elif isinstance(outcome, Diverged):
                failures.append(f"{order.title}: {outcome}")
        raise_first(outcomes)
        say(console, f"{done} of {len(plan.missing)} runs done")
    return failures


def _batches_of_cells(jobs: Sequence[Job], at_once: int) -> list[Sequence[Job]]:
    """Return jobs of the same cell, which share its data, `at_once` at a time."""
    cells = dict.fromkeys(job.cell for job in jobs)
    return [batch for cell in cells for batch in batches([job for job in jobs if job.cell == cell], at_once)]


def _orders(
    jobs: Sequence[Job], rounds: int, out: Path, data_dir: Path, console: Console, changes: dict[str, Any]
) -> Iterator[run.Order]:
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
            **changes,
        )
        for job in jobs
    ]
    # Methods that share a seed share its federation.
    first = {config.seed: config for config in reversed(configs)}
    federations: dict[int, Federation] = dict(
        zip(first, run.federations_of(list(first.values()), console), strict=True)
    )
    for job, config in zip(jobs, configs, strict=True):
        folder = seed_folder(out / f"{job.cell.name}-{job.method}{_tag(job)}", job.seed)
        yield run.Order(config, federations[job.seed], folder, f"{job.cell.name} {job.method} seed {job.seed}")


def _tag(job: Job) -> str:
    """Return what tells runs with other hyper-parameters apart, so that one is never taken for another."""
    return "".join(f"-{name}_{value}" for name, value in job.settings.items())
