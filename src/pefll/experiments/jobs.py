"""Runs and results: which result a run makes, and which results one trained run can make."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pefll.core.wording import counted
from pefll.data import DATASETS
from pefll.experiments.results import Result
from pefll.experiments.table1 import Job
from pefll.experiments.timing import has_rounds
from pefll.methods import hyperparameters, personal_settings
from pefll.training.evaluation import counts_of
from pefll.training.run import Run
from pefll.training.summary import COUNTED_CLIENTS


def personal_steps(method: str, settings: Mapping[str, Any]) -> int:
    """Return the steps with which clients train the models that they get; 0 for none."""
    return next((int(settings.get(name, 0)) for name in personal_settings(method)), 0)


def split_settings(method: str, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return hyper-parameters of training, and those of a later evaluation.

    The second are empty if clients use the trained models as they are.
    """
    personal = personal_settings(method)
    training = {name: value for name, value in settings.items() if name not in personal}
    if not personal_steps(method, settings):
        return training, {}
    return training, {name: (hyperparameters(method) | settings)[name] for name in personal}


def is_result_of(result: Result, job: Job, rounds: int) -> bool:
    """Return whether a result has a job's method, cell, settings, first evaluation and measures; its seed may differ.

    Args:
        result: the content of a result file.
        job: the run.
        rounds: of cells that do not say how many they have.
    """
    if not is_in_cell(result, job, rounds):
        return False
    evaluation = job.evaluations[0]
    if not evaluation and not all(measure.name in result.get("measured", {}) for measure in job.measures):
        return False
    return _effective(job.method, result["settings"]) == _effective(job.method, job.settings | evaluation)


def is_in_cell(result: Result, job: Job, rounds: int) -> bool:
    """Return whether a result has a job's method, cell and steps on the device; other settings may differ."""
    cell = job.cell
    wanted = {
        "method": job.method,
        "dataset": cell.data,
        "num_clients": cell.clients,
        "partition": cell.partition,
        "rounds": cell.rounds_of(rounds) if has_rounds(job.method) else 0,
        "clients_per_round": cell.cohort,
    }
    if any(result.get(name) != value for name, value in wanted.items()):
        return False
    if result.get("prior_clients", 0.0) != cell.prior_clients:
        return False
    if personal_steps(job.method, result["settings"]) != personal_steps(job.method, job.evaluations[0]):
        return False
    unseen: float = result["num_unseen"] / result["num_clients"]
    # Older results have the model's name as it was asked for.
    model = "lenet" if result["model"] == "auto" else result["model"]
    return bool(model == cell.model) and round(10 * unseen) == 1


def _effective(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return all hyper-parameters that have an effect. Older results lack newer ones; assume the defaults."""
    every = hyperparameters(method) | settings
    unused = () if personal_steps(method, every) else personal_settings(method)[1:]
    return {name: value for name, value in every.items() if name not in unused}


def is_same_run(job: Job, other: Job) -> bool:
    """Return whether one training serves both jobs."""
    if (job.method, job.cell, job.seed) != (other.method, other.cell, other.seed):
        return False
    return _effective(job.method, job.settings) == _effective(job.method, other.settings)


def merged(jobs: Iterable[Job]) -> list[Job]:
    """Return each training run once, with the measures, evaluations and experiments of all jobs that it serves."""
    found: list[Job] = []
    for job in jobs:
        twin = next((place for place, other in enumerate(found) if is_same_run(job, other)), None)
        if twin is None:
            found.append(job)
            continue
        other = found[twin]
        evaluations = [*other.evaluations, *(one for one in job.evaluations if one not in other.evaluations)]
        found[twin] = other._replace(
            measures=tuple(dict.fromkeys((*other.measures, *job.measures))),
            evaluations=tuple(evaluations),
            experiments=tuple(dict.fromkeys((*other.experiments, *job.experiments))),
        )
    return found


def evaluated(run: Run, settings: dict[str, Any], console: Console | None = None) -> Result:
    """Return the summary of a trained run with other personal hyper-parameters, at its best round.

    Args:
        run: the run, with its data.
        settings: such as {"refine_steps": 10, "refine_lr": 5e-4}.
        console: shows progress; None for silence.
    """
    started = time.perf_counter()
    scores, clients = run.with_settings(**settings).scores("test", console=console)
    sums = np.array([one[3:] for one in clients], dtype=np.float64)  # samples to loss
    words = "".join(f" --set {name}={value}" for name, value in settings.items())
    return run.summary | {
        "evaluation": f"pefll evaluate RUN{words}",
        "settings": run.summary["settings"] | settings,
        "test_seconds": round(time.perf_counter() - started, 3),
        "accuracy": {"best": scores.rows(), "as_trained": run.summary["accuracy"]["best"]},
        "client_counts": counts_of(sums, run.summary["num_seen"]) if len(clients) <= COUNTED_CLIENTS else None,
    }


def absent_data(jobs: Sequence[Job], data_dir: Path) -> list[str]:
    """Return the names of the data sets that jobs need and `data_dir` lacks."""
    needed = dict.fromkeys(job.cell.data for job in jobs)
    return [name for name in needed if not DATASETS[name].embedded and not DATASETS[name].found(data_dir)]


def absent_data_words(jobs: Sequence[Job], data_dir: Path) -> str:
    """Return a sentence about absent data; "" if there is none."""
    absent = absent_data(jobs, data_dir)
    if not absent:
        return ""
    runs = counted(sum(job.cell.data in absent for job in jobs), "run")
    return f"{runs} cannot start: {data_dir} lacks {', '.join(absent)}. Get data with `pefll data get {absent[0]}`."
